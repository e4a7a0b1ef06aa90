"""The plan of an update on a rank's device, with the flat message of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from hpcstrat._communicators.device import Move, RankSlice
from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Interval, round_up
from hpcstrat._memory.layout import PackKernel, packings_of
from hpcstrat._storage.plan import MessageOrder, Plan
from hpcstrat._storage.shards import RankPart, rank_slices
from hpcstrat._update.update import Chunk, Update

PIECE = 1 << 24
"""Bytes of new values that one call sends. Ranks need not agree on where a run of variables in
memory ends: only pieces in which one does are copied to the message."""


class Transfer(NamedTuple):
    """New values of one dtype, as one call sends or receives them.

    Attributes:
        flat: the array that is sent or received: the variables in place where they are contiguous,
            else a part of the message.
        parts: in the latter case, each run of the variables and its part of `flat`.
    """

    flat: Array
    parts: list[tuple[Array, Array]]


@final
class DevicePlan(Plan):
    """A plan with the flat message of its updates on this rank's device, and views of its parts.

    If slots are split over the ranks, a second message follows it: this rank's part.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update: see `Plan`.
        readable: the runs of the variables that this rank reads.
        rank_parts: each rank's, where slots are split.
        rank: this rank.

    Attributes:
        readable: as above; with `transfers`, unused where each rank updates all.
        message: the message of the gradients, in the memory that the plan has taken.
        gradients: the message by dtype.
        own_message: the message by which this rank updates its shards: the same, or its part.
        own_gradients: that message by dtype.
        slices: for each dtype of the message, the elements of each rank; empty if none is split.
        transfers: how new values reach the other ranks: in the same pieces on all ranks or, where
            slots are split, one per dtype.
        reductions: the sums of all gradients, prepared by the storage in the first step.
        sharing: the calls that send new values, likewise.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        readable: Sequence[Chunk],
        rank_parts: Sequence[RankPart] = (),
        rank: int = 0,
    ) -> None:
        super().__init__(order, update)
        self.readable = readable
        self._own_layout = rank_parts[rank].layout if rank_parts else None
        self.slices: list[list[RankSlice]] = rank_slices(order, rank_parts) if rank_parts else []
        self._packings: list[PackKernel] = []  # on a GPU
        self._drop()

    def _drop(self) -> None:
        self.message: Array = None
        self.own_message: Array = None
        self.gradients: list[Array] = []
        self.own_gradients: list[Array] = []
        self.transfers: list[Transfer] = []
        self.reductions: list[Move] | None = None
        self.sharing: list[Move] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        whole = self.order.layout.nbytes
        if self._own_layout is None:
            return whole
        # With the gap after this rank's last element: if parts are equal, a reduce-scatter writes a
        # whole part, also for a rank whose last variable ends before.
        return round_up(whole, ALIGNMENT) + round_up(self._own_layout.nbytes, ALIGNMENT)

    def take(self, memory: Array) -> None:
        """Makes both messages and all views of them, in some bytes on this rank's device."""
        super().take(memory)
        layout = self.order.layout
        self.message = self.own_message = memory[: layout.nbytes]
        self.gradients = self.own_gradients = [group.of(self.message) for group in layout.groups]
        if self._own_layout is not None:
            self.own_message = memory[round_up(layout.nbytes, ALIGNMENT) : self.nbytes]
            self.own_gradients = [group.of(self.own_message) for group in self._own_layout.groups]
        # Kernels, views and addresses are made once: a steady step only launches.
        if not self._packings and gpu.is_on_gpu(memory):
            self._packings = packings_of(layout)
        self.transfers, self.reductions, self.sharing = [], None, None
        for group, whole in zip(layout.groups, self.gradients, strict=True):
            runs = [
                (value, group.within(shard.message))
                for shard, value, _ in self.readable
                if shard.dtype == group.dtype
            ]
            everything = Interval(0, group.elements)
            # Slices of the ranks are of all elements.
            pieces = [everything] if self.slices else everything.split(PIECE // whole.itemsize)
            self.transfers += [_transfer(piece, whole, runs) for piece in pieces]

    def forget_message(self) -> None:
        """See `Plan.forget_message`."""
        super().forget_message()
        self._drop()

    def pack(self, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """Copies values on this rank's device to the message.

        Returns:
            For each dtype the flat array with the values: a part of the message or, if they are
            reduced over the ranks before they are used, perhaps the array that was passed. If all
            are in the message, it is the list `gradients` itself: then prepared reductions fit.
        """
        if not self._packings:
            self.order.write(self.message, values)
            return self.gradients
        arrays, sources = list(values), self.gradients
        for index, group in enumerate(self.order.layout.groups):
            for i in group.members:
                # The packing kernel copies words, and converts nothing.
                if arrays[i].dtype != group.dtype:
                    arrays[i] = arrays[i].astype(group.dtype)
            first = arrays[group.members[0]]
            # A single gradient is its own message: NCCL reads it in place, which saves the copy.
            if is_reduced and len(group.members) == 1 and first.flags.c_contiguous:
                sources = [*sources[:index], first.reshape(-1), *sources[index + 1 :]]
            else:
                self._packings[index](arrays, self.message)
        return sources


def _transfer(piece: Interval, whole: Array, runs: Sequence[tuple[Array, Interval]]) -> Transfer:
    """The transfer of some elements of a dtype, whose variables are in these runs."""
    parts = [
        (value[both.shift(-elements.start).slice], whole[both.slice])
        for value, elements in runs
        if (both := elements & piece)
    ]
    if len(parts) == 1 and parts[0][0].size == piece.size:
        return Transfer(parts[0][0], [])
    return Transfer(whole[piece.slice], parts)
