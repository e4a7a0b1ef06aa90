"""Functions of elements: when they run and on what, their errors, and who owns an element."""

import itertools

import numpy as np
import pytest
from pipelines import items, plain

from hpcstrat.data import Dataset


def generated(n):
    return Dataset.from_generator(lambda: iter(range(n)), np.int64)


def test_functions_run_when_an_element_is_asked_for():
    called = []
    dataset = Dataset.range(100).map(lambda x: called.append(int(x)) or x).shard(2, 1).skip(3)
    assert called == []
    iterator = iter(dataset)
    assert next(iterator) == 7
    assert called == [7]
    assert items(dataset.batch(2).take(1)) == [[7, 9]]
    assert called == [7, 7, 9]


HUNDRED = Dataset.range(100).map(lambda x: x)
READ = {
    "map": lambda d: d.map(lambda x: -x),
    "filter": lambda d: d.filter(lambda x: True),
    "enumerate": lambda d: d.enumerate(),
    "zip": lambda d: Dataset.zip(d, Dataset.range(100)),
    "zip behind": lambda d: Dataset.zip(HUNDRED, d),
    "zip with a cache": lambda d: Dataset.zip(d, HUNDRED.cache()),
    "zip with a shuffle": lambda d: Dataset.zip(d, HUNDRED.cache().shuffle(5, seed=1)),
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


def test_what_follows_a_source_is_read_when_its_turn_comes():
    read = []
    noted = Dataset.range(4).filter(lambda x: read.append(int(x)) or True)
    iterator = iter(Dataset.range(9).concatenate(noted))
    assert [next(iterator) for _ in range(9)] == [*range(9)] and read == []
    assert [*iterator] == read == [0, 1, 2, 3]


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


def test_results_of_functions():
    """The members of a tuple are arguments, and a list counts as a tuple."""
    pairs = Dataset.range(10).enumerate(5)
    assert items(pairs.map(lambda i, x: (x, [i, x])).take(1)) == [(0, [5, 0])]
    assert items(pairs.map(lambda i, x: [i, x]).take(1)) == [(5, 0)]
    assert items(pairs.filter(lambda i, x: i + x > 21)) == [(14, 9)]


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


def check(x):
    if x in (2, 5):
        raise BAD(f"no {x}")
    return True


FAILING = {
    "map": lambda: Dataset.range(7).map(lambda x: check(x) and x),
    "map in threads": lambda: Dataset.range(7).map(lambda x: check(x) and x, 3),
    "filter": lambda: Dataset.range(7).filter(check),
    "generated": lambda: generated(7).map(lambda x: check(x) and x),
}
STAGES = {
    "map": (lambda d: d, [0, 1, BAD]),
    "prefetch": (lambda d: d.prefetch(4), [0, 1, BAD]),
    "map again": (lambda d: d.map(lambda x: x + 1), [1, 2, BAD]),
    "map again in threads": (lambda d: d.map(lambda x: x + 1, 4), [1, 2, BAD]),
    "filter": (lambda d: d.filter(lambda x: x % 3), [1, BAD]),
    "batch": (lambda d: d.batch(2), [[0, 1], BAD]),
    "batches": (lambda d: d.batch(2).prefetch(1).map(lambda x: -x), [[0, -1], BAD]),
    "batch and unbatch": (lambda d: d.batch(2).map(lambda x: x).unbatch(), [0, 1, BAD]),
    "rows": (lambda d: d.batch(2).unbatch(), [0, 1, BAD]),
    "take and skip": (lambda d: d.take(5).skip(1), [1, BAD]),
    "shard": (lambda d: d.shard(2, 0), [0, BAD]),
    "repeat": (lambda d: d.repeat(2), [0, 1, BAD]),
    "enumerate": (lambda d: d.enumerate(), [(0, 0), (1, 1), BAD]),
    "zip": (lambda d: Dataset.zip((d, Dataset.range(5))), [(0, 0), (1, 1), BAD]),
    "concatenate": (lambda d: d.take(2).concatenate(d), [0, 1, 0, 1, BAD]),
    "after a source": (lambda d: Dataset.range(3).concatenate(d.skip(2)), [0, 1, 2, BAD]),
    "cache": (lambda d: d.cache().repeat(2), [0, 1, BAD]),
}


@pytest.mark.parametrize("source", FAILING)
def test_an_error_comes_after_the_elements_before_it_and_ends_the_iteration(source):
    for stage, (transform, expected) in STAGES.items():
        dataset = transform(FAILING[source]())
        assert attempts(dataset) == attempts(dataset) == expected, stage


def test_what_failed_is_tried_again_in_the_next_pass():
    tries = []
    dataset = Dataset.range(3).map(lambda x: tries.append(x) or int(x) // (len(tries) != 2))
    cached = dataset.filter(lambda x: True).cache()
    assert attempts(cached) == [0, BAD]
    assert attempts(cached) == [0, 1, 2]
    made = len(tries)
    assert attempts(cached) == [0, 1, 2] and len(tries) == made


def test_an_error_of_a_generator():
    def numbers():
        yield 1
        yield 1 // 0

    for dataset in (
        Dataset.from_generator(numbers),
        Dataset.from_generator(numbers).filter(bool).map(lambda x: x, 3),
        Dataset.from_generator(numbers).prefetch(2),
    ):
        assert attempts(dataset) == attempts(dataset) == [1, BAD]


def test_rows_that_have_no_common_number_come_after_those_that_have():
    pairs = [(np.arange(n), np.arange(m)) for n, m in [(2, 2), (1, 3), (1, 1)]]
    rows = iter(Dataset.from_generator(lambda: pairs).unbatch())
    assert [next(rows), next(rows)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="first dimension"):
        next(rows)
    assert [*rows] == []


def test_an_error_between_parts_comes_after_the_elements_of_the_first():
    integers, floats = (Dataset.range(5).map(function) for function in (int, np.float32))
    for both in integers.concatenate(floats), integers.concatenate(floats).cache():
        got = []
        with pytest.raises(TypeError, match=r"Dataset\.concatenate"):
            got.extend(int(x) for x in both)
        assert got == [0, 1, 2, 3, 4]


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
    "nested": lambda rows: Dataset.zip({"x": rows, "y": (rows,)}).map(lambda d: d["x"]),
    "mapped": lambda rows: rows.map(lambda x: x),
    "unbatched": lambda rows: rows.batch(64).unbatch(),
    "unbatched results": lambda rows: rows.batch(64).map(lambda x: x).unbatch(),
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


def test_a_record_that_is_kept_keeps_no_others():
    records = np.zeros(100, [("a", np.int32), ("b", np.float64)])
    record = next(iter(Dataset.from_tensor_slices(records)))
    assert record.base is None or record.base.nbytes == record.nbytes == 12


def test_a_file_larger_than_memory_stays_on_disk(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    array = np.memmap(tmp_path / "sparse", np.uint8, "r", shape=(1 << 20, 1 << 20))
    batch = next(iter(Dataset.from_tensor_slices(array).shuffle(1 << 20, seed=0).batch(2)))
    assert batch.shape == (2, 1 << 20)
    assert not batch.any()
