"""Masked arrays are refused; byte orders make no difference; 8-bit integers do not wrap."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")
N = COMM.size
RANK = COMM.rank
MASKED: Any = np.ma.array([1, 1e20], np.float32, mask=[False, True])
WHOLE = np.ones(2, np.float32)


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    with request.param(["CPU:0"] * N) as made:
        yield made


def test_masked_arrays_travel_as_objects(strategy):
    """If nothing is computed with them, they stay what they are."""
    found = strategy.run(lambda: np.ma.array([RANK, 7], mask=[False, True]))
    for rank, one in enumerate(strategy.experimental_local_results(found)):
        assert isinstance(one, np.ma.MaskedArray) and one.tolist() == [rank, None]
    assert hs.broadcast_object(MASKED).tolist() == [1, None]
    assert strategy.run(lambda x: x.sum(), (found,)) is not None
    filled = strategy.run(lambda x: x.filled(0), (found,))
    assert strategy.reduce("SUM", filled, axis=None).tolist() == [N * (N - 1) // 2, 0]
    with strategy.scope():
        v = hs.Variable(WHOLE)
    assert (v + MASKED).tolist() == [2, None] and (MASKED + v).tolist() == [2, None]


@pytest.mark.parametrize("kind", ["i4", "u8", "f2", "c8"])
def test_the_other_byte_order(strategy, kind):
    """Results are those of this byte order, bit for bit, and of this byte order."""
    dtype = np.dtype(kind).newbyteorder("S")
    parts = [((np.arange(6).reshape(2, 3) + 1) * (rank + 1)).astype(dtype) for rank in range(N)]
    usual = [part.astype(kind) for part in parts]
    swapped, native = strategy.run(lambda: (parts[RANK], usual[RANK]))
    for axis in (None, 0, (0, 1)):
        for op in ("SUM", "MEAN", "MIN", "MAX") if dtype.kind != "c" else ("SUM", "MEAN"):
            pairs = [(swapped, native)]
            if op != "SUM" and axis is not None:
                pairs.append((parts[0], usual[0]))  # of a plain value
            for pair in pairs:
                found, expected = (strategy.reduce(op, value, axis) for value in pair)
                assert found.dtype == expected.dtype and found.dtype.isnative
                assert np.array_equal(found, expected)
    rows = strategy.gather(swapped, 0)
    assert np.array_equal(rows, np.concatenate(usual)) and rows.dtype == kind
    total = strategy.run(lambda: hs.get_replica_context().all_reduce("SUM", parts[RANK]))
    for one in strategy.experimental_local_results(total):
        assert np.array_equal(one, sum(usual)) and one.dtype == kind
    with strategy.scope():
        made, v = hs.Variable(parts[0]), hs.Variable(np.zeros((2, 3), np.complex64))
        optimizer, mean = hs.optimizers.SGD(1.0), hs.metrics.Mean()
    assert made.dtype == kind and np.array_equal(made.numpy(), usual[0])
    if dtype.kind in "fc":
        v.assign(parts[0])
        strategy.run(lambda: optimizer.apply_gradients([(parts[RANK], v)]))
        assert np.array_equal(v.numpy(), usual[0] - sum(usual))
    if dtype.kind != "c":
        strategy.run(lambda: mean.update_state(parts[RANK]))
        assert mean.result() == 3.5 * (N + 1) / 2
    dataset = hs.data.Dataset.from_tensor_slices(np.arange(8).astype(dtype)).batch(8)
    for batch in strategy.experimental_distribute_dataset(dataset):
        assert strategy.reduce("SUM", batch, axis=0) == 28
        assert strategy.reduce("MEAN", batch, axis=0) == 3.5


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_sums_of_few_bits_along_an_axis_have_64(strategy, dtype):
    """Three pixels are beyond their range. test_reduce.py has the dtypes of others."""
    least = np.iinfo(dtype).max - 1
    parts = [np.full((300, 3), least + rank % 2, dtype) for rank in range(N)]
    value = strategy.run(lambda: parts[RANK])
    for axis in ((0,), (0, 1), -1):
        found, sums = strategy.reduce("SUM", value, axis), [part.sum(axis=axis) for part in parts]
        assert np.array_equal(found, sum(sums)) and found.dtype == sums[0].dtype
        mean = strategy.reduce("MEAN", value, axis)
        assert np.all(mean == np.float32(least + (N // 2) / N)) and mean.dtype == np.float32
