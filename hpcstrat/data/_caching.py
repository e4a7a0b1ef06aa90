"""Caches: what a pass over the stages before has found is kept for the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from hpcstrat.data import _elements
from hpcstrat.data._choosing import Choosing
from hpcstrat.data._node import Chunk, Failure, Node, caught, opened
from hpcstrat.data._walk import Walk


def cache(source: Node) -> Node:
    """The stage that keeps what `source` computes.

    Orders are kept by walking them again. Where no code of the user's runs there is nothing else to keep: the arrays
    are in memory as it is.
    """
    if not source.user_code:
        return _SameOrder(source)
    return _ByPosition(source) if source.width is None else _ByKey(source)


class _Cache(Choosing):
    def __init__(self, source: Node) -> None:
        super().__init__(source, "cache()")

    def _chosen(self, size: int) -> int:
        return size


@final
class _SameOrder(_Cache):
    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        return self._source.chunks(walk.frozen())


@final
class _ByKey(_Cache):
    """Keeps the elements that were asked for, so each replica keeps its own."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self._kept: dict[bytes, Any] = {}

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        return self._source.chunks(walk.frozen())

    def load(self, item: Any) -> Any:
        return _elements.copied(self._keep(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self._keep(item) for item in chunk])

    def _keep(self, item: Any) -> Any:
        key = item.tobytes()
        if key not in self._kept:
            self._kept[key] = self._source.load(item)
        return self._kept[key]


@final
class _ByPosition(_Cache):
    """Keeps the elements of the first pass that reached the end, in which none failed."""

    def __init__(self, source: Node) -> None:
        super().__init__(source)
        self.rows = None
        self._kept: list[Any] | None = None

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        if self._kept is not None:
            for element in self._kept:
                yield [element]
            return
        kept = []
        for element in caught(self._source.elements(walk.frozen())):
            kept.append(element)
            yield [element]
        if not any(isinstance(element, Failure) for element in kept):
            self._kept = kept

    def load(self, item: Any) -> Any:
        return _elements.copied(opened(item))

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([opened(item) for item in chunk])
