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


# ---- arguments that differ between ranks

A, B = np.ones((2, 2)), np.ones(3)
USUAL = {"scan": ("SUM", A, False), "reduce_scatter": ("SUM", A, 0)}
OTHERS = [
    *[("scan", other) for other in (("SUM", B, False), ("MAX", A, False), ("SUM", A, True))],
    *[("reduce_scatter", other) for other in (("SUM", B, 0), ("MAX", A, 0), ("SUM", A, 1))],
]


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ(strategy):
    for name, other in OTHERS:
        given = other if RANK == N - 1 else USUAL[name]
        with pytest.raises(hs.ReplicaMismatchError, match=rf"ReplicaContext\.{name}"):
            strategy.run(lambda name=name, given=given: getattr(context(), name)(*given))


# ---- broadcast


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


def test_broadcast_of_a_variable(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM")

    def replica():
        v.assign(xp.asarray([RANK, 2.0]))
        v.assign(context().broadcast(v, N - 1))
        return v.value()

    assert inside(strategy, replica) == [N - 1, 2]


# ---- scan

SCANS = {"SUM": (np.sum, "zero"), "MIN": (np.min, "max"), "MAX": (np.max, "min")}


@pytest.mark.parametrize("op", SCANS)
def test_a_scan_reduces_what_is_before(strategy, xp, op):
    function, name = SCANS[op]
    for dtype, shape in itertools.product(("int8", "float16", "uint64"), [(), (0,), (2, 3)]):
        limits = {"zero": 0, "max": np.inf, "min": -np.inf}
        if np.dtype(dtype).kind in "iu":
            limits |= {"max": np.iinfo(dtype).max, "min": np.iinfo(dtype).min}
        start = np.arange(np.prod(shape)).reshape(shape) * 3
        by_rank = [(start + 5 * r % 7).astype(dtype) for r in range(N)]
        for inclusive in (False, True):
            value = {"x": xp.asarray(by_rank[RANK]), "none": None}
            found = inside(strategy, lambda v=value, i=inclusive: context().scan(op, v, i))
            before = by_rank[: RANK + inclusive]
            expected = function(before, axis=0) if before else np.full(shape, limits[name])
            assert found == {"x": expected.astype(dtype).tolist(), "none": None}


def test_the_last_of_a_scan_has_the_bits_of_all_reduce(strategy):
    x = np.random.default_rng(RANK).standard_normal(1000).astype(np.float32)
    found = []

    def replica():
        found.extend([context().scan("SUM", x, inclusive=True), context().all_reduce("SUM", x)])

    strategy.run(replica)
    assert COMM.bcast(found[0], N - 1).tobytes() == found[1].tobytes()


def test_offsets_of_parts_of_any_size(strategy):
    sizes = [(3, 0, 4, 1)[rank % 4] for rank in range(N)]
    assert inside(strategy, lambda: int(context().scan("SUM", sizes[RANK]))) == sum(sizes[:RANK])


# ---- reduce_scatter


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
def test_reduce_scatter_is_a_part_of_all_reduce(strategy, xp, op):
    for size in (0, 1, 2 * N, 2 * N + 1, 50_001):
        a, b = xp.arange(3.0 * size).reshape(3, size) * (RANK + 1), xp.full(size, RANK - 1)

        def replica(a=a, b=b):
            value = {"a": a, "b": b}
            whole = context().all_reduce(op, value)
            own = context().reduce_scatter(op, value, axis=-1)
            return whole, own, context().all_gather(own, -1)

        whole, own, joined = inside(strategy, replica)
        assert joined == whole
        for key, one in whole.items():
            assert own[key] == np.array_split(np.asarray(one), N, -1)[RANK].tolist()


# ---- all_to_all


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


def test_all_to_all_transposes(strategy, xp):
    """From a matrix in blocks of rows to the same matrix in blocks of columns."""
    matrix = np.arange(5.0 * N * 301).reshape(5 * N, 301)
    rows = xp.asarray(np.array_split(matrix, N)[RANK])
    columns = np.array_split(np.arange(301), N)

    def replica():
        parts = context().all_to_all([rows[:, one[0] : one[-1] + 1] for one in columns])
        return xp.concatenate(parts)

    assert inside(strategy, replica) == matrix[:, columns[RANK]].tolist()


# ---- neighbor_exchange


@pytest.mark.parametrize("size", [1, 20_000])
def test_neighbors(strategy, xp, size):
    for periodic in (False, True):

        def replica(periodic=periodic):
            above = {"edge": xp.full(size + RANK, -1.0 - RANK)}
            below = xp.full((2, size), RANK), RANK
            return context().neighbor_exchange(above, below, periodic=periodic)

        from_left, from_right = inside(strategy, replica)
        left, right = RANK - 1, RANK + 1
        if periodic:
            left, right = left % N, right % N
        assert from_left == ([[[left] * size] * 2, left] if left >= 0 else None)
        assert from_right == ({"edge": [-1 - right] * (size + right)} if right < N else None)


def test_to_one_side_only(strategy, xp):
    def replica():
        return [
            context().neighbor_exchange(None, xp.full(2, RANK), periodic=True) for _ in range(3)
        ]

    assert inside(strategy, replica) == [[[(RANK - 1) % N] * 2, None]] * 3
