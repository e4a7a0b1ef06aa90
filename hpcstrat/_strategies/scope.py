"""The scope of a strategy: its cross-replica context, in which variables are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcstrat import _context
from hpcstrat._variable_creators import creators

if TYPE_CHECKING:
    from hpcstrat._strategies.base import Strategy


class Scope:
    """See `Strategy.scope`."""

    __slots__ = ("_entered", "_strategy")

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered: list[Any] = []

    def __enter__(self) -> Strategy:
        self._strategy._require_cross_replica("Strategy.scope")
        self._entered.append((_context.current.set(self._strategy._cross_context), creators.get()))
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        token, asked = self._entered[-1]
        if creators.get() != asked:
            raise RuntimeError(
                "Strategy.scope was left inside a variable_creator_scope that was entered in it; leave that one first"
            )
        self._entered.pop()
        _context.current.reset(token)


class DefaultScope(Scope):
    """The default strategy's, which changes nothing: its contexts count there already, as in TensorFlow."""

    __slots__ = ()

    def __enter__(self) -> Strategy:
        if _context.has_strategy():
            raise RuntimeError("Strategy.scope was called in the scope of another strategy; leave that scope first")
        return self._strategy

    def __exit__(self, *_: Any) -> None:
        pass
