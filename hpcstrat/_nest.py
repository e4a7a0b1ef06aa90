"""Nests: any structure of dict, list, tuple, namedtuple and dataclass, over optree. `None` is a leaf."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import optree

Structure: TypeAlias = optree.PyTreeSpec
"""What a nest is without its leaves. Hashable; two nests of equal structure have equal ones."""

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
    """The structure in words, such as `{'a': *, 'b': [*, *]}`; equal ones have equal descriptions on all ranks."""
    return str(structure).removeprefix("PyTreeSpec(").partition(", NoneIsLeaf")[0]


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """The nest of this structure with these leaves."""
    return structure.unflatten(leaves)


def map_leaves(fn: Callable[[Any], Any], nest: Any) -> Any:
    """A nest like `nest` whose leaves are `fn(leaf)`."""
    leaves, structure = flatten(nest)
    return structure.unflatten([fn(leaf) for leaf in leaves])


def _register(cls: type) -> bool:
    """Teaches optree a dataclass that it took for a leaf; whether `cls` was one."""
    if not dataclasses.is_dataclass(cls):
        _leaf_types.add(cls)
        return False
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
    return True
