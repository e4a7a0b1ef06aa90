"""Datasets in one process: transformations, attributes, and what is refused."""

import copy
import inspect
import itertools
import operator
import re
from typing import Any

import numpy as np
import pytest
from internals import Transformation
from public_api import begins_with_a_call
from thread_ranks import parts

from hpcstrat import TensorSpec
from hpcstrat.data import AUTOTUNE, UNKNOWN_CARDINALITY, AutoShardPolicy, Dataset, Options


def plain(element) -> Any:
    """The element with lists in place of arrays, to compare."""
    if isinstance(element, dict):
        return {key: plain(part) for key, part in element.items()}
    if isinstance(element, tuple):
        return tuple(plain(part) for part in element)
    return element if element is None else np.asarray(element).tolist()


def items(dataset):
    return [plain(element) for element in dataset]


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
    for wrong in 3, None:
        with pytest.raises(TypeError, match=r"Dataset\.zip: (int|NoneType) is not a Dataset"):
            Dataset.zip((a, wrong))
    with pytest.raises(TypeError, match="at least one"):
        Dataset.zip(())


def test_sources_that_are_zipped_are_read_together():
    """Each by its own keys, also where the orders before and after the zip differ."""
    letters = Dataset.from_tensor_slices(np.array([*"abcdef"]))
    pairs = Dataset.zip(Dataset.range(10, 16), letters)
    expected = [(10 + i, "abcdef"[i]) for i in range(6)]
    assert items(pairs) == expected
    assert items(pairs.shuffle(6, seed=1)) == [expected[i] for i in order(6, 1)]
    assert items(Dataset.zip(pairs, letters.skip(1)).batch(5)) == [
        (([*range(10, 15)], [*"abcde"]), [*"bcdef"])
    ]
    shuffled = Dataset.zip(Dataset.range(6).shuffle(6, seed=1), letters.shuffle(6, seed=2))
    assert items(shuffled) == [
        (i, "abcdef"[j]) for i, j in zip(order(6, 1), order(6, 2), strict=True)
    ]


def order(n, *numbers):
    """The order of a shuffle of all `n` elements of a source, in its first pass."""
    seed, number, round_ = (*numbers, 0, 0)[:3]
    return np.random.default_rng([seed, number, round_]).permutation(n).tolist()


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
    assert items(ten.batch(4).unbatch().batch(3)) == batches(full, 3)
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


def test_many_elements():
    n = (1 << 16) + 5
    dataset = Dataset.range(n).enumerate()
    assert sum(len(count) for count, _ in dataset.batch(1000)) == n
    assert items(dataset.skip(n - 2)) == [(n - 2, n - 2), (n - 1, n - 1)]
    assert items(Dataset.zip((Dataset.range(n), Dataset.range(3).repeat())).skip(n - 1)) == [
        (n - 1, (n - 1) % 3)
    ]
    assert items(Dataset.range(10**12).skip(10**6).take(2)) == [10**6, 10**6 + 1]


def test_rows_of_two_sources_in_one_batch_keep_their_order():
    a, b = (Dataset.from_tensor_slices(np.arange(5) * factor) for factor in (1.0, 10.0))
    values = [*range(5), *range(0, 50, 10)]
    places = Dataset.range(5).concatenate(Dataset.range(5, 10)).shuffle(10, seed=2)
    expected = [values[i] for i in places]
    assert items(a.concatenate(b).shuffle(10, seed=2)) == expected
    assert items(a.concatenate(b).shuffle(10, seed=2).batch(10)) == [expected]


def test_prefetch_changes_no_element():
    for size in None, AUTOTUNE, 0, 5:
        assert items(Dataset.range(4).prefetch(size)) == [0, 1, 2, 3]


class Negated(Transformation):
    """The least that a transformation must define."""

    def load(self, chunks):
        return map(operator.neg, self._source.load(chunks))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_new_transformation_takes_what_is_true_of_its_input(batch_size):
    def negated(dataset):
        return Dataset(Negated(dataset._node, "negated()"))

    shuffled = Dataset.range(10).shuffle(10, seed=1)
    expected = [-x for x in items(shuffled)]
    dataset = negated(Dataset.range(10).shuffle(10, seed=1))
    assert repr(dataset).endswith(".negated()") and len(dataset) == 10
    assert items(dataset.batch(batch_size)) == batches(expected, batch_size)
    for step in parts(2, lambda: negated(Dataset.range(4).batch(4))):
        assert [part.tolist() for part in step] == [[0, -1], [-2, -3]]


# ---- what is refused


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
    for number in 0, -2:
        with pytest.raises(ValueError, match=f"num_parallel_calls is {number}; it must be at le"):
            ten.map(abs, num_parallel_calls=number)
    with pytest.raises(TypeError, match=r"Dataset\.concatenate: list is not a Dataset"):
        ten.concatenate([1])  # pyright: ignore[reportArgumentType]


NUMBERS: dict[str, list[Any]] = {  # each argument of each method that is a number
    "Dataset.range: an argument": [
        Dataset.range,
        lambda x: Dataset.range(0, x),
        lambda x: Dataset.range(0, 5, x),
    ],
    "Dataset.batch: batch_size": [Dataset.range(3).batch],
    "Dataset.shard: num_shards": [lambda x: Dataset.range(3).shard(x, 0)],
    "Dataset.shard: index": [lambda x: Dataset.range(3).shard(2, x)],
    "Dataset.repeat: count": [Dataset.range(3).repeat],
    "Dataset.shuffle: buffer_size": [Dataset.range(3).shuffle],
    "Dataset.shuffle: seed": [lambda x: Dataset.range(3).shuffle(2, x)],
    "Dataset.map: num_parallel_calls": [lambda x: Dataset.range(3).map(abs, x)],
    "Dataset.take: count": [Dataset.range(3).take],
    "Dataset.skip: count": [Dataset.range(3).skip],
    "Dataset.enumerate: start": [Dataset.range(3).enumerate],
    "Dataset.prefetch: buffer_size": [Dataset.range(3).prefetch],
}


@pytest.mark.parametrize("wrong", ["x", 2.5, {}], ids=repr)
@pytest.mark.parametrize("argument", NUMBERS)
def test_an_argument_that_is_no_number_is_named(argument, wrong):
    for call in NUMBERS[argument]:
        with pytest.raises(
            TypeError, match=f"^{argument} is {re.escape(repr(wrong))}; it must be an int$"
        ):
            call(wrong)


STRINGS = {code: Dataset.from_tensor_slices(np.array(["a"], code)) for code in "US"}
NOT_ALIKE: dict[str, tuple[Any, type[Exception], str]] = {
    "lengths": (
        lambda: Dataset.from_tensor_slices((np.ones(3), np.ones(4))),
        ValueError,
        r"from_tensor_slices: .*first dimension.*\[3\], \[4\]",
    ),
    "no length": (
        lambda: Dataset.from_tensor_slices(np.float32(1)),
        ValueError,
        "from_tensor_slices: .*first dimension",
    ),
    "rows of numbers": (
        lambda: list(Dataset.range(3).unbatch()),
        ValueError,
        "unbatch: .*first dimension",
    ),
    "rows of a function's numbers": (
        lambda: list(Dataset.range(3).map(lambda x: x).unbatch()),
        ValueError,
        "unbatch: .*first dimension",
    ),
    "different numbers of rows": (
        lambda: list(Dataset.from_tensors((np.arange(2), np.arange(3))).unbatch()),
        ValueError,
        "unbatch: .*first dimension",
    ),
    "another dtype": (
        lambda: Dataset.range(3).concatenate(Dataset.from_tensors(1.5)),
        TypeError,
        "concatenate: .*must have the same structure",
    ),
    "another structure": (
        lambda: Dataset.range(3).concatenate(Dataset.from_tensors({"a": np.int64(1)})),
        TypeError,
        r"concatenate: .*must have the same structure.*\{'a': TensorSpec",
    ),
    "strings and numbers": (
        lambda: STRINGS["U"].concatenate(Dataset.range(3)),
        TypeError,
        "concatenate: .*must have the same structure",
    ),
    "strings and bytes": (
        lambda: STRINGS["U"].concatenate(STRINGS["S"]),
        TypeError,
        "concatenate: .*must have the same structure",
    ),
    "a function's strings and numbers": (
        lambda: list(STRINGS["U"].map(lambda x: x).concatenate(Dataset.range(3))),
        TypeError,
        "concatenate: .*must have the same structure",
    ),
    **{
        f"rows of {name}": (
            lambda odd=odd: list(Dataset.from_generator(lambda: iter([1, odd])).batch(2)),
            ValueError,
            f"batch: .*the same {what}",
        )
        for name, odd, what in [
            ("another shape", np.arange(2), "shape and dtype"),
            ("another dtype", 1.5, "shape and dtype"),
            ("another structure", (1, 2), "structure"),
        ]
    },
}


@pytest.mark.parametrize("case", NOT_ALIKE)
def test_what_does_not_fit_together_is_refused_by_the_name_of_the_call(case):
    wrong, error, match = NOT_ALIKE[case]
    with pytest.raises(error, match=match) as caught:
        wrong()
    assert begins_with_a_call(str(caught.value))
    assert str(caught.value).startswith("Dataset.")


UNLIKE = {
    "structure": (lambda x: {"a": x}, r"\{'a': TensorSpec"),
    "dtype": (lambda x: x / 2, "dtype=float64"),
    "dimensions": (lambda x: np.full(2, x), r"shape=\(2,\)"),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_datasets_that_are_not_alike_are_refused_with_functions_too(unlike):
    function, found = UNLIKE[unlike]
    mapped = Dataset.range(4).map(function)
    given = Dataset.from_tensor_slices(next(iter(mapped.batch(4))))
    for other in (mapped, given.filter(lambda x: True), given.map(lambda x: x).cache().shuffle(4)):
        dataset = Dataset.range(4).concatenate(other)
        for _ in range(2):
            with pytest.raises(TypeError, match=f"must have the same structure.*{found}") as caught:
                list(dataset)
            assert str(Dataset.range(4).element_spec) in str(caught.value)


@pytest.mark.parametrize("code", ["U", "S"])
def test_strings_of_different_lengths_are_alike(code):
    def strings(*values):
        return Dataset.from_tensor_slices(np.array(values, code))

    short, long = strings("zz", "a"), strings("abc", "d")
    common = TensorSpec((), np.dtype(f"{code}3"))
    joined = short.concatenate(long)
    for dataset in joined, joined.shuffle(4), long.concatenate(short):
        assert dataset.element_spec == common
    assert joined.batch(3).element_spec == TensorSpec((None,), common.dtype)
    assert items(joined) == np.array(["zz", "a", "abc", "d"], code).tolist()
    (batch,) = joined.batch(4)
    assert batch.dtype == common.dtype and batch.tolist() == items(joined)
    functions = joined.map(lambda x: x).concatenate(long)
    assert items(functions.batch(6)) == [items(functions)] == [items(joined) + items(long)]


@pytest.mark.parametrize("owner", [Dataset.range(3), Dataset], ids=["a dataset", "the class"])
def test_an_unknown_name_is_an_ordinary_error(owner):
    name = "misspelt"
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(owner, name)
    assert items(copy.copy(Dataset.range(3))) == [0, 1, 2]


def test_nothing_takes_a_name():
    methods = [method for name, method in vars(Dataset).items() if not name.startswith("_")]
    functions = [method for method in methods if callable(method)]
    assert len(functions) > 20
    for function in functions:
        assert "name" not in inspect.signature(function).parameters, function
    call: Any = Dataset.range
    with pytest.raises(TypeError, match="name"):
        call(4, name="numbers")


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
    cubes = Dataset.from_tensor_slices((np.zeros((3, 2)), np.ones((3, 2, 4))))
    assert len(cubes.repeat(2).unbatch()) == 12 and len(ten.batch(3, True).unbatch()) == 9
    assert ten.repeat().batch(3, True).unbatch().cardinality() == -1
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
    batched = pairs.batch(3)
    assert batched.element_spec == (TensorSpec((None,), "i8"), TensorSpec((None, 2), "f4"))
    for dataset in pairs.batch(3, True).unbatch(), pairs.shuffle(2).repeat():
        assert dataset.element_spec == pairs.element_spec
    assert pairs.enumerate().element_spec == (TensorSpec((), np.int64), pairs.element_spec)
    assert Dataset.zip({"a": pairs}).element_spec == {"a": pairs.element_spec}
    joined = pairs.batch(2).concatenate(pairs.batch(2, True))
    assert joined.element_spec == pairs.batch(2).element_spec
    assert pairs.take(0).map(lambda a, b: b * 2).element_spec == TensorSpec((2,), np.float32)


def test_the_spec_of_a_function_is_that_of_its_first_result():
    called = []

    def function(a, b):
        called.append(len(a))
        return b, b.sum(), np.ones((len(a), 3))

    pairs = Dataset.from_tensor_slices((np.arange(5), np.ones((5, 2), np.float32)))
    mapped = pairs.batch(3).map(function)
    for _ in range(2):
        assert mapped.element_spec == (
            TensorSpec((None, 2), np.float32),
            TensorSpec((), np.float32),
            TensorSpec((None, 3), np.float64),
        )
    assert called == [3]
    assert pairs.batch(1).map(lambda a, b: a).element_spec == TensorSpec((None,), np.int64)


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


def test_the_next_element_or_none():
    iterator = Dataset.range(2).as_numpy_iterator()
    assert iterator.element_spec == TensorSpec((), np.int64)
    assert iterator.get_next() == 0
    found = iterator.get_next_as_optional()
    assert found.has_value() and found.get_value() == 1
    assert repr(found) == f"Optional({np.int64(1)!r})"
    for _ in range(2):
        nothing = iterator.get_next_as_optional()
        assert not nothing.has_value() and repr(nothing) == "Optional()"
        with pytest.raises(ValueError, match="has_value"):
            nothing.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_options_change_nothing():
    options = Options()
    options.deterministic = False
    dataset = Dataset.range(6).shuffle(6, seed=1).batch(2)
    for policy in AutoShardPolicy:
        options.experimental_distribute.auto_shard_policy = policy
        if policy is AutoShardPolicy.OFF:
            with pytest.raises(
                NotImplementedError, match=r"Dataset\.with_options: .*OFF.* split evenly"
            ):
                dataset.with_options(options)
        else:
            other = dataset.with_options(options)
            assert repr(other) == repr(dataset) and len(other) == 3
    wrong: Any = 1
    with pytest.raises(TypeError, match="Dataset.with_options: options is int"):
        Dataset.range(3).with_options(wrong)
    for unknown in "nonsense", "threading", "autotune":
        with pytest.raises(AttributeError, match=unknown):
            setattr(options, unknown, 1)
    for unknown in "shard_policy", "num_devices":
        with pytest.raises(AttributeError, match=unknown):
            setattr(options.experimental_distribute, unknown, 1)


def test_repr_is_what_the_user_wrote():
    dataset = Dataset.range(10).shuffle(4, seed=1).batch(2)
    assert repr(dataset) == "Dataset.range(0, 10).shuffle(4, 1, True).batch(2, False)"
    assert repr(dataset.prefetch(None)) == repr(dataset.prefetch(AUTOTUNE))
