"""Arrays in files as sources: rows are read when needed, in long reads, where needed."""

import itertools
import math

import numpy as np
import pytest
from internals import distribute_dataset, select
from pipelines import items
from thread_ranks import on_ranks

from hpcstrat import ReplicaMismatchError, TensorSpec
from hpcstrat.data import Dataset

ROWS = np.arange(120.0).reshape(40, 3)


class Stored:
    """A stand-in for an array in a file, which takes only slices of rows, and records them."""

    def __init__(self, array):
        self.array, self.reads = array, []

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        # The file's dtype; reads return another, as netCDF4 does when it scales.
        return np.dtype(np.int16)

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("read as a whole")

    def __getitem__(self, rows):
        assert type(rows) is slice and type(rows.start) is type(rows.stop) is int
        found = self.array[rows]
        if found.size:
            self.reads.append((rows.start, rows.stop))
        return found

    @property
    def rows(self):
        """The rows that were read, in their order, some perhaps more than once."""
        return [row for run in self.reads for row in range(*run)]


def test_rows_are_read_when_they_are_needed_and_in_one_read_for_a_batch():
    stored = Stored(ROWS)
    dataset = Dataset.from_tensor_slices({"x": stored, "y": np.arange(40)})
    batches = dataset.batch(16)
    assert batches.element_spec == {
        "x": TensorSpec((None, 3), np.float64),
        "y": TensorSpec((None,), np.int64),
    }
    assert len(dataset) == 40 and len(batches) == 3 and stored.reads == []
    found = list(batches)
    assert stored.reads == [(0, 16), (16, 32), (32, 40)]
    assert np.array_equal(np.concatenate([batch["x"] for batch in found]), ROWS)
    found[0]["x"][:] = -1  # the program owns the batch
    assert ROWS[0, 0] == 0 and next(iter(batches))["y"].tolist() == list(range(16))
    stored.reads.clear()
    assert len(list(dataset.skip(5).take(2).batch(2))) == 1 and stored.reads == [(5, 7)]


def test_elements_that_are_not_batched_are_read_many_at_once():
    stored = Stored(ROWS)
    assert items(Dataset.from_tensor_slices(stored)) == ROWS.tolist() and stored.reads == [(0, 40)]


@pytest.mark.parametrize("shape", [(40,), (40, 3), (40, 2, 3, 4)], ids=str)
def test_shuffled_rows_are_read_once_and_neighbours_together(shape):
    array = np.arange(math.prod(shape)).reshape(shape)
    stored = Stored(array)
    (batch,) = Dataset.from_tensor_slices(stored).shuffle(40, seed=1).take(30).batch(30)
    (order,) = items(Dataset.range(40).shuffle(40, seed=1).take(30).batch(30))
    assert batch.tolist() == array[order].tolist() and order != sorted(order)
    assert stored.rows == sorted(order)
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(stored.reads))
    stored.reads.clear()
    rows = Dataset.from_tensor_slices(stored)
    (batch,) = rows.take(3).repeat(2).batch(6)
    assert batch.tolist() == array[[0, 1, 2, 0, 1, 2]].tolist() and stored.reads == [(0, 3)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_reads_its_own_rows_only(size):
    def program(rank):
        stored = Stored(ROWS)
        iterator = iter(
            distribute_dataset(Dataset.from_tensor_slices(stored).batch(12), rank, None)
        )
        sample = stored.rows  # which the ranks compare
        stored.reads = []
        steps = [select(step).tolist() for step in iterator]
        return steps, sample, stored.reads

    every = on_ranks(size, program)
    together = zip(*[steps for steps, _, _ in every], strict=True)
    assert [row for parts in together for part in parts for row in part] == ROWS.tolist()
    for steps, sample, reads in every:
        assert 0 < len(sample) <= 4
        read = [ROWS[slice(*run)].tolist() for run in reads]
        assert read == [part for part in steps if part]  # one read for a batch


def test_ranks_compare_a_few_rows(monkeypatch):
    def program(rank, array):
        stored = Stored(array)
        iter(distribute_dataset(Dataset.from_tensor_slices(stored).batch(8), rank, None))
        return stored.rows

    monkeypatch.setenv("HPCSTRAT_CHECK", "1")
    for shape in ((3000,), (50, 40, 30)):
        array = np.arange(math.prod(shape)).reshape(shape)
        for rows in on_ranks(2, lambda rank, array=array: program(rank, array)):
            assert 2 <= len(rows) <= 4 and {0, shape[0] - 1} <= {*rows}
        for other in (array[::-1], array[..., ::-1], array + 1):
            with pytest.raises(ReplicaMismatchError, match="different arrays in"):
                on_ranks(2, lambda rank, pair=(array, other): program(rank, pair[rank.rank]))
    assert on_ranks(2, lambda rank: program(rank, np.zeros((0, 3)))) == [[], []]


def test_what_is_not_an_array_of_rows_is_refused():
    with pytest.raises(TypeError, match=r"masked array.*variable\.set_auto_mask\(False\)"):
        Dataset.from_tensor_slices(Stored(np.ma.masked_equal(np.arange(3), 1)))
    with pytest.raises(TypeError, match="is a Stored of dtype int16.* Python objects"):
        Dataset.from_tensor_slices(Stored(np.array(["a", "bb"], object)))
    with pytest.raises(ValueError, match="from_tensor_slices: .*a first dimension"):
        Dataset.from_tensor_slices((Stored(ROWS), np.arange(3)))
    shrinks = Stored(ROWS)
    dataset = Dataset.from_tensor_slices(shrinks).batch(10)
    shrinks.array = ROWS[:35]
    with pytest.raises(ValueError, match=r"\(40, 3\) .* of shape \(5, 3\) for the rows 30 to 40"):
        list(dataset)


def test_a_series_with_labels_is_an_array_in_memory():
    class Series:
        shape, dtype, iloc = (3,), np.dtype(float), None

        def __array__(self, dtype=None, copy=None):
            return np.array([2.0, 0.0, 1.0])

        def __getitem__(self, index):
            raise AssertionError("indexed by position")

    assert items(Dataset.from_tensor_slices(Series())) == [2, 0, 1]


@pytest.mark.parametrize("name", ["h5py", "zarr"])
def test_arrays_of_libraries(name, tmp_path, monkeypatch):
    library = pytest.importorskip(name, reason=f"the arrays are those of {name}")

    def real(array):
        if name == "zarr":
            return library.array(array, chunks=(7, *array.shape[1:]))
        return library.File(tmp_path / f"{array.ndim}.h5", "w").create_dataset("x", data=array)

    stored = real(ROWS)
    monkeypatch.setattr(type(stored), "__array__", Stored.__array__)
    dataset = Dataset.from_tensor_slices({"x": stored, "n": real(np.arange(40))})
    assert dataset.element_spec == {"x": TensorSpec((3,), float), "n": TensorSpec((), np.int64)}
    plain = Dataset.from_tensor_slices({"x": ROWS, "n": np.arange(40)})
    for size in (40, 3):
        shuffled = [one.shuffle(size, seed=2).batch(9) for one in (dataset, plain)]
        assert items(shuffled[0]) == items(shuffled[1])

    def program(rank):
        shared = distribute_dataset(dataset.batch(10), rank, None)
        return [select(step["x"]).tolist() for step in shared]

    first, second = on_ranks(2, program)
    assert [
        row for pair in zip(first, second, strict=True) for part in pair for row in part
    ] == ROWS.tolist()
