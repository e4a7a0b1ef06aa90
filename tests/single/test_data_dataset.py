"""Datasets in one process: what they tell of themselves, what is refused, and what is left out."""

import copy
import functools
import glob
import inspect
import itertools
import operator
import re
import sys
from typing import Any

import numpy as np
import pytest
from pipelines import items
from public_api import begins_with_a_call

import hpcstrat as hs
from hpcstrat import TensorSpec
from hpcstrat.data import (
    AUTOTUNE,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    InputOptions,
    Optional,
    Options,
)

# ---- what is refused

TEN: Any = Dataset.range(10)
STRINGS = {code: Dataset.from_tensor_slices(np.array(["a"], code)) for code in "US"}
WRONG: dict[str, tuple[Any, type[Exception], str]] = {  # a call, and the error's facts
    "no node": (lambda: Dataset([1, 2]), TypeError, "make one with"),
    "negative batches": (lambda: TEN.batch(-1), ValueError, "batch: batch_size is -1"),
    "all of an endless one": (
        lambda: TEN.repeat().shuffle(UNKNOWN_CARDINALITY),
        ValueError,
        "the dataset is infinite",
    ),
    "prefetch": (lambda: TEN.prefetch(-2), ValueError, "prefetch: buffer_size is -2; .* 0"),
    "the shard behind": (lambda: TEN.shard(3, 3), ValueError, r"shard: index is 3; .*\[0, 3\)"),
    "no function": (lambda: TEN.map(3), TypeError, "map_func is int"),
    "no calls": (lambda: TEN.map(abs, 0), ValueError, "num_parallel_calls is 0; .* at least 1"),
    "lengths": (
        lambda: Dataset.from_tensor_slices((np.ones(3), np.ones(4))),
        ValueError,
        r"from_tensor_slices: .*first dimension.*\[3\], \[4\]",
    ),
    "rows of numbers": (lambda: [*TEN.unbatch()], ValueError, "unbatch: .*first dimension"),
    "different numbers of rows": (
        lambda: [*Dataset.from_tensors((np.arange(2), np.arange(3))).unbatch()],
        ValueError,
        "unbatch: .*first dimension",
    ),
    **{
        f"rows of {name}": (
            lambda odd=odd: [*Dataset.from_generator(lambda: iter([1, odd])).batch(2)],
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


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_the_name_of_the_call(case):
    wrong, error, match = WRONG[case]
    with pytest.raises(error, match=match) as caught:
        wrong()
    assert str(caught.value).startswith("Dataset") and begins_with_a_call(f"{caught.value}")


NUMBERS: dict[str, list[Any]] = {  # each argument of each method that is a number
    "Dataset.range: an argument": [
        Dataset.range,
        lambda x: Dataset.range(0, x),
        lambda x: Dataset.range(0, 5, x),
    ],
    "Dataset.batch: batch_size": [TEN.batch],
    "Dataset.shard: num_shards": [lambda x: TEN.shard(x, 0)],
    "Dataset.shard: index": [lambda x: TEN.shard(2, x)],
    "Dataset.repeat: count": [TEN.repeat],
    "Dataset.shuffle: buffer_size": [TEN.shuffle],
    "Dataset.shuffle: seed": [lambda x: TEN.shuffle(2, x)],
    "Dataset.map: num_parallel_calls": [lambda x: TEN.map(abs, x)],
    "Dataset.take: count": [TEN.take],
    "Dataset.skip: count": [TEN.skip],
    "Dataset.enumerate: start": [TEN.enumerate],
    "Dataset.prefetch: buffer_size": [TEN.prefetch],
}


@pytest.mark.parametrize("argument", NUMBERS)
def test_an_argument_that_is_no_number_is_named(argument):
    for call, wrong in itertools.product(NUMBERS[argument], ["x", 2.5, {}]):
        with pytest.raises(
            TypeError, match=f"^{argument} is {re.escape(repr(wrong))}; it must be an int$"
        ):
            call(wrong)


UNLIKE = {  # two datasets, and what is found of the second
    "a dict": (TEN, Dataset.zip({"a": TEN}), r"\{'a': TensorSpec"),
    "another key": (Dataset.zip({"x": TEN}), Dataset.zip({"y": TEN}), r"\{'y': TensorSpec"),
    "a dtype": (TEN, Dataset.from_tensors(1.5), "dtype=float32"),
    "numbers behind strings": (STRINGS["U"], TEN, "dtype=int64"),
    "strings and bytes": (STRINGS["U"], STRINGS["S"], "dtype=.*S1|dtype=bytes"),
    "dimensions": (TEN, Dataset.from_tensor_slices(np.ones((2, 3), np.int64)), r"shape=\(3,\)"),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_datasets_that_are_not_alike_are_not_joined(kind):
    """Where functions hide the elements, it shows when the first are made."""

    def computed(dataset):
        return dataset.map(lambda *x: x[0] if len(x) == 1 else x)

    first, second, found = UNLIKE[kind]
    facts = rf"^Dataset\.concatenate: .*must have the same structure(?s:.*)({found})"
    with pytest.raises(TypeError, match=facts):
        first.concatenate(second)
    for one, other in (
        (computed(first), second),
        (first, computed(second)),
        (computed(first), computed(second)),
        (first, second.filter(lambda *x: True)),
        (first, computed(second).cache().shuffle(4)),
    ):
        dataset = one.concatenate(other)
        for _ in range(2):
            with pytest.raises(TypeError, match=facts) as caught:
                list(dataset)
            assert str(first.element_spec) in str(caught.value)


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


# ---- what a dataset tells of itself


def test_cardinality():
    ten, unknown, endless = TEN, TEN.filter(bool), TEN.repeat()
    assert endless.take(3).cardinality() == 3 and endless.skip(3).cardinality() == -1
    assert Dataset.zip(ten, endless).cardinality() == 10
    assert ten.concatenate(unknown).cardinality() == -2
    assert ten.repeat(0).cardinality() == ten.take(0).repeat().cardinality() == 0
    pairs = Dataset.from_tensor_slices((np.zeros((3, 2)), np.ones((3, 2, 4))))
    assert len(pairs.repeat(2).unbatch()) == 12 and len(ten.batch(3, True).unbatch()) == 9
    assert ten.repeat().batch(3, True).unbatch().cardinality() == -1
    for varying in (ten.batch(3), ten.batch(3, True).map(lambda x: x[1:]), ten):
        assert varying.unbatch().cardinality() == -2
    for dataset, why in (unknown, "unknown"), (endless, "infinite"):
        with pytest.raises(TypeError, match=why):
            len(dataset)
    assert unknown


def test_the_spec_of_a_function_is_that_of_its_first_result():
    called = []
    pairs = Dataset.from_tensor_slices((np.arange(5), np.ones((5, 2), np.float32)))
    mapped = pairs.batch(3).map(lambda a, b: called.append(len(a)) or (b, b.sum(), np.ones((3, 3))))
    specs = TensorSpec((None, 2), "f4"), TensorSpec((), "f4"), TensorSpec((None, 3), "f8")
    assert mapped.element_spec == mapped.element_spec == specs
    assert called == [3]


def test_an_attribute_error_in_element_spec_is_the_functions_own():
    dataset = Dataset.range(3).map(lambda x: x.nothing)
    for ask in (
        lambda: dataset.element_spec,
        lambda: iter(dataset).element_spec,
        lambda: next(iter(dataset)),
    ):
        with pytest.raises(AttributeError, match="int64' object has no attribute 'no") as caught:
            ask()
        assert "lambda x: x.nothing" in str(caught.traceback[-1].statement)


def test_the_next_element_or_none():
    iterator = Dataset.range(2).skip(1).as_numpy_iterator()
    found = iterator.get_next_as_optional()
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
        if policy is not AutoShardPolicy.OFF:
            other = dataset.with_options(options)
            assert repr(other) == repr(dataset) and len(other) == 3
            continue
        with pytest.raises(NotImplementedError, match=r"^Dataset\.with_options: .*OFF.* evenly"):
            dataset.with_options(options)
    wrong: Any = 1
    with pytest.raises(TypeError, match="Dataset.with_options: options is int"):
        Dataset.range(3).with_options(wrong)
    for owner, unknown in [
        *((options, name) for name in ("nonsense", "threading", "autotune")),
        *((options.experimental_distribute, name) for name in ("shard_policy", "num_devices")),
    ]:
        with pytest.raises(AttributeError, match=unknown):
            setattr(owner, unknown, 1)


def test_repr_is_what_the_user_wrote():
    dataset = Dataset.range(10).shuffle(4, seed=1).batch(2)
    assert repr(dataset) == "Dataset.range(0, 10).shuffle(4, 1, True).batch(2, False)"
    assert repr(dataset.prefetch(None)) == repr(dataset.prefetch(AUTOTUNE))
    assert items(copy.copy(Dataset.range(3))) == [0, 1, 2]


# ---- methods that `tf.data.Dataset` has and `Dataset` leaves to NumPy and Python


ROWS = np.arange(12).reshape(3, 4)
NAMES = {
    **{"hs": hs, "np": np, "sys": sys, "glob": glob, "itertools": itertools},
    **{"functools": functools, "Dataset": Dataset},
    "from_tensor_slices": Dataset.from_tensor_slices,
}
# What the line needs, and the elements that TensorFlow's method gives for the same.
LINES = {
    "flat_map": ({"n": 3, "rows": 4, "parts": ROWS}, [*range(12)]),
    "interleave": ({"n": 3, "rows": 4, "parts": ROWS}, ROWS.T.ravel().tolist()),
    "padded_batch": (
        {"dataset": Dataset.range(1, 4).map(lambda n: np.full(n, n)), "size": 3, "n": 2},
        [[[1, 0, 0], [2, 2, 0]], [[3, 3, 3]]],
    ),
    "window": ({"x": np.arange(7), "size": 3, "shift": 2}, [[0, 1, 2], [2, 3, 4], [4, 5, 6]]),
    "choose_from_datasets": (
        {"which": [0, 2, 0], "place": [0, 0, 1], "parts": ROWS},
        [0, 8, 1],
    ),
    "scan": ({"dataset": Dataset.range(5), "function": operator.add}, [0, 1, 3, 6, 10]),
    "apply": ({"dataset": Dataset.range(3), "function": lambda d: d.skip(1)}, [1, 2]),
    "rebatch": ({"dataset": Dataset.range(5).batch(2), "n": 3}, [[0, 1, 2], [3, 4]]),
}


def line_of(name):
    """What the error says to write in place of a method."""
    with pytest.raises(AttributeError, match=f"^Dataset.{name} does not exist; write ") as caught:
        getattr(Dataset, name)
    return str(caught.value).partition("; write ")[2]


def of_line(name, **names):
    return eval(line_of(name), NAMES | names)


@pytest.mark.parametrize("name", LINES)
def test_a_line_makes_the_elements_of_the_method(name):
    names, expected = LINES[name]
    assert items(of_line(name, **names)) == expected


def test_lines_of_other_results(tmp_path):
    drawn = items(of_line("sample_from_datasets", x=np.arange(3), n=300, p=[0.5, 0.5, 0]))
    assert len(drawn) == 300 and {*drawn} == {0, 1}
    assert items(of_line("counter", start=3, step=-2).take(0)) == []
    assert items(of_line("counter", start=3, step=2).take(3)) == [3, 5, 7]
    assert of_line("reduce", dataset=Dataset.range(5), function=operator.add, initial=10) == 20
    one = {"dataset": Dataset.from_tensors(5)}
    exec(line_of("get_single_element"), NAMES, one)
    assert one["element"] == 5
    path = tmp_path / "array.npy"
    of_line("save", dataset=Dataset.range(4).batch(2), path=path)
    assert items(of_line("load", path=path)) == [[0, 1], [2, 3]]
    assert items(of_line("list_files", pattern=f"{tmp_path}/*.npy")) == [str(path)]


def test_names_that_are_left_out_are_unknown():
    for name in *LINES, "options":
        assert line_of(name) and not hasattr(Dataset, name) and name not in dir(TEN)
    for owner in Dataset, TEN, Optional, Options, InputOptions():
        with pytest.raises(AttributeError, match="has no attribute 'misspelt'"):
            getattr(owner, "misspelt")  # noqa: B009


def test_arguments_that_tensorflow_has_are_unknown():
    functions = [method for name, method in vars(Dataset).items() if not name.startswith("_")]
    functions = [function for function in functions if callable(function)]
    assert len(functions) > 20
    assert not any("name" in inspect.signature(function).parameters for function in functions)
    for call, facts in [
        (lambda: TEN.cache("file"), "positional argument"),
        (lambda: InputOptions(even_batches=True), "even_batches"),  # pyright: ignore
    ]:
        with pytest.raises(TypeError, match=facts):
            call()
