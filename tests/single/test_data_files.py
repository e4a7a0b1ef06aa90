"""Dataset.save and load, in one process: what is written is read again, and nothing is lost when something fails."""

import os
from typing import Any

import numpy as np
import pytest
from test_data_dataset import items

from hpcstrat import TensorSpec
from hpcstrat.data import Dataset


def saved(dataset, path):
    dataset.save(path)
    return Dataset.load(path)


@pytest.mark.parametrize("dtype", ["bool", "uint8", ">i4", "int64", "float16", "complex128", "U3", "S2", "M8[s]"])
def test_slices_of_any_dtype(tmp_path, dtype):
    array = np.arange(12).astype("i8" if dtype == "M8[s]" else dtype).astype(dtype).reshape(4, 3)
    found = saved(Dataset.from_tensor_slices((array, array[:, 0])), tmp_path / "data")
    assert found.element_spec[0].dtype.kind == array.dtype.kind and found.element_spec[0].shape == (3,)
    assert len(found) == 4
    batch, column = next(iter(found.batch(4)))
    assert batch.dtype == array.dtype and type(batch) is np.ndarray
    np.testing.assert_array_equal(batch, array)
    np.testing.assert_array_equal(column, array[:, 0])
    batch[...] = batch[::-1]  # a copy, which may be written to
    np.testing.assert_array_equal(next(iter(found.batch(4)))[0], array)


def test_elements_that_differ_in_size(tmp_path):
    rows = Dataset.range(6).map(lambda x: {"n": np.full(x % 4, x), "text": "ab" * int(x), "none": np.zeros((0, 2))})
    found = saved(rows, tmp_path / "data")
    assert items(found) == items(rows) and len(found) == 6
    assert found.element_spec["n"] == TensorSpec((None,), np.int64) and found.element_spec["none"].shape == (0, 2)
    assert items(found.take(3).padded_batch(3))[0]["n"] == [[0, 0], [1, 0], [2, 2]]
    assert items(found.shuffle(6, seed=1)) == items(rows.shuffle(6, seed=1))
    assert repr(found) == "Dataset.load('data')"


def test_batches_and_nothing_within(tmp_path):
    assert items(saved(Dataset.range(5).batch(2), tmp_path / "a")) == [[0, 1], [2, 3], [4]]
    empty = saved(Dataset.from_tensor_slices(np.zeros((3, 0))), tmp_path / "b")
    assert [x.shape for x in empty] == [(0,)] * 3


def test_what_is_saved_again_is_replaced(tmp_path):
    path = tmp_path / "folder" / "data"
    assert items(saved(Dataset.range(5), path)) == [0, 1, 2, 3, 4]
    assert items(saved(Dataset.range(3), path)) == [0, 1, 2]
    assert os.listdir(path.parent) == ["data"]
    before = Dataset.load(path)
    assert items(saved(before.map(lambda x: -x), path)) == [0, -1, -2]  # from the files that it replaces
    assert items(before) == [0, 1, 2]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "data"
    Dataset.range(3).save(path)
    wrongs: list[Any] = [
        (Dataset.range(3).map(lambda x: 6 // (2 - int(x))), ZeroDivisionError),
        (Dataset.from_generator(lambda: iter([1, (1, 2)])), ValueError),
        (Dataset.range(0), ValueError),
        (Dataset.range(4).window(2), TypeError),
        (Dataset.from_tensors({1: 2}), TypeError),
    ]
    for dataset, error in wrongs:
        with pytest.raises(error):
            dataset.save(path)
        assert os.listdir(tmp_path) == ["data"] and items(Dataset.load(path)) == [0, 1, 2]
    (tmp_path / "other").mkdir()
    with pytest.raises(FileExistsError, match="is not a dataset that was saved"):
        Dataset.range(3).save(tmp_path / "other")
    with pytest.raises(NotImplementedError, match="Dataset.save: compression is 'GZIP'"):
        Dataset.range(3).save(path, "GZIP")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="Dataset.load: reader_func is"):
        Dataset.load(path, reader_func=len)  # pyright: ignore[reportArgumentType]


def test_what_is_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="no dataset that was saved"):
        Dataset.load(tmp_path)
    Dataset.range(3).save(tmp_path / "data")
    with open(tmp_path / "data" / "leaf0", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="has 25 bytes; it must have 24"):
        Dataset.load(tmp_path / "data")
    (tmp_path / "data" / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match="is not a header"):
        Dataset.load(tmp_path / "data")
