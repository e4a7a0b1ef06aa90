"""Strategy.gather: the replicas' arrays, one after another; and scatter, the inverse.

Any nests, shapes and dtypes: test_reduce.py.
"""

import itertools

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


def test_uneven_parts_in_replica_order(strategy, place):
    for axis, dtype, unit in [
        (0, bool, 2),
        (-1, np.int16, 2),
        (np.int64(1), np.complex128, 2),
        (0, np.float32, 9000),
        (0, np.float32, 0),
    ]:
        parts = []
        for rank in range(N):
            shape = [2, 3, 4]
            shape[axis] = unit * rank
            parts.append((np.arange(np.prod(shape)) % 7 + rank).astype(dtype).reshape(shape))
        mine, expected = place.xp.asarray(parts[RANK]), np.concatenate(parts, axis)
        for _ in range(2):
            found = strategy.gather(strategy.run(lambda mine=mine: mine), axis=axis)
            assert isinstance(found, place.xp.ndarray) and found.dtype == dtype
            assert found.shape == expected.shape and np.array_equal(hs.asnumpy(found), expected)
            assert len(set(COMM.allgather(found.tobytes()))) == 1
            found[...] = 0  # fresh


def test_a_nest_takes_no_more_calls_than_an_array(strategy, place):
    """Arrays of the device and of the host stay where they are."""
    xp = place.xp
    value = strategy.run(
        lambda: {
            "a": xp.full((RANK, 2), RANK),
            "b": (None, [np.array([0.5 * RANK, 1])]),
            "c": xp.ones((1, 1)),
        }
    )
    counts = [strategy.replica_group.communicator.calls.number]
    for nest in (value["a"], {"a": value["a"], "c": value["c"], "none": None}):
        strategy.gather(nest, 0)
        counts.append(strategy.replica_group.communicator.calls.number)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    found = strategy.gather(value, 0)
    assert type(found["a"]) is xp.ndarray and type(found["b"][1][0]) is np.ndarray
    assert found["a"].tolist() == [[rank] * 2 for rank in range(N) for _ in range(rank)]
    assert found["b"][0] is None and found["c"].shape == (N, 1)
    assert found["b"][1][0].tolist() == [x for rank in range(N) for x in (0.5 * rank, 1)]

    def replica():
        context = hs.get_replica_context()
        assert context is not None
        return context.all_gather([None, xp.array([RANK])], 0)

    inside = strategy.run(replica)
    assert inside[0] is None
    assert strategy.experimental_local_results(inside[1])[-1].tolist() == list(range(N))


def test_a_plain_array_and_a_variable(strategy, place):
    """A plain one is returned as it is."""
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
    assert strategy.gather(strategy.run(v.value), 0).tolist() == [0, 1, 2] * N
    array = place.xp.ones((2, 3))
    assert strategy.gather(array, 1) is array
    found = strategy.gather([array, strategy.run(lambda: place.xp.full((1, 3), RANK))], 0)
    assert found[0] is array and found[1].shape == (N, 3)


def test_an_axis_that_is_not_there(strategy, place):
    for value, shape in [(place.xp.array(1.0), r" .* \(\) on ranks? 0"), (2.5, "")]:
        message = f"Strategy.gather: axis 0 does not exist{shape}"
        with pytest.raises(ValueError, match=message):
            strategy.gather(strategy.run(lambda value=value: value), 0)
    for axis in (2, -3):
        message = f"Strategy.gather: axis {axis} does not exist"
        with pytest.raises(hs.ReplicaMismatchError, match=message) as caught:
            strategy.gather(strategy.run(lambda: place.xp.zeros((RANK, 2))), axis)
        for rank in range(min(N, 8)):  # of more, some are shown
            assert f"({rank}, 2) on rank {rank}" in str(caught.value)


# ---- scatter


def test_what_is_scattered_is_gathered_again(strategy, place):
    for axis, size in itertools.product((0, 1, -1, np.int64(2)), (0, 1, 7, 12)):
        shape = [2, 3, 4]
        shape[axis] = size
        whole = {
            "a": np.arange(np.prod(shape), dtype=np.float32).reshape(shape),
            "b": np.arange(size) if axis < 0 else np.ones((*shape, 2)),
        }
        parts = strategy.scatter(whole, axis)
        _, indices = strategy.scatter(whole, axis, return_indices=True)
        seen = []
        strategy.run(lambda *given, seen=seen: seen.append(given), args=(parts, indices))
        ((own, own_indices),) = seen
        gathered = strategy.gather(parts, axis)
        for name, array in whole.items():
            assert isinstance(own[name], place.xp.ndarray) and own[name].dtype == array.dtype
            expected = np.array_split(array, N, axis)[RANK]
            assert np.array_equal(hs.asnumpy(own[name]), expected)
            assert np.array_equal(hs.asnumpy(gathered[name]), array)
        assert type(own_indices) is range
        assert list(own_indices) == np.array_split(np.arange(size), N)[RANK].tolist()


def test_scattered_parts_are_copies_and_arrays_may_be_on_the_device(strategy, place):
    whole = place.xp.arange(7.0)
    parts = strategy.scatter(whole)
    strategy.run(lambda part: part.fill(-1), args=(parts,))
    assert np.array_equal(hs.asnumpy(whole), np.arange(7.0))
    parts = strategy.scatter(hs.Variable(np.arange(4.0)))
    assert np.array_equal(hs.asnumpy(strategy.gather(parts, 0)), np.arange(4.0))


UNSCATTERED = [
    (np.arange(3), 1, ValueError, r"axis 1 does not exist in an array of shape \(3,\)"),
    (np.float32(3), 0, ValueError, "axis 0"),
    (np.arange(3), 0.5, TypeError, "axis is 0.5; it must be an int"),
    ("text", 0, TypeError, "array of numbers"),
    (None, 0, TypeError, "None"),
    ((np.zeros((9, 3)), np.zeros(5)), 0, ValueError, r"\(9, 3\), \(5,\), whose sizes along"),
    ([np.zeros((5, 3)), np.zeros(5)], -1, ValueError, r"sizes along axis -1 differ"),
]


def test_what_cannot_be_scattered(strategy):
    for value, axis, error, text in UNSCATTERED:
        with pytest.raises(error, match=f"Strategy.scatter.*{text}"):
            strategy.scatter(value, axis)
    with pytest.raises(TypeError, match=r"Strategy\.scatter"):
        strategy.scatter("text" if RANK == N - 1 else np.arange(3))
    with pytest.raises(RuntimeError, match=r"Strategy\.scatter"):
        strategy.run(lambda: strategy.scatter(np.arange(3)))
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
