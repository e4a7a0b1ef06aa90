"""The scope of a strategy: its cross-replica context, in which variables are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcstrat import _context

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


class Scope:
    """See `Strategy.scope`."""

    __slots__ = ("_strategy", "_tokens")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._tokens: list[Any] = []

    def __enter__(self) -> Strategy:
        self._strategy._require_cross_replica("Strategy.scope")
        self._tokens.append(_context.current.set(self._strategy._cross_context))
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        _context.current.reset(self._tokens.pop())


class DefaultScope(Scope):
    """The default strategy's, which changes nothing: its contexts count there already, as in TensorFlow."""

    __slots__ = ()

    def __enter__(self) -> Strategy:
        if _context.has_strategy():
            raise RuntimeError("Strategy.scope was called in the scope of another strategy; leave that scope first")
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        pass
