"""Strategy.gather: the replicas' arrays, one after another."""

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


@pytest.mark.core
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3, pytest.param(np.int64(1), id="int64")])
@pytest.mark.parametrize("dtype", [np.float32, np.int16, bool, np.complex128])
def test_uneven_parts_in_replica_order(strategy, place, axis, dtype):
    parts = []
    for rank in range(N):
        shape = [2, 3, 4]
        shape[axis] = 2 * rank
        parts.append((np.arange(np.prod(shape)) % 7 + rank).astype(dtype).reshape(shape))
    mine = place.xp.asarray(parts[RANK])
    found = strategy.gather(strategy.run(lambda: mine), axis=axis)
    expected = np.concatenate(parts, axis)
    assert isinstance(found, place.xp.ndarray) and found.dtype == dtype
    assert np.array_equal(hs.asnumpy(found), expected) and found.shape == expected.shape
    assert len(set(COMM.allgather(found.tobytes()))) == 1
    found[...] = 0
    assert np.array_equal(
        hs.asnumpy(strategy.gather(strategy.run(lambda: mine), axis=axis)), expected
    )


@pytest.mark.core
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("has_equal_parts", [True, False])
def test_parts_that_are_not_contiguous(strategy, place, axis, has_equal_parts):
    def numbers(rank):
        return (
            np.arange(80.0 if has_equal_parts else 40.0 * (1 + rank)).reshape(-1, 10) + 1000 * rank
        )

    def part(array):
        return array[::-2, 1::3].T if axis else array[::-2, 1::3]

    mine = place.xp.asarray(numbers(RANK))
    found = strategy.gather(strategy.run(lambda: part(mine)), axis)
    assert np.array_equal(
        hs.asnumpy(found), np.concatenate([part(numbers(rank)) for rank in range(N)], axis)
    )


@pytest.mark.core
@pytest.mark.parametrize("axis", [0, 1])
def test_nothing_from_anyone(strategy, place, axis):
    found = strategy.gather(strategy.run(lambda: place.xp.zeros((0, 3), np.float32)), axis)
    assert isinstance(found, place.xp.ndarray) and found.dtype == np.float32
    assert found.shape == ((0, 3 * N) if axis else (0, 3))


@pytest.mark.core
def test_large_parts(strategy, place):
    value = strategy.run(lambda: place.xp.full((30_000 * (N - RANK), 3), RANK, np.float32))
    found = strategy.gather(value, 0)
    assert found.shape == (30_000 * N * (N + 1) // 2, 3)
    start = 0
    for rank in range(N):
        stop = start + 30_000 * (N - rank)
        assert (found[start:stop] == rank).all()
        start = stop


@pytest.mark.core
def test_a_nest(strategy, place):
    xp = place.xp
    value = strategy.run(
        lambda: {"a": xp.full((RANK, 2), RANK), "b": (xp.ones((1, 1)), [xp.array([RANK, True])])}
    )
    counts = [strategy.replica_group.communicator.calls.number]
    for nest in (value["a"], value):  # takes no more calls than an array
        found = strategy.gather(nest, 0)
        counts.append(strategy.replica_group.communicator.calls.number)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert found["a"].tolist() == [[rank] * 2 for rank in range(N) for _ in range(rank)]
    assert found["b"][0].shape == (N, 1)
    assert found["b"][1][0].tolist() == [x for rank in range(N) for x in (rank, 1)]


@pytest.mark.core
def test_arrays_of_the_device_and_of_the_host_in_one_nest(strategy, place):
    value = strategy.run(
        lambda: [np.full((RANK, 2), RANK), place.xp.full((2, RANK), RANK), np.array([0.5 * RANK])]
    )
    found = (
        strategy.gather(value[:1], 0)
        + strategy.gather(value[1:2], 1)
        + strategy.gather(value[2:], 0)
    )
    both = strategy.gather([strategy.run(lambda: place.xp.array([RANK])), value[2]], 0)
    for one, kind in zip((*found, *both), (np, place.xp, np, place.xp, np), strict=True):
        assert isinstance(one, kind.ndarray)
    assert found[0].tolist() == [[rank] * 2 for rank in range(N) for _ in range(rank)]
    assert found[1].tolist() == [[rank for rank in range(N) for _ in range(rank)]] * 2
    assert found[2].tolist() == both[1].tolist() == [0.5 * rank for rank in range(N)]
    assert both[0].tolist() == list(range(N))


def test_a_plain_array_is_returned_as_it_is(strategy, place):
    array = place.xp.ones((2, 3))
    assert strategy.gather(array, 1) is array
    found = strategy.gather([array, strategy.run(lambda: place.xp.full((1, 3), RANK))], 0)
    assert found[0] is array and found[1].shape == (N, 3)


@pytest.mark.core
def test_a_variable_that_a_replica_returns(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
    found = strategy.gather(strategy.run(v.value), 0)
    assert found.tolist() == [0, 1, 2] * N


def test_arrays_without_dimensions(strategy, place):
    with pytest.raises(
        hs.ReplicaMismatchError, match=r"Strategy.gather: axis 0 does not exist .* \(\) on ranks? 0"
    ):
        strategy.gather(strategy.run(lambda: place.xp.array(1.0)), 0)
    with pytest.raises(ValueError, match=r"Strategy.gather: axis 0 does not exist"):
        strategy.gather(strategy.run(lambda: 2.5), 0)


@pytest.mark.core
@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there(strategy, place, axis):
    with pytest.raises(ValueError, match=f"Strategy.gather: axis {axis} does not exist") as caught:
        strategy.gather(strategy.run(lambda: place.xp.zeros((RANK, 2))), axis)
    for rank in range(min(N, 8)):  # of more, some are shown
        assert f"({rank}, 2) on rank {rank}" in str(caught.value)


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one replica matches itself
@pytest.mark.parametrize("unit", [1, 3000])
def test_shapes_that_do_not_fit(strategy, place, unit):
    xp = place.xp
    with pytest.raises(
        hs.ReplicaMismatchError, match="Strategy.gather: shapes may differ along axis 0 only"
    ) as caught:
        strategy.gather(strategy.run(lambda: xp.zeros((2, unit * (RANK + 1)))), 0)
    for rank in range(min(N, 8)):
        assert f"(2, {unit * (rank + 1)}) on rank {rank}" in str(caught.value)
    with pytest.raises(hs.ReplicaMismatchError, match=r"Strategy.gather: axis -2 does not exist"):
        strategy.gather(strategy.run(lambda: xp.zeros((2, 2) if RANK else (2,))), -2)
    with pytest.raises(hs.ReplicaMismatchError, match="float64(.|\n)*float32"):
        strategy.gather(strategy.run(lambda: xp.zeros(2, np.float32 if RANK else np.float64)), 0)
    assert strategy.gather(strategy.run(lambda: xp.array([RANK])), 0).tolist() == list(range(N))


@pytest.mark.core
def test_none_in_a_nest_stays_none(strategy, place):
    xp = place.xp
    value = strategy.run(lambda: {"a": xp.full((RANK + 1,), RANK), "b": (None, xp.array([RANK]))})
    found = strategy.gather(value, 0)
    assert found["b"][0] is None
    assert found["a"].tolist() == [rank for rank in range(N) for _ in range(rank + 1)]
    assert found["b"][1].tolist() == list(range(N))

    def replica():
        context = hs.get_replica_context()
        assert context is not None
        return context.all_gather([None, xp.array([RANK])], 0)

    inside = strategy.run(replica)
    assert inside[0] is None
    assert strategy.experimental_local_results(inside[1])[-1].tolist() == list(range(N))


# ---- scatter, the inverse


def own_part(array, axis):
    return np.array_split(array, N, axis)[RANK]


@pytest.mark.core
@pytest.mark.parametrize("axis", [0, 1, -1, pytest.param(np.int64(2), id="int64")])
@pytest.mark.parametrize("size", [0, 1, 7, 12])
def test_what_is_scattered_is_gathered_again(strategy, place, axis, size):
    shape = [2, 3, 4]
    shape[axis] = size
    whole = {
        "a": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
        "b": np.ones((*shape, 2)),
    }
    if axis < 0:
        whole["b"] = np.arange(size)
    parts = strategy.scatter(whole, axis)
    for name, array in whole.items():
        seen = []
        strategy.run(seen.append, args=(parts[name],))
        assert isinstance(seen[0], place.xp.ndarray) and seen[0].dtype == array.dtype
        assert np.array_equal(hs.asnumpy(seen[0]), own_part(array, axis))
    _, indices = strategy.scatter(whole, axis, return_indices=True)
    seen = []
    strategy.run(seen.append, args=(indices,))
    assert type(seen[0]) is range
    assert list(seen[0]) == np.array_split(np.arange(size), N)[RANK].tolist()
    gathered = strategy.gather(parts, axis)
    assert all(np.array_equal(hs.asnumpy(gathered[name]), whole[name]) for name in whole)


def test_parts_are_copies_and_arrays_may_be_on_the_device(strategy, place):
    whole = place.xp.arange(7.0)
    parts = strategy.scatter(whole)

    def clear(part):
        part[...] = -1

    strategy.run(clear, args=(parts,))
    assert np.array_equal(hs.asnumpy(whole), np.arange(7.0))
    variable = hs.Variable(np.arange(4.0))
    assert np.array_equal(
        hs.asnumpy(strategy.gather(strategy.scatter(variable), 0)), np.arange(4.0)
    )


UNSCATTERED = {
    "an axis that is not there": (
        np.arange(3),
        1,
        ValueError,
        r"axis 1 does not exist in an array of shape \(3,\)",
    ),
    "a number": (np.float32(3), 0, ValueError, "axis 0"),
    "half an axis": (np.arange(3), 0.5, TypeError, "axis is 0.5; it must be an int"),
    "text": ("text", 0, TypeError, "array of numbers"),
    "None": (None, 0, TypeError, "None"),
    "sizes that differ": (
        (np.zeros((20, 3)), np.zeros(5)),
        0,
        ValueError,
        r"shapes \(20, 3\), \(5,\), whose sizes along",
    ),
    "last sizes that differ": (
        [np.zeros((5, 3)), np.zeros(5)],
        -1,
        ValueError,
        r"sizes along axis -1 differ",
    ),
}


@pytest.mark.parametrize("case", UNSCATTERED)
def test_what_cannot_be_scattered(strategy, case):
    value, axis, error, text = UNSCATTERED[case]
    with pytest.raises(error, match=f"Strategy.scatter.*{text}"):
        strategy.scatter(value, axis)
    assert hs.asnumpy(strategy.gather(strategy.scatter(np.arange(3)), 0)).tolist() == [0, 1, 2]


@pytest.mark.mpi(min_size=2)
def test_only_what_is_equal_on_all_ranks_is_scattered(strategy):
    for other in (
        np.arange(6.0) + RANK,
        np.arange(6.0 + RANK),
        np.arange(6, dtype=f"f{4 + 4 * (RANK % 2)}"),
    ):
        with pytest.raises(hs.ReplicaMismatchError, match="scatter"):
            strategy.scatter(other)
    with pytest.raises(hs.ReplicaMismatchError, match="scatter"):
        strategy.scatter(np.zeros((2, 2)), RANK % 2)
    parts = strategy.scatter(np.arange(6))
    with pytest.raises(TypeError, match="distributed already"):
        strategy.scatter(parts)


def test_a_rank_that_cannot_scatter_fails_all(strategy):
    with pytest.raises(TypeError, match=r"Strategy\.scatter"):
        strategy.scatter("text" if RANK == N - 1 else np.arange(3))
    with pytest.raises(RuntimeError, match=r"Strategy\.scatter"):
        strategy.run(lambda: strategy.scatter(np.arange(3)))
