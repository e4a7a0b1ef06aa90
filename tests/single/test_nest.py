"""Nests: the order of their leaves, the types of their containers, and their structures in words."""

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
from internals import nests

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


def unflatten(structure, leaves):
    return structure.unflatten(leaves)  # a nest of any type


def structure_of(nest):
    return nests.flatten(nest)[1]


def pair(first, second):
    made = object.__new__(Pair)
    made.first, made.second = first, second
    return made


def test_leaves_in_a_fixed_order():
    nest = {"b": 1, "a": [2, (3, None)], "c": Point({"y": 4, "x": 5}, "text")}
    leaves, structure = nests.flatten(nest)
    assert leaves == [2, 3, None, 1, 5, 4, "text"]
    assert unflatten(structure, leaves) == nest
    assert structure_of({"c": nest["c"], "a": nest["a"], "b": 1}) == structure


def test_what_is_no_nest_is_a_leaf():
    for leaf in (None, 1, "text", b"bytes", np.ones(2), {1, 2}, object(), range(3), len, Plain):
        leaves, structure = nests.flatten(leaf)
        assert len(leaves) == 1 and leaves[0] is leaf
        assert unflatten(structure, ["new"]) == "new"


def test_types_of_containers_are_kept():
    nest = [Point(3, [4]), collections.defaultdict(list, k=5), collections.deque([6])]
    found = nests.map_leaves(lambda x: x * 10, nest)
    assert found == [Point(30, [40]), {"k": 50}, collections.deque([60])]
    assert [type(one) for one in found] == [type(one) for one in nest]
    for empty in [], {}, (), [[], {}], {"a": ()}:
        leaves, structure = nests.flatten(empty)
        assert leaves == [] and unflatten(structure, []) == empty


def test_dataclasses_are_nests_and_not_made_through_their_init():
    @dataclasses.dataclass
    class MetInside:
        value: Any

    nest = {"p": pair(1, [2, Frozen(MetInside(3))]), "q": Plain(4, [5])}
    leaves, structure = nests.flatten(nest)
    assert leaves == [1, 2, 3, 4, 5]
    found = unflatten(structure, ["a", "b", "c", "d", "e"])
    assert type(found["p"]) is Pair
    assert found["p"].first == "a" and found["p"].second == ["b", Frozen(MetInside("c"))]
    assert found["q"] == Plain("d", ["e"])
    assert structure_of(nest) == structure


def test_arrays_that_are_dataclasses_are_leaves():
    def kind(*fields, **members):
        return dataclasses.make_dataclass("Kind", fields, namespace=members)

    exported = kind("store", __array__=lambda self: np.zeros(2))
    indexed = kind("store", shape=(1,), dtype=np.dtype(int), __getitem__=lambda self, i: i)
    for array in (exported([1]), indexed([1])):
        leaves, _ = nests.flatten({"x": array, "y": 1})
        assert leaves[0] is array and len(leaves) == 2
    assert nests.flatten(kind("shape", "dtype")((2,), int))[0] == [2, int]


# ---- subclasses of dict


class Keys(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Named(dict):
    """Is not constructed from items."""

    def __init__(self, name):
        self.name = name


class Strict(dict):
    """Changes the values it is given."""

    def __init__(self, items):
        super().__init__((key, str(value)) for key, value in items.items())

    def __setitem__(self, key, value):
        raise AssertionError("set by its method")


class Default(collections.defaultdict):
    pass


def filled(made, items):
    dict.update(made, items)
    return made


@pytest.mark.parametrize(
    "nest",
    [
        Keys(b=1, a=2),
        Ordered(b=1, a=2),
        Attributes(b=1, a=2),
        filled(Named("n"), {"b": 1, "a": 2}),
        filled(Strict({}), {"b": 1, "a": 2}),
        Default(list, b=1, a=2),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_subclasses_of_dict_are_nests(nest):
    leaves, structure = nests.flatten([nest])
    keys = ["b", "a"] if isinstance(nest, collections.OrderedDict) else ["a", "b"]
    assert leaves == [nest[key] for key in keys]
    marks = [object(), object()]
    (found,) = unflatten(structure, marks)
    assert type(found) is type(nest) and list(found.items()) == [*zip(keys, marks, strict=True)]
    assert nests.describe(structure_of(nest)).startswith(f"{type(nest).__name__}({{")
    if isinstance(nest, Attributes):
        assert found.a is marks[0] and found.b is marks[1]


# ---- structures


def test_structures_are_equal_if_all_but_the_leaves_are():
    nests_ = [1, [1], (1,), {"a": 1}, {"b": 1}, [1, 1], [[1]], Point(1, 2), Keys(a=1), Keys(c=1)]
    structures = [*map(structure_of, nests_), structure_of(Ordered(a=1, b=2))]
    assert len({*structures, structure_of(Ordered(b=3, a=4))}) == len(structures) + 1
    assert structure_of([None]) == structure_of([1])  # None is a leaf like any other
    assert structure_of(Keys(a=1, b=2)) == structure_of(Keys(b=3, a=4))
    assert nests.map_leaves(lambda x: x + 1, Keys({1: Keys(x=2), "a": [3]})) == {
        1: {"x": 3},
        "a": [4],
    }


WORDS = [
    (None, "*"),
    ({"b": [1, (2, None)], "a": 3}, "{'a': *, 'b': [*, (*, *)]}"),
    ([], "[]"),
    ({}, "{}"),
    ((1,), "(*,)"),
    (Point(3, {"z": 4}), "Point(x=*, y={'z': *})"),
    (pair(1, [2]), "Pair(first=*, second=[*])"),
    (collections.OrderedDict(b=1, a=2), "OrderedDict({'b': *, 'a': *})"),
    (collections.defaultdict(lambda: 0, a=1), "defaultdict({'a': *})"),
    (Keys(b=1, a=2), "Keys({'a': *, 'b': *})"),
    ({1: 2, "1": 3}, "{1: *, '1': *}"),
]


def test_structures_in_words():
    for nest, text in WORDS:
        assert nests.describe(structure_of(nest)) == text
    alike = [{"a, NoneIsLeaf": 1}, {"a, NoneIsLeaf": 1, "c": 2}, {"'a": 1}, {"a'": 1}]
    alike += [{"a': *, 'b": 1}, {"a": 1, "b": 2}, {1: 2}, {"1": 2}, Keys(a=1), Ordered(a=1)]
    assert len({nests.describe(structure_of(nest)) for nest in alike}) == len(alike)


class Key:
    """Keys with equal reprs; they cannot be sorted, so they stay in the order of insertion."""

    def __init__(self, repr_="k"):
        self.repr = repr_

    def __repr__(self):
        return self.repr


def test_keys_of_one_repr_are_told_apart():
    """By a description that no other rank has: the keys of two ranks cannot be matched."""
    structures = [structure_of(kind({Key(): 1, Key(): 2})) for kind in (dict, dict, Keys)]
    descriptions = [nests.describe(structure) for structure in structures]
    assert len(set(descriptions)) == len(descriptions)
    assert all("keys of equal reprs" in text for text in descriptions)
    assert [nests.describe(structure) for structure in structures] == descriptions
    nest = {Key("other"): 1, Key("one"): 2}
    assert nests.describe(structure_of(nest)) == "{other: *, one: *}"
