"""Nests: any structure of dict and its subclasses, list, tuple, namedtuple, dataclass, over optree. None is a leaf."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar, cast

import optree
from optree.utils import total_order_sorted

Structure: TypeAlias = optree.PyTreeSpec
"""What a nest is without its leaves. Hashable; two nests of equal structure have equal ones."""

_Class = TypeVar("_Class", bound=type)
_NAMESPACE = "hpcstrat"
_LEAF: Structure = optree.treespec_leaf(none_is_leaf=True, namespace=_NAMESPACE)
_leaf_types: set[type] = {type(None), int, float, bool, str, complex}


def flatten(nest: Any) -> tuple[list[Any], Structure]:
    """The leaves of `nest` in a fixed order (the keys of dicts sorted), and its structure."""
    if type(nest) in _leaf_types:
        return [nest], _LEAF
    leaves, structure = optree.tree_flatten(nest, none_is_leaf=True, namespace=_NAMESPACE)
    for leaf in leaves:
        if type(leaf) not in _leaf_types and _register(type(leaf)):
            return flatten(nest)
    return leaves, structure


@functools.lru_cache(maxsize=1024)
def describe(structure: Structure) -> str:
    """The structure in words, such as `{'a': *, 'b': [*, *]}`, by which ranks compare theirs.

    Equal ones have equal descriptions on all ranks, others have others. Keys of one repr might be in another order on
    another rank: a description with such keys is like no other rank's.
    """
    kind = structure.type
    if kind is None:
        return "*"
    parts = [describe(child) for child in structure.children()]
    if kind is list:
        return f"[{', '.join(parts)}]"
    if kind is tuple:
        return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
    if not issubclass(kind, dict):
        names = getattr(kind, "_fields", structure.entries())
        return f"{kind.__qualname__}({', '.join(map('{}={}'.format, names, parts))})"
    keys = [repr(key) for key in structure.entries()]
    text = f"{{{', '.join(map('{}: {}'.format, keys, parts))}}}"
    if len(set(keys)) < len(keys):
        text += f" with keys of one repr, which must differ: {os.urandom(8).hex()}"
    return text if kind is dict else f"{kind.__qualname__}({text})"


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The nest of this structure with these leaves."""
    return structure.unflatten(leaves)


def leaf(cls: _Class) -> _Class:
    """Makes the instances of a dataclass leaves, not nests: for one value of several parts. A class decorator."""
    _leaf_types.add(cls)
    return cls


def map_leaves(fn: Callable[[Any], Any], nest: Any) -> Any:
    """A nest like `nest` whose leaves are `fn(leaf)`."""
    leaves, structure = flatten(nest)
    return structure.unflatten([fn(leaf) for leaf in leaves])


def _register(cls: type) -> bool:
    """Teaches optree a class that it took for a leaf; whether `cls` is one of nests."""
    if dataclasses.is_dataclass(cls):
        _register_dataclass(cls)
    elif issubclass(cls, dict):
        _register_mapping(cls)
    else:
        _leaf_types.add(cls)
        return False
    return True


def _register_dataclass(cls: type) -> None:
    names = [field.name for field in dataclasses.fields(cls)]

    def to_leaves(node: Any) -> tuple[list[Any], None, list[str]]:
        return [getattr(node, name) for name in names], None, names

    def from_leaves(_: None, leaves: Iterable[Any]) -> Any:
        # Not through __init__: its checks and defaults are for the user's values, and a leaf may be anything here.
        node = object.__new__(cls)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(node, name, leaf)
        return node

    optree.register_pytree_node(cls, to_leaves, from_leaves, namespace=_NAMESPACE)  # pyright: ignore[reportArgumentType]


def _register_mapping(cls: type[dict[Any, Any]]) -> None:
    is_ordered = issubclass(cls, collections.OrderedDict)
    base = cast("Any", collections.OrderedDict if is_ordered else dict)
    ordered = list if is_ordered else total_order_sorted

    def to_leaves(node: Any) -> tuple[list[Any], tuple[Any, ...], list[Any]]:
        keys = ordered(node)
        return [base.__getitem__(node, key) for key in keys], tuple(keys), keys

    def from_leaves(keys: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        items = base(zip(keys, leaves, strict=True))
        # Through __init__, as TensorFlow does, because it may put the items where attributes are. Where it takes other
        # arguments, or changes what it is given, without it.
        try:
            node = cls(items)
            if len(node) == len(items) and all(base.__getitem__(node, key) is items[key] for key in keys):
                return node
        except Exception:
            pass
        node = cls.__new__(cls)
        for key, leaf in items.items():
            base.__setitem__(node, key, leaf)
        return node

    optree.register_pytree_node(cls, to_leaves, from_leaves, namespace=_NAMESPACE)  # pyright: ignore[reportArgumentType]
