import collections
import dataclasses
from typing import Any

import numpy as np
import pytest

from hpcstrat import _nest

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = "default"

    def __post_init__(self):
        raise AssertionError("made through __init__")


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: list[Any]


def pair(first, second):
    made = object.__new__(Pair)
    made.first, made.second = first, second
    return made


def test_leaves_in_a_fixed_order():
    nest = {"b": 1, "a": [2, (3, None)], "c": Point({"y": 4, "x": 5}, "text")}
    leaves, structure = _nest.flatten(nest)
    assert leaves == [2, 3, None, 1, 5, 4, "text"]
    assert _nest.unflatten(structure, leaves) == nest
    assert _nest.flatten({"c": nest["c"], "a": nest["a"], "b": 1})[1] == structure


@pytest.mark.parametrize("leaf", [None, 1, 2.5, "text", b"bytes", np.ones(2), {1, 2}, object(), range(3), len])
def test_what_is_no_nest_is_a_leaf(leaf):
    leaves, structure = _nest.flatten(leaf)
    assert len(leaves) == 1 and leaves[0] is leaf
    assert _nest.unflatten(structure, ["new"]) == "new"


@pytest.mark.parametrize("empty", [[], {}, (), [[], {}], {"a": ()}])
def test_empty_nests(empty):
    leaves, structure = _nest.flatten(empty)
    assert leaves == []
    assert _nest.unflatten(structure, []) == empty


def test_types_of_containers_are_kept():
    nest = [
        collections.OrderedDict(z=1, a=2),
        Point(3, [4]),
        collections.defaultdict(list, k=5),
        collections.deque([6]),
    ]
    found = _nest.map_leaves(lambda x: x * 10, nest)
    assert found == [collections.OrderedDict(z=10, a=20), Point(30, [40]), {"k": 50}, collections.deque([60])]
    assert [type(one) for one in found] == [type(one) for one in nest]


def test_dataclasses_are_nests_and_not_made_through_their_init():
    nest = {"p": pair(1, [2, Frozen(3)]), "q": Plain(4, [5])}
    leaves, structure = _nest.flatten(nest)
    assert leaves == [1, 2, 3, 4, 5]
    found = _nest.unflatten(structure, ["a", "b", "c", "d", "e"])
    assert (found["p"].first, found["p"].second[1], found["q"]) == ("a", Frozen("c"), Plain("d", ["e"]))
    assert type(found["p"]) is Pair
    assert _nest.flatten(nest)[1] == structure


def test_a_dataclass_class_is_a_leaf():
    assert _nest.flatten([Plain])[0] == [Plain]


def test_a_dataclass_first_met_inside_another():
    @dataclasses.dataclass
    class Inner:
        value: Any

    @dataclasses.dataclass
    class Outer:
        inner: Any

    assert _nest.flatten(Outer([Inner(1), Inner(2)]))[0] == [1, 2]


def test_structures_differ():
    structures = [
        _nest.flatten(nest)[1] for nest in (1, [1], (1,), {"a": 1}, {"b": 1}, [1, 1], [[1]], Point(1, 2), [None])
    ]
    assert len(set(structures)) == len(structures) - 1  # None is a leaf as another
    assert _nest.flatten([None])[1] == _nest.flatten([1])[1]


@pytest.mark.parametrize(
    ("nest", "text"),
    [(5, "*"), (None, "*"), ({"b": [1, (2, None)], "a": 3}, "{'a': *, 'b': [*, (*, *)]}"), ([], "[]"), ({}, "{}")],
)
def test_structures_in_words(nest, text):
    assert _nest.describe(_nest.flatten(nest)[1]) == text


def test_dataclasses_in_words_are_the_same_in_every_process():
    text = _nest.describe(_nest.flatten([pair(1, [2]), Point(3, 4)])[1])
    assert "Pair" in text and "Point(x=*, y=*)" in text and "0x" not in text
