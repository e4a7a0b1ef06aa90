"""Helpers for tests of wrong uses."""

from typing import Any

import numpy as np
from mpi4py import MPI

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
ONES = np.ones(3, np.float32)
FIVE = np.ones(5, np.float32)


class Env:
    """Two strategies, with variables, and values for them."""

    def __init__(self, place, strategy, other):
        self.place = place
        self.s = strategy
        self.other = other
        self.outside = hs.Variable(np.zeros(3, np.float32), name="outside", aggregation="SUM")
        with other.scope():
            self.foreign = hs.Variable(np.zeros(3, np.float32), name="foreign", aggregation="SUM")
        with strategy.scope():
            self.v = hs.Variable(np.zeros(3, np.float32), name="v", aggregation="SUM")
            self.large = hs.Variable(np.zeros((300, 100)), name="large", aggregation="MEAN")
            self.none = hs.Variable(np.zeros(3, np.float32), name="none")
            self.scalar = hs.Variable(0.0, name="scalar", aggregation="SUM")
            self.i = hs.Variable(np.zeros(3, np.int32), name="i", aggregation="SUM")
            self.mean = hs.Variable(np.zeros(3, np.int32), name="mean", aggregation="MEAN")
            self.b = hs.Variable(
                np.array([True, False]), name="b", aggregation="ONLY_FIRST_REPLICA"
            )
            self.own = hs.Variable(
                np.zeros(3, np.float32), name="own", synchronization="ON_READ", aggregation="SUM"
            )
        self.all = (self.v, self.large, self.none, self.scalar, self.i, self.mean, self.b)
        self.before = [v.numpy() for v in self.all]
        self.context: Any = None
        strategy.run(self.enter)
        self.slices = hs.IndexedSlices(place.xp.ones((1, 2)), place.xp.array([0]), (4, 2))

    def enter(self):
        self.context = hs.get_replica_context()

    def here(self, value) -> Any:
        """`value` with its arrays on this rank's device, if that supports their dtype."""
        if (
            isinstance(value, np.ndarray)
            and value.dtype.kind in "biufc"
            and value.dtype.char != "g"
        ):
            return self.place.xp.asarray(value)
        if isinstance(value, list):
            return [self.here(one) for one in value]
        return (
            {key: self.here(one) for key, one in value.items()}
            if isinstance(value, dict)
            else value
        )

    def each(self, value):
        """A value from each replica."""
        return self.s.run(lambda: self.here(value))

    def works(self):
        """Nothing has changed, and the next calls are right."""
        xp = self.place.xp
        for v, before in zip(self.all, self.before, strict=True):
            assert np.array_equal(v.numpy(), before)
        assert not hs.has_strategy()
        assert self.s.reduce("SUM", self.s.run(lambda: RANK), None) == N * (N - 1) // 2
        assert (
            self.s.reduce("SUM", self.s.run(lambda: xp.full(2, RANK)), None).tolist()
            == [N * (N - 1) // 2] * 2
        )
        assert self.s.gather(self.s.run(lambda: xp.full(2, RANK)), 0).tolist() == [
            r for r in range(N) for _ in "ab"
        ]
        self.s.run(lambda: self.v.assign_add(xp.ones(3)))
        assert self.v.numpy().tolist() == [N, N, N]
        with self.s.scope():
            assert hs.Variable([2.0]).numpy().tolist() == [2]
