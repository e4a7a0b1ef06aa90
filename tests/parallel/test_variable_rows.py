"""Rows of variables: read by their indices, and written by all replicas."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


def variable(strategy, value, **options):
    with strategy.scope():
        return hs.Variable(value, **options)


def scatter(v, verb, values, indices):
    return getattr(v, f"scatter_{verb}")(hs.IndexedSlices(values, indices))


def rows_of(rank, count, rows):
    """A replica's indices, some repeated, each with a row of powers of 2: sums are exact."""
    indices = (np.arange(count) * 5 + 3 * rank) % rows
    values = 2.0 ** ((np.arange(count)[:, None] + np.arange(3) + rank) % 3 - 1)
    return indices, values


def one_by_one(verb, value, indices, values):
    """As TensorFlow does it: one row after another."""
    for index, row in zip(indices, values, strict=True):
        if verb == "update":
            value[index] = row
        else:
            value[index] += row if verb == "add" else -row


@pytest.mark.parametrize("verb", ["add", "sub", "update"])
def test_one_value_for_all_replicas(strategy, xp, verb):
    for shape in (4, 3), (700, 3):
        initial = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        indices, values = rows_of(0, 2 * len(initial), len(initial))
        v = variable(strategy, xp.asarray(initial), aggregation="MEAN")  # of replicas only
        assert scatter(v, verb, xp.asarray(values), xp.asarray(indices)) is v
        one_by_one(verb, initial, indices, values)
        np.testing.assert_allclose(v.numpy(), initial, rtol=1e-12)


@pytest.mark.parametrize(
    "verb, aggregation, count",
    [
        ("sub", "SUM", lambda rank: 3 * rank),
        ("add", "SUM", lambda rank: 900 - 2 * rank),
        ("sub", "MEAN", lambda rank: 7),
        ("add", "MEAN", lambda rank: 0),
        ("sub", "ONLY_FIRST_REPLICA", lambda rank: 7),
        ("update", "ONLY_FIRST_REPLICA", lambda rank: 5 + rank),
    ],
    ids=["rising from 0", "falling from 900", "mean of 7", "none", "first of 7", "update"],
)
def test_the_replicas_rows_come_together(strategy, xp, verb, aggregation, count):
    expected = np.arange(1.0, 61.0).reshape(20, 3)
    v = variable(strategy, xp.asarray(expected), aggregation=aggregation)
    scale = N if aggregation == "MEAN" else 1  # means are powers of 2, too

    def replica():
        indices, values = rows_of(RANK, count(RANK), 20)
        scatter(v, verb, xp.asarray(values * scale), xp.asarray(indices))
        return hs.asnumpy(v.value()).copy()

    seen = hs.asnumpy(strategy.experimental_local_results(strategy.run(replica))[RANK])
    for rank in range(N if aggregation != "ONLY_FIRST_REPLICA" else 1):
        indices, values = rows_of(rank, count(rank), 20)
        one_by_one(verb, expected, indices, values)
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-12)
    assert (seen == v.numpy()).all()
    assert len(set(COMM.allgather(v.numpy().tobytes()))) == 1


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, np.complex64]
)
def test_dtypes(strategy, dtype):
    aggregation, replicas = ("ONLY_FIRST_REPLICA", 1) if dtype == np.uint16 else ("SUM", N)
    v = variable(strategy, np.ones(5, dtype), aggregation=aggregation)
    expected = [1 + replicas * (replicas + 1) // 2, 1, 1, 1, 1 + 2 * replicas]
    strategy.run(lambda: scatter(v, "add", np.array([1 + RANK, 2], dtype), [0, 4]))
    assert np.array_equal(v.numpy(), np.array(expected, dtype)) and v.dtype == dtype
    scatter(v, "add", np.array([2, 3, 1], dtype), [1, 1, 3])
    expected[1:4] = 6, 1, 2
    assert np.array_equal(v.numpy(), np.array(expected, dtype))
    scatter(v, "update", np.array([2, 3, 4], dtype), [1, 1, 3])
    expected[1:4] = 3, 1, 4
    assert np.array_equal(v.numpy(), np.array(expected, dtype))


def test_values_of_any_dtype_shape_and_number(strategy, xp):
    half = variable(strategy, np.zeros(2, np.float16))
    # Added one by one in half precision they would stay at 2048.
    scatter(half, "add", xp.ones(3000, np.float16), xp.zeros(3000, np.int64))
    assert half.numpy().tolist() == [3000, 0]
    v = variable(strategy, np.zeros((4, 2), np.float32))
    scatter(v, "add", [[1, 2]], [3])
    scatter(v, "add", 5, np.array([[0, 3], [3, 1]], np.uint8))
    scatter(v, "add", xp.ones((1, 2)), xp.asarray([0]))
    scatter(v, "add", xp.ones((0, 2), np.float32), [])
    assert v.numpy().tolist() == [[6, 6], [5, 5], [0, 0], [11, 12]]
    for shape, indices in ((3, 0), [0, 2]), ((0, 3), []):  # no elements
        empty, rows = variable(strategy, np.zeros(shape)), (len(indices), shape[1])
        scatter(empty, "add", np.zeros(rows), indices)
        scatter(empty, "update", np.zeros(rows), indices)
        assert empty.sparse_read(indices).shape == rows
    own = hs.Variable([float(RANK), 0.0])  # of no scope
    scatter(own, "add", [1.0, RANK], [0, 1])
    assert own.numpy().tolist() == [RANK + 1, RANK]


def test_reads_are_copies(strategy, xp):
    v = variable(strategy, np.arange(6.0).reshape(3, 2))

    def replica():
        for one in (v.sparse_read(xp.asarray([RANK % 3, 0])), v.sparse_read([[2, 1]])):
            one[...] = -1

    strategy.run(replica)
    assert hs.asnumpy(v.sparse_read([[2], [0], [1]])).tolist() == [[[4, 5]], [[0, 1]], [[2, 3]]]


def test_in_an_update(strategy, xp):
    v, w = variable(strategy, np.arange(4.0)), variable(strategy, np.arange(4.0))

    def change(v, value):
        scatter(v, "add", xp.asarray([value, value]), [1, 1])
        scatter(v, "update", [7.0, 8.0], [3, 3])
        scatter(w, "add", [1.0], [0])

    strategy.extended.update(v, change, args=(4.0,))
    assert v.numpy().tolist() == [0, 9, 2, 8]
    assert w.numpy().tolist() == [1, 1, 2, 3]


@pytest.mark.mpi(min_size=2)  # one rank agrees with itself
def test_the_first_replicas_values_count_unless_they_are_checked(strategy, monkeypatch):
    v, expected = variable(strategy, np.zeros(N)), [1] + [0] * (N - 1)
    scatter(v, "update", RANK + 1.0, [RANK])
    assert v.numpy().tolist() == expected
    # As with HPCSTRAT_CHECK=1.
    monkeypatch.setattr(strategy.replica_group.communicator, "checks", True)
    for odd in {0, N - 1}:
        with pytest.raises(hs.ReplicaMismatchError, match="checksum"):
            scatter(v, "update", float(RANK == odd), [0])
        assert v.numpy().tolist() == expected
