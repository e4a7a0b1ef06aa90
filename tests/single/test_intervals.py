"""Intervals and shards, against lists of the integers that they stand for."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import ByteRange, ElementRange, Shard, runs

INTERVALS = st.builds(
    lambda start, size: ElementRange(start, start + size), st.integers(-50, 50), st.integers(0, 60)
)


def round_up(n, unit):
    return -(-n // unit) * unit


def members(interval):
    return list(range(interval.start, interval.stop))


@hypothesis.given(INTERVALS, INTERVALS, st.integers(-9, 9), st.integers(1, 70))
def test_an_interval_is_its_integers(a, b, by, size):
    both = a & b
    assert members(both) == [n for n in members(a) if n in members(b)]
    assert both.size == len(members(both)) and bool(both) is (both.size > 0)
    assert members(a.shift(by)) == [n + by for n in members(a)]
    itemsize = 1 + size % 8
    of_bytes = a.bytes(itemsize)
    assert members(of_bytes) == [itemsize * n + k for n in members(a) for k in range(itemsize)]
    assert of_bytes.elements(itemsize) == a
    parts = [members(part) for part in a.split(size)]
    assert [*itertools.chain(*parts)] == members(a)
    assert all(len(part) == size for part in parts[:-1])
    assert all(0 < len(part) <= size for part in parts[-1:])


@hypothesis.given(INTERVALS, st.integers(1, 9), st.integers(1, 20))
def test_ranks_have_equal_parts(a, size, unit):
    parts = [a.of_rank(rank, size, unit) for rank in range(size)]
    assert [*itertools.chain(*map(members, parts))] == members(a)
    units = [round_up(part.size, unit) // unit for part in parts]
    assert max(units) - min(units) <= 1
    # Only the last part that has any may end between two units.
    cut = [part for part in parts if part.stop < a.stop]
    assert all((part.stop - a.start) % unit == 0 for part in cut)


# A variable is its bytes in memory, its slots' bytes, and gaps before them; a gap of None means
# that it follows the previous one, up to `alignment`.
GAPS = st.lists(st.none() | st.integers(1, 300), min_size=2, max_size=2)
VARIABLES = st.lists(st.tuples(st.integers(0, 12), GAPS), max_size=8)


def shards_of(variables, itemsize, alignment):
    dtype = np.dtype(f"V{itemsize}")
    shards, ends = [], [0, 0, 10_000]
    for i, (count, gaps) in enumerate(variables):
        pairs = zip(ends, [0, *gaps], strict=True)
        starts = [round_up(end + (gap or 0), alignment) for end, gap in pairs]
        message, *memory = (ByteRange(start, start + count * itemsize) for start in starts)
        shards.append(Shard(i, dtype, ElementRange(0, count), message, tuple(memory)))
        ends = [place.stop for place in (message, *memory)]
    return shards


def triples(shards, itemsize):
    """Where each element is: in the message, in the variable, in the slot."""
    found = []
    for shard in shards:
        places = shard.message, *shard.memory
        assert all(place.size % itemsize == 0 for place in places)
        each = [range(place.start, place.stop, itemsize) for place in places]
        found += zip(*each, strict=True)
    return found


@pytest.mark.parametrize("itemsize", [2, 8])
@pytest.mark.parametrize("alignment", [1, 16])
@hypothesis.given(VARIABLES, st.integers(0, 200), st.integers(0, 400), st.integers(1, 9))
def test_runs_have_the_elements_of_their_shards(itemsize, alignment, variables, start, size, count):
    shards = shards_of(variables, itemsize, alignment)
    window = ElementRange(start, start + size).bytes(itemsize)
    own = [shard.within(window) for shard in shards]
    everything = triples(shards, itemsize)
    expected = [one for one in everything if window.start <= one[0] < window.stop]
    assert triples(own, itemsize) == expected
    merged = runs(own, alignment)
    in_runs = triples(merged, itemsize)
    assert [element for element in in_runs if element in everything] == expected
    # What else is in a run lies in gaps: no other variable's element, and none outside of memory.
    others = [element for element in in_runs if element not in everything]
    for taken, found in zip(zip(*everything, strict=True), zip(*others, strict=True), strict=False):
        assert not {*taken} & {*found}
    assert triples([part for run in merged for part in run.split(count)], itemsize) == in_runs
    assert all(run.elements for run in merged)
    # Two neighbours are two runs only where the next does not follow.
    for before, after in itertools.pairwise(merged):
        ends = zip((before.message, *before.memory), (after.message, *after.memory), strict=True)
        assert any(round_up(end.stop, alignment) != start.start for end, start in ends)
