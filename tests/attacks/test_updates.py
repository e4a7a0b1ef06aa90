"""Attacks on slots: dying ranks, other numbers of ranks and strategies, steps of all sizes."""

import pytest
from training import training, weight

MIRRORED = "MirroredStrategy()"
ODD = {"sizes": (*range(4), 100_003, *(k % 7 for k in range(211))), "momentum": 0.5}
KILL = "if start == 0 and step == 13 and rank == last: os.kill(os.getpid(), signal.SIGKILL)"
slow = pytest.mark.slow


def went_on(ended, ranks, restarts=1):
    assert ended.status == 0 and ended.stdout.splitlines()[-1] == f"weight {weight(ranks, 0.5)}"
    assert sum("restart" in line for line in ended.said) == restarts


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow), pytest.param(4, marks=slow)])
def test_slots_of_a_rank_that_dies_are_found_again(cell, ranks):
    cell.write(training(KILL, strategy=MIRRORED, **ODD))
    went_on(cell("hpcstrat", "run", "-n", ranks, "--restarts", 5, "program.py"), ranks)


@slow
@pytest.mark.parametrize(
    "first, second",
    [(MIRRORED, "CentralStorageStrategy()"), ("CentralStorageStrategy()", MIRRORED)],
)
@pytest.mark.parametrize("ranks", [(4, 2), (2, 3)], ids=str)
def test_another_number_of_ranks_goes_on_with_a_dead_jobs_slots(cell, ranks, first, second):
    """From its last file, which is of step 24."""
    cell.write(
        training(
            "if rank == last and step == 26: os.kill(os.getpid(), signal.SIGKILL)",
            strategy=first,
            **ODD,
        )
    )
    assert cell("hpcstrat", "run", "-n", ranks[0], "program.py").status != 0
    cell.write(training(strategy=second, **ODD))
    ended = cell("hpcstrat", "run", "-n", ranks[1], "program.py")
    assert (ended.status, ended.stdout) == (
        0,
        f"weight {weight(ranks[1], 0.5, before=24 * [ranks[0]])}\n",
    )


# The steps of each strategy, with random choices that are the same on all ranks.
ANY_STEPS = """
    import hashlib, sys
    import numpy as np
    import hpcstrat as hs

    OPTIONS = [{}, {"clipvalue": 0.1}, {"weight_decay": 0.1}]  # norms add up in another order
    seed, rank = int(sys.argv[1]), hs.rank()

    def digests(strategy):
        random = np.random.default_rng(seed)
        kinds, found = [hs.optimizers.Adam, hs.optimizers.RMSprop, hs.optimizers.Lion, hs.optimizers.SGD], []
        with strategy.scope():
            optimizer = kinds[random.integers(4)](0.1, **OPTIONS[random.integers(len(OPTIONS))])
            variables = [hs.Variable(np.ones((2, 3), np.float32))]
            for step in range(30):
                if random.random() < 0.4:
                    shape = [(), (0, 3), (1,), (7, 5), (1009,), (300, 401), (2, 3, 4)][random.integers(7)]
                    dtype = ["float32", "float64", "float16"][random.integers(3)]
                    variables.append(hs.Variable(random.standard_normal(shape).astype(dtype)))
                if random.random() < 0.2 and len(variables) > 1:
                    del variables[random.integers(len(variables))]
                if random.random() < 0.1:
                    one = variables[random.integers(len(variables))]
                    one.assign(one.numpy() * 2)
                some = list(random.permutation(len(variables))[: random.integers(1, len(variables) + 1)])
                rows = random.random() < 0.3
                def update():
                    own = np.random.default_rng([seed, step, rank])
                    pairs = []
                    for v in map(variables.__getitem__, some):
                        gradient = own.standard_normal(v.shape).astype(v.dtype)
                        if rows and v.shape and v.shape[0] > 1:
                            at = own.integers(v.shape[0], size=3)
                            gradient = hs.IndexedSlices(gradient[at], at)
                        pairs.append((gradient, v))
                    optimizer.apply_gradients(pairs)
                strategy.run(update)
                read = [v.numpy().tobytes() for v in (*variables, *optimizer.variables)]
                found.append(hashlib.sha256(b"|".join(read)).hexdigest())
        return found

    with hs.MirroredStrategy() as strategy:
        mirrored = digests(strategy)
    with hs.CentralStorageStrategy() as strategy:
        central = digests(strategy)
    differ = [step for step in range(30) if mirrored[step] != central[step]]
    assert not hs.any_rank(bool(differ)), differ
    print("the same", len(set(mirrored)))
"""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[slow] * (seed > 0)) for seed in range(8)]
)
def test_any_steps_have_the_same_bits_with_each_strategy(cell, seed):
    cell.write(ANY_STEPS)
    ended = cell("hpcstrat", "run", "-n", 2 + seed % 3, "program.py", seed)
    assert (ended.status, ended.stderr) == (0, "") and ended.stdout.startswith("the same ")
