"""Functions of elements: when they run and on what, their errors, and who owns an element."""

import itertools

import numpy as np
import pytest
from pipelines import items, plain

from hpcstrat.data import Dataset


def generated(n):
    return Dataset.from_generator(lambda: iter(range(n)), np.int64)


HUNDRED = Dataset.range(100).map(lambda x: x)
READ = {
    "map": lambda d: d.map(lambda x: -x),
    "filter": lambda d: d.filter(lambda x: True),
    "zip": lambda d: Dataset.zip(d, Dataset.range(100)),
    "zip with a cache": lambda d: Dataset.zip(d, HUNDRED.cache()),
    "zip of joined": lambda d: Dataset.zip(d, HUNDRED.take(9).concatenate(HUNDRED)),
    "concatenate": lambda d: d.concatenate(Dataset.range(3)),
    "repeat": lambda d: d.repeat(2).take(150),
    "cache": lambda d: d.cache(),
}


@pytest.mark.parametrize("pipeline", READ)
def test_a_generator_is_read_when_an_element_is_asked_for(pipeline):
    read = []

    def numbers():
        for x in range(100):
            read.append(x)
            yield x

    made = READ[pipeline](Dataset.from_generator(numbers, np.int64))
    iterator, batches = iter(made), iter(made.batch(3))
    assert read == []
    for count in range(1, 20):
        next(iterator)
        assert read == [*range(count)]
    read.clear()
    next(batches)
    assert read == [0, 1, 2]


@pytest.mark.parametrize("dataset", [Dataset.range(5), generated(5)], ids=["range", "generated"])
def test_a_cache_calls_functions_once(dataset):
    called = []
    cached = dataset.map(lambda x: called.append(int(x)) or x * 2).cache()
    for _ in range(2):
        assert items(cached) == [0, 2, 4, 6, 8]
    assert items(cached.batch(5)) == [[0, 2, 4, 6, 8]]
    assert called == list(range(5))


def test_a_generator_left_early_is_closed_and_begins_anew():
    closed = []

    def numbers():
        try:
            yield from range(5)
        finally:
            closed.append(True)

    dataset = Dataset.from_generator(numbers, np.int64).batch(2)
    iterator = iter(dataset)
    next(iterator)
    del iterator
    assert closed == [True]
    assert items(dataset) == [[0, 1], [2, 3], [4]]


# ---- errors


BAD = ZeroDivisionError


def attempts(dataset):
    """The elements, and the class of the error that ends them."""
    found, iterator = [], iter(dataset)
    try:
        for element in iterator:
            found.append(plain(element))
    except ArithmeticError as error:
        found.append(type(error))
    assert next(iterator, None) is None
    return found


def test_what_failed_is_tried_again_in_the_next_pass():
    tries = []
    dataset = Dataset.range(3).map(lambda x: tries.append(x) or int(x) // (len(tries) != 2))
    cached = dataset.filter(lambda x: True).cache()
    assert attempts(cached) == [0, BAD]
    assert attempts(cached) == [0, 1, 2]
    made = len(tries)
    assert attempts(cached) == [0, 1, 2] and len(tries) == made


def test_rows_that_have_no_common_number_come_after_those_that_have():
    pairs = [(np.arange(n), np.arange(m)) for n, m in [(2, 2), (1, 3), (1, 1)]]
    rows = iter(Dataset.from_generator(lambda: pairs).unbatch())
    assert [next(rows), next(rows)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="first dimension"):
        next(rows)
    assert [*rows] == []


@pytest.mark.parametrize("result", [None, np.array([True, False])])
def test_a_predicate_must_return_one_flag(result):
    """A function without `return` would leave nothing of a dataset, and say nothing."""
    with pytest.raises(TypeError, match=r"Dataset\.filter: predicate returned .*True or False"):
        items(Dataset.range(3).filter(lambda x: result))


def test_a_function_cannot_end_the_elements():
    def stop(x):
        raise StopIteration

    for dataset, name in [
        (Dataset.range(3).map(stop), "map: map_func"),
        (Dataset.range(3).map(stop, 2), "map: map_func"),
        (Dataset.range(3).filter(stop), "filter: pred"),
    ]:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"Dataset\.{name}.* raised StopIteration"):
                next(iter(dataset))


# ---- elements belong to the program


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_are_new_writable_and_contiguous(shuffled):
    source = np.arange(12.0).reshape(6, 2)
    dataset = Dataset.from_tensor_slices(source)
    dataset = (dataset.shuffle(6, seed=0) if shuffled else dataset).batch(3)
    for batch in dataset:
        assert batch.flags.writeable and batch.flags.c_contiguous
        assert not np.shares_memory(batch, source)
        batch[:] = -1
    for cached in (
        dataset.cache(),
        dataset.map(lambda x: x).cache(),
        dataset.unbatch().cache(),
        Dataset.from_tensors(source).repeat(2),
    ):
        for batch in itertools.chain(cached, cached):
            assert (batch >= 0).all()
            batch[:] = -1
    for row in Dataset.from_tensor_slices(source):
        row[:] = -1
    np.testing.assert_array_equal(source, np.arange(12.0).reshape(6, 2))


def test_a_function_may_write_to_its_argument():
    def add(x):
        x += 1
        return x

    zeros = [np.zeros((2, 3)) for _ in range(4)]
    others = Dataset.from_tensor_slices(np.ones((1, 2, 3)))
    for source in Dataset.from_generator(lambda: zeros), Dataset.from_tensor_slices([*zeros]):
        added = source.map(add)
        for dataset in added, added.cache(), added.concatenate(others), source.cache().map(add):
            _ = dataset.element_spec
            for element in itertools.chain(dataset, dataset):
                assert (element == 1).all()
    assert not np.any(zeros)


ROWS = np.arange(4096.0).reshape(512, 8)
KEPT = {
    "slices": lambda rows: rows,
    "shuffled": lambda rows: rows.shuffle(512, seed=0),
    "mapped": lambda rows: rows.map(lambda x: x),
    "unbatched": lambda rows: rows.batch(64).unbatch(),
    "cached": lambda rows: rows.cache(),
    "prefetched": lambda rows: rows.prefetch(2),
}


@pytest.mark.parametrize("kind", KEPT)
def test_an_element_that_is_kept_keeps_no_others(kind):
    for row in KEPT[kind](Dataset.from_tensor_slices(ROWS)):
        owner = row if row.base is None else row.base
        assert owner.nbytes == row.nbytes == 64
    batch = next(iter(KEPT[kind](Dataset.from_tensor_slices(ROWS)).batch(5)))
    assert batch.base is None


def test_a_file_larger_than_memory_stays_on_disk(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    array = np.memmap(tmp_path / "sparse", np.uint8, "r", shape=(1 << 20, 1 << 20))
    batch = next(iter(Dataset.from_tensor_slices(array).shuffle(1 << 20, seed=0).batch(2)))
    assert batch.shape == (2, 1 << 20)
    assert not batch.any()
