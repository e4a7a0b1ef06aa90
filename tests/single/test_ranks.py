"""Reports of many ranks: who says the same shares a line, and no report grows with the job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from internals import (
    CallDescription,
    RankStatus,
    StallDetector,
    join_by_rank,
    list_by_rank,
    mismatch,
    ranges_in_words,
    ranks_in_words,
)

MANY = 512
HALVES = [*range(256), *range(257, 512)]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 5], "ranks 0, 2, 5"),
        (HALVES, "ranks 0-255, 257-511"),
        (range(0, MANY, 64), "ranks 0, 64, 128, 192, 256, 320, 384, 448"),
        (range(0, MANY, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 248 more"),
    ],
    ids=str,
)
def test_ranks_in_words(ranks, words):
    assert ranks_in_words(ranks) == words


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranges_name_each_number_once_or_count_it(numbers):
    shown, _, left_out = ranges_in_words(numbers).partition(" and ")
    named = [
        number
        for a, _, b in (part.partition("-") for part in shown.split(", "))
        for number in range(int(a), int(b or a) + 1)
    ]
    assert named == sorted(numbers)[: len(named)]
    assert len(named) + int(left_out.removesuffix(" more") or 0) == len(numbers)
    assert len(shown.split(", ")) == 8 or not left_out


def test_those_that_say_the_same_share_an_item():
    said = [(0, "a"), (1, "b"), (2, "a"), (3, ""), (4, "b")]
    assert list_by_rank(said) == ["ranks 0, 2: a", "ranks 1, 4: b"]
    assert join_by_rank(said) == "a on ranks 0, 2; b on ranks 1, 4"
    assert list_by_rank([]) == []


def test_of_very_many_items_some_are_shown():
    found = list_by_rank((rank, f"lr={rank / 8}") for rank in range(MANY))
    assert found == [*(f"rank {rank}: lr={rank / 8}" for rank in range(8)), "ranks 8-511: 504 more"]


@pytest.mark.parametrize(
    "other", ["another call, at t.py:3 in f", "lr=7, at t.py:4 in f", "lr=7, at t.py:3 in g"]
)
def test_one_of_another_kind_is_not_lost_among_them(other):
    said = [f"lr={rank}, at t.py:3 in f" for rank in range(MANY)]
    said[300] = other
    *lines, last = list_by_rank(enumerate(said))
    assert lines == [*(f"rank {rank}: {said[rank]}" for rank in range(7)), f"rank 300: {other}"]
    assert last == "ranks 7-299, 301-511: 504 more"


# ---- the reports


def reports(odd):
    """One report per rank: all reduce, except the ranks in `odd`, each with a line of its own."""
    usual = CallDescription("Strategy.reduce(SUM)", ("float64 of shape ()",))
    others = [CallDescription("barrier()"), CallDescription("Strategy.reduce(MEAN)")]
    found = [mismatch.RankReport(usual, "train.py:12 in main", None)] * MANY
    for i, rank in enumerate(odd):
        found[rank] = mismatch.RankReport(others[i], f"train.py:{20 + i} in evaluate", None)
    return found


def test_a_mismatch_of_one_and_of_two_ranks():
    assert mismatch.lines(reports([256])) == (
        "\n  ranks 0-255, 257-511: Strategy.reduce(SUM) of float64 of shape (), at train.py:12 in "
        "main\n  rank 256: barrier(), at train.py:20 in evaluate"
    )
    assert mismatch.lines(reports([3, 500])).splitlines()[1:] == [
        "  ranks 0-2, 4-499, 501-511: Strategy.reduce(SUM) of float64 of shape (), at train.py:12 "
        "in main",
        "  rank 3: barrier(), at train.py:20 in evaluate",
        "  rank 500: Strategy.reduce(MEAN), at train.py:21 in evaluate",
    ]


def test_a_mismatch_of_all_ranks():
    each = [
        mismatch.RankReport(
            CallDescription("apply", tuple(f"v{i}" for i in range(99)), (f"lr={rank}",)),
            "t.py:1 in f",
            None,
        )
        for rank in range(MANY)
    ]
    lines = mismatch.lines(each).splitlines()[1:]
    assert len(lines) == 10 and lines[8] == "  ranks 8-511: 504 more"
    assert "a model on each rank" in lines[9]


def test_a_rank_that_does_not_come():
    waits = RankStatus(8, "Strategy.reduce(SUM)", "train.py:7 in main", True, 0, 0.0, False, 1)
    late = waits._replace(number=7, location="train.py:9 in load", waits=False)
    detector = StallDetector(60, 600)
    statuses = [late if rank == 256 else waits for rank in range(MANY)]
    found = [
        detector.diagnose([one._replace(beat=beat) for one in statuses], [], float(beat))
        for beat in range(62)
    ]
    (diagnosis,) = filter(None, found)
    assert diagnosis.text.splitlines()[1:] == [
        "  ranks 0-255, 257-511: waiting in call 8, Strategy.reduce(SUM), at train.py:7 in main",
        "  rank 256: has not arrived; last in call 7, Strategy.reduce(SUM); now at train.py:9 in "
        "load",
    ]
