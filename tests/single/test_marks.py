"""The ranges of a message that are covered by marked gradients."""

import numpy as np
from internals import layout_of, parts_of

F4, F8 = np.dtype("f4"), np.dtype("f8")


def layout(sizes, dtypes, alignment=1):
    return layout_of(tuple((size,) for size in sizes), tuple(dtypes), alignment)


def test_neighbours_are_one_range():
    made = layout([3, 4, 5, 6], [F4] * 4)
    assert parts_of(made, [0, 1]) == [[(0, 7)]]
    assert parts_of(made, [3, 0, 2]) == [[(0, 3), (7, 18)]]
    assert parts_of(made, range(4)) == [[(0, 18)]]
    assert parts_of(made, []) == [[]]


def test_neighbours_are_those_of_a_dtype():
    made = layout([3, 4, 5, 6], [F4, F8, F4, F8])
    assert parts_of(made, [0, 2]) == [[(0, 8)], []]
    assert parts_of(made, [1, 2, 3]) == [[(3, 8)], [(0, 10)]]


def test_empty_ones_are_in_nobodys_way():
    made = layout([3, 0, 5], [F4] * 3)
    assert parts_of(made, [0, 2]) == [[(0, 8)]]
    assert parts_of(made, [1]) == [[]]


def test_gaps_between_neighbours_belong_to_the_range():
    made = layout([3, 100, 5], [F4] * 3, alignment=256)  # 64 elements
    assert parts_of(made, [0, 1]) == [[(0, 164)]]
    assert parts_of(made, [0, 2]) == [[(0, 3), (192, 197)]]
