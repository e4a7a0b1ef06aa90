"""Plans of updates whose message is on a device: a GPU, or the host of a rank without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

from hpcstrat._communicators.device import Move, RankSlice
from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Interval, round_up
from hpcstrat._memory.layout import Layout, PackKernel, packings_of
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update.update import Run, Update

PIECE = 1 << 24
"""Bytes of new values that one call sends. Ranks need not agree on where a run of variables in
memory ends: only pieces in which one does are copied to the message."""


class Transfer(NamedTuple):
    """How some new values reach other ranks.

    Attributes:
        array: what one call sends or receives, flat: the variables in place where they are
            contiguous, else a part of the message.
        copies: then, each run of the variables and its part of the array.
    """

    array: Array
    copies: Sequence[tuple[Array, Array]] = ()


@final
class DevicePlan(Plan):
    """A plan with the flat message of its updates on this rank's device, and views of its parts.

    If slots are split over the ranks, a second message follows it: this rank's part.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update: see `Plan`.
        readable: the runs of the variables that this rank reads.
        own: the layout of the second message; `None` if slots are not split.
        slices: then, for each dtype of the message, the elements of each rank.

    Attributes:
        readable, slices: as above.
        message: the message of the gradients.
        gradients: the message by dtype.
        own_message: the message by which this rank updates its shards: the same, or its part.
        own_gradients: that message by dtype.
        has_integers: whether some of the variables are integers: NCCL casts these to sum them.
        sums: the sums of all gradients, prepared by the storage in the first step.
        sharing: the calls that send new values, likewise.
        copies: what is copied between the variables and the message before and after these calls.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        readable: Sequence[Run],
        own: Layout | None = None,
        slices: Sequence[Sequence[RankSlice]] = (),
    ) -> None:
        super().__init__(order, update)
        self.readable = readable
        self.slices = slices
        self._own = own
        self.has_integers: bool = any(group.dtype.kind in "iu" for group in order.layout.groups)
        self._packings: list[PackKernel] = []  # on a GPU
        self._drop()

    def _drop(self) -> None:
        self.message: Array = None
        self.own_message: Array = None
        self.gradients: list[Array] = []
        self.own_gradients: list[Array] = []
        self.sums: list[Move] | None = None
        self.sharing: list[Move] | None = None
        self.copies: list[tuple[Array, Array]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        whole = self.order.layout.nbytes
        if self._own is None:
            return whole
        # With the gap after this rank's last element: if parts are equal, a reduce-scatter writes a
        # whole part, also for a rank whose last variable ends before.
        return round_up(whole, ALIGNMENT) + round_up(self._own.nbytes, ALIGNMENT)

    def take(self, memory: Array) -> None:
        """Makes both messages and their views, in some bytes on this rank's device."""
        super().take(memory)
        layout = self.order.layout
        self.message = self.own_message = memory[: layout.nbytes]
        self.gradients = self.own_gradients = [group.of(self.message) for group in layout.groups]
        if self._own is not None:
            self.own_message = memory[round_up(layout.nbytes, ALIGNMENT) : self.nbytes]
            self.own_gradients = [group.of(self.own_message) for group in self._own.groups]
        # Kernels, views and addresses are made once: a steady step only launches.
        if not self._packings and gpu.is_on_gpu(memory):
            self._packings = packings_of(layout)

    def forget_message(self) -> None:
        """See `Plan.forget_message`."""
        super().forget_message()
        self._drop()

    def pack(self, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """Copies values on this rank's device to the message.

        Returns:
            For each dtype the flat array with the values: a part of the message or, if they are
            reduced over the ranks before they are used, perhaps the array that was passed. If all
            are in the message, it is the list `gradients` itself: then prepared sums fit.
        """
        if not self._packings:
            self.write(self.message, values)
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

    def transfers(self) -> list[Transfer]:
        """The transfers of all new values.

        The arrays are as large on all ranks. Where slots are split, there is one per dtype.
        """
        transfers = []
        for group, whole in zip(self.order.layout.groups, self.gradients, strict=True):
            readable = [
                (value, group.within(shard.message))
                for shard, value, _ in self.readable
                if shard.dtype == group.dtype
            ]
            everything = Interval(0, group.elements)
            # Slices of the ranks are of all elements.
            pieces = [everything] if self.slices else everything.split(PIECE // whole.itemsize)
            for piece in pieces:
                parts = [
                    (value[both.shift(-elements.start).slice], whole[both.slice])
                    for value, elements in readable
                    if (both := elements & piece)
                ]
                is_in_place = len(parts) == 1 and parts[0][0].size == piece.size
                transfers.append(
                    Transfer(parts[0][0]) if is_in_place else Transfer(whole[piece.slice], parts)
                )
        return transfers
