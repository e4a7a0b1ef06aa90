import hypothesis
import hypothesis.strategies as st
import pytest
from internals import RangeAllocator


def test_neighbours_are_back_to_back():
    heap = RangeAllocator(100, 1000)
    assert [heap.allocate(10, 1), heap.allocate(20, 1), heap.allocate(5, 1)] == [100, 110, 130]


def test_alignment():
    heap = RangeAllocator(0, 100)
    assert heap.allocate(3, 1) == 0
    assert heap.allocate(16, 8) == 8
    assert heap.allocate(76, 1) == 24
    assert heap.allocate(5, 1) == 3  # the gap is used


def test_what_is_made_together_lies_in_a_row():
    heap = RangeAllocator(0, 1000)
    starts = [heap.allocate(100, 1) for _ in range(6)]
    heap.free(starts[1], 100)
    heap.free(starts[3], 100)
    assert [heap.allocate(60, 1) for _ in range(3)] == [600, 660, 720]
    heap.free(660, 60)
    assert heap.allocate(60, 1) == 780
    heap.free(780, 60)
    assert heap.allocate(20, 1) == 780


def test_holes_are_filled_when_the_end_is_reached():
    heap = RangeAllocator(0, 1000)
    starts = [heap.allocate(100, 1) for _ in range(6)]
    heap.free(starts[1], 100)
    heap.free(starts[3], 100)
    assert heap.allocate(350, 1) == 600
    assert heap.allocate(60, 1) == 100
    assert heap.allocate(60, 1) == 300
    assert heap.allocate(40, 1) == 360
    assert heap.allocate(40, 1) == 950
    assert heap.allocate(40, 1) == 160


def test_free_ranges_grow_together():
    heap = RangeAllocator(0, 100)
    starts = [heap.allocate(20, 1) for _ in range(5)]
    assert heap.free(starts[1], 20) == (20, 40)
    assert heap.free(starts[3], 20) == (60, 80)
    assert heap.free(starts[2], 20) == (20, 80)
    assert heap.free(starts[4], 20) == (20, 100)
    assert heap.free(starts[0], 20) == (0, 100)
    assert heap.allocate(100, 1) == 0


def test_nothing_takes_no_room():
    heap = RangeAllocator(0, 8)
    assert heap.allocate(0, 8) == 0
    assert heap.allocate(8, 8) == 0
    heap.free(0, 0)
    with pytest.raises(MemoryError, match="cannot allocate 1 contiguous bytes"):
        heap.allocate(1, 1)
    heap.free(0, 8)
    assert heap.allocate(8, 1) == 0


def test_when_it_is_full():
    heap = RangeAllocator(0, 100)
    heap.allocate(60, 1)
    with pytest.raises(MemoryError, match="cannot allocate 1,000,000 contiguous bytes"):
        heap.allocate(1_000_000, 1)
    assert heap.allocate(40, 1) == 60  # nothing was lost


@hypothesis.settings(max_examples=2 * hypothesis.settings().max_examples)
@hypothesis.given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 40), st.sampled_from([1, 2, 4, 8, 16])), max_size=60
    )
)
def test_ranges_never_overlap(steps):
    heap = RangeAllocator(64, 1024)
    taken: list[tuple[int, int]] = []
    for frees, number, alignment in steps:
        if frees and taken:
            start, nbytes = taken.pop(number % len(taken))
            a, b = heap.free(start, nbytes)
            assert a <= start and start + nbytes <= b
            assert not any(x < b and a < x + n for x, n in taken if n)
            continue
        try:
            start = heap.allocate(number, alignment)
        except MemoryError:
            continue
        assert start % alignment == 0 and start >= 64 and start + number <= 1024
        assert not any(x < start + number and start < x + n for x, n in taken)
        taken.append((start, number))
    for start, nbytes in taken:
        heap.free(start, nbytes)
    assert heap.allocate(960, 1) == 64
