"""Sources of datasets in one process: ranges, arrays and generators; the kinds of elements."""

from typing import Any

import numpy as np
import pytest
from pipelines import items

from hpcstrat import TensorSpec
from hpcstrat.data import UNKNOWN_CARDINALITY, Dataset


def test_a_range_has_the_dtype_that_is_asked_for():
    assert {type(x) for x in Dataset.range(3)} == {np.int64}
    assert next(iter(Dataset.range(3, output_type=np.float32).batch(3))).dtype == np.float32
    assert items(Dataset.range(3, 3)) == []
    with pytest.raises(ValueError, match="zero"):
        Dataset.range(1, 2, 0)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "complex128", "U3"])
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
    for values, spec in [
        ([1, 2], TensorSpec((), np.int32)),
        ([1.5, float("nan")], TensorSpec((), np.float32)),
        ([2**40], TensorSpec((), np.int64)),
        ([[1, 2], [3, 4], [5, 6]], TensorSpec((2,), np.int32)),
    ]:
        assert Dataset.from_tensor_slices(values).element_spec == spec
    assert Dataset.from_tensors([np.float64(1)]).element_spec == TensorSpec((1,), np.float64)
    assert Dataset.from_tensors(True).element_spec == TensorSpec((), np.bool_)
    assert items(Dataset.from_tensor_slices(([1, 2], {"a": [3.5, 4.5]}))) == [
        (1, {"a": 3.5}),
        (2, {"a": 4.5}),
    ]


class Column:
    """Like a text column of a pandas table: an object array for NumPy, with a long repr."""

    name, dtype = "city", "str"

    def __init__(self, texts):
        self.texts = texts

    def __array__(self, dtype=None, copy=None):
        return np.array(self.texts, dtype or object)


def test_sources_refuse_what_makes_no_elements():
    with pytest.raises(TypeError, match="must be an array"):
        Dataset.from_tensors(None)
    for text in np.array(["a", "bc"], object), Column(["a", "bc"]):
        with pytest.raises(TypeError, match=r"dtype (object|str), .* np\.asarray\(leaf, dtype=str"):
            Dataset.from_tensor_slices({"city": text, "size": [1, 2]})
        assert items(Dataset.from_tensor_slices(np.asarray(text, dtype=str))) == ["a", "bc"]
    with pytest.raises(TypeError, match="a Column 'city' of dtype str, "):
        Dataset.from_tensor_slices({"city": Column([])})
    with pytest.raises(ValueError, match="pass a tuple, whose members may have different shapes"):
        Dataset.from_tensors([[1, 2], [3]])


# ---- generators


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
    assert free.cardinality() == UNKNOWN_CARDINALITY


@pytest.mark.parametrize("signature", [None, TensorSpec((2,), np.float32)], ids=["free", "held"])
def test_a_generator_may_fill_the_same_array_again(signature):
    def filled():
        array = np.zeros(2, np.float32)
        for i in range(3):
            array[:] = i
            yield array

    dataset = Dataset.from_generator(filled, output_signature=signature)
    assert items(dataset.batch(3)) == [[[0, 0], [1, 1], [2, 2]]]


def test_a_generator_is_held_to_its_signature():
    for wrong in (np.zeros(3), np.zeros((2, 2)), (np.zeros(2),), "text"):
        dataset = Dataset.from_generator(
            lambda wrong=wrong: iter([wrong]), output_signature=TensorSpec((2,), np.float32)
        )
        with pytest.raises(ValueError, match="from_generator: .* does not match TensorSpec"):
            list(dataset)


def test_from_generator_refuses_wrong_arguments():
    nothing: Any = lambda: iter([])  # noqa: E731
    for error, facts, wrong in [
        (TypeError, r"pass `f`, not `f\(\)`", (count_up(3),)),
        (TypeError, "one or the other", (nothing, np.int64, None, None, TensorSpec((), np.int64))),
        (TypeError, "without output_types", (nothing, None, ())),
        (TypeError, "must be a TensorSpec", (nothing, None, None, None, np.int64)),
    ]:
        with pytest.raises(error, match=f"^Dataset.from_generator: .*{facts}"):
            Dataset.from_generator(*wrong)
    with pytest.raises(ValueError, match=r"pass an output_signature to Dataset.from_generator"):
        _ = Dataset.from_generator(nothing).element_spec


# ---- datasets side by side


def test_zip():
    a, b = Dataset.range(3), Dataset.from_generator(lambda: iter(range(10)), np.int64)
    assert items(Dataset.zip(datasets=(a, a.skip(1)))) == [(0, 1), (1, 2)]
    assert items(Dataset.zip({"a": a, "b": (b, a)})) == [{"a": i, "b": (i, i)} for i in range(3)]
    for facts, args, kwargs in [
        ("at least one", (), {}),
        ("at least one", ((),), {}),
        ("one or the other", (a,), {"datasets": (a, b)}),
        ("int is not a Dataset", ((a, 3),), {}),
        ("NoneType is not a Dataset", ((a, None),), {}),
    ]:
        with pytest.raises(TypeError, match=rf"^Dataset\.zip: .*{facts}"):
            Dataset.zip(*args, **kwargs)


# ---- None, which is part of a structure


def none_and(x):
    return None, x


def test_none_comes_from_any_source():
    one = [(None, 1)]
    kinds: list[dict[str, Any]] = [{"output_signature": (None, TensorSpec((), np.int32))}]
    for options in {}, *kinds, {"output_types": (None, "i4")}:
        assert list(Dataset.from_generator(lambda: one, **options)) == one
    rows = Dataset.from_tensor_slices({"a": None, "b": np.arange(4)}).shuffle(4, seed=0)
    assert [x["a"] for x in rows] == [None] * 4 and sorted(x["b"] for x in rows) == [0, 1, 2, 3]
    mapped = Dataset.range(4).map(none_and)
    assert mapped.element_spec == (None, TensorSpec((), np.int64))
    assert mapped.batch(2).element_spec == (None, TensorSpec((None,), np.int64))


def test_none_matches_none_alone():
    pairs = Dataset.range(4).map(none_and), Dataset.range(4).map(lambda x: (x, x))
    for size in None, 8:
        joined = pairs[0].concatenate(pairs[1])
        with pytest.raises((TypeError, ValueError), match=r"None, (\*|TensorSpec)"):
            list(joined if size is None else joined.batch(size))
    with pytest.raises(TypeError, match="a leaf of an element is None"):  # a forgotten return
        list(Dataset.range(4).map(lambda x: None))
