"""Broadcasts, and what ranks send to some others, by every transport."""

import numpy as np
import pytest
from internals import HostsCommunicator
from slow import slow_but
from transports import (
    DEVICE,
    HOST,
    OPERATIONS,
    SUM,
    check,
    close_devices,
    has,
    kind,
    parametrize,
    transport,
    values,
)

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
    parametrize(metafunc, {"communicator": HOST + DEVICE})


@pytest.fixture
def communicator(request, monkeypatch, place):
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


# ---- all_to_all

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


@pytest.mark.core
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shapes", SENT)
def test_all_to_all(communicator, place, shapes, pattern):
    kinds = [
        ("float32", SENT[shapes]),
        ("int8", lambda source, target: ()),
        ("complex128", lambda source, target: (target, source + 1)),
    ]
    exchanged(communicator, place.xp, kinds, PATTERNS[pattern])


@pytest.mark.core
def test_all_to_all_of_views(communicator, place):
    rank, n, xp = communicator.rank, communicator.size, place.xp
    whole = xp.asarray(values((6, n), np.dtype(np.float64), rank))
    found = communicator.all_to_all(
        [(r, whole[::-2, r]) for r in range(n)], [(r, whole) for r in range(n)]
    )
    for r in range(n):
        check(found[r], values((6, n), np.dtype(np.float64), r)[::-2, rank], xp)


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
def test_sent_arrays_in_pieces(monkeypatch):
    communicator = transport("hosts of one rank", monkeypatch)
    for piece in (1999, 2000, 2001, 999):
        monkeypatch.setattr(HostsCommunicator, "LARGEST", piece)
        kinds = [("int8", lambda source, target: (2000 // (1 + abs(source - target)),))]
        exchanged(communicator, np, kinds, PATTERNS["each to each"])


@pytest.mark.core
def test_calls_in_turn(communicator, place):
    """A fast rank may be one call ahead of a slow rank that still reads."""
    rank, n, xp = communicator.rank, communicator.size, place.xp
    for step in range(40):
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
