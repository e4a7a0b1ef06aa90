"""What replica functions send each other: broadcast, reduce_scatter, all_to_all, neighbors."""

import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import strategies_for

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def context() -> Any:
    return hs.get_replica_context()


def lists(value) -> Any:
    """Arrays as nested lists."""
    if isinstance(value, dict):
        return {key: lists(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [lists(one) for one in value]
    return None if value is None else hs.asnumpy(value).tolist()


def inside(strategy, fn) -> Any:
    """What `fn` returns on this rank's replica, with arrays as lists."""
    found = []
    strategy.run(lambda: found.append(fn()))
    return lists(found[0])


A, B = np.ones((2, 2)), np.ones(3)
DIFFERENT = [  # what most ranks pass, and what the last one passes
    ("scan", ("SUM", A, False), ("SUM", B, False)),
    ("scan", ("SUM", A, False), ("MAX", A, False)),
    ("scan", ("SUM", A, False), ("SUM", A, True)),
    ("reduce_scatter", ("SUM", A, 0), ("SUM", B, 0)),
    ("reduce_scatter", ("SUM", A, 0), ("SUM", A, 1)),
]


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ(strategy):
    for name, usual, other in DIFFERENT:
        given = other if RANK == N - 1 else usual
        with pytest.raises(hs.ReplicaMismatchError, match=rf"ReplicaContext\.{name}"):
            strategy.run(lambda name=name, given=given: getattr(context(), name)(*given))


def test_broadcast_from_every_root(strategy, xp):
    given = {"w": xp.arange(3.0) + RANK, "more": [0.5 * RANK, None], "none": xp.zeros((0, 2))}
    for root in range(N):
        found = inside(strategy, lambda root=root: context().broadcast(given, root=root))
        expected = {"w": [root, root + 1, root + 2], "more": [0.5 * root, None], "none": []}
        assert found == expected
    assert given["w"].tolist() == [RANK, RANK + 1, RANK + 2]
    large, results = xp.full((300, 400), RANK + 1.0), []
    strategy.run(lambda: results.append(context().broadcast(large)))  # of the first replica
    assert type(results[0]) is xp.ndarray and (results[0] == 1).all()


SCANS = {"SUM": np.sum, "MIN": np.min, "MAX": np.max}
NEUTRAL = {  # of SUM, MIN and MAX
    "int8": (0, 127, -128),
    "float16": (0, np.inf, -np.inf),
    "uint64": (0, 2**64 - 1, 0),
}


def test_a_scan_reduces_what_is_before(strategy, xp):
    for dtype, shape in itertools.product(NEUTRAL, [(), (0,), (2, 3)]):
        start = np.arange(np.prod(shape)).reshape(shape) * 3
        by_rank = [(start + 5 * r % 7).astype(dtype) for r in range(N)]
        for (op, function), neutral in zip(SCANS.items(), NEUTRAL[dtype], strict=True):
            for inclusive in (False, True):
                value = {"x": xp.asarray(by_rank[RANK]), "none": None}
                found = inside(
                    strategy, lambda o=op, v=value, i=inclusive: context().scan(o, v, inclusive=i)
                )
                before = by_rank[: RANK + inclusive]
                expected = function(before, axis=0) if before else np.full(shape, neutral, dtype)
                assert found == {"x": expected.astype(dtype).tolist(), "none": None}


def test_the_last_of_a_scan_has_the_bits_of_all_reduce(strategy):
    x = np.random.default_rng(RANK).standard_normal(1000).astype(np.float32)
    found = []

    def replica():
        found.extend([context().scan("SUM", x, inclusive=True), context().all_reduce("SUM", x)])

    strategy.run(replica)
    assert COMM.bcast(found[0], N - 1).tobytes() == found[1].tobytes()


def test_reduce_scatter_is_a_part_of_all_reduce(strategy, xp):
    cases = [*itertools.product(("SUM", "MEAN"), (0, 2 * N + 1, 50_001)), ("MIN", 1), ("MAX", 1)]
    for op, size in cases:
        a, b = xp.arange(3.0 * size).reshape(3, size) * (RANK + 1), xp.full(size, RANK - 1)

        def replica(op=op, a=a, b=b):
            value = {"a": a, "b": b}
            whole = context().all_reduce(op, value)
            own = context().reduce_scatter(op, value, axis=-1)
            return whole, own, context().all_gather(own, -1)

        whole, own, joined = inside(strategy, replica)
        assert joined == whole
        for key, one in whole.items():
            assert own[key] == np.array_split(np.asarray(one), N, -1)[RANK].tolist()


def test_all_to_all_of_nests(strategy, xp):
    def replica():
        return context().all_to_all(
            tuple(
                {"x": xp.full((RANK * target, 2), float(RANK)), "n": RANK - target, "none": None}
                for target in range(N)
            )
        )

    expected = [
        {"x": [[source] * 2] * (source * RANK), "n": source - RANK, "none": None}
        for source in range(N)
    ]
    assert inside(strategy, replica) == expected


def test_neighbors(strategy, xp):
    for size, periodic in itertools.product((1, 20_000), (False, True)):

        def replica(size=size, periodic=periodic):
            above = {"edge": xp.full(size + RANK, -1.0 - RANK)}
            below = xp.full((2, size), RANK), RANK
            return context().neighbor_exchange(above, below, periodic=periodic)

        from_left, from_right = inside(strategy, replica)
        left, right = RANK - 1, RANK + 1
        if periodic:
            left, right = left % N, right % N
        assert from_left == ([[[left] * size] * 2, left] if left >= 0 else None)
        assert from_right == ({"edge": [-1 - right] * (size + right)} if right < N else None)
    found = inside(
        strategy, lambda: context().neighbor_exchange(None, xp.full(2, RANK), periodic=True)
    )
    assert found == [[(RANK - 1) % N] * 2, None]
