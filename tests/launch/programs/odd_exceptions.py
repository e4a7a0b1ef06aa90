"""Whatever a function of a dataset raises on one rank, all ranks raise."""

import threading

import numpy as np

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()


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


random = np.random.default_rng(0)
for number, make in enumerate(ODD_EXCEPTIONS):
    bad = int(random.integers(0, 24))

    def fail(x, make=make, bad=bad):
        if x == bad:  # of a batch of 8 each rank has 4, in order
            raise make()
        return x

    dataset = (
        hs.data.Dataset.range(24).map(fail, num_parallel_calls=2 if number % 2 else None).batch(8)
    )
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    seen, raised = [], False
    try:
        for batch in iterator:
            seen += strategy.gather(batch, axis=0).tolist()
    except Exception:
        raised = True
    rest = [strategy.gather(batch, axis=0).tolist() for batch in iterator]
    assert (seen, raised, rest) == ([*range(bad // 8 * 8)], True, []), (make, bad, seen, rest)
print("all raised")
