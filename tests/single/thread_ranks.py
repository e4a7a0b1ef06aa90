"""Ranks that are threads of one process, to distribute datasets to."""

import contextlib
import threading
from typing import Any

from internals import current_call, distribute_dataset, select


class Rank:
    """A communicator whose ranks are threads that share a barrier and a table."""

    def __init__(self, rank, barrier, table):
        self.rank = rank
        self.size = len(table)
        self.calls = []
        self._barrier = barrier
        self._table = table

    @contextlib.contextmanager
    def raise_together(self):
        before = len(self.calls)
        try:
            yield
        except Exception as error:
            if len(self.calls) == before:
                self._exchange(error, None)
            raise

    def all_gather_obj(self, obj):
        return self._exchange(None, obj)

    all_gather_differing_obj = all_gather_obj

    def _exchange(self, error, obj):
        call = current_call()
        self.calls.append(call)
        self._table[self.rank] = call, error, obj
        self._barrier.wait(20)
        table = list(self._table)
        self._barrier.wait(20)
        for other, (_, found, _) in enumerate(table):
            if found is not None and error is None:
                raise type(found)(f"{found} (found by rank {other})")
        assert len({name for name, _, _ in table}) == 1, table
        return [given for _, _, given in table]


def on_ranks(size, program) -> list[Any]:
    """The results of `program(communicator)` on `size` ranks; raises the first exception."""
    barrier, table = threading.Barrier(size), [None] * size
    ranks = [Rank(rank, barrier, table) for rank in range(size)]
    results, errors = [None] * size, []

    def run(rank):
        try:
            results[rank.rank] = program(rank)
        except BaseException as error:
            errors.append((rank.rank, error))
            if isinstance(error, threading.BrokenBarrierError) or not isinstance(error, Exception):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # Either all ranks raised, or the test is wrong.
        assert sorted(rank for rank, _ in errors) == list(range(size)), errors
        raise min(errors, key=lambda entry: entry[0])[1]
    return results


def parts(size, make, distribute=distribute_dataset, options=None):
    """`[step][rank]`: the parts that the ranks get, each from the dataset that it makes."""
    every = on_ranks(size, lambda rank: [select(x) for x in distribute(make(), rank, options)])
    assert len({len(steps) for steps in every}) == 1
    return list(zip(*every, strict=True))
