"""What goes wrong in communicators: every rank raises, and the next call works."""

import numpy as np
import pytest
from internals import HostsCommunicator, call_named, ranks_in_words
from transports import (
    DEVICE,
    HOST,
    MAX,
    MEAN,
    MIN,
    SUM,
    close_devices,
    parametrize,
    transport,
    works,
)

from hpcstrat import ReplicaMismatchError

several_ranks = pytest.mark.mpi(min_size=2)  # one rank cannot disagree with another


def pytest_generate_tests(metafunc):
    parametrize(metafunc, {"communicator": HOST + DEVICE, "group": HOST[:-1] + DEVICE})


@pytest.fixture
def communicator(request, monkeypatch, place):
    return transport(request.param, monkeypatch, place)


@pytest.fixture
def group(request, monkeypatch, place):
    return transport(request.param, monkeypatch, place)


@pytest.fixture(scope="module", autouse=True)
def _closed_in_the_end():
    yield
    close_devices()


def named(call, verb, *arguments):
    """What a verb returns in a call of this name."""
    with call_named(call):
        return verb(*arguments)


@pytest.fixture(autouse=True)
def _in_a_call():
    with call_named("some_call"):
        yield


# ---- refusals

REFUSED = {
    "objects": (np.array([None, 1]), SUM, "object cannot be reduced"),
    "long double": (
        np.arange(3, dtype=np.longdouble),
        SUM,
        "cannot be reduced; it takes int8, int16",
    ),
    "text": (np.array(["a"]), MIN, "cannot be reduced"),
    "records": (np.zeros(2, [("a", "f4")]), SUM, "cannot be reduced"),
    "bool": (
        np.array([True]),
        SUM,
        "SUM of bool is not defined; bool takes MIN, MAX: .* x.astype.np.int64",
    ),
    "bool mean": (np.array([True]), MEAN, "MEAN of bool is not defined"),
    "complex": (
        np.array([1j]),
        MAX,
        "MAX of complex128 is not defined; complex128 takes SUM, MEAN",
    ),
    "complex64": (np.array([1j], np.complex64), MIN, "MIN of complex64 is not defined"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_dtypes_that_are_refused(communicator, place, case):
    array, op, message = REFUSED[case]
    if array.dtype.char in "?hHFD":  # the others are not dtypes of a GPU
        array = place.xp.asarray(array)
    with pytest.raises(TypeError, match=f"^some_call: .*{message}"):
        communicator.all_reduce([array], op)
    for rank in range(communicator.size):  # one rank only
        with pytest.raises(TypeError, match=f"^some_call: .*{message}"):
            communicator.all_reduce(
                [array if communicator.rank == rank else place.xp.ones(9000)], op
            )
    works(communicator, place)


def test_objects_do_not_travel_as_arrays(communicator, place):
    for rank in range(communicator.size):  # one rank's
        x = np.array([None]) if communicator.rank == rank else place.xp.ones(3)
        for call in (
            lambda x=x: communicator.all_gather([place.xp.ones(3), x], 0),
            lambda x=x: communicator.broadcast([x], 0),
            lambda x=x: communicator.all_to_all([(0, x)], []),
        ):
            with pytest.raises(
                TypeError, match="some_call: an array of dtype object cannot travel between ranks"
            ):
                call()
            works(communicator, place)


@pytest.mark.core
def test_axes_that_are_not_there(communicator, place):
    for axis in (1, -2):
        with pytest.raises(
            ReplicaMismatchError,
            match=rf"some_call: axis {axis} does not exist .*\(3,\) on ranks? 0",
        ):
            communicator.all_gather([place.xp.ones(3)], axis)
    with pytest.raises(ReplicaMismatchError, match="axis 0 does not exist"):
        communicator.all_gather([place.xp.array(1.0)], 0)
    works(communicator, place)


# ---- ranks that disagree

DISAGREEMENTS = {
    "shape": (
        lambda c, xp, odd: c.all_reduce([xp.ones((3, 5 if odd else 4))], SUM),
        "float64 of shape (3, {})",
        (4, 5),
    ),
    "dimensions": (
        lambda c, xp, odd: c.all_reduce([xp.ones((1, 3) if odd else 3)], SUM),
        "{}",
        ("(3,)", "(1, 3)"),
    ),
    "size": (
        lambda c, xp, odd: c.all_reduce([xp.ones(50_000 if odd else 3)], SUM),
        "({},)",
        (3, 50_000),
    ),
    "large": (
        lambda c, xp, odd: c.all_reduce([xp.ones(50_000 + odd)], SUM),
        "({},)",
        (50_000, 50_001),
    ),
    "dtype": (
        lambda c, xp, odd: c.all_reduce([xp.ones(3, "f4" if odd else "f8")], SUM),
        "{} of shape (3,)",
        ("float64", "float32"),
    ),
    # All of them are averaged in float64, but the results have other dtypes.
    "averaged dtype": (
        lambda c, xp, odd: c.all_reduce([xp.ones(3, "i8" if odd else "i1")], MEAN),
        "call(MEAN, {} as float64",
        ("int8", "int64"),
    ),
    "op": (
        lambda c, xp, odd: c.all_reduce([xp.ones(3)], MAX if odd else SUM),
        "call({}",
        ("SUM", "MAX"),
    ),
    "count": (
        lambda c, xp, odd: c.all_reduce([xp.ones(3)] * (1 + odd), SUM),
        "{}",
        (" of float64 of shape (3,), at", "(3,), float64 of"),
    ),
    "call": (
        lambda c, xp, odd: named("odd" if odd else "even", c.all_reduce, [xp.ones(3)], SUM),
        "{}(SUM",
        ("even", "odd"),
    ),
    "verb": (
        lambda c, xp, odd: (
            named("pause", c.barrier) if odd else named("meet", c.all_gather, [xp.ones(9000)], 0)
        ),
        "{}",
        ("meet(axis=0", "pause()"),
    ),
    "object": (
        lambda c, xp, odd: (
            named("tell", c.all_gather_obj, xp.ones(9000))
            if odd
            else c.all_reduce([xp.ones(3)], SUM)
        ),
        "{}",
        ("call(SUM", "tell()"),
    ),
    "root": (lambda c, xp, odd: c.broadcast_obj(1, root=int(odd)), "call(root={})", (0, 1)),
    "broadcast": (
        lambda c, xp, odd: c.broadcast([xp.ones(5 - odd)], 0),
        " of float64 of shape ({},)",
        (5, 4),
    ),
    "broadcast root": (
        lambda c, xp, odd: c.broadcast([xp.ones(9000)], int(odd)),
        "call(root={}",
        (0, 1),
    ),
    "all_to_all": (
        lambda c, xp, odd: c.all_to_all([(0, xp.ones(3))], [], int(odd)),
        "call({}",
        (0, 1),
    ),
    "gathered axis": (
        lambda c, xp, odd: c.all_gather([xp.ones((2, 2))], int(odd)),
        "axis={}",
        (0, 1),
    ),
    "gathered dtype": (
        lambda c, xp, odd: c.all_gather([xp.ones(2, "f4" if odd else "f8")], 0),
        "of {}, at",
        ("float64", "float32"),
    ),
}


@several_ranks
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.core] * (case in ("shape", "verb")))
        for case in DISAGREEMENTS
    ],
)
def test_ranks_that_disagree(group, place, case):
    call, text, facts = DISAGREEMENTS[case]
    for odd in range(group.size):
        with pytest.raises(ReplicaMismatchError, match="must make the same call") as caught:
            call(group, place.xp, group.rank == odd)
        lines = str(caught.value).splitlines()[1:]
        others = [rank for rank in range(group.size) if rank != odd]
        for ranks, line in zip(sorted([[odd], others]), lines, strict=True):
            assert line.startswith(f"  {ranks_in_words(ranks)}: ")
            # NCCL's words end with the places of the arrays.
            assert text.format(facts[ranks == [odd]]) in line.replace(", on the GPU [0]", "")
        works(group, place)


@pytest.mark.core
@several_ranks
def test_every_rank_makes_another_call(group, place):
    with pytest.raises(ReplicaMismatchError) as caught:
        named(f"call number {group.rank}", group.barrier)
    for rank in range(min(group.size, 8)):  # of more, some are shown
        assert f"rank {rank}: call number {rank}()" in str(caught.value)
    works(group, place)


@pytest.mark.core
@several_ranks
def test_shapes_that_cannot_be_gathered_are_all_named(group, place):
    xp = place.xp
    for unit in (1, 5000):
        with pytest.raises(
            ReplicaMismatchError, match="some_call: shapes may differ along axis 0 only"
        ) as caught:
            group.all_gather([xp.ones((2, unit * (group.rank + 1)))], 0)
        for rank in range(min(group.size, 8)):
            assert f"(2, {unit * (rank + 1)}) on rank {rank}" in str(caught.value)
        with pytest.raises(ReplicaMismatchError, match="some_call") as caught:
            group.all_gather([xp.ones(unit) if group.rank else xp.ones((unit, 1))], 0)
        assert f"({unit}, 1) on rank 0; ({unit},) on rank" in str(caught.value)
        works(group, place)


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
    UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"): UnicodeError,
}


@several_ranks
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_fails_on_one_rank_fails_on_all(group, place, error):
    for failing in range(group.size):
        with pytest.raises(Exception) as caught:
            with group.raise_together():
                if group.rank == failing:
                    raise error
            group.all_reduce([place.xp.ones(9000)], SUM)
        if group.rank == failing:
            assert caught.value is error
        else:
            assert type(caught.value) is ERRORS[error]
            assert str(error) in str(caught.value)
            assert f"(found by rank {failing})" in str(caught.value)
    works(group, place)


@pytest.mark.core
@several_ranks
def test_what_fails_on_several_ranks(group, place):
    for first in range(group.size):
        with pytest.raises(ValueError) as caught:
            with group.raise_together():
                if group.rank >= first:
                    raise ValueError(f"fault of rank {group.rank}")
            group.all_gather_obj(np.ones(9000))
        mine = f"fault of rank {group.rank}"
        assert str(caught.value) == (
            mine if group.rank >= first else f"fault of rank {first} (found by rank {first})"
        )
    works(group, place)


@pytest.mark.core
@several_ranks
def test_a_joint_block_around_another_and_around_a_call(group, place):
    with pytest.raises(ValueError, match="inner"):
        with group.raise_together():
            with group.raise_together():
                if group.rank == 1:
                    raise ValueError("inner")
            group.barrier()
    with pytest.raises(TypeError, match="SUM of bool"):
        with group.raise_together():
            group.all_reduce([place.xp.ones(3, bool if group.rank == 0 else np.int32)], SUM)
    with pytest.raises(ReplicaMismatchError):
        with group.raise_together():
            named("one" if group.rank else "other", group.barrier)
    works(group, place)


@pytest.mark.mpi(min_size=3)  # one that fails and two that differ
def test_one_rank_fails_where_another_makes_a_different_call(group, place):
    with pytest.raises(ValueError, match="mine"):
        with group.raise_together():
            if group.rank == 1:
                raise ValueError("mine")
        named(f"call {group.rank}", group.barrier)
    works(group, place)


def test_an_array_for_which_there_is_no_memory(communicator, place):
    huge = place.xp.broadcast_to(place.xp.asarray(np.float32(1)), (10**14,))
    calls = {"all_reduce": lambda x: communicator.all_reduce([x], SUM)}
    if not isinstance(communicator, HostsCommunicator):  # there it ends the job
        calls["all_gather"] = lambda x: communicator.all_gather([x], 0)
    for name, call in calls.items():
        with pytest.raises(MemoryError):
            call(huge)
        works(communicator, place)
        for rank in range(communicator.size):  # one rank only; the others have something small
            with pytest.raises(
                (MemoryError, ReplicaMismatchError) if name == "all_reduce" else MemoryError
            ):
                call(huge if communicator.rank == rank else place.xp.ones(3, np.float32))
            works(communicator, place)
