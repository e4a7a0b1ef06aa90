"""What goes wrong in communicators: every rank raises, and the next call works."""

import numpy as np
import pytest
import transports
from internals import call_named, hosts, ranks_in_words
from transports import DEVICE, HOST, MAX, MEAN, MIN, SUM, works

from hpcstrat import ReplicaMismatchError

several_ranks = pytest.mark.mpi(min_size=2)  # one rank cannot disagree with another
communicator = transports.communicator


def pytest_generate_tests(metafunc):
    transports.parametrize(metafunc, {"communicator": HOST + DEVICE})


@pytest.fixture(autouse=True)
def _in_a_call():
    with call_named("some_call"):
        yield


# ---- refusals

REFUSED = [
    (np.array([None, 1]), SUM, "object cannot be reduced"),
    (np.arange(3, dtype=np.longdouble), SUM, "cannot be reduced; it takes int8, int16"),
    (np.array(["a"]), MIN, "cannot be reduced"),
    (np.zeros(2, [("a", "f4")]), SUM, "cannot be reduced"),
    (np.array([True]), SUM, "SUM of bool is not .*; bool takes MIN, MAX: .* x.astype.np.int64"),
    (np.array([1j]), MAX, "MAX of complex128 is not defined; complex128 takes SUM, MEAN"),
]


def test_dtypes_that_are_refused(communicator, place):
    """On all ranks, or on one of them only."""
    for array, op, message in REFUSED:
        if array.dtype.char in "?FD":  # the others are not dtypes of a GPU
            array = place.xp.asarray(array)
        for odd in (communicator.rank, *range(communicator.size)):
            mine = array if communicator.rank == odd else place.xp.ones(9000)
            with pytest.raises(TypeError, match=f"^some_call: .*{message}"):
                communicator.all_reduce([mine], op)
    works(communicator, place)


def test_objects_do_not_travel_as_arrays(communicator, place):
    for odd in range(communicator.size):
        x = np.array([None]) if communicator.rank == odd else place.xp.ones(3)
        for call in (
            lambda x=x: communicator.all_gather([place.xp.ones(3), x], 0),
            lambda x=x: communicator.broadcast([x], 0),
            lambda x=x: communicator.all_to_all([(0, x)], []),
        ):
            with pytest.raises(TypeError, match="some_call: .* dtype object cannot travel"):
                call()
    works(communicator, place)


# ---- ranks that disagree


def named(call, verb, *arguments):
    """What a verb returns in a call of this name."""
    with call_named(call):
        return verb(*arguments)


def reduce(*shapes, dtype="f8", op=SUM, call="some_call"):
    return lambda c, xp: named(call, c.all_reduce, [xp.ones(one, dtype) for one in shapes], op)


def mean(dtype):
    return reduce(3, dtype=dtype, op=MEAN)


def gather(shape, dtype="f8", axis=0, call="some_call"):
    return lambda c, xp: named(call, c.all_gather, [xp.ones(shape, dtype)], axis)


def broadcast(size, root=0):
    return lambda c, xp: c.broadcast([xp.ones(size)], root)


def tell(root):
    return lambda c, xp: c.broadcast_obj(1, root)


def send(fact):
    return lambda c, xp: c.all_to_all([(0, xp.ones(3))], [], fact)


# What most ranks call, and what one calls; and what the error says of each.
DISAGREEMENTS = {
    "shape": (reduce((3, 4)), reduce((3, 5)), "float64 of shape (3, 4)", "float64 of shape (3, 5)"),
    "large": (reduce(50_000), reduce(50_001), "(50000,)", "(50001,)"),
    "dtype": (reduce(3), reduce(3, dtype="f4"), "float64 of shape (3,)", "float32 of shape (3,)"),
    # All of them are averaged in float64, but the results have other dtypes.
    "averaged": (mean("i1"), mean("i8"), "call(MEAN, int8 as fl", "call(MEAN, int64 as float64"),
    "op": (reduce(3), reduce(3, op=MAX), "call(SUM", "call(MAX"),
    "count": (reduce(3), reduce(3, 3), " of float64 of shape (3,), at", "(3,), float64 of"),
    "call": (reduce(3, call="even"), reduce(3, call="odd"), "even(SUM", "odd(SUM"),
    "verb": (gather(9, call="meet"), lambda c, xp: named("stop", c.barrier), "meet(ax", "stop()"),
    "object": (reduce(3), lambda c, xp: c.all_gather_obj(xp.ones(9000)), "call(SUM", "call()"),
    "object's root": (tell(0), tell(1), "call(root=0)", "call(root=1)"),
    "broadcast": (broadcast(5), broadcast(4), " of float64 of shape (5,)", "of shape (4,)"),
    "root": (broadcast(9000, 0), broadcast(9000, 1), "call(root=0", "call(root=1"),
    "all_to_all": (send(0), send(1), "call(0", "call(1"),
    "axis": (gather((2, 2)), gather((2, 2), axis=1), "axis=0", "axis=1"),
    "gathered dtype": (gather(2), gather(2, dtype="f4"), "of float64, at", "of float32, at"),
}


@several_ranks
def test_ranks_that_disagree(communicator, place):
    for most, one, of_most, of_one in DISAGREEMENTS.values():
        for odd in range(communicator.size):
            with pytest.raises(ReplicaMismatchError, match="must make the same call") as caught:
                (one if communicator.rank == odd else most)(communicator, place.xp)
            others = [rank for rank in range(communicator.size) if rank != odd]
            expected = sorted([([odd], of_one), (others, of_most)])
            lines = str(caught.value).splitlines()[1:]
            for (ranks, fact), line in zip(expected, lines, strict=True):
                assert line.startswith(f"  {ranks_in_words(ranks)}: ")
                # NCCL's words end with the places of the arrays.
                assert fact in line.replace(", on the GPU [0]", "")
    works(communicator, place)


@several_ranks
def test_shapes_that_cannot_be_gathered_are_all_named(communicator, place):
    for unit in (1, 5000):
        message = "some_call: shapes may differ along axis 0 only"
        with pytest.raises(ReplicaMismatchError, match=message) as caught:
            communicator.all_gather([place.xp.ones((2, unit * (communicator.rank + 1)))], 0)
        for rank in range(min(communicator.size, 8)):  # of more, some are shown
            assert f"(2, {unit * (rank + 1)}) on rank {rank}" in str(caught.value)
        form = unit if communicator.rank else (unit, 1)
        with pytest.raises(ReplicaMismatchError, match=rf"\({unit}, 1\) on rank 0; \({unit},\) on"):
            communicator.all_gather([place.xp.ones(form)], 0)
    works(communicator, place)


# ---- work that fails on some ranks


class Special(ValueError):
    pass


class Strange(Exception):
    pass


ERRORS = [  # of one rank, and what the others raise
    (Special("special"), ValueError),
    (Strange("strange"), RuntimeError),
    (KeyError("key"), KeyError),
    (MemoryError("full"), MemoryError),
    (ReplicaMismatchError("differs"), ReplicaMismatchError),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), UnicodeError),
]


@several_ranks
def test_what_fails_on_one_rank_fails_on_all(communicator, place):
    for number, (error, of_others) in enumerate(ERRORS):
        failing = number % communicator.size
        with pytest.raises(Exception) as caught:
            with communicator.raise_together():
                if communicator.rank == failing:
                    raise error
            communicator.all_reduce([place.xp.ones(9000)], SUM)
        if communicator.rank == failing:
            assert caught.value is error
        else:
            assert type(caught.value) is of_others
            assert str(error) in str(caught.value)
            assert f"(found by rank {failing})" in str(caught.value)
    works(communicator, place)


@several_ranks
def test_what_fails_on_several_ranks(communicator, place):
    for first in range(communicator.size):
        with pytest.raises(ValueError) as caught:
            with communicator.raise_together():
                if communicator.rank >= first:
                    raise ValueError(f"fault of rank {communicator.rank}")
            communicator.all_gather_obj(np.ones(9000))
        mine = f"fault of rank {communicator.rank}"
        of_others = f"fault of rank {first} (found by rank {first})"
        assert str(caught.value) == (mine if communicator.rank >= first else of_others)
    works(communicator, place)


@several_ranks
def test_a_joint_block_around_another_and_around_a_call(communicator, place):
    with pytest.raises(ValueError, match="inner"):
        with communicator.raise_together():
            with communicator.raise_together():
                if communicator.rank == 1:
                    raise ValueError("inner")
            communicator.barrier()
    with pytest.raises(TypeError, match="SUM of bool"):
        with communicator.raise_together():
            communicator.all_reduce(
                [place.xp.ones(3, bool if communicator.rank == 0 else np.int32)], SUM
            )
    if communicator.size > 2:  # one that fails, and two whose calls differ
        with pytest.raises(ValueError, match="mine"):
            with communicator.raise_together():
                if communicator.rank == 1:
                    raise ValueError("mine")
            named(f"call {communicator.rank}", communicator.barrier)
    works(communicator, place)


def test_an_array_for_which_there_is_no_memory(communicator, place):
    huge = place.xp.broadcast_to(place.xp.asarray(np.float32(1)), (10**14,))
    small = place.xp.ones(3, np.float32)
    for odd in (communicator.rank, *range(communicator.size)):  # all ranks, or one of them
        mine = huge if communicator.rank == odd else small
        with pytest.raises((MemoryError, ReplicaMismatchError)):
            communicator.all_reduce([mine], SUM)
        if not isinstance(communicator, hosts.HostsCommunicator):  # there it ends the job
            with pytest.raises(MemoryError):
                communicator.all_gather([mine], 0)
        works(communicator, place)
