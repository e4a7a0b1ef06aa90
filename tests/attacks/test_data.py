"""Attacks on `hpcstrat.data`: ranks that are killed, functions that fail, end a rank or block."""

import pytest


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
