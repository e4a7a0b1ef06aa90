"""Every verb of every transport: one body, several communicators."""

import hashlib
import itertools
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from hpcstrat import ReduceOp, ReplicaMismatchError, _world
from hpcstrat._communicators import SoloCommunicator, connect
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._communicators.messages import SUMMED_BY_ALL
from hpcstrat._communicators.records import PAYLOAD
from hpcstrat._communicators.reduction import CHUNK, slice_of
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator

COMM = MPI.COMM_WORLD
SUM, MEAN, MIN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX
ARITHMETIC = (SUM, MEAN, MIN, MAX)
OPERATIONS = {
    **dict.fromkeys("int8 int32 int64 uint8 uint32 uint64 float16 float32 float64".split(), ARITHMETIC),
    "bfloat16": ARITHMETIC,
    "complex64": (SUM, MEAN),
    "complex128": (SUM, MEAN),
    "bool": (MIN, MAX),
}
TRANSPORTS = ["shared memory", "MPI", "MPI in pieces", "solo"]
_made = {}


@pytest.fixture(params=TRANSPORTS)
def communicator(request, monkeypatch):
    return transport(request.param, monkeypatch)


@pytest.fixture(params=TRANSPORTS[:3])
def group(request, monkeypatch):
    if COMM.size == 1:
        pytest.skip("one rank cannot disagree with another")
    return transport(request.param, monkeypatch)


def transport(name, monkeypatch):
    if name == "MPI in pieces":  # an odd number of bytes, so that pieces cut elements
        monkeypatch.setattr(HostCommunicator, "PIECE", 5003)
    if name == "solo":
        return SoloCommunicator()
    world = _world.start()
    kind = "shared memory" if name == "shared memory" else "MPI"
    if kind not in _made:
        assert world.comm is not None
        cls = SharedMemoryCommunicator if kind == "shared memory" else HostCommunicator
        _made[kind] = cls(world.comm.Dup())
    return _made[kind]


def kind(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(shape, dtype, rank) -> Any:
    """Small whole numbers, exact in every dtype, that differ by rank and by place."""
    size = int(np.prod(shape))
    numbers = (np.arange(size) * 5 + 3 * rank + rank * np.arange(size)) % 11
    if dtype.kind in "if":
        numbers -= 4
    if dtype.kind == "b":
        return (numbers % 3 > 0).reshape(shape)
    array = numbers.astype(dtype)
    if dtype.kind == "c":
        array += (1j * ((numbers + rank) % 5)).astype(dtype)
    return array.reshape(shape)


def reduced(parts, op):
    """What the values of `values` must reduce to."""
    dtype = parts[0].dtype
    exact = [part.astype(np.complex128 if dtype.kind == "c" else np.float64) for part in parts]
    if op is MIN or op is MAX:
        pick = min if op is MIN else max
        flat = [pick(column) for column in zip(*(part.ravel().tolist() for part in exact), strict=True)]
        return np.array(flat).reshape(parts[0].shape).astype(dtype)
    total = np.sum(exact, axis=0)
    if op is SUM:
        return total.astype(dtype)
    if dtype.kind in "iu":
        return total / len(parts) if len(parts) > 1 else parts[0]
    narrow = {"float16": np.float32, "bfloat16": np.float32}.get(dtype.name, dtype)
    return (total.astype(narrow) / np.asarray(len(parts), narrow)).astype(dtype)


def check(found, expected):
    assert isinstance(found, np.ndarray)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes() or np.array_equal(found, expected)  # the zeros of either sign


def digests(arrays):
    """The same on every rank, or the ranks have different bits."""
    return COMM.allgather([hashlib.sha256(array.tobytes()).hexdigest() for array in arrays])


def works(communicator):
    """The call after one that went wrong."""
    rank, size = communicator.rank, communicator.size
    (total,) = communicator.all_reduce("next", [np.full(7000, float(rank + 1))], SUM)
    assert total.tolist() == [size * (size + 1) / 2] * 7000
    assert communicator.all_gather_obj("next", rank) == list(range(size))


def test_connect_gives_the_transport_of_one_host():
    expected = SoloCommunicator if COMM.size == 1 else SharedMemoryCommunicator
    assert type(connect()) is expected
    assert connect() is connect()
    assert (connect().rank, connect().size) == (COMM.rank, COMM.size)


# ---- all_reduce


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_reduce_of_every_dtype(communicator, name):
    for shape, op in itertools.product([(3, 5), (33_333,)], OPERATIONS[name]):
        parts = [values(shape, kind(name), rank) for rank in range(communicator.size)]
        (found,) = communicator.all_reduce("test", [parts[communicator.rank]], op)
        check(found, reduced(parts, op))


@pytest.mark.parametrize(
    "size",
    [
        *(0, 1, 3, 63, 65),
        *(PAYLOAD // 4 - 1, PAYLOAD // 4, PAYLOAD // 4 + 1),
        *(SUMMED_BY_ALL // 4 - 1, SUMMED_BY_ALL // 4, SUMMED_BY_ALL // 4 + 1),
        *(CHUNK - 1, CHUNK, CHUNK + 1, 4 * CHUNK + 77),
    ],
)
def test_sums_of_float32_are_in_rank_order_on_every_rank(communicator, size):
    size_ = communicator.size
    parts = [np.random.default_rng([size, rank]).standard_normal(size).astype(np.float32) for rank in range(size_)]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    results = [communicator.all_reduce("test", [parts[communicator.rank]], SUM)[0] for _ in range(2)]
    for found in results:
        assert found.tobytes() == expected.tobytes()
    (mean,) = communicator.all_reduce("test", [parts[communicator.rank]], MEAN)
    assert mean.tobytes() == (expected / np.float32(size_)).tobytes()
    if size_ > 1:
        assert len(set(map(tuple, digests([*results, mean])))) == 1


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [4, 40_000])
def test_16_bit_floats_are_summed_in_float32(communicator, name, size):
    rank, n = communicator.rank, communicator.size
    largest = 60_000.0 if name == "float16" else 3e38
    (mean,) = communicator.all_reduce("test", [np.full(size, 1.0 if n == 1 else largest / n).astype(kind(name))], MEAN)
    assert np.isfinite(mean.astype(np.float64)).all()
    # In float16 60000 + 60000 is inf; 2048 + 1 is 2048 there, and 256 + 1 is 256 in bfloat16.
    big = 2048.0 if name == "float16" else 256.0
    (total,) = communicator.all_reduce("test", [np.full(size, big if rank == 0 else 1.0).astype(kind(name))], SUM)
    check(total, np.full(size, np.float32(big + n - 1)).astype(kind(name)))
    if name == "float16":
        (mean,) = communicator.all_reduce("test", [np.full(size, 60_000, np.float16)], MEAN)
        check(mean, np.full(size, 60_000, np.float16))


def layouts(array):
    """The numbers of `array`, of three dimensions, as they may lie in memory."""
    spread = np.zeros([2 * n for n in array.shape], array.dtype)
    spread[::2, ::2, ::2] = array
    yield np.ascontiguousarray(array)
    yield np.asfortranarray(array)
    yield spread[::2, ::2, ::2]
    yield np.ascontiguousarray(array[::-1, :, ::-1])[::-1, :, ::-1]
    yield np.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)
    yield array.astype(array.dtype.newbyteorder("S"))
    frozen = array.copy()
    frozen.flags.writeable = False
    yield frozen


@pytest.mark.parametrize("shape", [(2, 3, 4), (20, 30, 40)])
def test_any_layout(communicator, shape):
    parts = [values(shape, np.dtype(np.float64), rank) for rank in range(communicator.size)]
    for i, array in enumerate(layouts(parts[communicator.rank])):
        (total,) = communicator.all_reduce("test", [array], SUM)
        check(total, sum(parts))
        (whole,) = communicator.all_gather("test", [array], 1)
        check(whole, np.concatenate(parts, 1))
        assert total.dtype.isnative and whole.dtype.isnative, i


def test_ranks_may_hold_different_layouts(communicator):
    parts = [values((4, 5, 6), np.dtype(np.int32), rank) for rank in range(communicator.size)]
    mine = list(layouts(parts[communicator.rank]))[communicator.rank % 7]
    check(communicator.all_reduce("test", [mine], SUM)[0], sum(parts))


def test_broadcast_arrays_of_no_stride(communicator):
    mine = np.broadcast_to(np.float64(communicator.rank + 1), (100, 90))
    n = communicator.size
    check(communicator.all_reduce("test", [mine], SUM)[0], np.full((100, 90), n * (n + 1) / 2))


def test_arrays_without_dimensions_or_elements(communicator):
    rank, n = communicator.rank, communicator.size
    arrays = [np.array(2.5 * rank), np.empty((0,), np.float32), np.empty((3, 0, 2), np.int8), np.array(rank, np.int64)]
    found = communicator.all_reduce("test", arrays, SUM)
    check(found[0], np.array(2.5 * n * (n - 1) / 2))
    check(found[1], np.empty((0,), np.float32))
    check(found[2], np.empty((3, 0, 2), np.int8))
    check(found[3], np.array(n * (n - 1) // 2))
    assert communicator.all_reduce("test", [], SUM) == []
    assert communicator.all_gather("test", [], 0) == []


@pytest.mark.parametrize("op", [SUM, MEAN, MIN, MAX])
def test_many_arrays_of_many_dtypes_in_one_call(communicator, op):
    names = [name for name in OPERATIONS if op in OPERATIONS[name]]
    shapes = [(), (3,), (0, 4), (5, 7), (11_111,), (2, 1, 3), (1,)]
    forms = [(shape, kind(names[(3 * i + j) % len(names)])) for i in range(6) for j, shape in enumerate(shapes)]
    everyones = [[values(*form, rank) for form in forms] for rank in range(communicator.size)]
    found = communicator.all_reduce("test", everyones[communicator.rank], op)
    for one, *parts in zip(found, *everyones, strict=True):
        check(one, reduced(parts, op))


def test_integer_sums_keep_their_dtype_and_wrap_round(communicator):
    (found,) = communicator.all_reduce("test", [np.full(3, 100, np.int8)], SUM)
    expected = (100 * communicator.size + 128) % 256 - 128
    check(found, np.full(3, expected, np.int8))


def test_large_integers_are_exact(communicator):
    n, big = communicator.size, 2**53 + 1
    (found,) = communicator.all_reduce("test", [np.array([big + communicator.rank])], SUM)
    assert found.tolist() == [n * big + n * (n - 1) // 2]
    (found,) = communicator.all_reduce("test", [np.array([2**64 - 1 - communicator.rank], np.uint64)], MIN)
    assert found.tolist() == [2**64 - n]


@pytest.mark.parametrize("op", [MIN, MAX, SUM])
def test_nan_wins(communicator, op):
    mine = np.zeros(9_000) if communicator.rank < communicator.size - 1 else np.full(9_000, np.nan)
    assert np.isnan(communicator.all_reduce("test", [mine], op)[0]).all()


@pytest.mark.parametrize("size", [10, 40_000])
def test_an_overflow_is_inf_and_no_exception_of_one_rank(communicator, size):
    """Warnings are errors here, and the last element is in the last rank's slice."""
    mine = np.zeros(size, np.float32)
    mine[-1] = 3e38
    with np.errstate(all="raise"):
        (found,) = communicator.all_reduce("test", [mine], SUM)
    assert found[-1] == (np.inf if communicator.size > 1 else np.float32(3e38))
    assert not found[:-1].any()


def test_results_are_fresh(communicator):
    rank, n = communicator.rank, communicator.size
    arrays = [np.full(5, float(rank)), np.full((100, 200), float(rank)).T]
    first = communicator.all_reduce("test", arrays, SUM)
    copies = [array.copy() for array in first]
    for array in first:
        assert array.flags.writeable and array.flags.c_contiguous
        assert not any(np.shares_memory(array, one) for one in arrays)
    second = communicator.all_reduce("test", [array + 1 for array in arrays], SUM)
    for one, copy, other in zip(first, copies, second, strict=True):
        assert (one == copy).all()
        assert (other == copy + n).all()
        one[...] = -1
        assert (other == copy + n).all()
    assert (arrays[0] == rank).all() and (arrays[1] == rank).all()


# ---- all_gather


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("unit", [1, 40])
def test_all_gather_of_uneven_sizes_on_every_axis(communicator, axis, unit):
    """Rank 1 of several has nothing; with the small unit some messages fit in a record and some do not."""
    for name in [*OPERATIONS, "int16", "uint16"]:
        parts = []
        for rank in range(communicator.size):
            shape = [2, 3, 4]
            shape[axis] = 0 if rank == 1 else unit * (rank + 1)
            parts.append(values(tuple(shape), kind(name), rank))
        (found,) = communicator.all_gather("test", [parts[communicator.rank]], axis)
        check(found, np.concatenate(parts, axis))
        assert found.flags.writeable


def test_all_gather_of_many_arrays(communicator):
    def arrays(rank):
        return [
            np.full((rank + 1, 2), rank, np.float32),
            np.full((3, 2), rank, np.int8),
            np.full((0 if rank % 2 else 4, 0), rank, np.complex128),
            np.full((5000 * rank, 3), rank, bool),
            np.full((rank, 1), rank, kind("bfloat16")),
        ]

    found = communicator.all_gather("test", arrays(communicator.rank), 0)
    for one, *parts in zip(found, *map(arrays, range(communicator.size)), strict=True):
        check(one, np.concatenate(parts))


def test_all_gather_of_nothing_from_everyone(communicator):
    check(communicator.all_gather("test", [np.empty((0, 3))], 0)[0], np.empty((0, 3)))


def test_all_gather_results_stay(communicator):
    first = communicator.all_gather("test", [np.full(5000, communicator.rank)], 0)[0]
    communicator.all_gather("test", [np.full(5000, 99)], 0)
    assert first.tolist() == [rank for rank in range(communicator.size) for _ in range(5000)]


# ---- objects


class Pair:
    def __init__(self, first, second):
        self.first, self.second = first, second


def treasure(rank):
    return {
        "rank": rank,
        "text": "é" * rank,
        "none": None,
        "arrays": [np.arange(rank), np.zeros((0, 3)), np.array(rank), np.full((300, 20), rank, order="F")],
        "part": np.arange(20.0 * (rank + 1)).reshape(-1, 4)[:, ::2],
        "object": Pair((rank,), [np.float32(rank)]),
        "big": np.full(50_000 * rank, rank, np.uint8),
    }


def check_treasure(found, rank):
    expected = treasure(rank)
    assert found.keys() == expected.keys()
    assert (found["rank"], found["text"], found["none"]) == (rank, "é" * rank, None)
    for one, other in zip(found["arrays"], expected["arrays"], strict=True):
        check(one, other)
    check(found["part"], expected["part"])
    check(found["big"], expected["big"])
    assert (found["object"].first, found["object"].second) == ((rank,), [np.float32(rank)])


def test_objects_of_all_ranks(communicator):
    found = communicator.all_gather_obj("test", treasure(communicator.rank))
    assert len(found) == communicator.size
    for rank, one in enumerate(found):
        check_treasure(one, rank)


def test_arrays_in_objects_are_fresh_and_may_be_written(communicator):
    mine = [np.full(shape, communicator.rank) for shape in [(), (3,), (300, 100), (30, 10)]]
    mine[2] = mine[2].T
    mine[3].flags.writeable = False
    found = communicator.all_gather_obj("test", [*mine, mine[2][::2], np.broadcast_to(communicator.rank, (5, 5))])
    for arrays in found:
        for array in arrays:
            array += 1000
    assert all((array == communicator.rank).all() for array in mine)
    communicator.all_gather_obj("test", mine)
    for rank, arrays in enumerate(found):
        assert [set(array.ravel().tolist()) for array in arrays] == [{1000 + rank}] * 6


def test_broadcast_from_every_root(communicator):
    for root in range(communicator.size):
        # What the others pass does not count, not even if it cannot travel.
        mine = treasure(root + 2) if communicator.rank == root else lambda: None
        check_treasure(communicator.broadcast_obj("test", mine, root), root + 2)
    assert communicator.broadcast_obj("test", communicator.rank) == 0


def test_an_object_that_cannot_travel(communicator):
    for root in range(communicator.size):
        with pytest.raises(TypeError, match=r"some_call: .*lambda.* cannot travel between ranks"):
            communicator.all_gather_obj("some_call", (lambda: 0) if communicator.rank == root else np.ones(9000))
        with pytest.raises(TypeError, match=r"some_call: .*generator.* cannot travel"):
            communicator.broadcast_obj("some_call", (i for i in ()) if communicator.rank == root else 1, root)
    works(communicator)


# ---- refusals

REFUSED = {
    "objects": (np.array([None, 1]), SUM, "object cannot be reduced"),
    "int16": (np.arange(3, dtype=np.int16), SUM, "int16 cannot be reduced; it takes int8, int32"),
    "uint16": (np.arange(3, dtype=np.uint16), MAX, "uint16 cannot be reduced"),
    "long double": (np.arange(3, dtype=np.longdouble), SUM, "cannot be reduced"),
    "text": (np.array(["a"]), MIN, "cannot be reduced"),
    "records": (np.zeros(2, [("a", "f4")]), SUM, "cannot be reduced"),
    "bool": (np.array([True]), SUM, "SUM of bool is not defined; bool takes MIN, MAX"),
    "bool mean": (np.array([True]), MEAN, "MEAN of bool is not defined"),
    "complex": (np.array([1j]), MAX, "MAX of complex128 is not defined; complex128 takes SUM, MEAN"),
    "complex64": (np.array([1j], np.complex64), MIN, "MIN of complex64 is not defined"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dtypes_that_are_refused(communicator, case):
    array, op, message = REFUSED[case]
    with pytest.raises(TypeError, match=f"^some_call: .*{message}"):
        communicator.all_reduce("some_call", [array], op)
    for rank in range(communicator.size):  # one rank only
        with pytest.raises(TypeError, match=f"^some_call: .*{message}"):
            communicator.all_reduce("some_call", [array if communicator.rank == rank else np.ones(9000)], op)
    works(communicator)


def test_objects_are_not_gathered_as_arrays(communicator):
    with pytest.raises(TypeError, match="some_call: an array of dtype object cannot be gathered"):
        communicator.all_gather("some_call", [np.ones(3), np.array([None])], 0)
    works(communicator)


def test_axes_that_are_not_there(communicator):
    for axis in (1, -2):
        with pytest.raises(ReplicaMismatchError, match=rf"some_call: axis {axis} does not exist .*\(3,\) on rank 0"):
            communicator.all_gather("some_call", [np.ones(3)], axis)
    with pytest.raises(ReplicaMismatchError, match="axis 0 does not exist"):
        communicator.all_gather("some_call", [np.array(1.0)], 0)
    works(communicator)


# ---- ranks that disagree

DISAGREEMENTS = {
    "shape": (lambda c, odd: c.all_reduce("call", [np.ones((3, 5 if odd else 4))], SUM), "float64, (3, {})", (4, 5)),
    "dimensions": (lambda c, odd: c.all_reduce("call", [np.ones((1, 3) if odd else 3)], SUM), "{}", ("(3,)", "(1, 3)")),
    "size": (lambda c, odd: c.all_reduce("call", [np.ones(50_000 if odd else 3)], SUM), "({},)", (3, 50_000)),
    "large": (lambda c, odd: c.all_reduce("call", [np.ones(50_000 + odd)], SUM), "({},)", (50_000, 50_001)),
    "dtype": (
        lambda c, odd: c.all_reduce("call", [np.ones(3, "f4" if odd else "f8")], SUM),
        "call(SUM, ({}, (3,)))",
        ("float64", "float32"),
    ),
    "op": (lambda c, odd: c.all_reduce("call", [np.ones(3)], MAX if odd else SUM), "call({},", ("SUM", "MAX")),
    "count": (lambda c, odd: c.all_reduce("call", [np.ones(3)] * (1 + odd), SUM), "{}", ("(3,)))", "(3,)), (float64")),
    "call": (lambda c, odd: c.all_reduce("odd" if odd else "even", [np.ones(3)], SUM), "{}(SUM", ("even", "odd")),
    "verb": (
        lambda c, odd: c.barrier("pause") if odd else c.all_gather("meet", [np.ones(9000)], 0),
        "{}",
        ("meet(axis=0, float64)", "pause()"),
    ),
    "object": (
        lambda c, odd: c.all_gather_obj("tell", np.ones(9000)) if odd else c.all_reduce("call", [np.ones(3)], SUM),
        "{}",
        ("call(SUM, (float64, (3,)))", "tell()"),
    ),
    "root": (lambda c, odd: c.broadcast_obj("call", 1, root=int(odd)), "call(root={})", (0, 1)),
    "gathered axis": (lambda c, odd: c.all_gather("call", [np.ones((2, 2))], int(odd)), "axis={}", (0, 1)),
    "gathered dtype": (
        lambda c, odd: c.all_gather("call", [np.ones(2, "f4" if odd else "f8")], 0),
        "call(axis=0, {})",
        ("float64", "float32"),
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_ranks_that_disagree(group, case):
    call, text, facts = DISAGREEMENTS[case]
    for odd in range(group.size):
        with pytest.raises(ReplicaMismatchError, match="must make the same call") as caught:
            call(group, group.rank == odd)
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == group.size
        for rank, line in enumerate(lines):
            assert line.startswith(f"  rank {rank}: ")
            assert text.format(facts[rank == odd]) in line
        works(group)


def test_every_rank_makes_another_call(group):
    with pytest.raises(ReplicaMismatchError) as caught:
        group.barrier(f"call number {group.rank}")
    for rank in range(group.size):
        assert f"rank {rank}: call number {rank}()" in str(caught.value)
    works(group)


def test_shapes_that_cannot_be_gathered_are_all_named(group):
    for unit in (1, 5000):
        with pytest.raises(ReplicaMismatchError, match="some_call: shapes may differ along axis 0 only") as caught:
            group.all_gather("some_call", [np.ones((2, unit * (group.rank + 1)))], 0)
        for rank in range(group.size):
            assert f"(2, {unit * (rank + 1)}) on rank {rank}" in str(caught.value)
        with pytest.raises(ReplicaMismatchError, match="some_call") as caught:
            group.all_gather("some_call", [np.ones(unit) if group.rank else np.ones((unit, 1))], 0)
        assert f"({unit}, 1) on rank 0, ({unit},) on rank 1" in str(caught.value)
        works(group)


# ---- work that fails on some ranks


class Special(ValueError):
    pass


class Strange(Exception):
    pass


ERRORS = {
    ValueError("a value"): ValueError,
    Special("special"): ValueError,
    Strange("strange"): RuntimeError,
    KeyError("key"): KeyError,
    MemoryError("full"): MemoryError,
    ReplicaMismatchError("differs"): ReplicaMismatchError,
    NotImplementedError("not yet"): NotImplementedError,
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"): ValueError,
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_fails_on_one_rank_fails_on_all(group, error):
    for failing in range(group.size):
        with pytest.raises(Exception) as caught:
            with group.joint("some_call"):
                if group.rank == failing:
                    raise error
            group.all_reduce("some_call", [np.ones(9000)], SUM)
        if group.rank == failing:
            assert caught.value is error
        else:
            assert type(caught.value) is ERRORS[error]
            assert str(error) in str(caught.value)
            assert f"(found by rank {failing})" in str(caught.value)
    works(group)


def test_what_fails_on_several_ranks(group):
    for first in range(group.size):
        with pytest.raises(ValueError) as caught:
            with group.joint("some_call"):
                if group.rank >= first:
                    raise ValueError(f"fault of rank {group.rank}")
            group.all_gather_obj("some_call", np.ones(9000))
        mine = f"fault of rank {group.rank}"
        assert str(caught.value) == (mine if group.rank >= first else f"fault of rank {first} (found by rank {first})")
    works(group)


def test_a_joint_block_around_another_and_around_a_call(group):
    with pytest.raises(ValueError, match="inner"):
        with group.joint("outer"):
            with group.joint("inner"):
                if group.rank == 1:
                    raise ValueError("inner")
            group.barrier("meet")
    with pytest.raises(TypeError, match="int16"):
        with group.joint("outer"):
            group.all_reduce("call", [np.ones(3, np.int16 if group.rank == 0 else np.int32)], SUM)
    with pytest.raises(ReplicaMismatchError):
        with group.joint("outer"):
            group.barrier("one" if group.rank else "other")
    works(group)


def test_one_rank_fails_where_another_makes_a_different_call(group):
    if group.size < 3:
        pytest.skip("needs three ranks: one that fails and two that differ")
    with pytest.raises(ValueError, match="mine"):
        with group.joint("some_call"):
            if group.rank == 1:
                raise ValueError("mine")
        group.barrier(f"call {group.rank}")
    works(group)


def test_a_message_for_which_there_is_no_memory(communicator):
    huge = np.broadcast_to(np.float32(1), (10**14,))
    with pytest.raises(MemoryError):
        communicator.all_reduce("some_call", [huge], SUM)
    with pytest.raises(MemoryError):
        communicator.all_gather("some_call", [huge], 0)
    works(communicator)
    for rank in range(communicator.size):  # one rank only, and the others have something small
        mine = huge if communicator.rank == rank else np.ones(3, np.float32)
        with pytest.raises((MemoryError, ReplicaMismatchError)):
            communicator.all_reduce("some_call", [mine], SUM)
        with pytest.raises(MemoryError):
            communicator.all_gather("some_call", [mine], 0)
        works(communicator)


# ---- what is particular to a transport


def test_mailboxes_grow_and_stay(monkeypatch):
    world = _world.start()
    assert world.comm is not None
    communicator = SharedMemoryCommunicator(world.comm.Dup())
    for size in [PAYLOAD // 8, PAYLOAD // 8 + 1, 30, 3000, 25, 6000, 100_000, 7]:
        parts = [values((size,), np.dtype(np.float64), rank) for rank in range(communicator.size)]
        for _ in range(3):  # records alternate
            check(communicator.all_reduce("test", [parts[communicator.rank]], SUM)[0], sum(parts))
        check(communicator.all_gather("test", [parts[communicator.rank]], 0)[0], np.concatenate(parts))


def test_fast_ranks_do_not_overwrite_what_slow_ones_read(communicator):
    """Without a barrier between them, messages of every size, all different."""
    n = communicator.size
    for step in range(60):
        size = [5, 3000, 20, 9000, 40_000][step % 5]
        mine = np.full(size, float(step * 10 + communicator.rank))
        if step % 3 == 0:
            (found,) = communicator.all_gather("test", [mine], 0)
            assert found.tolist() == [step * 10 + rank for rank in range(n) for _ in range(size)]
        else:
            (found,) = communicator.all_reduce("test", [mine], SUM)
            assert set(found.tolist()) == {step * 10 * n + n * (n - 1) / 2}


@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_pieces_that_just_fit(monkeypatch, difference):
    """A slice and a part are one piece, or one byte more or less."""
    communicator: Any = transport("MPI", monkeypatch)
    n = communicator.size
    slices = [slice_of(40_000, rank, n) for rank in range(n)]
    longest = max(one.stop - one.start for one in slices)
    parts = [values((40_000,), np.dtype(np.int8), rank) for rank in range(n)]
    for piece in (n * (longest + difference), longest + difference, 40_000 + difference):
        monkeypatch.setattr(HostCommunicator, "PIECE", piece)
        check(communicator.all_reduce("test", [parts[communicator.rank]], SUM)[0], sum(parts))
        check(communicator.all_gather("test", [parts[communicator.rank]], 0)[0], np.concatenate(parts))


def test_a_namespace_travels(communicator):
    found = communicator.all_gather_obj("test", types.SimpleNamespace(rank=communicator.rank))
    assert [one.rank for one in found] == list(range(communicator.size))
