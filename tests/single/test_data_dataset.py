"""Datasets in one process: elements, order, attributes, and what is read when."""

import collections
import copy
import dataclasses
import inspect
import itertools
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import _node, distribute_dataset
from thread_ranks import on_ranks

import hpcstrat as hs
from hpcstrat import TensorSpec
from hpcstrat.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    DatasetSpec,
    Optional,
    Options,
    assert_cardinality,
)


def plain(element) -> Any:
    if isinstance(element, dict):
        return {key: plain(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(plain(part) for part in element)
    return np.asarray(element).tolist()


def items(dataset):
    return [plain(element) for element in dataset]


# ---- sources


def test_range_is_pythons():
    for args in [(4,), (2, 5), (1, 10, 3), (5, 0, -2), (0,), (3, 3)]:
        assert items(Dataset.range(*args)) == list(range(*args))
    assert {type(x) for x in Dataset.range(3)} == {np.int64}
    assert next(iter(Dataset.range(3, output_type=np.float32).batch(3))).dtype == np.float32
    with pytest.raises(ValueError, match="zero"):
        Dataset.range(1, 2, 0)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "int64", "float16", "float32", "complex128", "U3"]
)
def test_slices_keep_their_dtype(dtype):
    array = np.arange(6).reshape(3, 2).astype(dtype)
    dataset = Dataset.from_tensor_slices(array)
    assert dataset.element_spec == TensorSpec((2,), dtype)
    batch = next(iter(dataset.batch(3)))
    assert batch.dtype == array.dtype
    np.testing.assert_array_equal(batch, array)
    scalars = Dataset.from_tensor_slices(array[:, 0]).map(lambda x: x).batch(3)
    assert next(iter(scalars)).dtype.kind == array.dtype.kind


def test_python_numbers_become_tensorflows_dtypes_and_lists_arrays():
    assert Dataset.from_tensor_slices([1, 2]).element_spec == TensorSpec((), np.int32)
    assert Dataset.from_tensor_slices([1.5, float("nan")]).element_spec == TensorSpec(
        (), np.float32
    )
    assert Dataset.from_tensor_slices([2**40]).element_spec == TensorSpec((), np.int64)
    assert Dataset.from_tensor_slices([[1, 2], [3, 4], [5, 6]]).element_spec == TensorSpec(
        (2,), np.int32
    )
    assert Dataset.from_tensors([np.float64(1)]).element_spec == TensorSpec((1,), np.float64)
    assert Dataset.from_tensors(True).element_spec == TensorSpec((), np.bool_)
    assert items(Dataset.from_tensor_slices(([1, 2], {"a": [3.5, 4.5]}))) == [
        (1, {"a": 3.5}),
        (2, {"a": 4.5}),
    ]


Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Sample:
    image: np.ndarray
    label: np.ndarray


def test_nests_of_all_kinds():
    point = next(iter(Dataset.from_tensor_slices(Point(np.arange(3), np.ones((3, 2)))).batch(2)))
    assert isinstance(point, Point)
    assert point.x.shape == (2,) and point.y.shape == (2, 2)
    sample = next(iter(Dataset.from_tensor_slices(Sample(np.ones((3, 2)), np.arange(3))).batch(3)))
    assert isinstance(sample, Sample)
    np.testing.assert_array_equal(sample.label, np.arange(3))


class Column:
    """Like a text column of a pandas table: an object array for NumPy, with a long repr."""

    name, dtype = "city", "str"

    def __init__(self, texts):
        self.texts = texts

    def __array__(self, dtype=None, copy=None):
        return np.array(self.texts, dtype or object)


@pytest.mark.parametrize(
    "owner", [Dataset.range(3), Dataset, hs.data], ids=["a dataset", "the class", "the module"]
)
def test_an_unknown_name_is_an_ordinary_error(owner):
    name = "misspelt"
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(owner, name)
    assert items(copy.copy(Dataset.range(3))) == [0, 1, 2]


def test_sources_refuse_what_makes_no_elements():
    with pytest.raises(ValueError, match=r"first dimension.*\[2\], \[3\]"):
        Dataset.from_tensor_slices((np.arange(2), np.arange(3)))
    with pytest.raises(ValueError, match="first dimension"):
        Dataset.from_tensor_slices(np.array(3))
    with pytest.raises(TypeError, match="must be an array"):
        Dataset.from_tensors(None)
    for text in np.array(["a", "bc"], object), Column(["a", "bc"]):
        with pytest.raises(
            TypeError,
            match=r"dtype (object|str), which .* cast it with np\.asarray\(leaf, dtype=str\)",
        ):
            Dataset.from_tensor_slices({"city": text, "size": [1, 2]})
        assert items(Dataset.from_tensor_slices(np.asarray(text, dtype=str))) == ["a", "bc"]
    with pytest.raises(TypeError, match="a Column 'city' of dtype str, "):
        Dataset.from_tensor_slices({"city": Column([])})
    with pytest.raises(ValueError, match="pass a tuple, whose members may have different shapes"):
        Dataset.from_tensors([[1, 2], [3]])


def count_up(n, start=0):
    for i in range(n):
        yield np.full(i + 1, start + i, np.int64)


def test_generators():
    signature = TensorSpec((None,), np.float32)
    dataset = Dataset.from_generator(count_up, args=(np.int64(3), 5), output_signature=signature)
    assert dataset.element_spec is signature
    for _ in range(2):
        assert items(dataset) == [[5.0], [6.0, 6.0], [7.0, 7.0, 7.0]]
    typed = Dataset.from_generator(lambda: iter([(1, [2, 3])]), (np.int16, np.float32), ((), (2,)))
    assert typed.element_spec == (TensorSpec((), np.int16), TensorSpec((2,), np.float32))
    assert items(typed) == [(1, [2.0, 3.0])]
    assert Dataset.from_generator(lambda: iter([1]), np.int16).element_spec == TensorSpec(
        (), np.int16
    )
    free = Dataset.from_generator(lambda: iter([{"a": np.arange(2)}]))
    assert free.element_spec == {"a": TensorSpec((2,), np.int64)}
    assert free.cardinality() == -2


@pytest.mark.parametrize(
    "signature", [None, TensorSpec((2,), np.float32)], ids=["free", "with a signature"]
)
def test_a_generator_may_fill_the_same_array_again(signature):
    def filled():
        array = np.zeros(2, np.float32)
        for i in range(3):
            array[:] = i
            yield array

    dataset = Dataset.from_generator(filled, output_signature=signature)
    assert items(dataset.batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(3), np.zeros((2, 2)), (np.zeros(2),), "text"],
    ids=["another length", "another rank", "a tuple", "text"],
)
def test_a_generator_is_held_to_its_signature(wrong):
    dataset = Dataset.from_generator(
        lambda: iter([wrong]), output_signature=TensorSpec((2,), np.float32)
    )
    with pytest.raises(
        ValueError, match="from_generator: the generator's element does not match TensorSpec"
    ):
        list(dataset)


def test_from_generator_refuses_wrong_arguments():
    with pytest.raises(TypeError, match=r"pass `f`, not `f\(\)`"):
        Dataset.from_generator(count_up(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="one or the other"):
        Dataset.from_generator(
            lambda: iter([]), np.int64, output_signature=TensorSpec((), np.int64)
        )
    with pytest.raises(TypeError, match="without output_types"):
        Dataset.from_generator(lambda: iter([]), output_shapes=())
    with pytest.raises(TypeError, match="must be a TensorSpec"):
        Dataset.from_generator(lambda: iter([]), output_signature=np.int64)
    with pytest.raises(ValueError, match=r"pass an output_signature to Dataset.from_generator"):
        _ = Dataset.from_generator(lambda: iter([])).element_spec


# The methods of TensorFlow 2.15.1 that take a name, but for those that are refused.
NAMED = """batch cache concatenate counter enumerate filter flat_map from_generator
    from_tensor_slices from_tensors get_single_element interleave list_files map padded_batch
    prefetch range rebatch reduce repeat scan shard shuffle skip take unbatch window with_options
    zip"""


def test_a_name_is_accepted_where_tensorflow_takes_it():
    for method in NAMED.split():
        name = inspect.signature(getattr(Dataset, method)).parameters["name"]
        assert name.default is None, method
    named = (
        Dataset.range(4, name="a").map(lambda x: -x, name="b").batch(2, name="c").cache(name="d")
    )
    assert items(named) == [[0, -1], [-2, -3]]


def test_counter():
    """The values are those of TensorFlow 2.15.1."""
    assert list(Dataset.counter(3, -2, np.int32).take(3)) == [3, 1, -1]
    assert items(Dataset.counter().skip(2000).batch(3).take(2)) == [
        [2000, 2001, 2002],
        [2003, 2004, 2005],
    ]
    endless = Dataset.counter(1, dtype=np.int32)
    assert endless.cardinality() == INFINITE_CARDINALITY
    assert endless.element_spec == TensorSpec((), np.int32)
    assert len(set(items(endless.shuffle(8, seed=1).take(50)))) == 50
    assert items(Dataset.zip(Dataset.range(10, 12), endless)) == [(10, 1), (11, 2)]
    with pytest.raises(TypeError, match=r"Dataset\.counter: step is 0\.5"):
        Dataset.counter(0, 0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="the dataset is infinite"):
        endless.shuffle(UNKNOWN_CARDINALITY)


def test_apply_and_the_single_element():
    assert items(Dataset.range(4).apply(lambda d: d.batch(2))) == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="transformation_func returned int"):
        Dataset.range(1).apply(lambda d: 3)  # pyright: ignore
    assert Dataset.range(4).batch(4).get_single_element().tolist() == [0, 1, 2, 3]
    for size, what in (0, "no elements"), (2, "more than one element"):
        with pytest.raises(ValueError, match=what):
            Dataset.range(size).get_single_element()


def test_the_number_of_elements_is_announced_and_checked():
    """As in TensorFlow 2.15.1, whose errors are `FailedPreconditionError`."""
    unknown = Dataset.from_generator(lambda: range(3), np.int64)
    for dataset in unknown, Dataset.range(3):
        announced = dataset.apply(assert_cardinality(3))
        assert len(announced) == 3 and items(announced) == items(announced.batch(1).unbatch())
        assert items(dataset.repeat().apply(assert_cardinality(-1)).take(4)) == [0, 1, 2, 0]
        for count, what in (2, "at least 3 elements, and 2 were"), (4, "3 elements, and 4 were"):
            iterator, seen = iter(dataset.apply(assert_cardinality(count))), []
            with pytest.raises(ValueError, match=f"the dataset has {what}"):
                while True:
                    seen.append(int(next(iterator)))
            assert seen == [0, 1, 2][:count]
    with pytest.raises(ValueError, match="expected_cardinality is -2"):
        assert_cardinality(-2)


def test_zip():
    assert items(Dataset.zip(datasets=(Dataset.range(2), Dataset.range(3)))) == [(0, 0), (1, 1)]
    for args in (), (Dataset.range(2),):
        with pytest.raises(TypeError, match=r"Dataset\.zip: "):
            Dataset.zip(*args, datasets=(Dataset.range(2), Dataset.range(3)) * len(args))
    a, b = Dataset.range(3), Dataset.from_generator(lambda: iter(range(10)), np.int64)
    assert items(Dataset.zip((a, a.skip(1)))) == [(0, 1), (1, 2)]
    assert items(Dataset.zip(a, b)) == items(Dataset.zip((a, b))) == [(0, 0), (1, 1), (2, 2)]
    assert items(Dataset.zip({"a": a, "b": (b, a)})) == [{"a": i, "b": (i, i)} for i in range(3)]
    assert items(Dataset.zip(a)) == [0, 1, 2]
    with pytest.raises(TypeError, match="int is not a Dataset"):
        Dataset.zip((a, 3))
    with pytest.raises(TypeError, match="at least one"):
        Dataset.zip(())


# ---- each transformation, compared with lists, over sources with and without random access

MAKERS = {
    "indexed": lambda n: Dataset.range(n),
    "generated": lambda n: Dataset.from_generator(lambda: iter(range(n)), np.int64),
    "mapped": lambda n: Dataset.range(1, n + 1).map(lambda x: x - 1),
    "mapped in threads": lambda n: Dataset.from_generator(lambda: iter(range(n)), np.int64).map(
        lambda x: x, AUTOTUNE
    ),
    "joined": lambda n: Dataset.range(n // 2).concatenate(Dataset.range(n // 2, n)),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def batches(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]


def test_transformations_are_those_of_lists(make):
    ten, full = make(10), list(range(10))
    assert items(ten) == items(ten.prefetch(2)) == items(ten.cache()) == full
    assert items(ten.batch(4)) == batches(full, 4)
    assert items(ten.batch(4, drop_remainder=True)) == batches(full, 4)[:2]
    assert items(ten.batch(20)) == [full]
    assert items(ten.batch(20, True)) == []
    assert items(ten.batch(2).batch(3)) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert items(ten.batch(4).unbatch()) == full
    assert items(ten.batch(2).batch(5).unbatch()) == batches(full, 2)
    assert items(ten.batch(3).map(lambda x: x).unbatch().batch(4)) == batches(full, 4)
    for num, index in itertools.product((1, 2, 3, 7, 12), range(12)):
        if index < num:
            assert items(ten.shard(num, index)) == full[index::num]
    for count in (0, 1, 3, 10, 30):
        assert items(ten.take(count)) == full[:count]
        assert items(ten.skip(count)) == full[count:]
    assert items(ten.take(-1)) == full
    assert items(ten.skip(-1)) == items(ten.repeat(0)) == []
    assert items(ten.repeat(2).batch(4)) == batches(full * 2, 4)
    assert items(ten.batch(4).repeat(2)) == batches(full, 4) * 2
    assert items(ten.repeat().take(25)) == (full * 3)[:25]
    assert items(ten.take(0).repeat()) == []
    assert items(ten.take(2).concatenate(make(4).skip(2)).batch(3)) == [[0, 1, 2], [3]]
    assert items(ten.enumerate(5).take(2)) == [(5, 0), (6, 1)]
    assert items(ten.take(3).enumerate().batch(2)) == [([0, 1], [0, 1]), ([2], [2])]
    assert items(ten.map(lambda x: (x, [x, x + 1])).take(1)) == [(0, [0, 1])]
    assert items(ten.map(lambda x: [x, x + 1]).take(1)) == [(0, 1)]
    assert items(Dataset.zip((ten, ten)).map(lambda a, b: {"sum": a + b}).skip(9)) == [{"sum": 18}]
    assert items(ten.filter(lambda x: x % 3 == 0)) == [0, 3, 6, 9]
    assert items(ten.batch(4).filter(lambda x: x[0] != 4)) == [[0, 1, 2, 3], [8, 9]]
    assert items(Dataset.zip((ten, ten)).filter(lambda a, b: a + b > 17)) == [(9, 9)]


def test_chunks_larger_than_one():
    n = (1 << 16) + 5
    dataset = Dataset.range(n).enumerate()
    total = sum(len(count) for count, _ in dataset.batch(1000))
    assert total == n
    assert items(dataset.skip(n - 2)) == [(n - 2, n - 2), (n - 1, n - 1)]
    assert items(Dataset.zip((Dataset.range(n), Dataset.range(3).repeat())).skip(n - 1)) == [
        (n - 1, (n - 1) % 3)
    ]
    assert items(Dataset.range(10**12).skip(10**6).take(2)) == [10**6, 10**6 + 1]


def test_mixtures_in_one_batch_keep_their_order():
    a, b = (
        Dataset.from_tensor_slices(np.arange(5) * 1.0),
        Dataset.from_tensor_slices(np.arange(5) * 10.0),
    )
    mixed = a.concatenate(b).shuffle(10, seed=2).map(lambda x: x).take(-1)
    assert sorted(items(mixed)) == sorted([*range(5), *range(0, 50, 10)])
    joined = a.concatenate(b).shuffle(10, seed=2)
    assert items(joined.batch(10))[0] == items(a.concatenate(b).shuffle(10, seed=2))


def test_wrong_arguments():
    with pytest.raises(TypeError, match="make one with"):
        Dataset([1, 2])
    ten = Dataset.range(10)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"Dataset\.batch: batch_size is"):
            ten.batch(wrong)
        with pytest.raises(ValueError, match=r"Dataset\.shuffle: buffer_size is"):
            ten.shuffle(wrong)
    for call in (ten.prefetch, ten.shuffle):
        with pytest.raises(ValueError, match=r"buffer_size is -3; it must be at least"):
            call(-3)
    with pytest.raises(ValueError, match=r"Dataset\.prefetch: buffer_size is -2"):
        ten.prefetch(-2)
    with pytest.raises(ValueError, match="the dataset is infinite"):
        ten.repeat().shuffle(UNKNOWN_CARDINALITY)
    for num, index in [(3, 3), (3, -1), (0, 0)]:
        with pytest.raises(ValueError, match=r"Dataset\.shard: index is"):
            ten.shard(num, index)
    with pytest.raises(TypeError, match="map_func is int"):
        ten.map(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Dataset\.concatenate: list is not a Dataset"):
        ten.concatenate([1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must have the same structure"):
        ten.concatenate(Dataset.from_tensors(1.5))


NUMBERS: dict[str, list[Any]] = {  # each argument of each method that is a number
    "Dataset.range: an argument": [
        Dataset.range,
        lambda x: Dataset.range(0, x),
        lambda x: Dataset.range(0, 5, x),
    ],
    "Dataset.batch: batch_size": [Dataset.range(3).batch],
    "Dataset.padded_batch: batch_size": [Dataset.range(3).padded_batch],
    "Dataset.rebatch: batch_size": [
        Dataset.range(3).rebatch,
        lambda x: Dataset.range(3).rebatch([2, x]),
    ],
    "Dataset.window: size": [Dataset.range(3).window],
    "Dataset.window: shift": [lambda x: Dataset.range(3).window(2, x)],
    "Dataset.window: stride": [lambda x: Dataset.range(3).window(2, stride=x)],
    "Dataset.shard: num_shards": [lambda x: Dataset.range(3).shard(x, 0)],
    "Dataset.shard: index": [lambda x: Dataset.range(3).shard(2, x)],
    "Dataset.repeat: count": [Dataset.range(3).repeat],
    "Dataset.shuffle: buffer_size": [Dataset.range(3).shuffle],
    "Dataset.shuffle: seed": [lambda x: Dataset.range(3).shuffle(2, x)],
    "Dataset.map: num_parallel_calls": [lambda x: Dataset.range(3).map(abs, x)],
    "Dataset.interleave: cycle_length": [lambda x: Dataset.range(3).interleave(Dataset.range, x)],
    "Dataset.interleave: block_length": [
        lambda x: Dataset.range(3).interleave(Dataset.range, 2, x)
    ],
    "Dataset.interleave: num_parallel_calls": [
        lambda x: Dataset.range(3).interleave(Dataset.range, 2, 2, x)
    ],
    "Dataset.take: count": [Dataset.range(3).take],
    "Dataset.skip: count": [Dataset.range(3).skip],
    "Dataset.enumerate: start": [Dataset.range(3).enumerate],
    "Dataset.prefetch: buffer_size": [Dataset.range(3).prefetch],
    "Dataset.sample_from_datasets: seed": [
        lambda x: Dataset.sample_from_datasets([Dataset.range(3)], seed=x)
    ],
    "Dataset.list_files: seed": [
        lambda x: Dataset.list_files("*", seed=x),
        lambda x: Dataset.list_files("*", False, x),
    ],
}


@pytest.mark.parametrize("wrong", ["x", 2.5, "3", {}, b"1"], ids=repr)
@pytest.mark.parametrize("argument", NUMBERS)
def test_an_argument_that_is_no_number_is_named(argument, wrong):
    for call in NUMBERS[argument]:
        with pytest.raises(
            TypeError, match=f"^{argument} is {re.escape(repr(wrong))}; it must be an int$"
        ):
            call(wrong)


WRONG_WEIGHTS: list[Any] = ["x", ["0.5"], 0.5, [None]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Dataset.list_files(3), "Dataset.list_files: file_pattern is 3; it must be a path"),
        (
            lambda: Dataset.list_files(["a", 3]),
            "Dataset.list_files: file_pattern is 3; it must be a path",
        ),
        (lambda: Dataset.load(3), "Dataset.load: path is 3; it must be a path"),  # pyright: ignore[reportArgumentType]
        (lambda: Dataset.range(3).save(3), "Dataset.save: path is 3; it must be"),  # pyright: ignore[reportArgumentType]
        *(
            (
                lambda wrong=wrong: Dataset.sample_from_datasets([Dataset.range(3)], wrong),
                "Dataset.sample_from_datasets: weights is .*; it must be a sequence of numbers",
            )
            for wrong in WRONG_WEIGHTS
        ),
    ],
    ids=["pattern", "patterns", "load", "save", "text for weights", "texts", "a number", "None"],
)
def test_an_argument_of_another_type_is_named(call, says):
    with pytest.raises(TypeError, match=f"^{says}"):
        call()


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (np.arange(2), "the same shape and dtype"),
        (1.5, "the same shape and dtype"),
        ((1, 2), "the same structure"),
    ],
    ids=["shape", "dtype", "structure"],
)
def test_elements_of_a_batch_must_be_alike(odd, text):
    with pytest.raises(ValueError, match=text):
        list(Dataset.from_generator(lambda: iter([1, odd])).batch(2))


def test_unbatch_of_what_has_no_rows():
    with pytest.raises(ValueError, match="first dimension"):
        list(Dataset.range(3).map(lambda x: x).unbatch())
    with pytest.raises(ValueError, match="first dimension"):
        list(Dataset.from_tensors((np.arange(2), np.arange(3))).unbatch())
    pairs = [(np.arange(n), np.arange(m)) for n, m in [(2, 2), (1, 3), (1, 1)]]
    rows = iter(Dataset.from_generator(lambda: pairs).unbatch())
    assert [next(rows), next(rows)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match="first dimension"):
        next(rows)
    assert [*rows] == [(0, 0)]


def rounds(*sizes):
    """A generator whose rounds have these numbers of elements."""
    left = iter(sizes)
    return Dataset.from_generator(
        lambda: iter(range(next(left))), output_signature=TensorSpec((), np.int64)
    )


def test_rounds_without_elements_end_no_repeat():
    assert items(rounds(1, 0, 2).repeat(3)) == [0, 0, 1]
    assert items(rounds(0, 0, 2).repeat(3).batch(2)) == [[0, 1]]
    assert items(rounds(1, 0, 2, 3).repeat(3)) == [0, 0, 1]
    assert items(rounds(0, 1).shuffle(3).repeat(2)) == [0]
    seen = []
    # One element in the first round, and one in the third.
    once = Dataset.range(2).filter(lambda x: seen.append(x) or len(seen) in (1, 6))
    assert items(once.repeat(4)) == [0, 1]


def test_an_endless_repeat_ends_with_a_round_without_elements():
    """As in TensorFlow, where after a shuffle only the first round counts."""
    assert items(rounds(1, 2, 0, 2).repeat()) == [0, 0, 1]
    assert items(rounds(0, 2).repeat()) == items(rounds(0, 2).shuffle(9).repeat()) == []
    assert items(rounds(1, 0, 0, 1, 0, 1).shuffle(9).repeat().take(3)) == [0, 0, 0]
    assert items(Dataset.range(9).take(0).shuffle(9).repeat()) == []
    assert items(rounds(*[2] * 9).take(0).repeat(3)) == []


def test_an_endless_repeat_of_an_iterator_that_is_used_up_is_an_error():
    numbers = iter(range(3))
    dataset = Dataset.from_generator(lambda: numbers, np.int64).shuffle(9, seed=0).repeat()
    iterator = iter(dataset)
    assert sorted(next(iterator) for _ in range(3)) == [0, 1, 2]
    with pytest.raises(
        RuntimeError, match=r"Dataset\.repeat: after 3 elements .* must return a new iterator"
    ):
        next(iterator)


@pytest.mark.parametrize("size", [None, -1, 0, 5])
def test_prefetch_changes_no_element(size):
    assert items(Dataset.range(4).prefetch(size)) == [0, 1, 2, 3]
    assert repr(Dataset.range(4).prefetch(None)) == repr(Dataset.range(4).prefetch(AUTOTUNE))


def test_a_shuffle_of_all_elements(make):
    order = items(make(50).shuffle(UNKNOWN_CARDINALITY, seed=1))
    assert order == items(make(50).shuffle(50, seed=1)) and sorted(order) == list(range(50))


# ---- errors of functions


def attempts(dataset, limit=1000):
    """The elements, as `items` returns them, and the classes of the errors between them."""
    found, iterator = [], iter(dataset)
    for _ in range(limit):
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            assert next(iterator, None) is None
            return found
        except ArithmeticError as error:
            found.append(type(error))
    raise AssertionError("there is no end")


def odd_one_out(*wrong):
    def check(x):
        if x in wrong:
            raise ZeroDivisionError(f"no {x}")
        return True

    return check


@pytest.mark.parametrize("result", [None, np.array([True, False])])
def test_a_predicate_must_return_one_flag(result):
    """A function without `return` would leave nothing of a dataset, and say nothing."""
    with pytest.raises(TypeError, match=r"Dataset\.filter: predicate returned .*True or False"):
        items(Dataset.range(3).filter(lambda x: result))


BAD = ZeroDivisionError
STAGES = {
    "map": (lambda d: d, [0, 1, BAD, 3, 4, BAD, 6]),
    "prefetch": (lambda d: d.prefetch(2), [0, 1, BAD, 3, 4, BAD, 6]),
    "map again": (lambda d: d.map(lambda x: x + 1), [1, 2, BAD, 4, 5, BAD, 7]),
    "filter": (lambda d: d.filter(lambda x: x % 3), [1, BAD, 4, BAD]),
    "batch": (lambda d: d.batch(2), [[0, 1], BAD, BAD, [6]]),
    "batches": (lambda d: d.batch(2).prefetch(1).map(lambda x: -x), [[0, -1], BAD, BAD, [-6]]),
    "batch and unbatch": (lambda d: d.batch(2).map(lambda x: x).unbatch(), [0, 1, BAD, BAD, 6]),
    "rows": (lambda d: d.batch(2).unbatch(), [0, 1, BAD, 3, 4, BAD, 6]),
    "take and skip": (lambda d: d.take(5).skip(1), [1, BAD, 3, 4]),
    "shard": (lambda d: d.shard(2, 0), [0, BAD, 4, 6]),
    "repeat": (lambda d: d.repeat(2), [0, 1, BAD, 3, 4, BAD, 6] * 2),
    "enumerate": (lambda d: d.enumerate(), [(0, 0), (1, 1), BAD, (3, 3), (4, 4), BAD, (6, 6)]),
    "zip": (lambda d: Dataset.zip((d, Dataset.range(5))), [(0, 0), (1, 1), BAD, (3, 3), (4, 4)]),
    "concatenate": (lambda d: d.take(3).concatenate(d.skip(5)), [0, 1, BAD, BAD, 6]),
    "cache": (lambda d: d.cache().repeat(2), [0, 1, BAD, 3, 4, BAD, 6] * 2),
}
FAILING = {
    "map": lambda: Dataset.range(7).map(lambda x: odd_one_out(2, 5)(x) and x),
    "map in threads": lambda: Dataset.range(7).map(
        lambda x: odd_one_out(2, 5)(x) and x, num_parallel_calls=3
    ),
    "filter": lambda: Dataset.range(7).filter(odd_one_out(2, 5)),
    "generated": lambda: Dataset.from_generator(lambda: iter(range(7)), np.int64).map(
        lambda x: odd_one_out(2, 5)(x) and x
    ),
}


@pytest.mark.parametrize("source", FAILING)
@pytest.mark.parametrize("stage", STAGES)
def test_the_element_after_an_error_comes_next(source, stage):
    transform, expected = STAGES[stage]
    assert attempts(transform(FAILING[source]())) == expected


@pytest.mark.parametrize("source", FAILING)
def test_an_error_has_its_place_in_a_shuffle(source):
    found = attempts(FAILING[source]().shuffle(3, seed=0))
    assert sorted(x for x in found if x is not BAD) == [0, 1, 3, 4, 6] and found.count(BAD) == 2


def test_what_failed_is_tried_again_in_the_next_pass():
    tries = []
    dataset = (
        Dataset.range(3)
        .map(lambda x: tries.append(x) or int(x) // (len(tries) != 2))
        .filter(lambda x: True)
    )
    cached = dataset.cache()
    assert attempts(cached) == [0, BAD, 2]
    assert attempts(cached) == attempts(cached) == [0, 1, 2]
    assert len(tries) == 6


def test_after_an_error_of_a_generator_it_has_ended():
    def numbers():
        yield 1
        yield 1 // 0

    for dataset in (
        Dataset.from_generator(numbers),
        Dataset.from_generator(numbers).filter(bool).map(lambda x: x),
    ):
        assert attempts(dataset) == [1, BAD]


def test_a_function_cannot_end_the_elements():
    def stop(x):
        raise StopIteration

    for dataset, name in [
        (Dataset.range(3).map(stop), "map: map_func"),
        (Dataset.range(3).filter(stop), "filter: pred"),
    ]:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=rf"Dataset\.{name}.* raised StopIteration"):
                next(iter(dataset))


# ---- attributes


def test_cardinality():
    ten, unknown, endless = (
        Dataset.range(10),
        Dataset.range(10).filter(bool),
        Dataset.range(10).repeat(),
    )
    assert [d.cardinality() for d in (ten, unknown, endless)] == [10, -2, -1]
    assert [d.batch(4).cardinality() for d in (ten, unknown, endless)] == [3, -2, -1]
    assert ten.batch(4, True).cardinality() == 2
    assert [d.take(3).cardinality() for d in (ten, unknown, endless)] == [3, -2, 3]
    assert [d.skip(3).cardinality() for d in (ten, unknown, endless)] == [7, -2, -1]
    assert [d.repeat(3).cardinality() for d in (ten, unknown, endless)] == [30, -2, -1]
    assert ten.repeat(0).cardinality() == ten.take(0).repeat().cardinality() == 0
    assert [ten.shard(3, i).cardinality() for i in range(3)] == [4, 3, 3]
    assert Dataset.zip((ten, endless)).cardinality() == 10
    assert Dataset.zip((ten, unknown)).cardinality() == -2
    assert ten.concatenate(ten.take(4)).cardinality() == 14
    assert ten.concatenate(endless).cardinality() == -1
    assert ten.enumerate().shuffle(3).map(lambda i, x: x).prefetch(1).cache().cardinality() == 10
    assert (
        len(Dataset.from_tensor_slices((np.zeros((3, 2)), np.ones((3, 2, 4)))).repeat(2).unbatch())
        == 12
    )
    assert (
        len(ten.batch(3, True).unbatch()) == 9
        and ten.repeat().batch(3, True).unbatch().cardinality() == -1
    )
    varying = [
        ten.batch(3),
        ten.batch(3, True).map(lambda x: x[1:]),
        ten,
        Dataset.zip(ten.batch(2, True), ten),
    ]
    assert [dataset.unbatch().cardinality() for dataset in varying] == [-2, -2, -2, -2]
    assert len(ten) == 10
    assert unknown
    with pytest.raises(TypeError, match="unknown"):
        len(unknown)
    with pytest.raises(TypeError, match="infinite"):
        len(endless)


def test_element_spec():
    pairs = Dataset.from_tensor_slices((np.arange(5), np.ones((5, 2), np.float32)))
    assert pairs.batch(3).element_spec == (
        TensorSpec((None,), np.int64),
        TensorSpec((None, 2), np.float32),
    )
    assert (
        pairs.batch(3, True).unbatch().element_spec
        == pairs.shuffle(2).repeat().element_spec
        == pairs.element_spec
    )
    assert pairs.enumerate().element_spec == (TensorSpec((), np.int64), pairs.element_spec)
    assert Dataset.zip({"a": pairs}).element_spec == {"a": pairs.element_spec}
    assert (
        pairs.batch(2).concatenate(pairs.batch(2, True)).element_spec == pairs.batch(2).element_spec
    )
    assert pairs.batch(3).map(lambda a, b: (b, b.sum())).element_spec == (
        TensorSpec((None, 2), np.float32),
        TensorSpec((), np.float32),
    )
    assert pairs.batch(1).map(lambda a, b: a).element_spec == TensorSpec((None,), np.int64)
    assert pairs.take(0).map(lambda a, b: b * 2).element_spec == TensorSpec((2,), np.float32)


def test_an_attribute_error_in_element_spec_is_the_functions_own():
    dataset = Dataset.range(3).map(lambda x: x.nothing)
    for ask in (
        lambda: dataset.element_spec,
        lambda: iter(dataset).element_spec,
        lambda: next(iter(dataset)),
    ):
        with pytest.raises(
            AttributeError, match="int64' object has no attribute 'nothing'"
        ) as caught:
            ask()
        assert "lambda x: x.nothing" in str(caught.traceback[-1].statement)
    with pytest.raises(AttributeError, match="'Dataset' object has no attribute 'nothing'"):
        _ = getattr(dataset, "nothing")  # noqa: B009


@pytest.mark.parametrize("code", ["U", "S"])
def test_strings_of_different_lengths_are_alike(code):
    def strings(*values):
        return Dataset.from_tensor_slices(np.array(values, code))

    short, long = strings("zz", "a"), strings("abc", "d")
    common = TensorSpec((), np.dtype(f"{code}3"))
    joined = short.concatenate(long)
    assert (
        joined.element_spec
        == joined.shuffle(4).element_spec
        == long.concatenate(short).element_spec
        == common
    )
    assert joined.batch(3).element_spec == TensorSpec((None,), common.dtype)
    assert items(joined) == np.array(["zz", "a", "abc", "d"], code).tolist()
    (batch,) = joined.batch(4)
    assert batch.dtype == common.dtype and batch.tolist() == items(joined)
    functions = joined.map(lambda x: x).concatenate(long)
    assert items(functions.batch(6)) == [items(functions)] == [items(joined) + items(long)]
    numbers = Dataset.from_tensor_slices(np.array([0, 1, 0]))
    assert (
        items(Dataset.choose_from_datasets([short, long], numbers))
        == np.array(["zz", "abc", "a"], code).tolist()
    )
    assert items(Dataset.sample_from_datasets([short, long], [1.0, 0.0])) == items(short)
    each = Dataset.range(2).interleave(lambda i: [short, long][i], 2)
    assert each.element_spec == common and items(each.batch(4)) == [
        np.array(["zz", "abc", "a", "d"], code).tolist()
    ]
    windows = short.window(2).concatenate(long.window(2))
    assert windows.element_spec == DatasetSpec(common) and items(
        windows.flat_map(lambda x: x)
    ) == items(joined)
    with pytest.raises(TypeError, match="must have the same structure"):
        strings("a").concatenate(
            Dataset.from_tensor_slices(np.array(["a"], {"U": "S", "S": "U"}[code]))
        )


UNLIKE = {
    "structure": (lambda x: {"a": x}, r"\{'a': TensorSpec"),
    "dtype": (lambda x: x / 2, "dtype=float64"),
    "dimensions": (lambda x: np.full(2, x), r"shape=\(2,\)"),
}
JOINED = {
    "concatenate": lambda a, b: a.concatenate(b),
    "choose": lambda a, b: Dataset.choose_from_datasets([a, b], Dataset.range(2).repeat()),
    "sample": lambda a, b: Dataset.sample_from_datasets([a, b], seed=0),
}


@pytest.mark.parametrize("join", JOINED)
@pytest.mark.parametrize("unlike", UNLIKE)
def test_datasets_that_are_not_alike_are_refused_with_functions_too(unlike, join):
    function, found = UNLIKE[unlike]
    mapped = Dataset.range(4).map(function)
    given = Dataset.from_tensor_slices(next(iter(mapped.batch(4))))
    with pytest.raises(TypeError, match=f"must have the same structure.*{found}"):
        JOINED[join](Dataset.range(4), given)
    for other in (mapped, given.filter(lambda x: True), given.map(lambda x: x).cache().shuffle(4)):
        dataset = JOINED[join](Dataset.range(4), other)
        for _ in range(2):
            with pytest.raises(TypeError, match=f"must have the same structure.*{found}") as caught:
                list(dataset)
            assert str(Dataset.range(4).element_spec) in str(caught.value)


@pytest.mark.parametrize("join", JOINED)
@pytest.mark.parametrize("batch_size", [4, 8])
def test_datasets_that_are_not_alike_are_refused_on_all_ranks(join, batch_size):
    """Even if the elements on each rank have the same structure."""

    def program(rank):
        first, second = (
            Dataset.range(4).map(function) for function in (lambda x: x, lambda x: {"a": x})
        )
        with pytest.raises(TypeError, match="must have the same structure") as caught:
            list(distribute_dataset(JOINED[join](first, second).batch(batch_size), rank, None))
        return str(caught.value).partition(" (found by")[0]

    assert len(set(on_ranks(2, program))) == 1


def test_the_next_element_or_none():
    iterator = iter(Dataset.range(2))
    assert iterator.element_spec == TensorSpec((), np.int64)
    assert iterator.get_next() == 0
    found = iterator.get_next_as_optional()
    assert (
        found.has_value() and found.get_value() == 1 and repr(found) == f"Optional({np.int64(1)!r})"
    )
    for _ in range(2):
        nothing = iterator.get_next_as_optional()
        assert not nothing.has_value() and nothing.element_spec == TensorSpec((), np.int64)
        with pytest.raises(ValueError, match="has_value"):
            nothing.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()
    made = Optional.from_value((1, [2.5]))
    assert made.element_spec == (TensorSpec((), np.int32), TensorSpec((1,), np.float32))
    assert not Optional.empty(TensorSpec((3,))).has_value()


def test_options_are_kept():
    options = Options()
    options.deterministic = False
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    dataset = Dataset.range(6).with_options(options).map(lambda x: x).batch(2)
    options.deterministic = True
    options.threading.private_threadpool_size = 3
    both = Dataset.zip((dataset, Dataset.range(3).with_options(options)))
    assert (
        dataset.options().deterministic is False
        and dataset.options().threading.private_threadpool_size is None
    )
    assert (
        both.options().deterministic is True
        and both.options().threading.private_threadpool_size == 3
    )
    assert both.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    assert items(dataset.with_options(Options())) == [[0, 1], [2, 3], [4, 5]]
    assert Dataset.range(3).options() == Options() != options
    assert repr(Dataset.range(3).with_options(options).options().threading) == (
        "Options.threading(private_threadpool_size=3)"
    )
    wrong: Any = 1
    with pytest.raises(TypeError, match="Dataset.with_options: options is int"):
        Dataset.range(3).with_options(wrong)
    with pytest.raises(
        AttributeError, match="Options has no attribute 'nonsense'; it has deterministic"
    ):
        options.nonsense = 1
    with pytest.raises(AttributeError, match=r"Options.threading has no attribute 'size'"):
        options.threading.size = 1
    with pytest.raises(TypeError, match="Options: threading has attributes of its own"):
        options.threading = 1


def test_element_spec_leaves_the_orders_as_they_are():
    def orders(ask):
        dataset = Dataset.range(10).shuffle(10, seed=3).map(lambda x: x)
        if ask:
            _ = dataset.element_spec
        return items(dataset)

    assert orders(True) == orders(False)


def test_repr_is_what_the_user_wrote():
    dataset = Dataset.range(10).shuffle(4, seed=1).batch(2)
    assert repr(dataset) == "Dataset.range(0, 10).shuffle(4, 1, True).batch(2, False)"


# ---- shuffles


@hypothesis.given(n=st.integers(0, 60), size=st.integers(1, 70), seed=st.integers(-(2**63), 2**63))
def test_a_shuffle_is_a_permutation_that_moves_nothing_further_forward_than_the_buffer(
    n, size, seed
):
    for make in MAKERS.values():
        order = items(make(n).shuffle(size, seed))
        assert sorted(order) == list(range(n))
        assert all(x <= place + size - 1 for place, x in enumerate(order))


@pytest.mark.parametrize("size", [3, 10, 100])
def test_seeds_and_rounds(make, size):
    def rounds(**kwargs):
        dataset = make(50).shuffle(size, **kwargs)
        return [items(dataset) for _ in range(3)]

    first = rounds(seed=4)
    assert rounds(seed=4) == first
    assert len(set(map(tuple, first))) == 3
    assert rounds(seed=5)[0] != first[0]
    still = rounds(seed=4, reshuffle_each_iteration=False)
    assert still[0] == still[1] == still[2] == first[0]
    assert items(make(50).shuffle(size, seed=4).repeat(3)) == [*first[0], *first[1], *first[2]]
    assert (
        items(make(50).shuffle(size, seed=4, reshuffle_each_iteration=False).repeat(2))
        == first[0] * 2
    )


def test_each_slot_of_the_buffer_is_drawn_equally_often(make):
    first = np.zeros(20)
    for seed in range(200):
        first[next(iter(make(20).shuffle(7, seed)))] += 1
    assert first[7:].sum() == 0
    assert (abs(first[:7] - 200 / 7) < 25).all()  # five standard deviations


@pytest.mark.parametrize("n", [0, 1, 2, 50])
def test_a_shuffle_of_a_whole_source_is_the_permutation_of_its_seed_and_round(n):
    """Checkpoints contain only these two numbers, so the order must never change."""
    for dataset in (
        Dataset.range(n),
        Dataset.from_tensor_slices(np.arange(n)),
        Dataset.range(n).map(lambda x: x),
    ):
        shuffled = dataset.shuffle(max(n, 1), seed=7)
        for number in range(3):
            assert items(shuffled) == np.random.default_rng([7, number]).permutation(n).tolist()


def test_a_shuffle_over_many_chunks_is_a_permutation():
    dataset = Dataset.range(5).concatenate(Dataset.range(5, 20)).concatenate(Dataset.range(20, 21))
    for size in range(1, 25):
        order = [int(x) for x in dataset.shuffle(size, seed=size)]
        assert sorted(order) == list(range(21))
        assert all(x <= place + size - 1 for place, x in enumerate(order))


def test_unseeded_shuffles_draw_one_seed_each(monkeypatch):
    drawn = []
    monkeypatch.setattr(_node, "_fresh_seed", lambda: drawn.append(len(drawn)) or len(drawn))
    dataset = Dataset.range(20).shuffle(20).shuffle(5)
    assert drawn == []
    orders = [items(dataset) for _ in range(3)]
    assert len(drawn) == 2
    assert len(set(map(tuple, orders))) == 3


def test_two_iterators_at_once_have_orders_of_their_own():
    dataset = Dataset.range(20).shuffle(20, seed=1)
    pairs = list(zip(dataset, dataset, strict=True))
    assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs) == list(range(20))
    assert [a for a, _ in pairs] != [b for _, b in pairs]


def test_a_cache_keeps_the_order(make):
    dataset = make(30).shuffle(30).cache()
    assert items(dataset) == items(dataset) == items(dataset.repeat(2))[30:]


# ---- when functions run, and on what


def test_functions_run_when_an_element_is_asked_for():
    called = []
    dataset = Dataset.range(100).map(lambda x: called.append(int(x)) or x).shard(2, 1).skip(3)
    assert called == []
    iterator = iter(dataset)
    assert next(iterator) == 7
    assert called == [7]
    assert items(dataset.batch(2).take(1)) == [[7, 9]]
    assert called == [7, 7, 9]


def test_a_cache_calls_functions_once():
    called = []
    for dataset in (Dataset.range(5), Dataset.from_generator(lambda: iter(range(5)), np.int64)):
        called.clear()
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


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_are_new_writable_and_contiguous(shuffled):
    source = np.arange(12.0).reshape(6, 2)
    dataset = Dataset.from_tensor_slices(source)
    dataset = (dataset.shuffle(6, seed=0) if shuffled else dataset).batch(3)
    for batch in dataset:
        assert (
            batch.flags.writeable
            and batch.flags.c_contiguous
            and not np.shares_memory(batch, source)
        )
        batch[:] = -1
    for cached in (
        dataset.cache(),
        dataset.map(lambda x: x).cache(),
        Dataset.from_tensors(source).repeat(2),
    ):
        for batch in itertools.chain(cached, cached):
            assert (batch >= 0).all()
            batch[:] = -1
    for row in Dataset.from_tensor_slices(source):
        row[:] = -1
    np.testing.assert_array_equal(source, np.arange(12.0).reshape(6, 2))


def test_a_file_larger_than_memory_stays_on_disk(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    array = np.memmap(tmp_path / "sparse", np.uint8, "r", shape=(1 << 20, 1 << 20))
    batch = next(iter(Dataset.from_tensor_slices(array).shuffle(1 << 20, seed=0).batch(2)))
    assert batch.shape == (2, 1 << 20)
    assert not batch.any()


class Negated(_node.Transformation):
    """The least that a transformation must define."""

    def load(self, item):
        return -self._source.load(item)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_new_transformation_takes_what_is_true_of_its_input(batch_size):
    def make():
        return Dataset._of(Negated(Dataset.range(10).shuffle(10, seed=1)._node, "negated()"))

    expected = [-x for x in items(Dataset.range(10).shuffle(10, seed=1))]
    dataset = make()
    assert repr(dataset).endswith(".negated()") and len(dataset) == 10
    assert items(dataset.batch(batch_size)) == batches(expected, batch_size)
    of_batches = Dataset._of(Negated(Dataset.range(4).batch(2)._node, "negated()"))
    strategy = hs.CentralStorageStrategy(["CPU:0"])
    assert items(strategy.experimental_distribute_dataset(of_batches)) == [[0, -1], [-2, -3]]
    iterator = iter(make())
    assert [next(iterator) for _ in range(4)] == expected[:4]
    resumed = iter(make())
    resumed._seek(iterator._position())
    assert items(resumed) == expected[4:]


def test_only_constructors_set_the_facts_of_nodes():
    facts = {"width", "user_code", "batch_sizes", "rows"}
    classes: list[type] = [_node.Node]
    for cls in classes:
        classes += cls.__subclasses__()
        assert not facts & vars(cls).keys(), (
            f"{cls} hides defaults; set them after super().__init__"
        )
    assert len(classes) > 30


def test_a_source_runs_user_code_unless_it_denies_it():
    class Source(_node.Node):
        spec = cardinality = chunks = load = __repr__ = object.__repr__  # pyright: ignore

    assert Source().user_code and not Source(Dataset.range(3)._node).user_code
