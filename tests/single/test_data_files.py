"""Dataset.save and load, in one process: round trips, and no data lost when a call fails."""

import json
import os
import re
import shutil
from typing import Any

import numpy as np
import pytest
from internals import connect, distribute_dataset
from test_data_dataset import items

from hpcstrat import TensorSpec
from hpcstrat.data import Dataset


def saved(dataset, path):
    dataset.save(path)
    return Dataset.load(path)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", ">i4", "int64", "float16", "complex128", "U3", "S2", "M8[s]"]
)
def test_slices_of_any_dtype(tmp_path, dtype):
    array = np.arange(12).astype("i8" if dtype == "M8[s]" else dtype).astype(dtype).reshape(4, 3)
    found = saved(Dataset.from_tensor_slices((array, array[:, 0])), tmp_path / "data")
    assert found.element_spec[0].dtype.kind == array.dtype.kind and found.element_spec[0].shape == (
        3,
    )
    assert len(found) == 4
    batch, column = next(iter(found.batch(4)))
    assert batch.dtype == array.dtype and type(batch) is np.ndarray
    np.testing.assert_array_equal(batch, array)
    np.testing.assert_array_equal(column, array[:, 0])
    batch[...] = batch[::-1]  # a copy, which is writable
    np.testing.assert_array_equal(next(iter(found.batch(4)))[0], array)


def test_elements_that_differ_in_size(tmp_path):
    rows = Dataset.range(6).map(
        lambda x: {"n": np.full(x % 4, x), "text": "ab" * int(x), "none": np.zeros((0, 2))}
    )
    found = saved(rows, tmp_path / "data")
    assert items(found) == items(rows) and len(found) == 6
    assert found.element_spec["n"] == TensorSpec((None,), np.int64) and found.element_spec[
        "none"
    ].shape == (0, 2)
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
    # Reads from the files that it replaces.
    assert items(saved(before.map(lambda x: -x), path)) == [0, -1, -2]
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
    with pytest.raises(FileExistsError, match="is not a saved dataset"):
        Dataset.range(3).save(tmp_path / "other")
    with pytest.raises(NotImplementedError, match="Dataset.save: compression is 'GZIP'"):
        Dataset.range(3).save(path, "GZIP")  # pyright: ignore[reportArgumentType]
    with pytest.raises(NotImplementedError, match="Dataset.load: reader_func is"):
        Dataset.load(path, reader_func=len)  # pyright: ignore[reportArgumentType]


def test_what_is_not_there_or_damaged(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved dataset"):
        Dataset.load(tmp_path)
    Dataset.range(3).save(tmp_path / "data")
    with open(tmp_path / "data" / "leaf0", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="has 25 bytes; it must have 24"):
        Dataset.load(tmp_path / "data")
    (tmp_path / "data" / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match="is not a header"):
        Dataset.load(tmp_path / "data")


HUGE = 10**18
LEAF = [["<i8", []]]
HEADERS: dict[str, tuple[Any, str]] = {
    "a number": (3, "dataset.json is not a header"),
    "a list": ([], "dataset.json is not a header"),
    "brackets": ("[" * 100_000, "dataset.json is not a header"),
    "a number of 5000 digits": ("9" * 5000, "dataset.json is not a header"),
    "no format": ({"format": ...}, "must have a format, a count, a nest and leaves"),
    "no leaves": ({"leaves": ...}, "must have a format, a count, a nest and leaves"),
    "another format": ({"format": "x"}, "has the format 'x'; this version reads 1"),
    "a negative count": ({"count": -3}, "data is damaged: its count is -3"),
    "a count that is true": ({"count": True}, "data is damaged: its count is True"),
    "a huge count": ({"count": HUGE}, "leaf0 has 24 bytes; it must have 8000000000000000000"),
    "a larger count": ({"count": HUGE**2}, "data is damaged: its count is 1000"),
    "leaves that are a number": ({"leaves": 3}, "data is damaged"),
    "a kind that is a number": ({"leaves": [[3]]}, "data is damaged"),
    "no kinds": ({"leaves": [[]]}, r"data is damaged: .*leaf0\.kinds\.npy"),
    "more leaves": ({"leaves": [LEAF, LEAF]}, "data is damaged: .*leaf1"),
    "objects": ({"leaves": [[["O", []]]]}, "data is damaged: elements have the dtype 'O'"),
    "an unknown dtype": ({"leaves": [[["x9", []]]]}, "data is damaged"),
    "a dtype of fields": (
        {"leaves": [[["i4,i4", []]]]},
        "data is damaged: elements have the dtype 'i4,i4'",
    ),
    "no dtype": ({"leaves": [[[None, []]]]}, "data is damaged: elements have the dtype None"),
    "a shape that is a number": (
        {"leaves": [[["<i8", 3]]]},
        "data is damaged: elements of dtype <i8 have the shape 3",
    ),
    "a negative shape": (
        {"leaves": [[["<i8", [-1]]]]},
        r"data is damaged: elements of dtype <i8 have the shape \[-1",
    ),
    "a huge shape": (
        {"leaves": [[["<i8", [HUGE, HUGE]]]]},
        "leaf0 has 24 bytes; it must have 24000",
    ),
    "65 dimensions": ({"leaves": [[["<i8", [1] * 65]]]}, "data is damaged"),
    "many empty strings": (
        {"leaves": [[["<U0", [HUGE]]]]},
        "data is damaged: elements of dtype <U0",
    ),
    "a nest of another kind": (
        {"nest": {"x": [0]}},
        r"data is damaged: a part of its nest is {'x': \[0\]}",
    ),
    "a nest of two kinds": (
        {"nest": {"list": [0], "tuple": [0]}},
        "data is damaged: a part of its nest",
    ),
    "a nest of no kind": ({"nest": {}}, "data is damaged: a part of its nest is {}"),
    "a dict with a list": ({"nest": {"dict": [0]}}, "data is damaged: a part of its nest"),
    "a leaf that is not there": (
        {"nest": 1},
        "data is damaged: its nest does not have each of the 1 leaves once",
    ),
    "a negative leaf": (
        {"nest": -1},
        "data is damaged: its nest does not have each of the 1 leaves once",
    ),
    "a leaf twice": (
        {"nest": {"tuple": [0, 0]}},
        "data is damaged: its nest does not have each of the 1 leaves once",
    ),
    "a leaf that is true": ({"nest": True}, "data is damaged: a part of its nest is True"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_crafted_header_is_refused_by_its_name(tmp_path, what):
    header, says = HEADERS[what]
    Dataset.range(3).save(tmp_path / "data")
    path = tmp_path / "data" / "dataset.json"
    if isinstance(header, dict):
        header = {
            name: value
            for name, value in (json.loads(path.read_text()) | header).items()
            if value is not ...
        }
    path.write_text(header if isinstance(header, str) else json.dumps(header))
    with pytest.raises(ValueError, match=f"^Dataset.load: {re.escape(str(tmp_path))}.*{says}"):
        Dataset.load(tmp_path / "data")


def test_what_takes_no_bytes_takes_no_memory(tmp_path):
    Dataset.from_tensor_slices(np.zeros((3, 0))).save(tmp_path / "data")
    path = tmp_path / "data" / "dataset.json"
    path.write_text(path.read_text().replace('"count": 3', f'"count": {HUGE}'))
    assert len(Dataset.load(tmp_path / "data")) == HUGE
    texts = saved(Dataset.range(3).map(lambda _: ""), tmp_path / "texts")
    assert items(texts) == ["", "", ""]


KINDS = {
    "a negative one": ([0, -1, 1], "numbers that are not below 2"),
    "one that is not there": ([0, 1, 2], "numbers that are not below 2"),
    "one that is huge": ([0, 1, 2**31 - 1], "numbers that are not below 2"),
    "too few": ([0, 1], "does not hold 3 numbers"),
    "the wrong ones": ([0, 0, 0], r"leaf0 has 16 bytes; it must have 0"),
}


@pytest.mark.parametrize("what", KINDS)
def test_crafted_kinds_are_refused(tmp_path, what):
    kinds, says = KINDS[what]
    path = tmp_path / "data"
    Dataset.range(3).map(lambda i: np.ones(min(1, i))).save(path)
    np.save(path / "leaf0.kinds.npy", np.array(kinds, np.int32))
    with pytest.raises(ValueError, match=f"data is damaged: .*{says}"):
        Dataset.load(path)


def test_crafted_kinds_take_no_memory(tmp_path):
    path = tmp_path / "data"
    Dataset.range(3).map(lambda i: np.ones(min(1, i))).save(path)
    with open(path / "leaf0.kinds.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<i4", "fortran_order": False, "shape": (HUGE,)}
        )
    with pytest.raises(ValueError, match="data is damaged"):
        Dataset.load(path)


# ---- a cache in files, with the results of TensorFlow 2.15.1 for the same programs, but for the
# wrong pipeline: there it is refused only where dtypes or shapes differ


def test_a_cache_in_files_is_read_by_every_later_iteration_and_program(tmp_path):
    called = []

    def double(x):
        called.append(int(x))
        return 2 * x

    def program():
        return Dataset.range(5).map(double).cache(tmp_path / "kept")

    first = program()
    for dataset in first, first, program():
        assert items(dataset) == [0, 2, 4, 6, 8] and len(dataset) == 5
    assert called == [0, 1, 2, 3, 4] and os.listdir(tmp_path) == ["kept"]
    assert items(Dataset.load(tmp_path / "kept")) == [0, 2, 4, 6, 8]


def test_a_cache_that_is_not_complete_is_not_used(tmp_path):
    os.mkdir(tmp_path / "kept.partial-0123")  # of a program that was killed
    wrong = [1]

    def fail(x):
        return x // (0 if x == 3 and wrong else 1)

    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        Dataset.range(5).map(fail).cache(str(tmp_path / "kept"))
    assert os.listdir(tmp_path) == ["kept.partial-0123"]
    wrong.clear()
    assert items(Dataset.range(5).map(fail).cache(str(tmp_path / "kept"))) == [0, 1, 2, 3, 4]


def test_two_programs_that_replace_a_dataset_at_once(tmp_path, monkeypatch):
    path, rename = tmp_path / "data", os.rename

    def rename_after_another(source, target):
        if ".previous-" in os.fspath(target):  # the other program has moved it away
            monkeypatch.undo()
            shutil.rmtree(source)
        rename(source, target)

    Dataset.range(5).save(path)
    monkeypatch.setattr(os, "rename", rename_after_another)
    Dataset.range(3).save(path)
    assert items(Dataset.load(path)) == [0, 1, 2] and os.listdir(tmp_path) == ["data"]


def test_a_cache_that_another_program_has_completed_meanwhile_is_kept(tmp_path):
    path, other = tmp_path / "kept", tmp_path / "other"

    def program(x):
        if x == 2 and other.exists():
            os.rename(other, path)
        return x

    Dataset.range(3).map(program).cache(path)
    number = os.stat(path / "leaf0").st_ino
    os.rename(path, other)

    assert items(Dataset.range(3).map(program).cache(path)) == [0, 1, 2]
    assert os.stat(path / "leaf0").st_ino == number and os.listdir(tmp_path) == ["kept"]


def test_a_cache_of_another_pipeline_is_refused(tmp_path):
    train, test = Dataset.range(5).map(abs), Dataset.range(3).map(abs)
    train.cache(tmp_path / "kept")
    with pytest.raises(
        ValueError, match=r"Dataset\.cache: .*range\(0, 5\).*range\(0, 3\).* remove"
    ):
        test.cache(tmp_path / "kept")
    Dataset.from_tensor_slices(np.arange(5)).cache(tmp_path / "arrays")
    Dataset.from_tensor_slices(np.arange(5)).cache(tmp_path / "arrays")
    with pytest.raises(ValueError, match="with checksums"):
        Dataset.from_tensor_slices(np.arange(1, 6)).cache(tmp_path / "arrays")
    with pytest.raises(ValueError, match="is infinite.*call Dataset.cache before Dataset.repeat"):
        train.repeat().cache(tmp_path / "endless")
    with pytest.raises(FileExistsError, match=r"Dataset\.cache: the path exists"):
        train.cache(tmp_path)
    with pytest.raises(TypeError, match=r"Dataset\.cache: filename is 3"):
        train.cache(3)  # pyright: ignore[reportArgumentType]
    assert items(train.shuffle(5, seed=1).cache("")) == items(train.shuffle(5, seed=1))


def test_a_cache_keeps_orders_and_batches(tmp_path):
    shuffled = Dataset.range(7).shuffle(7).batch(3).cache(tmp_path / "kept")
    assert items(shuffled) == items(shuffled)
    batches = distribute_dataset(shuffled, connect(), None)
    assert items(batches) == items(shuffled)
