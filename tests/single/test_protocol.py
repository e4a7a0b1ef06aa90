"""What ranks tell each other: records, calls in words, reports by rank, errors and objects."""

import errno
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from internals import join_by_rank, mismatch, ranks_in_words, records

from hpcstrat import ReduceOp, ReplicaMismatchError

signature_of, Description = records.signature_of, records.CallDescription
MANY = 512


def test_a_record_holds_what_was_put_in():
    digest = bytes(range(16))
    packed = records.pack_record(2**40, 2**50 + 1, records.LEAVING, digest, 2**33)
    buffer = np.zeros(records.RECORD, np.uint8)
    buffer[: len(packed)] = np.frombuffer(packed, np.uint8)
    for form in (packed, memoryview(buffer)):  # pyright: ignore[reportArgumentType]
        assert records.message_sizes([form]) == [2**33]
        assert records.read_record(form) == (2**40, 2**50 + 1, records.LEAVING, digest)
    # The size is no part of what must agree.
    one, other = (records.pack_record(1, 0, records.OK, bytes(16), nbytes) for nbytes in (3, 4))
    assert one[: records.COMMON] == other[: records.COMMON] and one != other


# ---- signatures


def test_equal_arguments_have_equal_signatures_and_different_ones_different():
    one = signature_of("call", "SUM", (np.dtype("f4"), (3, 4)), None)
    assert str(one) == "call(SUM, None) of float32 of shape (3, 4)"
    assert len(one.digest) == 16
    assert one.digest == signature_of("call", "SUM", (np.dtype("<f4"), (3, 4)), None).digest
    shapes = [(), (1,), (2,), (1, 2), (2, 1), (12,), ((1,), (2,)), ((1, 2), ())]
    dtypes = [np.dtype(dtype) for dtype in ("f2", "f4", "f8", "i4", "u4", "c8", "?")]
    names = [records.ManyValues(names) for names in [("a", "b"), ("a, b",)]]
    calls = [
        ("a",),
        ("b",),
        ("a ",),
        *(("a", one) for one in (*ReduceOp, *dtypes, *shapes, *names)),
    ]
    assert len({signature_of(*one).digest for one in calls}) == len(calls)


def test_numbers_are_part_of_a_signature():
    plain = signature_of("call", (3,))
    given = [(0.1,), (0.2,), (0.1, 0.0), (float(np.nextafter(0.1, 1)),)]
    found = [plain.with_numbers(numbers) for numbers in given]
    assert len({one.digest for one in [plain, *found]}) == 5
    assert found[0].digest == signature_of("call", (3,)).with_numbers((0.1,)).digest
    assert found[0].digest != signature_of("call", (4,)).with_numbers((0.1,)).digest
    assert found[0].numbers == (0.1,)
    assert str(found[2]) == "call((3,)) with 0.1, 0"
    assert str(found[3]) == "call((3,)) with 0.10000000000000002"  # which looks like no other's
    named = plain.with_numbers((0.1, 2.0), ("rate", "step"))
    assert str(named) == "call((3,)) with rate=0.1, step=2"


def test_a_call_in_words():
    v, w = (
        records.VariableId(f"'{name}'", number, 1, np.dtype("f4"), (2,))
        for number, name in enumerate("vw", 1)
    )
    in_words = "'v' (float32 of shape (2,), variable 1 of storage 1)"
    for made, expected in [
        (signature_of("barrier"), "barrier()"),
        (signature_of("reduce", "SUM", "*"), "reduce(SUM)"),
        (signature_of("f", "{'a': *}", (np.dtype("f8"), ())), "f({'a': *}) of float64 of shape ()"),
        (signature_of("Variable.assign of 'v'", v), f"Variable.assign of {in_words}"),
        (signature_of("apply", v), f"apply of {in_words}"),
        (signature_of("save", records.ManyValues(("a", "b"))), "save of a, b"),
    ]:
        assert str(made) == expected
    assert signature_of("apply", v).digest != signature_of("apply", w).digest


# ---- reports by rank: who says the same shares an item, and no report grows with the job


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([*range(256), *range(257, 512)], "ranks 0-255, 257-511"),
        (range(0, MANY, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 248 more"),
    ],
    ids=str,
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(ranks) == words


def ranks_of(words):
    """The ranks that words name, and how many more they count."""
    shown, _, more = re.fullmatch(r"ranks? (.*?)( and (\d+) more)?", words).groups()  # pyright: ignore
    ends = (part.partition("-") for part in shown.split(", "))
    named = [n for a, _, b in ends for n in range(int(a), int(b or a) + 1)]
    return named, int(more or 0)


SAID = st.sampled_from(["", "a", *(f"lr={i}" for i in range(10)), "b, at t.py:3"])


@given(st.lists(SAID, max_size=40))
def test_each_rank_is_in_one_item_with_what_it_says(said):
    items = [one.rpartition(" on ") for one in join_by_rank(enumerate(said)).split("; ") if one]
    texts = [*dict.fromkeys(filter(None, said))]
    kinds = {re.sub(r"\d", "", text) for text in texts}
    shown = [text for text, _, _ in items if not text.endswith(" more")]
    assert shown == [text for text in texts if text in shown] and len(shown) == min(8, len(texts))
    assert {re.sub(r"\d", "", text) for text in shown} == kinds  # the odd one is not lost
    assert len(items) - len(shown) == (len(texts) > 8)
    for text, _, words in items:
        meant = [text] if text in shown else {*texts} - {*shown}
        assert text in shown or text == f"{len(meant)} more"
        of_it = [i for i, one in enumerate(said) if one in meant]
        named, more = ranks_of(words)
        assert named == of_it[: len(named)] and len(named) + more == len(of_it)
        assert len(words.split(", ")) == 8 or not more


def test_one_of_another_kind_is_not_lost_among_many():
    said = [f"lr={rank}, at t.py:3 in f" for rank in range(MANY)]
    said[300] = other = "lr=7, at t.py:4 in f"
    *items, last = join_by_rank(enumerate(said)).split("; ")
    assert items == [*(f"{said[rank]} on rank {rank}" for rank in range(7)), f"{other} on rank 300"]
    assert last == "504 more on ranks 7-299, 301-511"


def rank(*passed, place="p.py:1 in f", call="apply(SUM)", numbers=()):
    return mismatch.RankReport(Description(call, passed, numbers), place, None)


def test_a_mismatch_lists_each_ranks_call():
    reports = [rank("a", "b")] * MANY
    reports[3], reports[500] = (
        rank(call="barrier()"),
        rank("a", place="p.py:2 in g", numbers=("rate=1",)),
    )
    assert mismatch.lines(reports).splitlines()[1:] == [
        "  ranks 0-2, 4-499, 501-511: apply(SUM) of a, b, at p.py:1 in f",
        "  rank 3: barrier(), at p.py:1 in f",
        "  rank 500: apply(SUM) of a with rate=1, at p.py:2 in g",
    ]
    each = [rank(*map(str, range(99)), numbers=(f"lr={i}",)) for i in range(MANY)]
    lines = mismatch.lines(each).splitlines()[1:]
    assert len(lines) == 10 and lines[8] == "  ranks 8-511: 504 more"
    assert "a model on each rank" in lines[9]


def test_hundreds_of_things_are_listed_and_thousands_are_cut():
    assert ", ".join(map(str, range(500))) in mismatch.lines([rank(*map(str, range(500))), rank()])
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


# ---- what other ranks raise


class Nameless(Exception):
    pass


class Mute(Exception):
    def __str__(self):
        raise ValueError


class OwnLookup(LookupError):
    def __init__(self, table, key):
        super().__init__(f"{key} is not in {table}")


class OwnMismatch(ReplicaMismatchError):
    pass


def raised_on_others(error):
    """What the others raise where rank 1 raises `error`."""
    report = pickle.loads(pickle.dumps(mismatch.report_of(Description("call"), error)))
    with pytest.raises(Exception) as caught:
        mismatch.raise_as(1, report)
    return caught.value


@pytest.mark.parametrize(
    ("error", "cls", "text"),
    [
        (ValueError(), ValueError, "ValueError()"),
        (Nameless(), RuntimeError, "Nameless()"),
        (Mute(), RuntimeError, "Mute()"),
        (OwnLookup("t", "k"), LookupError, "k is not in t"),
        (OwnMismatch("bad"), ReplicaMismatchError, "bad"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            UnicodeError,
            "'utf-8' codec can't decode byte 0xff in position 0: bad",
        ),
    ],
    ids=repr,
)
def test_what_other_ranks_raise_has_a_class_of_python_and_a_text(error, cls, text):
    found = raised_on_others(error)
    assert type(found) is cls and str(found) == f"{text} (found by rank 1)"


def test_what_other_ranks_raise_keeps_the_number_of_the_system():
    own = type("Own", (OSError,), {})
    for error, cls in [
        (own(errno.ENOSPC, "no"), OSError),
        (own(errno.EACCES, "no"), PermissionError),
    ]:
        found = raised_on_others(error)
        assert isinstance(found, OSError) and type(found) is cls
        assert (found.errno, found.strerror) == (error.errno, "no (found by rank 1)")


# ---- objects


def travelled(obj, room=0):
    nbytes, write = records.pack_object(obj)
    target = np.full(nbytes + room, 255, np.uint8)
    write(target)
    assert (target[nbytes:] == 255).all()
    found = records.load_object(target)
    target[:] = 0  # the result must not share its memory
    return found


DTYPES = [np.int8, np.float64, np.complex64, bool, ">i4", "U5", "M8[s]", "i4, (2,)f8"]


@pytest.mark.parametrize("dtype", [*DTYPES, ml_dtypes.bfloat16], ids=str)
def test_arrays(dtype):
    for shape in [(), (0,), (5,), (0, 3), (2, 3, 4), (40, 50)]:
        array = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype("i8").astype(dtype)
        turned = array[..., ::-1] if shape else array
        for sent in (array, np.asfortranarray(array), turned, array.T):
            found = travelled({"x": sent})["x"]
            assert found.dtype.newbyteorder("=") == sent.dtype.newbyteorder("=")
            assert found.shape == sent.shape and np.array_equal(found, sent)
            assert found.flags.writeable
            assert found.flags.f_contiguous or not sent.flags.f_contiguous


def test_kinds_of_arrays():
    masked = np.ma.masked_less(np.arange(300.0), 2)
    table = np.ones(300, [("id", "i4"), ("weight", "f8")]).view(np.recarray)
    for sent in (masked, table):
        found = travelled(sent)
        assert type(found) is type(sent) and (found == sent).all()
    assert travelled(masked).mask.sum() == 2 and travelled(table).weight.sum() == 300
    first, second = travelled([table, table])
    assert first is second
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    for sent in (frozen, frozen.T, np.broadcast_to(np.float32(2), (30, 30))):
        found = travelled(sent, room=100)
        assert np.array_equal(found, sent)
        found[...] = 0  # it comes as a writable one
    assert frozen.sum() == 15
