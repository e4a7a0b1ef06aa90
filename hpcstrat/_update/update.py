"""What an update does to this rank's shards of the variables, once the gradients are there."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.chunks import Chunk, cut_at_variables
from hpcstrat._update.rule import Norms, UpdateRule

InPlace: TypeAlias = Mapping[int, tuple[Interval, Array]]
"""Gradients that this rank reads where they are, by variable: the elements that are therefore not
in its message, and the whole gradient, flat."""
NOTHING_IN_PLACE: InPlace = MappingProxyType({})


class Update(abc.ABC):
    """The update of this rank's shards of some variables.

    Args:
        chunks: the chunks of the shards.
        shards: for each variable this rank's part, in the order of the message.
    """

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        self._chunks = chunks
        self._shards = shards
        self._parts: dict[int, Update] = {}

    @abc.abstractmethod
    def _with(self, chunks: Sequence[Chunk], shard: Shard) -> Update:
        """An update of the same kind, of these chunks of one shard."""

    @abc.abstractmethod
    def apply(
        self, rule: UpdateRule, messages: Sequence[Array], op: ReduceOp, in_place: InPlace
    ) -> None:
        """Reduces the messages, and applies a rule that takes no norms; see `run`."""

    @abc.abstractmethod
    def add_squares(
        self,
        norms: Norms,
        messages: Sequence[Array],
        op: ReduceOp,
        in_place: InPlace,
        out: Array,
    ) -> None:
        """Reduces the messages, and adds the sum of squares of each term to `out`.

        `out`, of shape `(norms.size,)`, is zero before.
        """

    def forget_messages(self) -> None:
        """Drops what it keeps for the next update with the same messages, and so the messages."""
        for update in self._parts.values():
            update.forget_messages()

    def in_place(self, gradients: Sequence[Array]) -> InPlace:
        """Those of this rank's gradients that are read in place; here there are none.

        This requires that no other rank needs this rank's gradients of its own shards.
        """
        return NOTHING_IN_PLACE

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """Reduces the messages, and updates the variables and slots.

        Args:
            rule: the update.
            messages: all ranks', or the only one that counts.
            op: how the messages are reduced.
            in_place: gradients of this rank that are not, or not wholly, in its message.
            add_up: adds up an array of float64 over the ranks that have the other shards; `None` if
                this rank has all.
        """
        if rule.norms is None:
            self.apply(rule, messages, op, in_place)
            return
        norms = rule.norms
        # In one array: on a GPU, each copy to the host waits for the stream.
        xp = gpu.array_module(*[chunk.value for chunk in self._chunks[:1]])
        squares = xp.zeros((len(self._shards), norms.size), np.float64)
        for variable, update in self._by_variable().items():
            update.add_squares(norms, messages, op, in_place, squares[variable])
        # A norm needs all elements of a variable, some of them on other ranks, so nothing can be
        # updated before. The gradients are reduced again: a copy would cost as much memory.
        sums = gpu.to_host(squares)
        roots = np.sqrt(sums if add_up is None else add_up(sums)).tolist()
        for variable, update in self._by_variable().items():
            update.apply(norms.rule_with(roots[variable]), messages, op, in_place)

    def _by_variable(self) -> dict[int, Update]:
        """The update of each variable, as far as this rank has elements of it."""
        if not self._parts:
            for shard, chunks in cut_at_variables(self._chunks, self._shards):
                self._parts[shard.variable] = self._with(chunks, shard)
        return self._parts
