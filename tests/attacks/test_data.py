"""Attacks on `hpcstrat.data`: failing or blocking functions, stopped pipelines, bad datasets."""

import pytest
from crafting import CRAFT

PIPELINES = """
import sys
import numpy as np
import hpcstrat as hs
from hpcstrat.data import Dataset

STAGES = {  # each with what it makes of a list
    "map": (lambda d, k: d.map(lambda x: 3 * x + k), lambda a, k: [3 * x + k for x in a]),
    "threads": (lambda d, k: d.map(lambda x: x ^ k, num_parallel_calls=3), lambda a, k: [x ^ k for x in a]),
    "filter": (lambda d, k: d.filter(lambda x: x % (k + 1) > 0), lambda a, k: [x for x in a if x % (k + 1) > 0]),
    "rows": (lambda d, k: d.batch(k).unbatch(), lambda a, k: a),
    "take": (lambda d, k: d.take(10 * k), lambda a, k: a[: 10 * k]),
    "skip": (lambda d, k: d.skip(k), lambda a, k: a[k:]),
    "shard": (lambda d, k: d.shard(2, k % 2), lambda a, k: a[k % 2 :: 2]),
    "cache": (lambda d, k: d.cache(), lambda a, k: a),
    "prefetch": (lambda d, k: d.prefetch(k), lambda a, k: a),
    "join": (lambda d, k: d.concatenate(Dataset.range(k)), lambda a, k: [*a, *range(k)]),
    "pairs": (lambda d, k: d.enumerate(k).map(lambda i, x: i + x), lambda a, k: [k + i + x for i, x in enumerate(a)]),
    "flat": (
        lambda d, k: d.flat_map(lambda x: Dataset.range(x, x + 2)), lambda a, k: [y for x in a for y in (x, x + 1)]
    ),
    "windows": (lambda d, k: d.window(k).flat_map(lambda w: w.batch(k)).unbatch(), lambda a, k: a),
    "scan": (lambda d, k: d.scan(np.int64(0), lambda s, x: (s + x, s + x)), lambda a, k: np.cumsum(a).tolist()),
    "shuffle": (lambda d, k: d.shuffle(3 * k, seed=k), None),
}

def pipeline(stages):
    dataset = Dataset.range(40)
    for name, k in stages:
        dataset = STAGES[name][0](dataset, k)
    return dataset

def rows_of(batches, strategy, steps=1000):
    return [strategy.gather(batch, axis=0).tolist() for _, batch in zip(range(steps), batches)]
"""


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_pipeline_that_is_stopped_anywhere_goes_on_where_it_was(cell, seeds):
    cell.write(f"""{PIPELINES}
strategy = hs.CentralStorageStrategy()
for seed in {seeds}:
    random = np.random.default_rng(seed)
    names = random.choice(list(STAGES), random.integers(2, 7)).tolist()
    stages = [(name, int(random.integers(1, 6))) for name in names]
    expected = list(range(40))
    for i, (name, k) in enumerate(stages):
        found = [int(x) for x in pipeline(stages[: i + 1])]
        wanted = found if STAGES[name][1] is None else STAGES[name][1](expected, k)
        assert found == wanted and (STAGES[name][1] or sorted(found) == sorted(expected)), (seed, stages[: i + 1])
        expected = found
    size = int(random.integers(2, 8))
    make = lambda: strategy.experimental_distribute_dataset(pipeline(stages).batch(size))
    batches = make()
    undisturbed = rows_of(batches, strategy), rows_of(batches, strategy)
    assert sum(undisturbed[0], []) == expected, (seed, stages)
    for stop in random.integers(0, len(undisturbed[0]) + 1, 2).tolist():
        batches = make()
        iterator = iter(batches)
        taken = rows_of(iterator, strategy, stop)
        hs.checkpoint.Checkpoint(batches=batches).save("stopped")
        batches = make()
        hs.checkpoint.Checkpoint(batches=batches).restore("stopped")
        went_on = taken + rows_of(batches, strategy)
        later = rows_of(batches, strategy)
        if went_on + later != undisturbed[0] + undisturbed[1]:
            print("NOT THE SAME", seed, stages, size, stop, went_on, later, undisturbed)
print("all went on")
""")
    ended = cell("hpcstrat", "run", "-n", "2", "program.py", seconds=200)
    assert (ended.status, ended.stdout) == (0, "all went on\n")


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
    seen, raised = [], 0
    while True:
        try:
            seen += strategy.gather(next(iterator), axis=0).tolist()
        except StopIteration:
            break
        except Exception as error:
            raised += 1
    at = bad // 8 * 8
    assert seen == [x for x in range(24) if not at <= x < at + 8] and raised == 1, (make, bad, seen, raised)
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


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_crafted_dataset_is_refused_by_name_and_takes_no_memory(cell, count):
    """Whatever loads can be read to its end."""
    cell.write(f"""{CRAFT}
import shutil
from hpcstrat.data import Dataset

Dataset.from_tensor_slices((np.arange(30.0).reshape(10, 3), {{"a": np.arange(10)}})).save("alike")
Dataset.range(6).map(lambda n: {{"x": np.arange(n), "y": b"n" * int(n)}}).save("unlike")
random = np.random.default_rng({count})
refused = 0
for number in range({count}):
    shutil.rmtree("crafted", ignore_errors=True)
    shutil.copytree(("alike", "unlike")[number % 2], "crafted")
    names = sorted(os.listdir("crafted"))
    if number % 4 < 2:
        with open("crafted/dataset.json") as file:
            header = json.load(file)
        with open("crafted/dataset.json", "w") as file:
            json.dump(crafted(header, random), file)
    else:
        damage("crafted/" + names[random.integers(len(names))], random)
    try:
        loaded = Dataset.load("crafted")
        count = sum(1 for _ in loaded)
        assert count == loaded.cardinality(), number
    except (ValueError, FileNotFoundError) as error:
        assert str(error).startswith("Dataset.load: ") or error.errno == 2, (number, error)
        assert "crafted" in str(error) and "\\x1b" not in str(error) and len(str(error)) < 600, (number, error)
        refused += 1
print(refused > {count} // 4)
""")
    ended = cell("python", "program.py")
    assert (ended.status, ended.stdout) == (0, "True\n")
