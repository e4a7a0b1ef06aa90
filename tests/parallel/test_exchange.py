"""What replica functions send each other: broadcast, reduce_scatter, all_to_all, neighbors."""

import types
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import strategies_for

import hpcstrat as hs

pytestmark = pytest.mark.core

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
@pytest.mark.parametrize(("name", "other"), OTHERS)
def test_arguments_that_differ(strategy, name, other):
    arguments = other if RANK == N - 1 else USUAL[name]
    with pytest.raises(hs.ReplicaMismatchError, match=rf"ReplicaContext\.{name}"):
        strategy.run(lambda: getattr(context(), name)(*arguments))


# ---- broadcast


@pytest.mark.parametrize("root", range(N))
def test_broadcast_of_a_nest(strategy, xp, root):
    given = {
        "w": xp.arange(3.0) + RANK,
        "numbers": [RANK, 0.5 * RANK, None],
        "none": xp.zeros((0, 2)),
    }
    found = inside(strategy, lambda: context().broadcast(given, root=root))
    assert found == {
        "w": [root, root + 1, root + 2],
        "numbers": [root, 0.5 * root, None],
        "none": [],
    }
    assert given["w"].tolist() == [RANK, RANK + 1, RANK + 2]


def test_broadcast_is_of_the_first_replica(strategy, xp):
    large = xp.full((300, 400), float(RANK))
    found = []
    strategy.run(lambda: found.append(context().broadcast(large)))
    assert type(found[0]) is xp.ndarray and not found[0].any()


def test_broadcast_of_a_variable(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM")

    def replica():
        v.assign(xp.asarray([RANK, 2.0]))
        v.assign(context().broadcast(v, N - 1))
        return v.value()

    assert inside(strategy, replica) == [N - 1, 2]


# ---- scan


@pytest.mark.parametrize("size", [(), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "uint64"])
def test_a_scan_reduces_what_is_before(strategy, xp, dtype, op, size):
    by_rank = [
        (np.arange(np.prod(size)).reshape(size) * 3 + 5 * r % 7).astype(dtype) for r in range(N)
    ]
    limits = (
        np.iinfo(dtype)
        if by_rank[0].dtype.kind in "iu"
        else types.SimpleNamespace(min=-np.inf, max=np.inf)
    )
    function, neutral = {
        "SUM": (np.sum, 0),
        "MIN": (np.min, limits.max),
        "MAX": (np.max, limits.min),
    }[op]
    for inclusive in (False, True):
        found = inside(
            strategy,
            lambda inclusive=inclusive: context().scan(
                op, {"x": xp.asarray(by_rank[RANK]), "none": None}, inclusive
            ),
        )
        before = by_rank[: RANK + inclusive]
        expected = (
            function(before, axis=0).astype(dtype) if before else np.full(size, neutral, dtype)
        )
        assert found == {"x": expected.tolist(), "none": None}


def test_the_last_of_a_scan_has_the_bits_of_all_reduce(strategy):
    x = np.random.default_rng(RANK).standard_normal(1000).astype(np.float32)
    found = []
    strategy.run(
        lambda: found.extend(
            [context().scan("SUM", x, inclusive=True), context().all_reduce("SUM", x)]
        )
    )
    last = COMM.bcast(found[0], N - 1)
    assert last.tobytes() == found[1].tobytes()


def test_offsets_of_parts_of_any_size(strategy):
    sizes = [(3, 0, 4, 1)[rank % 4] for rank in range(N)]
    assert inside(strategy, lambda: int(context().scan("SUM", sizes[RANK]))) == sum(sizes[:RANK])


# ---- reduce_scatter


@pytest.mark.parametrize("size", [0, 1, 2 * N, 2 * N + 1, 50_001])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
def test_reduce_scatter_is_a_part_of_all_reduce(strategy, xp, op, size):
    value = {"a": xp.arange(3.0 * size).reshape(3, size) * (RANK + 1), "b": xp.full(size, RANK - 1)}

    def replica():
        own = context().reduce_scatter(op, value, axis=-1)
        whole = context().all_reduce(op, value)
        return own, {
            key: np.array_split(hs.asnumpy(one), N, -1)[RANK] for key, one in whole.items()
        }

    own, expected = inside(strategy, replica)
    assert own == expected
    joined = inside(
        strategy, lambda: context().all_gather(context().reduce_scatter(op, value, -1), -1)
    )
    assert joined == inside(strategy, lambda: context().all_reduce(op, value))


def test_reduce_scatter_of_gradients_then_a_step_of_ones_own_part(strategy, xp):
    """Shares the optimizer's memory: replicas update their parts, and gather the new values."""
    w = xp.arange(7.0)

    def replica():
        c = context()
        gradient = c.reduce_scatter("SUM", xp.full(7, RANK + 1.0))
        own = xp.asarray(np.array_split(hs.asnumpy(w), N)[RANK]) - 0.5 * gradient
        return c.all_gather(own, 0)

    assert inside(strategy, replica) == (np.arange(7) - 0.25 * N * (N + 1)).tolist()


# ---- all_to_all


def test_all_to_all_of_parts_of_any_size(strategy, xp):
    def replica():
        return context().all_to_all(
            [xp.full(RANK * target, 10 * RANK + target) for target in range(N)]
        )

    assert inside(strategy, replica) == [
        [10 * source + RANK] * (source * RANK) for source in range(N)
    ]


def test_all_to_all_of_nests(strategy, xp):
    def replica():
        return context().all_to_all(
            tuple(
                {"x": xp.full((target, 2), float(RANK)), "n": RANK - target, "none": None}
                for target in range(N)
            )
        )

    expected = [
        {"x": [[source] * 2] * RANK, "n": source - RANK, "none": None} for source in range(N)
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


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("size", [1, 20_000])
def test_neighbors(strategy, xp, size, periodic):
    def replica():
        return context().neighbor_exchange(
            {"edge": xp.full(size + RANK, -1.0 - RANK)},
            (xp.full((2, size), RANK), RANK),
            periodic=periodic,
        )

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


def test_a_grid_in_parts_is_the_grid(strategy, xp):
    """Jacobi's iteration of the heat equation: parts that exchange edges, against a whole grid."""
    grid = np.random.default_rng(0).random((6 * N + 1, 9))
    whole = np.pad(grid, 1)
    for _ in range(10):
        whole[1:-1, 1:-1] = (
            whole[:-2, 1:-1] + whole[2:, 1:-1] + whole[1:-1, :-2] + whole[1:-1, 2:]
        ) / 4
    own = xp.asarray(np.array_split(grid, N)[RANK])

    def replica():
        u = xp.zeros((own.shape[0] + 2, 11))
        u[1:-1, 1:-1] = own
        for _ in range(10):
            above, below = context().neighbor_exchange(u[1], u[-2])
            u[0] = 0 if above is None else above
            u[-1] = 0 if below is None else below
            u[1:-1, 1:-1] = (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]) / 4
        return u[1:-1, 1:-1].copy()

    assert inside(strategy, replica) == np.array_split(whole[1:-1, 1:-1], N)[RANK].tolist()
