"""Nests of dicts and their subclasses, lists, tuples, namedtuples and dataclasses, over optree.

`None` is a leaf, except in the elements of datasets, where it is a part of the structure.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import optree
from optree.utils import total_order_sorted

from hpcstrat._core.call_name import current_call

Structure: TypeAlias = optree.PyTreeSpec
"""A nest without its leaves: hashable, and equal for nests of equal structure."""

_NAMESPACE = "hpcstrat"
# The structure of a leaf; a structure with `None` as a leaf equals none without.
_LEAVES: dict[bool, Structure] = {
    none_is_leaf: optree.treespec_leaf(none_is_leaf=none_is_leaf, namespace=_NAMESPACE)
    for none_is_leaf in (True, False)
}
# Types that are known to be leaves: most nests are just a leaf, and need no call of optree.
leaf_types: set[type] = {type(None), int, float, bool, str, complex}


def flatten(nest: Any, none_is_leaf: bool = True) -> tuple[list[Any], Structure]:
    """The leaves of `nest` in a fixed order (the keys of dicts sorted), and its structure.

    Raises:
        ValueError: it is nested too deep.
    """
    if type(nest) in leaf_types and (none_is_leaf or nest is not None):
        return [nest], _LEAVES[none_is_leaf]
    try:
        leaves, structure = optree.tree_flatten(
            cast("Any", nest), none_is_leaf=none_is_leaf, namespace=_NAMESPACE
        )
    except RecursionError as error:
        raise ValueError(
            f"{current_call()}: the {type(nest).__name__} is nested more than "
            f"{optree.MAX_RECURSION_DEPTH} levels deep, or contains itself; pass a flatter one"
        ) from error
    for leaf in leaves:
        # A class is registered when it first occurs: optree takes dataclasses and subclasses of
        # dict for leaves.
        if type(leaf) not in leaf_types and _register(type(leaf)):
            return flatten(nest, none_is_leaf)
    return leaves, structure


def describe(structure: Structure) -> str:
    """The structure as text, such as `{'a': *, 'b': [*, *]}`, for ranks to compare theirs.

    Equal structures have equal descriptions on all ranks, and different ones different
    descriptions. Keys with equal reprs might be sorted differently on another rank, so a
    description with such keys equals no other rank's.
    """
    # A leaf skips the cache: hashing costs more than this comparison.
    is_leaf = structure is _LEAVES[True] or structure is _LEAVES[False]
    return "*" if is_leaf else _describe(structure)


@functools.lru_cache(maxsize=1024)
def _describe(structure: Structure) -> str:
    # Not by recursion: nests may be deeper than Python allows calls to be.
    nodes, below = [], [structure]
    while below:
        nodes.append(node := below.pop())
        below += node.children()
    texts: list[str] = []
    for node in reversed(nodes):
        start = len(texts) - node.num_children
        texts[start:] = [_join(node, texts[start:])]
    return texts[0]


def _join(node: Structure, members: list[str]) -> str:
    kind = node.type
    if kind is None or kind is type(None):
        return "*" if kind is None else "None"
    if kind is list:
        return f"[{', '.join(members)}]"
    if kind is tuple:
        return f"({', '.join(members)}{',' * (len(members) == 1)})"
    if not issubclass(kind, dict):
        names = getattr(kind, "_fields", node.entries())
        return f"{kind.__qualname__}({', '.join(map('{}={}'.format, names, members))})"
    # Text, because structures cannot be compared across processes: their hashes differ.
    keys = [repr(key) for key in node.entries()]
    text = f"{{{', '.join(map('{}: {}'.format, keys, members))}}}"
    if len(set(keys)) < len(keys):
        text += f" with keys of equal reprs, which must differ: {os.urandom(8).hex()}"
    return text if kind is dict else f"{kind.__qualname__}({text})"


def map_leaves(fn: Callable[[Any], Any], nest: Any, none_is_leaf: bool = True) -> Any:
    """A nest like `nest` whose leaves are `fn(leaf)`."""
    leaves, structure = flatten(nest, none_is_leaf)
    return structure.unflatten([fn(leaf) for leaf in leaves])


def _register(cls: type) -> bool:
    """Registers a class that optree took for a leaf; returns whether its instances are nests.

    Arrays never are, even if the class is a dataclass, as zarr's is.
    """
    if hasattr(cls, "__array__") or all(
        hasattr(cls, name) for name in ("shape", "dtype", "__getitem__")
    ):
        leaf_types.add(cls)
        return False
    if dataclasses.is_dataclass(cls):
        _register_dataclass(cls)
    elif issubclass(cls, dict):
        _register_mapping(cls)
    else:
        leaf_types.add(cls)
        return False
    return True


def _register_dataclass(cls: type) -> None:
    names = [field.name for field in dataclasses.fields(cls)]

    def to_leaves(node: Any) -> tuple[list[Any], None, list[str]]:
        return [getattr(node, name) for name in names], None, names

    def from_leaves(_: None, leaves: Iterable[Any]) -> Any:
        # Not through __init__, which may check or convert the user's values: a leaf can be anything
        # here, such as a PerReplica or a TensorSpec.
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
        # Through __init__, as in TensorFlow, because some classes also set attributes from the
        # items; without it if it takes other arguments, or changes the items.
        try:
            node = cls(items)
            if len(node) == len(items) and all(
                base.__getitem__(node, key) is items[key] for key in keys
            ):
                return node
        except Exception:
            pass
        node = cls.__new__(cls)
        for key, leaf in items.items():
            base.__setitem__(node, key, leaf)
        return node

    optree.register_pytree_node(cls, to_leaves, from_leaves, namespace=_NAMESPACE)  # pyright: ignore[reportArgumentType]
