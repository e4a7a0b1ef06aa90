"""Attacks on `hpcstrat.data`: random pipelines stopped anywhere, functions that fail or block."""

import pytest

PIPELINES = """
import numpy as np
import hpcstrat as hs
from hpcstrat.data import Dataset

N = 24
SOURCES = [  # each has the numbers below N
    lambda: Dataset.range(N),
    lambda: Dataset.from_tensor_slices(np.arange(N)),
    lambda: Dataset.from_generator(lambda: iter(range(N)), np.int64),
    lambda: Dataset.from_generator(lambda: iter(np.arange(N).reshape(6, 4))).unbatch(),
    lambda: Dataset.range(9).concatenate(Dataset.from_tensor_slices(np.arange(9, N))),
    lambda: Dataset.zip(Dataset.range(N), Dataset.from_tensors({"a": 0}).repeat()).map(lambda x, _: x),
    lambda: Dataset.from_tensors(np.arange(N)).unbatch(),
]
STAGES = {  # each with what it makes of a list
    "map": (lambda d, k: d.map(lambda x: 3 * x + k), lambda a, k: [3 * x + k for x in a]),
    "threads": (lambda d, k: d.map(lambda x: x ^ k, num_parallel_calls=k), lambda a, k: [x ^ k for x in a]),
    "filter": (lambda d, k: d.filter(lambda x: x % (k + 1) > 0), lambda a, k: [x for x in a if x % (k + 1) > 0]),
    "rows": (lambda d, k: d.batch(k).unbatch(), lambda a, k: a),
    "whole batches": (lambda d, k: d.batch(k, True).unbatch(), lambda a, k: a[: len(a) // k * k]),
    "batches": (
        lambda d, k: d.batch(k).map(lambda x: x[::-1], 2).unbatch(),
        lambda a, k: [x for i in range(0, len(a), k) for x in a[i : i + k][::-1]],
    ),
    "take": (lambda d, k: d.take(10 * k), lambda a, k: a[: 10 * k]),
    "skip": (lambda d, k: d.skip(k), lambda a, k: a[k:]),
    "shard": (lambda d, k: d.shard(2, k % 2), lambda a, k: a[k % 2 :: 2]),
    "cache": (lambda d, k: d.cache(), lambda a, k: a),
    "prefetch": (lambda d, k: d.prefetch(k), lambda a, k: a),
    "join": (lambda d, k: d.concatenate(Dataset.range(k)), lambda a, k: [*a, *range(k)]),
    "join first": (lambda d, k: Dataset.range(k).map(lambda x: -x).concatenate(d), lambda a, k: [*range(0, -k, -1), *a]),
    "zip": (
        lambda d, k: Dataset.zip({"x": d, "y": Dataset.range(30).skip(k)}).map(lambda z: z["x"] + z["y"]),
        lambda a, k: [x + y for x, y in zip(a, range(k, 30))],
    ),
    "pairs": (lambda d, k: d.enumerate(k).map(lambda i, x: i + x), lambda a, k: [k + i + x for i, x in enumerate(a)]),
    "options": (lambda d, k: d.with_options(hs.data.Options()), lambda a, k: a),
    "repeat": (lambda d, k: d.repeat(2), lambda a, k: [*a, *a]),
    "endless": (lambda d, k: d.repeat().take(30), lambda a, k: (a * 30)[:30]),
    "shuffle": (lambda d, k: d.shuffle(3 * k, seed=k), None),
    "shuffle all": (lambda d, k: d.shuffle(99, seed=k), None),
    "shuffle batches": (lambda d, k: d.batch(k).shuffle(k, seed=k).unbatch(), None),
    "shuffle without a seed": (lambda d, k: d.shuffle(2 * k), None),
    "one order": (lambda d, k: d.shuffle(3 * k, seed=k, reshuffle_each_iteration=False), None),
}
ENDS = [  # of the batches
    lambda d: d,
    lambda d: d.prefetch(2),
    lambda d: d.map(lambda x: -x, 3).prefetch(1),
    lambda d: d.shuffle(3, seed=9),
    lambda d: d.repeat(2),
    lambda d: d.cache(),
    lambda d: d.filter(lambda x: x[0] % 3),
]

def pipeline(source, stages):
    dataset = SOURCES[source]()
    for name, k in stages:
        dataset = STAGES[name][0](dataset, k)
    return dataset

def drawn(random):
    names = random.choice([*STAGES, "shuffle"], random.integers(2, 7), replace=False).tolist()
    stages = [(name, int(random.integers(1, 6))) for name in names]
    return stages, *[int(random.integers(n)) for n in (len(SOURCES), len(ENDS), 7)]

def check_model(source, stages):
    # Each stage makes what it makes of a list; the orders of shuffles count as given.
    expected, is_reshuffled = list(range(N)), False
    for i, (name, k) in enumerate(stages):
        if name == "shuffle without a seed":
            return
        found, model = [int(x) for x in pipeline(source, stages[: i + 1])], STAGES[name][1]
        if model is None:
            assert sorted(found) == sorted(expected), (source, stages[: i + 1])
            is_reshuffled |= name != "one order"
        elif is_reshuffled and name in ("repeat", "endless"):  # other orders in later rounds
            assert found[: len(expected)] == expected[: len(found)], (source, stages[: i + 1])
        else:
            assert found == model(expected, k), (source, stages[: i + 1])
        expected, is_reshuffled = found, is_reshuffled and name != "cache"

def rows_of(batches, strategy):
    # The rows of all replicas in each step, which are split evenly.
    steps = []
    for batch in batches:
        parts = [part.tolist() for part in strategy.experimental_local_results(batch)]
        steps.append(sum(parts, []))
        total, size = len(steps[-1]), len(parts)
        assert [len(part) for part in parts] == [total // size + (r < total % size) for r in range(size)]
    return steps
"""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_pipeline_that_is_stopped_anywhere_goes_on_where_it_was(cell, seeds, ranks):
    """At each position of a pass, also before it and after it."""
    cell.write(f"""{PIPELINES}
import itertools

strategy = hs.CentralStorageStrategy()
for seed in {seeds}:
    random = np.random.default_rng(seed)
    stages, source, end, size = drawn(random)
    check_model(source, stages)
    make = lambda: ENDS[end](pipeline(source, stages).batch(size + 1))
    batches = strategy.experimental_distribute_dataset(make())
    hs.checkpoint.Checkpoint(batches=batches).save("before")
    checkpoint, steps = hs.checkpoint.Checkpoint(batches=batches), []
    iterator = iter(batches)
    for stop in itertools.count():
        checkpoint.save(f"stopped-{{stop}}")
        step = rows_of(itertools.islice(iterator, 1), strategy)
        if not step:
            break
        steps += step
    checkpoint.save("after")
    later = rows_of(batches, strategy)
    case = seed, source, stages, end, size
    if "shuffle without a seed" not in dict(stages):
        alone = make()
        both = [[batch.tolist() for batch in alone] for _ in range(2)]
        assert [steps, later] == both, (case, steps, later, both)
    paths = ["before", *[f"stopped-{{i}}" for i in range(stop + 1)], "after"]
    for path, rest in zip(paths, [steps, *[steps[i:] for i in range(stop + 1)], later], strict=True):
        batches = strategy.experimental_distribute_dataset(make())
        hs.checkpoint.Checkpoint(batches=batches).restore(path)
        found = rows_of(batches, strategy)
        if path == "after":
            assert found == later, (case, found, later)
        elif (found, again := rows_of(batches, strategy)) != (rest, later):
            print("NOT THE SAME", case, path, found, again, rest, later)
hs.barrier()
print("all went on")
""")
    ended = cell("hpcstrat", "run", "-n", ranks, "program.py", seconds=250)
    assert (ended.status, ended.stdout) == (0, "all went on\n")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "seeds",
    [range(200), pytest.param(range(200, 4000), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_an_error_anywhere_comes_after_the_batches_before_it(cell, seeds, ranks):
    cell.write(f"""{PIPELINES}
def check(x):
    if x == bad:
        raise ZeroDivisionError
    return x

def attempts(batches, rows):
    found, iterator = [], iter(batches)
    try:
        found += (rows(batch) for batch in iterator)
    except ZeroDivisionError:
        found.append("an error")
    assert list(iterator) == []
    return found

STAGES["check"] = lambda d, k: d.map(check, k), None
strategy = hs.CentralStorageStrategy()
for seed in {seeds}:
    random = np.random.default_rng(seed)
    stages, source, end, size = drawn(random)
    bad = int(random.integers(0, 2 * N))
    stages.insert(random.integers(len(stages) + 1), ("check", 1 + seed % 3))
    if "shuffle without a seed" in dict(stages):
        continue
    make = lambda: ENDS[end](pipeline(source, stages).batch(size + 1))
    alone, batches = make(), strategy.experimental_distribute_dataset(make())
    for _ in range(2):
        expected = attempts(alone, lambda batch: batch.tolist())
        found = attempts(batches, lambda batch: strategy.gather(batch, axis=0).tolist())
        if found != expected:
            print("NOT THE SAME", seed, source, stages, end, size, bad, found, expected)
hs.barrier()
print("all the same")
""")
    ended = cell("hpcstrat", "run", "-n", ranks, "program.py", seconds=250)
    assert (ended.status, ended.stdout) == (0, "all the same\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_no_element_is_lost_or_seen_twice_where_ranks_are_killed(cell, seed):
    """The sum weighs each batch by its step."""
    cell.write(f"""
        import os, pathlib, signal
        import numpy as np
        import hpcstrat as hs

        random = np.random.default_rng({seed})
        steps = np.sort(random.choice(np.arange(1, 40), 3, replace=False)).tolist()
        victims = random.integers(0, hs.size(), 3).tolist()
        strategy = hs.CentralStorageStrategy()
        start = hs.on_lead(lambda: len(list(pathlib.Path().glob("start-*"))))
        hs.on_lead(lambda: pathlib.Path(f"start-{{start}}").touch())

        def make():
            shuffled = hs.data.Dataset.range(80).shuffle(30, seed={seed})
            return shuffled.map(lambda x: x * x, num_parallel_calls=2).batch(4)

        with strategy.scope():
            w = hs.Variable(0, dtype=np.int64)
        batches = strategy.experimental_distribute_dataset(make())
        checkpoint = hs.checkpoint.Checkpoint(w=w, batches=batches)
        with hs.checkpoint.CheckpointManager(checkpoint, "checkpoint", every=3) as manager:
            manager.restore_or_initialize()
            while manager.steps < 40:
                for batch in batches:
                    total = strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)
                    w.assign_add((manager.steps + 1) * int(total))
                    if start < 3 and manager.steps + 1 == steps[start] and hs.rank() == victims[start]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    manager.step()
        alone = make()
        epochs = [batch for _ in range(2) for batch in alone]
        print(int(w) == sum(t * int(batch.sum()) for t, batch in enumerate(epochs, start=1)), len(epochs))
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "--restarts", "3", "program.py")
    assert (
        ended.status == 0
        and ended.stdout.splitlines()[-1] == "True 40"
        and "restart 3 of 3" in ended.said[-1]
    )


ODD_EXCEPTIONS = """
import threading
import numpy as np
import hpcstrat as hs

class Needs(Exception):
    def __init__(self, one, two):
        super().__init__("needs two")

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

def locked():
    error = ValueError("holds a lock")
    error.lock = threading.Lock()
    return error

MAKERS = [
    lambda: ValueError("\\x1b[31m\\n\\r"), lambda: ValueError("\\udc80"), lambda: ValueError("x" * 100_000),
    lambda: Needs(1, 2), Silent, locked, lambda: ExceptionGroup("two", [ValueError(1), OSError(5, "x")]), StopIteration,
    StopAsyncIteration, MemoryError, RecursionError, lambda: OSError(28, "full", "name"),
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    lambda: KeyError(None), AssertionError,
]
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", [None, 2])
def test_whatever_a_function_raises_on_one_rank_all_ranks_raise(cell, threads):
    cell.write(f"""{ODD_EXCEPTIONS}
strategy = hs.CentralStorageStrategy()
random = np.random.default_rng(0)
for make in MAKERS:
    bad, culprit = int(random.integers(0, 24)), int(random.integers(0, hs.size()))

    def fail(x):
        # Of a batch of 8 each rank has 4, in order.
        if x == bad:
            raise make()
        return x

    dataset = hs.data.Dataset.range(24).map(fail, num_parallel_calls={threads}).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    seen, raised = [], False
    try:
        for batch in iterator:
            seen += strategy.gather(batch, axis=0).tolist()
    except Exception:
        raised = True
    rest = [strategy.gather(batch, axis=0).tolist() for batch in iterator]
    assert (seen, raised, rest) == ([*range(bad // 8 * 8)], True, []), (make, bad, seen, raised, rest)
hs.barrier()
print("all raised")
""")
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert (ended.status, ended.stdout) == (0, "all raised\n")


ENDS = [
    "sys.exit(0)",
    "os._exit(0)",
    "exec('raise KeyboardInterrupt')",
    "exec('raise GeneratorExit')",
]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("threads", [None, 2])
def test_a_function_that_ends_one_rank_ends_all(cell, end, threads):
    cell.write(f"""
        import os, sys
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        dataset = hs.data.Dataset.range(40).map(lambda x: {end} if x == 21 else x, num_parallel_calls={threads})
        for batch in strategy.experimental_distribute_dataset(dataset.batch(4)):
            strategy.reduce("SUM", batch, axis=0)
        hs.barrier()
        print("end")
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert ended.status != 0 and "end" not in ended.stdout


BLOCKS = {
    "generator": "from_generator(blocks, output_signature=hs.TensorSpec((), 'int64'))",
    "function": "range(40).map(block)",
    "threads": "range(40).map(block, num_parallel_calls=2).prefetch(2)",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", BLOCKS.values(), ids=BLOCKS)
def test_what_blocks_on_one_rank_ends_the_job_and_is_named(cell, source):
    cell.write(f"""
        import threading
        import numpy as np
        import hpcstrat as hs

        def block(x):
            if hs.rank() == 1 and x in (21, 23):
                threading.Event().wait()  # for ever
            return x

        def blocks():
            yield from (block(np.int64(x)) for x in range(40))

        strategy = hs.CentralStorageStrategy()
        for batch in strategy.experimental_distribute_dataset(hs.data.Dataset.{source}.batch(4)):
            strategy.reduce("SUM", batch, axis=0)
    """)
    limits = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}
    ended = cell("hpcstrat", "run", "-n", "2", "program.py", **limits)
    assert ended.status != 0 and "program.py" in ended.stderr and "rank 1" in ended.stderr
