"""Broadcasts, and what ranks send each other in parts, by every transport."""

import itertools

import numpy as np
import pytest
from internals import Outgoing, PointToPoint
from slow import slow_but
from transports import (
    COMM,
    DEVICE,
    HOST,
    MAX,
    MEAN,
    OPERATIONS,
    SUM,
    check,
    close_devices,
    has,
    kind,
    parametrize,
    reduced,
    transport,
    values,
    works,
)

import hpcstrat as hs
from hpcstrat import asnumpy

# Even and uneven parts, in a record and in a mailbox.
SHAPES = [
    (5,),
    (1,),
    (0, 3),
    (7, 2, 3),
    (33_333,),
    (301, 77),
]


def pytest_generate_tests(metafunc):
    parametrize(metafunc, {"communicator": HOST + DEVICE, "ordered": HOST})


@pytest.fixture
def communicator(request, monkeypatch, place):
    return transport(request.param, monkeypatch, place)


@pytest.fixture
def ordered(request, monkeypatch, place):
    """A communicator that sums in rank order."""
    return transport(request.param, monkeypatch, place)


@pytest.fixture(scope="module", autouse=True)
def _closed_in_the_end():
    yield
    close_devices()


# ---- broadcast


@pytest.mark.core
@pytest.mark.parametrize(
    "name", slow_but(["int16", "bfloat16", "float32", "complex128"], OPERATIONS)
)
def test_broadcast_of_every_dtype_from_every_root(communicator, place, name):
    if not has(place.xp, kind(name)):
        pytest.skip(f"CuPy {place.xp.__version__} does not compute with {name}")
    for root in range(communicator.size):
        mine = [
            place.xp.asarray(values(shape, kind(name), communicator.rank))
            for shape in [(), *SHAPES]
        ]
        found = communicator.broadcast(mine, root)
        for shape, one, own in zip([(), *SHAPES], found, mine, strict=True):
            check(one, values(shape, kind(name), root), place.xp)
            assert not place.xp.may_share_memory(one, own) or not own.size
    assert communicator.broadcast([], 0) == []


@pytest.mark.core
def test_broadcast_of_views(communicator, place):
    mine = place.xp.asarray(values((20, 30), np.dtype(np.float64), communicator.rank))[::2, ::-1].T
    root = communicator.size - 1
    check(
        communicator.broadcast([mine], root)[0],
        values((20, 30), np.dtype(np.float64), root)[::2, ::-1].T,
        place.xp,
    )


# ---- reduce_scatter


@pytest.mark.core
@pytest.mark.parametrize("name", slow_but(["int8", "int16", "bfloat16", "complex64"], OPERATIONS))
def test_reduce_scatter_of_every_dtype(communicator, place, name):
    if not has(place.xp, kind(name)):
        pytest.skip(f"CuPy {place.xp.__version__} does not compute with {name}")
    rank, n = communicator.rank, communicator.size
    for shape in SHAPES:
        parts = [values(shape, kind(name), other) for other in range(n)]
        for op, axis in itertools.product(OPERATIONS[name], (0, -1)[: len(shape)]):
            (found,) = communicator.reduce_scatter([place.xp.asarray(parts[rank])], op, axis)
            expected = np.array_split(reduced(parts, op), n, axis)[rank]
            # CuPy divides complex numbers by another formula.
            if op is MEAN and name.startswith("complex"):
                np.testing.assert_allclose(asnumpy(found), expected, 4 * np.finfo(name).eps)
                found = place.xp.asarray(expected)
            check(found, expected, place.xp)


@pytest.mark.core
def test_reduce_scatter_gives_the_bits_of_all_reduce(ordered, place):
    n, rank = ordered.size, ordered.rank
    for size in (3, 1000, 77_777):
        mine = [
            place.xp.asarray(
                np.random.default_rng([size, rank]).standard_normal((size, 3), np.float32)
            ),
            place.xp.asarray(
                np.random.default_rng([size, rank]).standard_normal(size).astype(np.float16)
            ),
        ]
        for op in (SUM, MEAN):
            whole = ordered.all_reduce(mine, op)
            for one, part in zip(whole, ordered.reduce_scatter(mine, op, 0), strict=True):
                check(part, np.array_split(asnumpy(one), n)[rank], place.xp)


@pytest.mark.core
def test_reduce_scatter_of_several_arrays(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    parts = [
        [
            values(shape, np.dtype(dtype), other)
            for shape, dtype in zip(SHAPES, "fdfldi", strict=True)
        ]
        for other in range(n)
    ]
    found = communicator.reduce_scatter([xp.asarray(one)[::-1] for one in parts[rank]], MAX, 0)
    for i, one in enumerate(found):
        check(one, np.array_split(np.max([part[i] for part in parts], axis=0)[::-1], n)[rank], xp)
    assert communicator.reduce_scatter([], SUM, 0) == []


# ---- all_to_all


def outgoing(xp, name, shape_of, rank, n, reaches=lambda source, target: True):
    return Outgoing(
        kind(name),
        {
            r: xp.asarray(values(shape_of(rank, r), kind(name), rank + 7 * r))
            for r in range(n)
            if reaches(rank, r)
        },
        [r for r in range(n) if reaches(r, rank)],
        is_on_gpu=xp is not np,
    )


PATTERNS = {
    "each to each": lambda source, target: True,
    "to the next": lambda source, target: target == source + 1,
    "to the first": lambda source, target: target == 0,
    "to no other": lambda source, target: target == source,
    "to nobody": lambda source, target: False,
}
SENT = {
    "equal": lambda source, target: (4, 3),
    "small": lambda source, target: (source * target, 2),
    "large": lambda source, target: (9000 * source,),
}


@pytest.mark.core
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shapes", SENT)
def test_all_to_all(communicator, place, shapes, pattern):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    reaches, shape_of = PATTERNS[pattern], SENT[shapes]
    kinds = [
        ("float32", shape_of),
        ("int8", lambda source, target: ()),
        ("complex128", lambda s, t: (t, s + 1)),
    ]
    found = communicator.all_to_all(
        [outgoing(xp, name, shape, rank, n, reaches) for name, shape in kinds]
    )
    for (name, shape), of in zip(kinds, found, strict=True):
        assert sorted(of) == [r for r in range(n) if reaches(r, rank)]
        for r, array in of.items():
            check(array, values(shape(r, rank), kind(name), r + 7 * rank), xp)
            array[...] = 0  # writable


@pytest.mark.core
def test_all_to_all_of_views_and_of_nothing(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    whole = xp.asarray(values((6, n), np.dtype(np.float64), rank))
    sent = Outgoing(
        whole.dtype, {r: whole[::-2, r] for r in range(n)}, range(n), is_on_gpu=xp is not np
    )
    (found,) = communicator.all_to_all([sent])
    for r in range(n):
        check(found[r], values((6, n), np.dtype(np.float64), r)[::-2, rank], xp)
    assert communicator.all_to_all([]) == []


@pytest.mark.core
def test_calls_in_turn(communicator, place):
    """A fast rank may be one call ahead of a slow rank that still reads."""
    rank, n, xp = communicator.rank, communicator.size, place.xp
    for step in range(30):
        size = [3, 5000, 40_000][step % 3]
        mine = xp.full(size, 10.0 * step + rank)
        (found,) = communicator.broadcast([mine], step % n)
        assert found.shape == (size,) and (found == 10.0 * step + step % n).all()
        (part,) = communicator.reduce_scatter([mine], SUM, 0)
        assert (part == 10.0 * step * n + n * (n - 1) / 2).all()
        sent = Outgoing(mine.dtype, dict.fromkeys(range(n), mine), range(n), is_on_gpu=xp is not np)
        (received,) = communicator.all_to_all([sent])
        for r in range(n):
            assert received[r].shape == (size,) and (received[r] == 10.0 * step + r).all()


@pytest.mark.core
def test_sections_in_pieces(monkeypatch):
    communicator = transport("hosts of one rank", monkeypatch)
    n = communicator.size
    for piece in (n, 8 * n, 16_001, 16_000 * n - 1, 16_000 * n):
        monkeypatch.setattr(PointToPoint, "PIECE", piece)
        shape_of = lambda source, target: (2000 // (1 + abs(source - target)),)  # noqa: E731
        (found,) = communicator.all_to_all([outgoing(np, "int8", shape_of, communicator.rank, n)])
        for r, array in found.items():
            check(
                array,
                values(shape_of(r, communicator.rank), kind("int8"), r + 7 * communicator.rank),
            )


# ---- misuse


several = pytest.mark.mpi(min_size=2)  # one rank agrees with itself

DIFFERENCES = {
    "shapes of broadcast": lambda c, x, is_odd: c.broadcast([x[:4] if is_odd else x], 0),
    "dtypes of broadcast": lambda c, x, is_odd: c.broadcast([x.astype("f4") if is_odd else x], 0),
    "roots of broadcast": lambda c, x, is_odd: c.broadcast([x], 1 if is_odd else 0),
    "counts of broadcast": lambda c, x, is_odd: c.broadcast([x, x] if is_odd else [x], 0),
    "shapes of reduce_scatter": lambda c, x, is_odd: c.reduce_scatter(
        [x[:4] if is_odd else x], SUM, 0
    ),
    "ops of reduce_scatter": lambda c, x, is_odd: c.reduce_scatter([x], MAX if is_odd else SUM, 0),
    "axes of reduce_scatter": lambda c, x, is_odd: c.reduce_scatter([x], SUM, -1 if is_odd else 0),
    "reduce_scatter and all_reduce": lambda c, x, is_odd: (
        c.reduce_scatter([x], SUM, 0) if is_odd else c.all_reduce([x], SUM)
    ),
    "dtypes of all_to_all": lambda c, x, is_odd: c.all_to_all(
        [
            Outgoing(
                np.dtype("f4" if is_odd else "f8"), {}, [], is_on_gpu=not isinstance(x, np.ndarray)
            )
        ]
    ),
}


@several
@pytest.mark.parametrize("odd", sorted({0, COMM.size - 1}))
@pytest.mark.parametrize("case", DIFFERENCES)
def test_ranks_that_differ(communicator, place, case, odd):
    if communicator.size == 1:
        return
    for size in (5, 50_000):
        x = place.xp.full((size, 2), 1.0)
        with pytest.raises(hs.ReplicaMismatchError, match=rf"\n  rank {odd}: "):
            DIFFERENCES[case](communicator, x, communicator.rank == odd)
        works(communicator, place)


@pytest.mark.core
@several
@pytest.mark.parametrize("odd", sorted({0, COMM.size - 1}))
def test_an_error_of_one_rank_is_everyones(communicator, place, odd):
    if communicator.size == 1:
        return
    is_odd, x = communicator.rank == odd, place.xp.ones((6, 2))
    for call in (
        lambda: communicator.broadcast([np.array([None]) if is_odd else x], 0),
        lambda: communicator.reduce_scatter([x.astype(bool) if is_odd else x], SUM, 0),
        lambda: communicator.reduce_scatter([x], SUM, 2 if is_odd else 1),
        lambda: communicator.all_to_all(
            [
                Outgoing(
                    np.dtype(object), {0: np.array([None])} if is_odd else {}, [], is_on_gpu=False
                )
            ]
        ),
    ):
        with pytest.raises((TypeError, ValueError), match="cannot travel|bool|axis 2"):
            call()
        works(communicator, place)
