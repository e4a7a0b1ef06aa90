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

from hpcstrat import ReduceOp


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


def test_lines_of_many_things_tell_the_difference():
    many = [f"v{i}" for i in range(100)]
    lines = mismatch.lines([rank(*many), rank(*many[1:], "w")]).splitlines()[1:]
    assert lines[0] == "  rank 0: apply(SUM) of v0, and 99 that all have, at p.py:1 in f"
    assert lines[1] == "  rank 1: apply(SUM) of w, and 99 that all have, at p.py:1 in f"
    assert "rank 1: apply(SUM) of 1 that all have, at" in mismatch.lines([rank(*many), rank("v0")])
    for other in (rank(*(f"w{i}" for i in range(100))), rank(*many, numbers=("rate=2",))):
        lines = mismatch.lines([rank(*many, numbers=("rate=1",)), other])
        assert len(lines) < 400 and "92 more" in lines


class Nameless(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (ValueError("bad"), ValueError, "bad"),
        (ValueError(), ValueError, "ValueError()"),
        (Nameless(), RuntimeError, "Nameless()"),
        (Nameless("bad"), RuntimeError, "Nameless: bad"),
        (Mute(), RuntimeError, "Mute()"),
    ],
    ids=[
        "a text",
        "none",
        "one's own class, none",
        "one's own class, a text",
        "no text can be made",
    ],
)
def test_what_other_ranks_raise_is_never_without_a_text(error, cls, text):
    with pytest.raises(cls) as caught:
        mismatch.raise_as(1, mismatch.report_of(CallDescription("call"), error))
    assert type(caught.value) is cls and str(caught.value) == f"{text} (found by rank 1)"
