import enum
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import (
    REDUCTIONS,
    Reduction,
    _reduce_own,
    accumulator,
    as_native,
    call_named,
    check_reducible,
    is_numeric,
    part_of_rank,
    reduce_chunk,
    reduce_in_chunks,
)

from hpcstrat import ReduceOp

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 7, *((1 << power) + 1 for power in range(10, 20)), 1 << 16])
def test_sums_are_in_order(count, size):
    parts = list(np.random.default_rng(count).standard_normal((count, size)).astype(np.float32))
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    out = np.full(size, -1, np.float32)
    reduce_in_chunks(out, parts, ReduceOp.SUM)
    assert out.tobytes() == expected.tobytes()
    reduce_in_chunks(out, parts, ReduceOp.MEAN)
    assert out.tobytes() == (expected / np.float32(count)).tobytes()
    reduce_in_chunks(out, parts, ReduceOp.MIN)
    assert out.tobytes() == np.min(parts, 0).tobytes()
    reduce_in_chunks(out, parts, ReduceOp.MAX)
    assert out.tobytes() == np.max(parts, 0).tobytes()


@pytest.mark.parametrize("dtype", ["float64", "int32", "complex64", *HALVES], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_result_may_lie_in_any_part(dtype, count):
    for op in (ReduceOp.SUM, ReduceOp.MAX) if np.dtype(dtype).kind != "c" else (ReduceOp.SUM,):
        for target in range(count):
            parts = [(np.arange(9) * (i + 1) % 5).astype(dtype) for i in range(count)]
            exact = np.real([part.astype(complex) for part in parts])
            reduce_chunk(parts[target], parts, op)
            expected = exact.sum(0) if op is ReduceOp.SUM else exact.max(0)
            assert parts[target].tolist() == expected.astype(dtype).tolist()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_16_bit_floats_are_rounded_once(dtype):
    big = 2048 if dtype == np.float16 else 256  # adding one 1 in that dtype changes nothing
    parts = [np.full(3, value).astype(dtype) for value in (big, 1, 1)]
    out = np.empty(3, dtype)
    reduce_chunk(out, parts, ReduceOp.SUM)
    assert out.tolist() == [big + 2] * 3
    assert accumulator(dtype) == np.float32 and accumulator(np.dtype(np.int8)) == np.int8


def test_an_overflow_is_inf():
    out = np.empty(2, np.float32)
    with np.errstate(all="raise"):
        reduce_in_chunks(out, [np.full(2, 3e38, np.float32)] * 2, ReduceOp.SUM)
    assert np.isinf(out).all()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 1000, 4096, 1_000_003])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 64])
def test_slices_cover_everything_once(count, size):
    slices = [part_of_rank(count, rank, size) for rank in range(size)]
    assert slices[0].start == 0 and slices[-1].stop == count
    for one, other in itertools.pairwise(slices):
        assert one.stop == other.start
        assert one.stop % 64 == 0 or one.stop == count
    lengths = [one.stop - one.start for one in slices]
    assert min(lengths) >= 0 and max(lengths) - min(lengths) <= 128


def test_the_table_of_dtypes():
    integers = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
    numbers = [*integers, np.float32, np.float64, *HALVES]
    allowed = {np.dtype(dtype): {"SUM", "MEAN", "MIN", "MAX"} for dtype in numbers}
    allowed |= {np.dtype(dtype): {"SUM", "MEAN"} for dtype in (np.complex64, np.complex128)}
    allowed |= {np.dtype(bool): {"MIN", "MAX"}}
    others = [np.longdouble, object, "U3", "S3", "M8[s]", "m8[s]", [("a", "f4")]]
    for dtype in [*allowed, *map(np.dtype, others)]:
        for op in ReduceOp:
            if op.name in allowed.get(dtype, ()):
                check_reducible(dtype, op)
                continue
            with (
                call_named("some_call"),
                pytest.raises(TypeError, match="^some_call: .*cast first"),
            ):
                check_reducible(dtype, op)


def test_what_is_a_number():
    for dtype in (
        bool,
        np.int16,
        np.uint64,
        np.float16,
        np.longdouble,
        np.complex64,
        ">f4",
        ml_dtypes.bfloat16,
    ):
        assert is_numeric(np.dtype(dtype))
    for dtype in (object, "U3", "S3", "M8[s]", "m8[s]", "V4", [("a", "f4")]):
        assert not is_numeric(np.dtype(dtype))


def test_this_machines_byte_order():
    array = np.arange(3, dtype=np.dtype(np.int32).newbyteorder())
    assert as_native(array).dtype.isnative and as_native(array).tolist() == [0, 1, 2]
    same = np.arange(3)
    assert as_native(same) is same


class Other(enum.Enum):
    """An operation added to `ReduceOp` later."""

    PROD = "PROD"


def test_every_operation_is_in_the_table():
    assert list(REDUCTIONS) == list(ReduceOp)


USES = {
    "reduce_chunk": lambda op: reduce_chunk(np.empty(2), [np.ones(2)] * 2, op),
    "check_reducible": lambda op: check_reducible(np.dtype(np.float32), op),
    "along axes": lambda op: _reduce_own(op, np.ones(2), 0),
}


@pytest.mark.parametrize("use", USES)
def test_an_operation_that_is_not_in_the_table_raises(use):
    with pytest.raises(KeyError, match=r"Other\.PROD"):
        USES[use](Other.PROD)


def test_one_line_of_the_table_is_a_new_operation(monkeypatch):
    product: Any = Other.PROD
    row = Reduction(
        np.multiply,
        "NCCL_PROD",
        ("float64",),
        along_axes=lambda array, axes: array.prod(axis=axes),
        finish=lambda total, count, dtype: total,
    )
    monkeypatch.setitem(REDUCTIONS, product, row)
    out = np.empty(2)
    reduce_chunk(out, [np.array([2.0, 3.0]), np.array([5.0, 7.0]), np.array([1.0, 2.0])], product)
    assert out.tolist() == [10, 42]
    total, count, _ = _reduce_own(product, np.array([[2.0, 3.0, 4.0], [1.0, 1.0, 5.0]]), 1)
    assert (total.tolist(), count) == ([24, 5], 3)
    with pytest.raises(
        TypeError, match="PROD of float32 is not defined; float32 takes SUM, MEAN, MIN, MAX"
    ):
        check_reducible(np.dtype(np.float32), product)
