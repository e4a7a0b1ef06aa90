"""Every verb of every transport: one body, several communicators."""

import itertools
import types
from typing import Any

import numpy as np
import pytest
from internals import (
    HostsCommunicator,
    SharedMemoryCommunicator,
    SoloCommunicator,
    call_named,
    connect,
    hosts,
    worlds,
)
from slow import slow_but
from transports import (
    ARITHMETIC,
    COMM,
    DEVICE,
    HOST,
    MAX,
    MEAN,
    MIN,
    OPERATIONS,
    SUM,
    check,
    close_devices,
    combined,
    has,
    have_the_same_bits,
    kind,
    parametrize,
    reduced,
    transport,
    values,
    works,
)

from hpcstrat import asnumpy

pytestmark = pytest.mark.core


def pytest_generate_tests(metafunc):
    parametrize(metafunc, {"communicator": HOST + DEVICE, "ordered": HOST})


@pytest.fixture
def communicator(request, monkeypatch, place):
    return transport(request.param, monkeypatch, place)


@pytest.fixture
def ordered(request, monkeypatch, place):
    """A communicator that combines the ranks' values in one order; see `combined`."""
    made: Any = transport(request.param, monkeypatch, place)
    return made


@pytest.fixture(scope="module", autouse=True)
def _closed_in_the_end():
    yield
    close_devices()


def test_connect_gives_the_transport_of_one_host():
    expected = SoloCommunicator if COMM.size == 1 else SharedMemoryCommunicator
    assert type(connect()) is expected
    assert connect() is connect()
    assert (connect().rank, connect().size) == (COMM.rank, COMM.size)


# ---- all_reduce


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["int8", "uint16", "uint64", "float16", "bfloat16", "float32", "complex64", "bool"],
        OPERATIONS,
    ),
)
def test_all_reduce_of_every_dtype(communicator, place, name):
    if not has(place.xp, kind(name)):
        pytest.skip(f"CuPy {place.xp.__version__} does not compute with {name}")
    everyones = [
        [values(shape, kind(name), rank) for rank in range(communicator.size)]
        for shape in [(3, 5), (33_333,)]
    ]
    for parts, op in itertools.product(everyones, OPERATIONS[name]):
        (found,) = communicator.all_reduce([place.xp.asarray(parts[communicator.rank])], op)
        # CuPy divides complex numbers by another formula.
        if op is MEAN and name.startswith("complex"):
            np.testing.assert_allclose(asnumpy(found), reduced(parts, op), 4 * np.finfo(name).eps)
            found = place.xp.asarray(reduced(parts, op))
        check(found, reduced(parts, op), place.xp)


EDGES = [
    edge + step
    for power in range(4, 17)
    for edge in (2**power, 3 * 2 ** (power - 1))
    for step in (-1, 0, 1)
]
"""Sizes beside those at which a transport may take another way."""


def test_sums_of_float32_are_in_one_order_on_every_rank(ordered):
    """Whatever their number, and whichever way they travel."""
    n, rank = ordered.size, ordered.rank
    for size in [0, 1, 3, *EDGES, 2**17 + 77]:
        parts = [
            np.random.default_rng([size, r]).standard_normal(size, np.float32) for r in range(n)
        ]
        total = combined(ordered, parts, np.add)
        found = ordered.all_reduce([parts[rank]], SUM)[0]
        assert found.tobytes() == total.tobytes(), size
        if size not in EDGES:
            found = ordered.all_reduce([parts[rank]], MEAN)[0]
            assert found.tobytes() == (total / np.float32(n)).tobytes(), size


@pytest.mark.parametrize("name", slow_but(["float64"], ["float32", "float64"]))
def test_sums_are_near_and_the_same_on_every_rank(communicator, place, name):
    """In any order in which the transport adds up."""
    for size in (5, 1000, 123_457):
        parts = [
            np.random.default_rng([size, rank]).random(size).astype(name)
            for rank in range(communicator.size)
        ]
        mine = place.xp.asarray(parts[communicator.rank])
        found = [communicator.all_reduce([mine], op)[0] for op in (SUM, MEAN)]
        for one, scale in zip(found, (1, communicator.size), strict=True):
            total = np.sum(parts, 0, dtype=np.float64) / scale
            np.testing.assert_allclose(asnumpy(one), total, 4 * np.finfo(name).eps)
        if communicator.size > 1:
            assert have_the_same_bits(found)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [4, 40_000])
def test_16_bit_floats_are_summed_in_float32(ordered, place, name, size):
    if not has(place.xp, kind(name)):
        pytest.skip(f"CuPy {place.xp.__version__} does not compute with {name}")
    rank, n = ordered.rank, ordered.size

    def reduce(number, op):
        return ordered.all_reduce([place.xp.asarray(np.full(size, number).astype(kind(name)))], op)[
            0
        ]

    largest = 60_000.0 if name == "float16" else 3e38
    mean = reduce(1.0 if n == 1 else largest / n, MEAN)
    assert np.isfinite(asnumpy(mean).astype(np.float64)).all()
    # In float16 60000 + 60000 is inf; 2048 + 1 is 2048 there, and 256 + 1 is 256 in bfloat16.
    big = 2048.0 if name == "float16" else 256.0
    check(
        reduce(big if rank == 0 else 1.0, SUM),
        np.full(size, np.float32(big + n - 1)).astype(kind(name)),
        place.xp,
    )
    if name == "float16":
        check(reduce(60_000, MEAN), np.full(size, 60_000, np.float16), place.xp)


def layouts(xp, numbers):
    """`numbers`, of three dimensions, in any layout in the memory of the host or of a GPU."""
    array = xp.asarray(numbers)
    spread = xp.zeros([2 * n for n in array.shape], array.dtype)
    spread[::2, ::2, ::2] = array
    yield xp.ascontiguousarray(array)
    yield xp.asfortranarray(array)
    yield spread[::2, ::2, ::2]
    yield xp.ascontiguousarray(array[::-1, :, ::-1])[::-1, :, ::-1]
    yield xp.ascontiguousarray(array.transpose(2, 0, 1)).transpose(1, 2, 0)
    if xp is np:
        yield array.astype(array.dtype.newbyteorder("S"))
        frozen = array.copy()
        frozen.flags.writeable = False
        yield frozen


@pytest.mark.parametrize("shape", [(2, 3, 4), (20, 30, 40)], ids=str)
def test_any_layout(communicator, place, shape):
    parts = [values(shape, np.dtype(np.float64), rank) for rank in range(communicator.size)]
    for i, array in enumerate(layouts(place.xp, parts[communicator.rank])):
        (total,) = communicator.all_reduce([array], SUM)
        check(total, sum(parts), place.xp)
        (whole,) = communicator.all_gather([array], 1)
        check(whole, np.concatenate(parts, 1), place.xp)
        assert total.dtype.isnative and whole.dtype.isnative, i


def test_ranks_may_hold_different_layouts(communicator, place):
    parts = [values((4, 5, 6), np.dtype(np.int32), rank) for rank in range(communicator.size)]
    mine = list(layouts(place.xp, parts[communicator.rank]))
    check(
        communicator.all_reduce([mine[communicator.rank % len(mine)]], SUM)[0], sum(parts), place.xp
    )


def test_broadcast_arrays_of_no_stride(communicator, place):
    mine = place.xp.broadcast_to(place.xp.asarray(communicator.rank + 1.0), (100, 90))
    n = communicator.size
    check(communicator.all_reduce([mine], SUM)[0], np.full((100, 90), n * (n + 1) / 2), place.xp)


def test_arrays_without_dimensions_or_elements(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    arrays = [
        xp.array(2.5 * rank),
        xp.empty((0,), np.float32),
        xp.empty((3, 0, 2), np.int8),
        xp.array(rank, np.int64),
    ]
    found = communicator.all_reduce(arrays, SUM)
    check(found[0], np.array(2.5 * n * (n - 1) / 2), xp)
    check(found[1], np.empty((0,), np.float32), xp)
    check(found[2], np.empty((3, 0, 2), np.int8), xp)
    check(found[3], np.array(n * (n - 1) // 2), xp)
    assert communicator.all_reduce([], SUM) == []
    assert communicator.all_gather([], 0) == []


@pytest.mark.parametrize("op", [SUM, MEAN, MIN, MAX])
def test_many_arrays_of_many_dtypes_in_one_call(communicator, place, op):
    names = [name for name in OPERATIONS if op in OPERATIONS[name] and has(place.xp, kind(name))]
    if op is MEAN:  # complex means are tested above
        names = [name for name in names if not name.startswith("complex")]
    shapes = [(), (3,), (0, 4), (5, 7), (11_111,), (2, 1, 3), (1,)]
    forms = [
        (shape, kind(names[(3 * i + j) % len(names)]))
        for i in range(6)
        for j, shape in enumerate(shapes)
    ]
    everyones = [[values(*form, rank) for form in forms] for rank in range(communicator.size)]
    mine = [place.xp.asarray(one) for one in everyones[communicator.rank]]
    found = communicator.all_reduce(mine, op)
    for one, *parts in zip(found, *everyones, strict=True):
        check(one, reduced(parts, op), place.xp)


@pytest.mark.parametrize("count", [1, 100, 389])
def test_hundreds_of_arrays_in_one_call(communicator, place, count):
    """Of two dtypes in turn, of 0 to 6 elements, with one large array that is not contiguous."""
    rank, n = communicator.rank, communicator.size

    def arrays(rank):
        whole = [np.arange(i % 7) * (rank + 1) + i for i in range(count)]
        whole[count // 2] = np.arange(8000).reshape(80, 100) * (rank + 1)
        return [one.astype((np.float32, np.int64)[i % 2]) for i, one in enumerate(whole)]

    mine = [place.xp.asarray(one) for one in arrays(rank)]
    mine[count // 2] = mine[count // 2].T
    everyones = [arrays(rank) for rank in range(n)]
    for one, *parts in zip(communicator.all_reduce(mine, SUM), *everyones, strict=True):
        check(one, np.sum(parts, 0).T, place.xp)
    some = [one for one in mine if one.ndim == 1]
    everyones = [[one for one in whole if one.ndim == 1] for whole in everyones]
    for one, *parts in zip(communicator.all_gather(some, 0), *everyones, strict=True):
        check(one, np.concatenate(parts), place.xp)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16])
def test_integer_sums_keep_their_dtype_and_wrap_round(communicator, place, dtype):
    most = np.iinfo(dtype).max - 1
    (found,) = communicator.all_reduce([place.xp.full(3, most, dtype)], SUM)
    check(found, np.full(3, most * communicator.size).astype(dtype), place.xp)


def test_large_integers_are_exact(communicator, place):
    n, big = communicator.size, 2**53 + 1
    (found,) = communicator.all_reduce([place.xp.array([big + communicator.rank])], SUM)
    assert found.tolist() == [n * big + n * (n - 1) // 2]
    (found,) = communicator.all_reduce(
        [place.xp.array([2**64 - 1 - communicator.rank], np.uint64)], MIN
    )
    assert found.tolist() == [2**64 - n]


def one_nan(rank, size, xp):
    return xp.zeros(9_000) if rank < size - 1 else xp.full(9_000, np.nan)


@pytest.mark.parametrize("op", [SUM, MEAN])
def test_nan_comes_through(communicator, place, op):
    (found,) = communicator.all_reduce(
        [one_nan(communicator.rank, communicator.size, place.xp)], op
    )
    assert place.xp.isnan(found).all()


def nans_and_zeros(size, dtype, rank, n):
    """NaN of every rank, NaN of one rank, and zeros, in turns; with signs and payloads of its own."""
    place = np.arange(size)
    is_nan = (place % 3 == 0) | ((place % 3 == 1) & (place // 3 % n == rank))
    array = np.where(is_nan, np.nan, 0).astype(dtype)
    bits = array.view(f"u{dtype.itemsize}")
    bits[is_nan] |= rank + 1
    bits[np.random.default_rng(rank).random(size) < 0.5] ^= 1 << (8 * dtype.itemsize - 1)
    return array


@pytest.mark.parametrize("op", ARITHMETIC)
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_nan_wins_and_all_ranks_have_the_same_bits(ordered, name, op):
    """Of zeros of either sign those that NumPy finds. NCCL's minima and maxima may leave NaN out."""
    n, wide = ordered.size, np.float64 if name == "float64" else np.float32
    ufunc = {MIN: np.minimum, MAX: np.maximum}.get(op, np.add)
    for size in (5, 9_001):
        parts = [nans_and_zeros(size, kind(name), rank, n) for rank in range(n)]
        (found,) = ordered.all_reduce([parts[ordered.rank]], op)
        expected = combined(ordered, [part.astype(wide) for part in parts], ufunc)
        numbers = ~np.isnan(expected)
        assert not np.isnan(found[numbers]).any() and np.isnan(found[~numbers]).all()
        assert found[numbers].tobytes() == expected[numbers].astype(found.dtype).tobytes()
        assert have_the_same_bits([found])


@pytest.mark.parametrize("size", [10, 40_000])
@pytest.mark.parametrize(("name", "large"), [("float16", 60_000), ("float32", 3e38)])
def test_an_overflow_is_inf_and_no_exception_of_one_rank(communicator, place, name, large, size):
    """Warnings are errors here, and the last element is in the last rank's slice."""
    mine = place.xp.zeros(size, name)
    mine[-1] = large
    with np.errstate(all="raise"):
        (found,) = communicator.all_reduce([mine], SUM)
    assert found[-1] == (np.inf if communicator.size > 1 else mine[-1])
    assert not found[:-1].any()


def test_results_are_fresh(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    arrays = [xp.full(5, float(rank)), xp.full((100, 200), float(rank)).T]
    first = communicator.all_reduce(arrays, SUM)
    copies = [array.copy() for array in first]
    for array in first:
        assert array.flags.c_contiguous
        assert not any(xp.may_share_memory(array, one) for one in arrays)
    second = communicator.all_reduce([array + 1 for array in arrays], SUM)
    for one, copy, other in zip(first, copies, second, strict=True):
        assert (one == copy).all()
        assert (other == copy + n).all()
        one[...] = -1
        assert (other == copy + n).all()
    assert (arrays[0] == rank).all() and (arrays[1] == rank).all()


# ---- all_gather


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("unit", [1, 40])
def test_all_gather_of_uneven_sizes_on_every_axis(communicator, place, axis, unit):
    """Rank 1 of several has nothing; with the small unit only some messages fit in a record."""
    for name in OPERATIONS:
        if not has(place.xp, kind(name)):
            continue
        parts = []
        for rank in range(communicator.size):
            shape = [2, 3, 4]
            shape[axis] = 0 if rank == 1 else unit * (rank + 1)
            parts.append(values(tuple(shape), kind(name), rank))
        (found,) = communicator.all_gather([place.xp.asarray(parts[communicator.rank])], axis)
        check(found, np.concatenate(parts, axis), place.xp)
        found[...] = 1  # it is writable


def test_all_gather_of_many_arrays(communicator, place):
    def arrays(rank):
        return [
            np.full((rank + 1, 2), rank, np.float32),
            np.full((3, 2), rank, np.int8),
            np.full((0 if rank % 2 else 4, 0), rank, np.complex128),
            np.full((5000 * rank, 3), rank, bool),
            np.full(
                (rank, 1), rank, kind("bfloat16") if has(place.xp, kind("bfloat16")) else np.float16
            ),
        ]

    found = communicator.all_gather([place.xp.asarray(one) for one in arrays(communicator.rank)], 0)
    for one, *parts in zip(found, *map(arrays, range(communicator.size)), strict=True):
        check(one, np.concatenate(parts), place.xp)


def test_all_gather_of_nothing_from_everyone(communicator, place):
    check(communicator.all_gather([place.xp.empty((0, 3))], 0)[0], np.empty((0, 3)), place.xp)


def test_all_gather_results_stay(communicator, place):
    first = communicator.all_gather([place.xp.full(5000, communicator.rank)], 0)[0]
    communicator.all_gather([place.xp.full(5000, 99)], 0)
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
        "arrays": [
            np.arange(rank),
            np.zeros((0, 3)),
            np.array(rank),
            np.full((300, 20), rank, order="F"),
        ],
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
    found = communicator.all_gather_obj(treasure(communicator.rank))
    assert len(found) == communicator.size
    for rank, one in enumerate(found):
        check_treasure(one, rank)


def test_arrays_in_objects_are_fresh_and_may_be_written(communicator):
    mine = [np.full(shape, communicator.rank) for shape in [(), (3,), (300, 100), (30, 10)]]
    mine[2] = mine[2].T
    mine[3].flags.writeable = False
    found = communicator.all_gather_obj(
        [*mine, mine[2][::2], np.broadcast_to(communicator.rank, (5, 5))]
    )
    for arrays in found:
        for array in arrays:
            array += 1000
    assert all((array == communicator.rank).all() for array in mine)
    communicator.all_gather_obj(mine)
    for rank, arrays in enumerate(found):
        assert [set(array.ravel().tolist()) for array in arrays] == [{1000 + rank}] * 6


def test_broadcast_from_every_root(communicator):
    for root in range(communicator.size):
        # The others' arguments are ignored, even if they cannot be sent.
        mine = treasure(root + 2) if communicator.rank == root else lambda: None
        check_treasure(communicator.broadcast_obj(mine, root), root + 2)
    assert communicator.broadcast_obj(communicator.rank) == 0


def test_an_object_that_cannot_travel(communicator, place):
    for root in range(communicator.size):
        with (
            call_named("some_call"),
            pytest.raises(TypeError, match=r"some_call: .*lambda.* cannot travel between"),
        ):
            communicator.all_gather_obj((lambda: 0) if communicator.rank == root else np.ones(9000))
        with (
            call_named("some_call"),
            pytest.raises(TypeError, match=r"some_call: .*generator.* cannot travel"),
        ):
            communicator.broadcast_obj((i for i in ()) if communicator.rank == root else 1, root)
    works(communicator, place)


# ---- specific to one transport


@pytest.mark.mpi(min_size=2)
def test_mailboxes_grow_and_stay():
    world = worlds.start()
    assert world.comm is not None
    communicator = SharedMemoryCommunicator(world.comm.Dup())
    for size in [*range(20, 30), 30, 3000, 25, 6000, 100_000, 7]:
        parts = [values((size,), np.dtype(np.float64), rank) for rank in range(communicator.size)]
        for _ in range(3):  # records alternate
            check(communicator.all_reduce([parts[communicator.rank]], SUM)[0], sum(parts))
        check(communicator.all_gather([parts[communicator.rank]], 0)[0], np.concatenate(parts))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_pieces_that_just_fit(monkeypatch, difference):
    """The whole, a part of it, or what hosts send at once: the limit, or a byte more or less."""
    communicator: Any = transport("hosts of one rank", monkeypatch)
    n, size = communicator.size, 40_000
    parts = [values((size,), np.dtype(np.int8), rank) for rank in range(n)]
    for piece, small in itertools.product((size, size // 2, 64), (0, 64 * n, size * n)):
        monkeypatch.setattr(hosts, "PIECE", piece + difference)
        monkeypatch.setattr(hosts, "SMALL_BYTES", max(small + difference, 0))
        check(communicator.all_reduce([parts[communicator.rank]], SUM)[0], sum(parts))
    for largest in (n * size, size, 7777):
        monkeypatch.setattr(HostsCommunicator, "LARGEST", largest + difference)
        check(communicator.all_gather([parts[communicator.rank]], 0)[0], np.concatenate(parts))
        for root in range(n):
            check(communicator.broadcast([parts[communicator.rank]], root)[0], parts[root])


def test_objects_that_differ_are_gathered_and_equal_ones_need_not_be(communicator):
    rank, n = communicator.rank, communicator.size
    gather = communicator.all_gather_differing_obj
    assert gather((3, "equal"), "fact") == [(3, "equal")] * n
    assert gather((3, rank // 2)) == [(3, other // 2) for other in range(n)]
    last = gather("last" if rank == n - 1 else None)
    assert last == [*[None] * (n - 1), "last"]


def test_a_namespace_travels(communicator):
    found = communicator.all_gather_obj(types.SimpleNamespace(rank=communicator.rank))
    assert [one.rank for one in found] == list(range(communicator.size))
