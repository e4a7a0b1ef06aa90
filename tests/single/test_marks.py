"""The ranges of a message that are covered by marked gradients."""

import numpy as np
import pytest
from internals import Block, Interval, MessageOrder

F4, F8 = np.dtype("f4"), np.dtype("f8")


def message(sizes, dtypes, alignment=1):
    arrays = [np.empty(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    blocks = [Block(array, array, Interval(0, 0)) for array in arrays]
    return MessageOrder(blocks, [()] * len(blocks), alignment)


def test_neighbours_are_one_range():
    made = message([3, 4, 5, 6], [F4] * 4)
    assert made.parts_of([0, 1]) == [[(0, 7)]]
    assert made.parts_of([3, 0, 2]) == [[(0, 3), (7, 18)]]
    assert made.parts_of(range(4)) == [[(0, 18)]]
    assert made.parts_of([]) == [[]]


def test_neighbours_are_those_of_a_dtype():
    made = message([3, 4, 5, 6], [F4, F8, F4, F8])  # in the message, of sizes 3, 5, 4 and 6
    assert made.parts_of([0, 1]) == [[(0, 8)], []]
    assert made.parts_of([1, 2, 3]) == [[(3, 8)], [(0, 10)]]


def test_empty_ones_are_in_nobodys_way():
    made = message([3, 0, 5], [F4] * 3)
    assert made.parts_of([0, 2]) == [[(0, 8)]]
    assert made.parts_of([1]) == [[]]


def test_gaps_between_neighbours_belong_to_the_range():
    made = message([3, 100, 5], [F4] * 3, alignment=256)  # 64 elements
    assert made.parts_of([0, 1]) == [[(0, 164)]]
    assert made.parts_of([0, 2]) == [[(0, 3), (192, 197)]]


@pytest.mark.parametrize("sizes", [[25, 0], [0, 25], [0], [3, 0, 4, 0, 0]], ids=str)
@pytest.mark.parametrize("alignment", [1, 256])
def test_all_of_a_dtype_end_with_its_last_element(sizes, alignment):
    """A rank that sums a gradient where it is sums as many elements as one that packs it."""
    made = message(sizes, [F4] * len(sizes), alignment)
    (group,) = made.layout.groups
    (parts,) = made.parts_of(range(len(sizes)))
    assert parts == ([(0, group.elements)] if any(sizes) else [])
    views = made.layout.views(np.empty(made.layout.nbytes, np.uint8))
    assert [view.size for view in views] == sizes
