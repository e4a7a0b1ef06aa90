import builtins
import errno
import pickle

import numpy as np
import pytest
from internals import (
    CallDescription,
    CallSignature,
    ManyValues,
    VariableId,
    mismatch,
    records,
    signature_of,
)

from hpcstrat import ReduceOp, ReplicaMismatchError


def test_a_record_holds_what_was_put_in():
    digest = bytes(range(16))
    packed = records.pack_record(2**40, 2**50 + 1, records.LEAVING, digest, 2**33)
    buffer = np.zeros(records.RECORD, np.uint8)
    buffer[: len(packed)] = np.frombuffer(packed, np.uint8)
    for form in (packed, memoryview(buffer)):  # pyright: ignore[reportArgumentType]
        assert records.message_sizes([form]) == [2**33]
        assert records.read_record(form) == (2**40, 2**50 + 1, records.LEAVING, digest)


def test_the_size_is_no_part_of_what_must_agree():
    one, other = (records.pack_record(1, 0, records.OK, bytes(16), nbytes) for nbytes in (3, 4))
    assert one[: records.COMMON] == other[: records.COMMON] and one != other


def test_equal_arguments_have_equal_signatures():
    one = signature_of("call", "SUM", (np.dtype("f4"), (3, 4)), None)
    assert str(one) == "call(SUM, None) of float32 of shape (3, 4)"
    assert len(one.digest) == 16
    assert one.digest == signature_of("call", "SUM", (np.dtype("<f4"), (3, 4)), None).digest


def test_different_arguments_have_different_signatures():
    calls = [
        *[(call,) for call in ("a", "b", "a ")],
        *[("a", op.name) for op in ReduceOp],
        *[("a", np.dtype(dtype)) for dtype in ("f2", "f4", "f8", "i4", "u4", "c8", "?")],
        *[
            ("a", shape)
            for shape in ((), (1,), (2,), (1, 2), (2, 1), (12,), ((1,), (2,)), ((1, 2), ()))
        ],
    ]
    assert len({signature_of(*one).digest for one in calls}) == len(calls)


def test_numbers_are_part_of_it():
    plain = signature_of("call", (3,))
    found = [
        plain.with_numbers(numbers)
        for numbers in [(0.1,), (0.2,), (0.1, 0.0), (float(np.nextafter(0.1, 1)),)]
    ]
    assert len({one.digest for one in [plain, *found]}) == 5
    assert found[0].digest == signature_of("call", (3,)).with_numbers((0.1,)).digest
    assert found[0].digest != signature_of("call", (4,)).with_numbers((0.1,)).digest
    assert str(found[2]) == "call((3,)) with 0.1, 0"
    assert str(found[3]) == "call((3,)) with 0.10000000000000002"  # which looks like no other's
    assert (
        str(plain.with_numbers((0.1, 2.0), ("rate", "step"))) == "call((3,)) with rate=0.1, step=2"
    )
    assert isinstance(found[0], CallSignature) and found[0].numbers == (0.1,)


def test_a_call_in_words():
    v, w = (
        VariableId(f"'{name}'", number, 1, np.dtype("f4"), (2,))
        for number, name in enumerate("vw", 1)
    )
    in_words = "float32 of shape (2,), variable 1 of storage 1"
    for made, expected in [
        (signature_of("barrier"), "barrier()"),
        (signature_of("reduce", "SUM", "*"), "reduce(SUM)"),
        (
            signature_of("reduce", "{'a': *}", (np.dtype("f8"), ())),
            "reduce({'a': *}) of float64 of shape ()",
        ),
        (signature_of("Variable.assign of 'v'", v), f"Variable.assign of 'v' ({in_words})"),
        (signature_of("apply", v), f"apply of 'v' ({in_words})"),
        (signature_of("save", ManyValues(("a", "b"))), "save of a, b"),
    ]:
        assert str(made) == expected
    assert signature_of("apply", v).digest != signature_of("apply", w).digest
    assert (
        signature_of("save", ManyValues(("a, b",))).digest
        != signature_of("save", ManyValues(("a", "b"))).digest
    )


def rank(*passed, place="p.py:1 in f", call="apply(SUM)", numbers=()):
    return mismatch.RankReport(CallDescription(call, passed, numbers), place, None)


def test_lines_of_few_things_are_whole():
    everyones = [rank("a", "b"), rank("a", place="p.py:2 in g", numbers=("rate=1",))]
    assert mismatch.lines(everyones) == (
        "\n  rank 0: apply(SUM) of a, b, at p.py:1 in f\n  rank 1: apply(SUM) of a with rate=1, at "
        "p.py:2 in g"
    )


def test_lines_of_hundreds_of_things_are_whole():
    many = [f"v{i}" for i in range(500)]
    lines = mismatch.lines([rank(*many), rank(*many[1:], "w")])
    assert all(lines.count(f" {name},") == 2 for name in many[1:])
    assert lines.count(" v0,") == lines.count(" w,") == 1


def test_lines_of_thousands_of_things_are_cut():
    many = [f"v{i}" for i in range(50_000)]
    odd = [*many[:25_000], "w", *many[25_001:]]  # where it is cut
    lines = mismatch.lines([rank(*many), rank(*odd), rank(*many)]).splitlines()[1:]
    assert [line[:28] for line in lines] == [
        "  ranks 0, 2: apply(SUM) of ",
        "  rank 1: apply(SUM) of v0, ",
    ]
    for line in lines:
        assert len(line) < 51_000 and " ... " in line
        assert line.endswith(" v49998, v49999, at p.py:1 in f")


class Nameless(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError


class OwnLookup(LookupError):
    def __init__(self, table, key):
        super().__init__(f"{key} is not in {table}")


class OwnOSError(OSError):
    pass


class OwnMismatch(ReplicaMismatchError):
    pass


def raised_on_others(error):
    """What the others raise where rank 1 raises `error`."""
    report = pickle.loads(pickle.dumps(mismatch.report_of(CallDescription("call"), error)))
    with pytest.raises(Exception) as caught:
        mismatch.raise_as(1, report)
    return caught.value


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (ValueError("bad"), ValueError, "bad"),
        (ValueError(), ValueError, "ValueError()"),
        (OverflowError("bad"), OverflowError, "bad"),
        (UserWarning("bad"), UserWarning, "bad"),
        (Nameless(), RuntimeError, "Nameless()"),
        (Nameless("bad"), RuntimeError, "Nameless: bad"),
        (Exception("bad"), RuntimeError, "Exception: bad"),
        (Mute(), RuntimeError, "Mute()"),
        (OwnLookup("t", "k"), LookupError, "k is not in t"),
        (OwnMismatch("bad"), ReplicaMismatchError, "bad"),
    ],
    ids=repr,
)
def test_what_other_ranks_raise_has_a_class_of_python_and_a_text(error, cls, text):
    found = raised_on_others(error)
    assert type(found) is cls and str(found) == f"{text} (found by rank 1)"


def test_what_other_ranks_raise_is_made_from_one_text():
    found = raised_on_others(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    assert type(found) is UnicodeError and "can't decode byte 0xff" in str(found)
    group = getattr(builtins, "ExceptionGroup", None)  # of Python 3.11
    if group is not None:
        found = raised_on_others(group("several", [ValueError("bad")]))
        assert type(found) is RuntimeError
        assert str(found) == "ExceptionGroup: several (1 sub-exception) (found by rank 1)"


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (FileNotFoundError(errno.ENOENT, "no file"), FileNotFoundError),
        (OwnOSError(errno.ENOSPC, "no file"), OSError),
        (OwnOSError(errno.EACCES, "no file"), PermissionError),
    ],
    ids=repr,
)
def test_what_other_ranks_raise_keeps_the_number_of_the_system(error, cls):
    found = raised_on_others(error)
    assert isinstance(found, OSError) and type(found) is cls
    assert (found.errno, found.strerror) == (error.errno, "no file (found by rank 1)")
