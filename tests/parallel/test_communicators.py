"""Every verb of every transport: one body, several communicators."""

import itertools
import types
from typing import Any

import numpy as np
import pytest
import transports
from internals import call_named, connect, hosts, worlds
from transports import ARITHMETIC, MAX, MEAN, MIN, OPERATIONS, SUM, check, has, kind, values

from hpcstrat import asnumpy

FLOAT = np.dtype(np.float64)
EDGES = [2**power + step for power in range(4, 17) for step in (-1, 0, 1)]
"""Sizes beside those at which a transport may take another way."""

communicator = ordered = transports.communicator
"""`ordered` combines the ranks' values in one order: see `transports.combined`."""


def pytest_generate_tests(metafunc):
    names = {"communicator": transports.HOST + transports.DEVICE, "ordered": transports.HOST}
    transports.parametrize(metafunc, names)


@pytest.mark.parametrize("op", ARITHMETIC)
def test_all_reduce_of_every_dtype(communicator, place, op):
    """One array alone, in a record and in a mailbox, and all in one call."""
    xp = place.xp
    names = [name for name in OPERATIONS if op in OPERATIONS[name] and has(xp, kind(name))]
    shapes = [(3, 5), (33_333,), (), (0, 4), (2, 1, 3)]
    forms = [(shape, kind(name)) for shape in shapes for name in names]
    everyones = [[values(*form, rank) for form in forms] for rank in range(communicator.size)]
    mine = [xp.asarray(one) for one in everyones[communicator.rank]]
    alone = [communicator.all_reduce([one], op)[0] for one in mine[: 2 * len(names)]]
    for found in (alone, communicator.all_reduce(mine, op)):
        for one, *parts in zip(found, *everyones, strict=found is not alone):
            expected = transports.reduced(parts, op)
            # CuPy divides complex numbers by another formula.
            if op is MEAN and one.dtype.kind == "c":
                eps = np.finfo(one.dtype).eps
                np.testing.assert_allclose(asnumpy(one), expected, 4 * eps, strict=True)
            else:
                check(one, expected, xp)


def test_sums_of_float32_are_in_one_order_on_every_rank(ordered):
    """Whatever their number, and whichever way they travel."""
    n, rank = ordered.size, ordered.rank
    for size in [0, 1, 3, *EDGES, 2**17 + 77]:
        parts = [
            np.random.default_rng([size, r]).standard_normal(size, np.float32) for r in range(n)
        ]
        total = transports.combined(ordered, parts, np.add)
        found = ordered.all_reduce([parts[rank]], SUM)[0]
        assert found.tobytes() == total.tobytes(), size
        if size not in EDGES:
            found = ordered.all_reduce([parts[rank]], MEAN)[0]
            assert found.tobytes() == (total / np.float32(n)).tobytes(), size


def test_16_bit_floats_are_summed_in_float32(ordered):
    """In float16 2048 + 1 is 2048, and 60000 + 60000 is inf; in bfloat16 256 + 1 is 256."""
    n = ordered.size
    for size, (name, big) in itertools.product((4, 40_000), [("float16", 2048), ("bfloat16", 256)]):
        mine = np.full(size, 1 if ordered.rank else big).astype(kind(name))
        for op, total in [(SUM, big + n - 1), (MEAN, (big + n - 1) / n)]:
            expected = np.full(size, np.float32(total)).astype(kind(name))
            check(ordered.all_reduce([mine], op)[0], expected)
        large = np.full(size, 60_000).astype(kind(name))
        check(ordered.all_reduce([large], MEAN)[0], large)


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


def test_any_layout(communicator, place):
    """Also another on each rank, and an array without strides."""
    rank, n, xp = communicator.rank, communicator.size, place.xp
    for shape in [(2, 3, 4), (20, 30, 40)]:
        parts = [values(shape, FLOAT, r) for r in range(n)]
        mine = list(layouts(xp, parts[rank]))
        for array in [*mine, mine[rank % len(mine)]]:
            check(communicator.all_reduce([array], SUM)[0], sum(parts), xp)
            check(communicator.all_gather([array], 1)[0], np.concatenate(parts, 1), xp)
    spread = xp.broadcast_to(xp.asarray(rank + 1.0), (100, 90))
    check(communicator.all_reduce([spread], SUM)[0], np.full((100, 90), n * (n + 1) / 2), xp)


def test_hundreds_of_arrays_in_one_call(communicator, place):
    """Of two dtypes in turn, of 0 to 6 elements, with one large array that is not contiguous."""

    def arrays(rank):
        whole = [np.arange(i % 7) * (rank + 1) + i for i in range(389)]
        whole[200] = np.arange(8000).reshape(80, 100) * (rank + 1)
        return [one.astype((np.float32, np.int64)[i % 2]) for i, one in enumerate(whole)]

    everyones = [arrays(rank) for rank in range(communicator.size)]
    mine = [place.xp.asarray(one) for one in everyones[communicator.rank]]
    mine[200] = mine[200].T
    for one, *parts in zip(communicator.all_reduce(mine, SUM), *everyones, strict=True):
        check(one, np.sum(parts, 0).T, place.xp)
    some = [one for one in mine if one.ndim == 1]
    everyones = [[one for one in whole if one.ndim == 1] for whole in everyones]
    for one, *parts in zip(communicator.all_gather(some, 0), *everyones, strict=True):
        check(one, np.concatenate(parts), place.xp)
    assert communicator.all_reduce([], SUM) == communicator.all_gather([], 0) == []
    assert communicator.broadcast([], 0) == communicator.all_to_all([], []) == []


def test_integers_wrap_round_and_are_exact(communicator, place):
    n, rank, xp = communicator.size, communicator.rank, place.xp
    for dtype in (np.int8, np.int16, np.uint16):
        most = np.iinfo(dtype).max - 1
        (found,) = communicator.all_reduce([xp.full(3, most, dtype)], SUM)
        check(found, np.full(3, most * n).astype(dtype), xp)
    big = 2**53 + 1
    (found,) = communicator.all_reduce([xp.array([big + rank])], SUM)
    assert found.tolist() == [n * big + n * (n - 1) // 2]
    (found,) = communicator.all_reduce([xp.array([2**64 - 1 - rank], np.uint64)], MIN)
    assert found.tolist() == [2**64 - n]


def test_an_overflow_is_inf_and_no_exception_of_one_rank(communicator, place):
    """The last element is in the last rank's slice."""
    cases = itertools.product((10, 40_000), [("float16", 60_000), ("float32", 3e38)])
    for size, (name, large) in cases:
        mine = place.xp.zeros(size, name)
        mine[-1] = large
        with np.errstate(all="raise"):
            (found,) = communicator.all_reduce([mine], SUM)
        assert found[-1] == (np.inf if communicator.size > 1 else mine[-1])
        assert not found[:-1].any()


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
def test_nan_wins_and_all_ranks_have_the_same_bits(ordered, op):
    """Of zeros of either sign those that NumPy finds. NCCL's minima and maxima may leave NaN out."""
    n, ufunc = ordered.size, {MIN: np.minimum, MAX: np.maximum}.get(op, np.add)
    for name in ("float16", "bfloat16", "float32", "float64"):
        wide = np.float64 if name == "float64" else np.float32
        for size in (5, 9_001):
            parts = [nans_and_zeros(size, kind(name), rank, n) for rank in range(n)]
            (found,) = ordered.all_reduce([parts[ordered.rank]], op)
            expected = transports.combined(ordered, [part.astype(wide) for part in parts], ufunc)
            numbers = ~np.isnan(expected)
            assert not np.isnan(found[numbers]).any() and np.isnan(found[~numbers]).all()
            assert found[numbers].tobytes() == expected[numbers].astype(found.dtype).tobytes()
            assert len(set(transports.COMM.allgather(found.tobytes()))) == 1


def test_results_are_fresh(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    arrays = [xp.full(5, float(rank)), xp.full((100, 200), float(rank)).T]
    for call, more in [
        (lambda mine: communicator.all_reduce(mine, SUM), n),
        (lambda mine: communicator.all_gather(mine, 0), 1),
        (lambda mine: communicator.broadcast(mine, n - 1), 1),
    ]:
        first = call(arrays)
        copies = [array.copy() for array in first]
        second = call([array + 1 for array in arrays])
        for one, copy, other in zip(first, copies, second, strict=True):
            assert one.flags.c_contiguous and (one == copy).all()
            one[...] = -1
            assert (other == copy + more).all()
        assert (arrays[0] == rank).all() and (arrays[1] == rank).all()


def test_all_gather_of_uneven_sizes(communicator, place):
    """Rank 1 of several has nothing; with small units only some messages fit in a record."""
    kinds = [kind(name) for name in OPERATIONS if has(place.xp, kind(name))]

    def arrays(rank, unit, axis):
        shape = [2, 3, 4]
        shape[axis] = 0 if rank == 1 else unit * (rank + 1)
        return [values(tuple(shape), dtype, rank) for dtype in kinds]

    for unit, axis in [(1, 0), (3, -1), (40, 1)]:
        everyones = [arrays(rank, unit, axis) for rank in range(communicator.size)]
        mine = [place.xp.asarray(one) for one in everyones[communicator.rank]]
        for found, *parts in zip(communicator.all_gather(mine, axis), *everyones, strict=True):
            check(found, np.concatenate(parts, axis), place.xp)


def test_broadcast_from_every_root(communicator, place):
    """Even and uneven parts, in a record and in a mailbox; and views."""
    xp, rank = place.xp, communicator.rank
    shapes = [(), (5,), (1,), (0, 3), (7, 2, 3), (33_333,), (301, 77)]
    kinds = [kind(name) for name in OPERATIONS if has(xp, kind(name))]
    for root, some in itertools.product(range(communicator.size), (shapes[:3], shapes)):
        forms = [*itertools.product(some, kinds)]
        found = communicator.broadcast([xp.asarray(values(*form, rank)) for form in forms], root)
        for form, one in zip(forms, found, strict=True):
            check(one, values(*form, root), xp)
    mine = xp.asarray(values((20, 30), FLOAT, rank))[::2, ::-1].T
    (found,) = communicator.broadcast([mine], communicator.size - 1)
    check(found, values((20, 30), FLOAT, communicator.size - 1)[::2, ::-1].T, xp)


PATTERNS = (  # whether a rank sends to another
    lambda source, target: True,
    lambda source, target: target == source + 1,
    lambda source, target: target == 0,
    lambda source, target: False,
)
SHAPES = (
    lambda source, target: (source * target, 2),
    lambda source, target: (9000 * source,),
)


def test_all_to_all(communicator, place):
    for shape_of, reaches in itertools.product(SHAPES, PATTERNS):
        kinds = [
            ("float32", shape_of),
            ("int8", lambda source, target: ()),
            ("complex128", lambda source, target: (target, source + 1)),
        ]
        exchanged(communicator, place.xp, kinds, reaches)
    rank, n, xp = communicator.rank, communicator.size, place.xp
    whole = xp.asarray(values((6, n), FLOAT, rank))  # views
    found = communicator.all_to_all(
        [(r, whole[::-2, r]) for r in range(n)], [(r, whole) for r in range(n)]
    )
    for r in range(n):
        check(found[r], values((6, n), FLOAT, r)[::-2, rank], xp)


def exchanged(communicator, xp, kinds, reaches):
    """Sends arrays of these dtypes and shapes to some ranks, and checks what comes from others."""
    rank, ranks = communicator.rank, range(communicator.size)
    sent, expected = [], []
    for r in ranks:
        for name, shape_of in kinds:
            if reaches(rank, r):
                sent.append((r, values(shape_of(rank, r), kind(name), rank + 7 * r)))
            if reaches(r, rank):
                expected.append((r, values(shape_of(r, rank), kind(name), r + 7 * rank)))
    found = communicator.all_to_all(
        [(r, xp.asarray(array)) for r, array in sent],
        [(r, xp.empty(0, array.dtype)) for r, array in expected],
    )
    for one, (_, array) in zip(found, expected, strict=True):
        check(one, array, xp)
        one[...] = 0  # writable


def test_calls_in_turn(communicator, place):
    """A fast rank may be one call ahead of a slow rank that still reads."""
    rank, n, xp = communicator.rank, communicator.size, place.xp
    for step in range(15):
        size = [5, 3000, 20, 9000, 40_000][step % 5]
        mine = xp.full(size, 10.0 * step + rank)
        everyones = [10.0 * step + r for r in range(n)]
        to_all = [(r, mine) for r in range(n)]
        received = communicator.all_to_all(to_all, to_all)
        calls = [
            (sum(everyones), communicator.all_reduce([mine], SUM)),
            (everyones[step % n], communicator.broadcast([mine], step % n)),
            (np.repeat(everyones, size), communicator.all_gather([mine], 0)),
            *zip(everyones, [[one] for one in received], strict=True),
        ]
        for expected, (found,) in calls:
            assert found.size in (size, n * size) and (asnumpy(found) == expected).all()


# ---- objects


def treasure(rank):
    return {
        "rank": rank,
        "text": "é" * rank,
        "arrays": [
            np.arange(rank),
            np.zeros((0, 3)),
            np.array(rank),
            np.full((300, 20), rank, order="F"),
            np.arange(20.0 * (rank + 1)).reshape(-1, 4)[:, ::2],
            np.broadcast_to(rank, (5, 5)),
            np.full(50_000 * rank, rank, np.uint8),
        ],
        "object": types.SimpleNamespace(first=(rank,), second=np.float32(rank)),
    }


def check_treasure(found, rank):
    """Arrays are fresh, and may be written: the second of two calls finds them as they were."""
    expected = treasure(rank)
    for one, other in zip(found.pop("arrays"), expected.pop("arrays"), strict=True):
        check(one, other)
        one[...] = 99
    assert found == expected


def test_objects(communicator):
    rank, n = communicator.rank, communicator.size
    mine = treasure(rank)
    for _ in range(2):
        found = communicator.all_gather_obj(mine)
        assert len(found) == n
        for other, one in enumerate(found):
            check_treasure(one, other)
    for root in range(n):
        # The others' arguments are ignored, even if they cannot be sent.
        mine = treasure(root + 2) if rank == root else lambda: None
        check_treasure(communicator.broadcast_obj(mine, root), root + 2)
    gather = communicator.all_gather_differing_obj
    assert gather((3, "equal"), "fact") == [(3, "equal")] * n
    assert gather((3, rank // 2)) == [(3, other // 2) for other in range(n)]
    assert gather("last" if rank == n - 1 else None) == [*[None] * (n - 1), "last"]


def test_an_object_that_cannot_travel(communicator, place):
    for root in range(communicator.size):
        is_odd = communicator.rank == root
        with call_named("some_call"):
            with pytest.raises(TypeError, match=r"some_call: .*lambda.* cannot travel between"):
                communicator.all_gather_obj((lambda: 0) if is_odd else np.ones(9000))
            with pytest.raises(TypeError, match=r"some_call: .*generator.* cannot travel"):
                communicator.broadcast_obj((i for i in ()) if is_odd else 1, root)
    transports.works(communicator, place)


@pytest.mark.mpi(min_size=2)
def test_mailboxes_grow_and_stay():
    comm: Any = worlds.start().comm
    transport: Any = type(connect())
    communicator = transport(comm.Dup())
    for size in [*range(20, 31), 3000, 25, 6000, 100_000, 7]:
        parts = [values((size,), FLOAT, rank) for rank in range(comm.size)]
        for _ in range(3):  # records alternate
            check(communicator.all_reduce([parts[comm.rank]], SUM)[0], sum(parts))
        check(communicator.all_gather([parts[comm.rank]], 0)[0], np.concatenate(parts))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", [-1, 0, 1])
def test_pieces_that_just_fit(monkeypatch, difference):
    """The whole, a part of it, or what hosts send at once: the limit, or a byte more or less."""
    communicator = transports.on_hosts("hosts of one rank", monkeypatch)
    n, size = communicator.size, 8_000
    parts = [values((size,), np.dtype(np.int8), rank) for rank in range(n)]
    for piece, small in itertools.product((size, size // 2, 64), (0, 64 * n, size * n)):
        monkeypatch.setattr(hosts, "PIECE", piece + difference)
        monkeypatch.setattr(hosts, "SMALL_BYTES", max(small + difference, 0))
        check(communicator.all_reduce([parts[communicator.rank]], SUM)[0], sum(parts))
    for largest in (n * size, size, 777):
        monkeypatch.setattr(hosts.HostsCommunicator, "LARGEST", largest + difference)
        check(communicator.all_gather([parts[communicator.rank]], 0)[0], np.concatenate(parts))
        for root in range(n):
            check(communicator.broadcast([parts[communicator.rank]], root)[0], parts[root])
        kinds = [("int8", lambda source, target: (2 * size // (1 + abs(source - target)),))]
        exchanged(communicator, np, kinds, PATTERNS[0])
