"""Datasets whose ranks are killed, or whose functions fail: `killed SEED`, `raises [THREADS]`."""

import os
import pathlib
import signal
import sys
import threading

import numpy as np

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
rank, N = hs.rank(), hs.size()


def killed(seed):
    """Three ranks are killed; the sum weighs each batch by its step."""
    random = np.random.default_rng(seed)
    steps = np.sort(random.choice(np.arange(1, 40), 3, replace=False)).tolist()
    victims = random.integers(0, N, 3).tolist()
    start = hs.on_lead(lambda: len(list(pathlib.Path().glob("start-*"))))
    hs.on_lead(lambda: pathlib.Path(f"start-{start}").touch())

    def make():
        shuffled = hs.data.Dataset.range(80).shuffle(30, seed=seed)
        return shuffled.map(lambda x: x * x, num_parallel_calls=2).batch(4)

    with strategy.scope():
        w = hs.Variable(0, dtype=np.int64)
    batches = strategy.experimental_distribute_dataset(make())
    checkpoint = hs.checkpoint.Checkpoint(w=w, batches=batches)
    with hs.checkpoint.CheckpointManager(checkpoint, "checkpoint", every=3) as manager:
        manager.restore_or_initialize()
        while manager.steps < 40:
            for batch in batches:
                sums = strategy.run(lambda x: x.sum(), args=(batch,))
                w.assign_add((manager.steps + 1) * int(strategy.reduce("SUM", sums, axis=None)))
                if start < 3 and manager.steps + 1 == steps[start] and rank == victims[start]:
                    os.kill(os.getpid(), signal.SIGKILL)
                manager.step()
    alone = make()
    epochs = [batch for _ in range(2) for batch in alone]
    weighed = sum(t * int(batch.sum()) for t, batch in enumerate(epochs, start=1))
    print(int(w) == weighed, len(epochs))


class Needs(Exception):
    def __init__(self, one, two):
        super().__init__("needs two")


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def locked():
    error: object = ValueError("holds a lock")
    error.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    return error


ODD_EXCEPTIONS = [
    lambda: ValueError("\x1b[31m\n\r"),
    lambda: ValueError("\udc80"),
    lambda: ValueError("x" * 100_000),
    lambda: Needs(1, 2),
    Silent,
    locked,
    StopIteration,
    StopAsyncIteration,
    MemoryError,
    RecursionError,
    lambda: OSError(28, "full", "name"),
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
    lambda: KeyError(None),
    AssertionError,
]


def raises(threads):
    """Whatever a function raises on one rank, all ranks raise."""
    random = np.random.default_rng(0)
    for make in ODD_EXCEPTIONS:
        bad = int(random.integers(0, 24))

        def fail(x, make=make, bad=bad):
            if x == bad:  # of a batch of 8 each rank has 4, in order
                raise make()
            return x

        dataset = hs.data.Dataset.range(24).map(fail, num_parallel_calls=threads).batch(8)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        seen, raised = [], False
        try:
            for batch in iterator:
                seen += strategy.gather(batch, axis=0).tolist()
        except Exception:
            raised = True
        rest = [strategy.gather(batch, axis=0).tolist() for batch in iterator]
        assert (seen, raised, rest) == ([*range(bad // 8 * 8)], True, []), (make, bad, seen, rest)


name, *words = sys.argv[1:]
if name == "killed":
    killed(int(words[0]))
else:
    raises(int(words[0]) if words else None)
hs.barrier()
print("end")
