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


def pair(first, second):
    made = object.__new__(Pair)
    made.first, made.second = first, second
    return made


def test_leaves_in_a_fixed_order():
    nest = {"b": 1, "a": [2, (3, None)], "c": Point({"y": 4, "x": 5}, "text")}
    leaves, structure = nests.flatten(nest)
    assert leaves == [2, 3, None, 1, 5, 4, "text"]
    assert unflatten(structure, leaves) == nest
    assert nests.flatten({"c": nest["c"], "a": nest["a"], "b": 1})[1] == structure


@pytest.mark.parametrize(
    "leaf",
    [None, 1, 2.5, "text", b"bytes", np.ones(2), {1, 2}, object(), range(3), len],
    ids=lambda leaf: type(leaf).__name__,
)
def test_what_is_no_nest_is_a_leaf(leaf):
    leaves, structure = nests.flatten(leaf)
    assert len(leaves) == 1 and leaves[0] is leaf
    assert unflatten(structure, ["new"]) == "new"


@pytest.mark.parametrize("empty", [[], {}, (), [[], {}], {"a": ()}], ids=str)
def test_empty_nests(empty):
    leaves, structure = nests.flatten(empty)
    assert leaves == []
    assert unflatten(structure, []) == empty


def test_types_of_containers_are_kept():
    nest = [
        collections.OrderedDict(z=1, a=2),
        Point(3, [4]),
        collections.defaultdict(list, k=5),
        collections.deque([6]),
    ]
    found = nests.map_leaves(lambda x: x * 10, nest)
    assert found == [
        collections.OrderedDict(z=10, a=20),
        Point(30, [40]),
        {"k": 50},
        collections.deque([60]),
    ]
    assert [type(one) for one in found] == [type(one) for one in nest]


def test_dataclasses_are_nests_and_not_made_through_their_init():
    nest = {"p": pair(1, [2, Frozen(3)]), "q": Plain(4, [5])}
    leaves, structure = nests.flatten(nest)
    assert leaves == [1, 2, 3, 4, 5]
    found = unflatten(structure, ["a", "b", "c", "d", "e"])
    assert (found["p"].first, found["p"].second[1], found["q"]) == (
        "a",
        Frozen("c"),
        Plain("d", ["e"]),
    )
    assert type(found["p"]) is Pair
    assert nests.flatten(nest)[1] == structure


def test_arrays_that_are_dataclasses_are_leaves():
    @dataclasses.dataclass
    class Exported:
        store: Any

        def __array__(self, dtype=None, copy=None):
            return np.zeros(2)

    @dataclasses.dataclass
    class Indexed:
        store: Any
        shape = property(len)
        dtype = np.dtype(int)

        def __getitem__(self, index):
            return self.store[index]

    @dataclasses.dataclass
    class Description:
        shape: Any
        dtype: Any

    for array in (Exported([1]), Indexed([1])):
        leaves, _ = nests.flatten({"x": array, "y": 1})
        assert leaves[0] is array and len(leaves) == 2
    assert nests.flatten(Description((2,), int))[0] == [2, int]


def test_a_dataclass_class_is_a_leaf():
    assert nests.flatten([Plain])[0] == [Plain]


def test_a_dataclass_first_met_inside_another():
    @dataclasses.dataclass
    class Inner:
        value: Any

    @dataclasses.dataclass
    class Outer:
        inner: Any

    assert nests.flatten(Outer([Inner(1), Inner(2)]))[0] == [1, 2]


def test_structures_differ():
    structures = [
        nests.flatten(nest)[1]
        for nest in (1, [1], (1,), {"a": 1}, {"b": 1}, [1, 1], [[1]], Point(1, 2), [None])
    ]
    assert len(set(structures)) == len(structures) - 1  # None is a leaf like any other
    assert nests.flatten([None])[1] == nests.flatten([1])[1]


class Keys(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class OnlyKeywords(dict):
    def __init__(self, **kwargs):
        super().__init__(kwargs)


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


def named(name, items):
    made = Named(name)
    dict.update(made, items)
    return made


def strict(items):
    made = Strict({})
    dict.update(made, items)
    return made


@pytest.mark.parametrize(
    "nest",
    [
        Keys(b=1, a=2),
        Ordered(b=1, a=2),
        Attributes(b=1, a=2),
        OnlyKeywords(b=1, a=2),
        named("n", {"b": 1, "a": 2}),
        strict({"b": 1, "a": 2}),
        Default(list, b=1, a=2),
        collections.Counter(b=1, a=2),
    ],
    ids=lambda nest: type(nest).__name__,
)
def test_subclasses_of_dict_are_nests(nest):
    leaves, structure = nests.flatten([nest])
    in_order = isinstance(nest, collections.OrderedDict)
    assert leaves == ([1, 2] if in_order else [2, 1])
    marks = [object(), object()]
    (found,) = unflatten(structure, marks)
    assert type(found) is type(nest) and dict(found) == dict(
        zip("ba" if in_order else "ab", marks, strict=True)
    )
    assert list(found) == (["b", "a"] if in_order else ["a", "b"])
    assert nests.describe(nests.flatten(nest)[1]).startswith(f"{type(nest).__name__}({{")
    if isinstance(nest, Attributes):
        assert found.a is marks[0] and found.b is marks[1]


def test_structures_of_subclasses_of_dict():
    assert (
        nests.flatten(Keys(a=1, b=2))[1]
        == nests.flatten(Keys(b=3, a=4))[1]
        != nests.flatten(Keys(a=1, c=2))[1]
    )
    assert nests.flatten(Ordered(a=1, b=2))[1] != nests.flatten(Ordered(b=3, a=4))[1]
    assert nests.flatten(Keys(a=1))[1] != nests.flatten({"a": 1})[1]
    assert nests.map_leaves(lambda x: x + 1, Keys({1: Keys(x=2), "a": [3]})) == {
        1: {"x": 3},
        "a": [4],
    }


@pytest.mark.parametrize(
    ("nest", "text"),
    [
        (5, "*"),
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
        ({"a, NoneIsLeaf": 1, "b": 2}, "{'a, NoneIsLeaf': *, 'b': *}"),
        ({1: 2, "1": 3}, "{1: *, '1': *}"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_structures_in_words(nest, text):
    assert nests.describe(nests.flatten(nest)[1]) == text


def test_deep_nests():
    nest = 7
    for _ in range(1000):
        nest = [nest]
    leaves, structure = nests.flatten(nest)
    assert leaves == [7]
    assert nests.describe(structure) == "[" * 1000 + "*" + "]" * 1000
    itself = []
    itself.append(itself)
    for refused in ([nest], itself):
        with pytest.raises(
            ValueError, match="the list is nested more than 1000 levels deep, or contains itself"
        ):
            nests.flatten(refused)


def test_no_two_structures_have_one_description():
    values = [
        *(1, [1], (1,), [[1]], {"a": 1}, {"a, NoneIsLeaf": 1}, {"a, NoneIsLeaf": 1, "b": 2}),
        *(
            {"a, NoneIsLeaf": 1, "c": 2},
            {"'a": 1},
            {"a'": 1},
            {"a': *, 'b": 1},
            {"a": 1, "b": 2},
            {1: 2},
            {"1": 2},
        ),
        *([1, 2], (1, 2), Point(1, 2), Keys(a=1), Ordered(a=1), collections.OrderedDict(a=1)),
    ]
    assert len({nests.describe(nests.flatten(nest)[1]) for nest in values}) == len(values)


class Key:
    """Keys with equal reprs; they cannot be sorted, so they stay in the order of insertion."""

    def __init__(self, repr_="k"):
        self.repr = repr_

    def __repr__(self):
        return self.repr


def test_keys_of_one_repr_are_told_apart():
    """By a description that no other rank has: the keys of two ranks cannot be matched."""
    alike = [
        {Key(): 1, Key(): 2},
        [{Key(): 1, Key(): 2}],
        {Key(): 1, Key(): 2},
        Keys({Key(): 1, Key(): 2}),
    ]
    structures = [nests.flatten(nest)[1] for nest in alike]
    descriptions = [nests.describe(structure) for structure in structures]
    assert len(set(descriptions)) == len(descriptions)
    assert all("keys of equal reprs" in text for text in descriptions)
    assert [nests.describe(structure) for structure in structures] == descriptions
    one, other = Key("one"), Key("other")
    assert nests.describe(nests.flatten({one: 1, other: 2})[1]) == "{one: *, other: *}"
    assert nests.describe(nests.flatten({other: 1, one: 2})[1]) == "{other: *, one: *}"
