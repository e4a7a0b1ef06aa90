"""Plans of updates whose message is on a device: a GPU, or the host of a rank without one.

DevicePlan       every rank has the sums of all gradients, and makes the whole update
CentralPlan      only the root has them; it sends the new values
DevicePartsPlan  each rank has those of its part of the elements; all send new values
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias, final

from hpcstrat._communicators.device import DeviceCommunicator, Move
from hpcstrat._core import gpu
from hpcstrat._core.call_name import UPDATE, Details, span
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Interval, round_up
from hpcstrat._memory.layout import PackKernel, packings_of
from hpcstrat._storage.order import MessageOrder, RankPart, rank_slices, slices_of
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update

PIECE = 1 << 24
"""Bytes of new values that one call sends. Ranks need not agree on where a run of variables in
memory ends: only pieces in which one does are copied to the message."""

Readable: TypeAlias = "Sequence[Sequence[tuple[Interval, Array]]]"
"""What programs read on this rank; see `LocalBlocks.to_read`."""


def _on_stream(name: str) -> Callable[..., Details]:
    """The span of a method of a plan."""
    return lambda plan, *_: Details(name, None, plan.communicator.stream)


class DevicePlan(Plan):
    """The plan of an update that every rank makes, by a flat message on its own device.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update: see `Plan`.
        communicator: the ranks.

    Attributes:
        message: the message of the gradients.
        gradients: the message by dtype.
        has_integers: whether some of the variables are integers: NCCL casts these to sum them.
    """

    _reduces_to: int | None = None
    """The rank that needs the gradients; `None` if all do."""

    def __init__(
        self, order: MessageOrder, update: Update, communicator: DeviceCommunicator
    ) -> None:
        super().__init__(order, update)
        self.communicator = communicator
        self.has_integers: bool = any(group.dtype.kind in "iu" for group in order.layout.groups)
        self._packings: list[PackKernel] = []  # on a GPU
        self._drop()

    def _drop(self) -> None:
        self.message: Array = None
        self.gradients: list[Array] = []
        self._sums: list[Move] | None = None

    def take(self, memory: Array) -> None:
        """Makes the message and its views, in some bytes on this rank's device."""
        super().take(memory)
        layout = self.order.layout
        self.message = memory[: layout.nbytes]
        self.gradients = [group.of(self.message) for group in layout.groups]
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

    # ---- collective: gradients to where updates read them, and new values to who reads these

    def sum(self, variables: Collection[int] | None = None) -> None:
        """Sums the gradients of some variables, or of all, in the message. These are floats."""
        if variables is not None:
            sums = self._prepare_sums(variables)
        else:
            if self._sums is None:
                self._sums = self._prepare_sums(range(len(self.order.blocks)))
            sums = self._sums
        self.communicator.launch("the sum of gradients", sums)

    def _prepare_sums(self, variables: Collection[int]) -> list[Move]:
        prepare, root = self.communicator.prepare_reduce, self._reduces_to
        gradients = self.order.views_of(variables, self.message)
        return [move for flat in gradients for move in prepare(flat, ReduceOp.SUM, root)]

    def reduce(self, sources: Sequence[Array], op: Aggregation) -> None:
        """Reduces all values in the message, or given as `pack` returns them.

        Where it sums floats, other ranks may launch prepared sums instead.
        """
        for k, source in enumerate(sources):
            if source.size:  # else there is no prepared sum of it
                self._reduce(k, source, op)

    def _reduce(self, k: int, source: Array, op: Aggregation) -> None:
        """Reduces the values of dtype `k`; by `FIRST_REPLICA` they are in the message."""
        if op is FIRST_REPLICA:
            self.communicator.broadcast_flat(source, 0)
        else:
            self.communicator.all_reduce_flat(source, self.gradients[k], op)

    @span(UPDATE, _on_stream("update"))
    def run(self, rule: UpdateRule) -> None:
        """Updates this rank's shards. Collective if `rule` has norms."""
        self.update.run(rule, [self.message])

    def send_values(self) -> None:
        """Sends new values to the ranks that have not computed them. Here all have."""


class NewValues(NamedTuple):
    """Prepared calls that send new values, and what is copied before and after them.

    What is contiguous in a rank's memory is sent or received in place. That may differ from rank to
    rank, because memory is freed at different moments; the calls may not.

    Attributes:
        moves: the calls.
        copies: of what is not in place, runs of the variables and their parts of the message.
    """

    moves: Sequence[Move]
    copies: Sequence[tuple[Array, Array]]

    def send(self, communicator: DeviceCommunicator, sends: bool, receives: bool) -> None:
        """Makes the calls, on a rank that has computed new values or receives others'."""
        if sends:
            for value, part in self.copies:
                part[...] = value
        communicator.launch("the new values", self.moves)
        if receives:
            for value, part in self.copies:
                value[...] = part


class Piece(NamedTuple):
    """New values that one call sends.

    Attributes:
        array: the variables in place if they are contiguous, else a part of the message.
        copies: then, each run of the variables and its part of the array.
    """

    array: Array
    copies: Sequence[tuple[Array, Array]] = ()


def piece_of(
    elements: Interval, readable: Sequence[tuple[Interval, Array]], message: Array
) -> Piece:
    """Some elements of a dtype, of which programs read these runs."""
    copies = [
        (value[both.shift(-of_run.start).slice], message[both.slice])
        for of_run, value in readable
        if (both := of_run & elements)
    ]
    if len(copies) == 1 and copies[0][0].size == elements.size:
        return Piece(copies[0][0])
    return Piece(message[elements.slice], copies)


@final
class CentralPlan(DevicePlan):
    """The plan of an update that only the root makes.

    Args:
        order, update, communicator: see `DevicePlan`.
        root: the rank.
        readable: what programs read on this rank.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        communicator: DeviceCommunicator,
        root: int,
        readable: Readable,
    ) -> None:
        super().__init__(order, update, communicator)
        self._root = self._reduces_to = root
        self._readable = readable

    def _drop(self) -> None:
        super()._drop()
        self._new: NewValues | None = None

    def _reduce(self, k: int, source: Array, op: Aggregation) -> None:
        root = self._root
        if op is not FIRST_REPLICA:
            self.communicator.reduce_flat(source, self.gradients[k], op, root)
        elif root != 0:  # the first replica is rank 0
            self.communicator.broadcast_flat(source, 0)

    def send_values(self) -> None:
        """Sends the root's to all ranks."""
        if self._new is None:
            self._new = self._prepare_values()
        is_root = self.communicator.rank == self._root
        self._new.send(self.communicator, is_root, not is_root)

    def _prepare_values(self) -> NewValues:
        pieces, send = self.pieces(), self.communicator.prepare_broadcast
        # One group of calls for all variables: a message's latency counts more than its bytes.
        moves = [move for piece in pieces for move in send(piece.array, self._root)]
        return NewValues(moves, [copy for piece in pieces for copy in piece.copies])

    def pieces(self) -> list[Piece]:
        """All new values. The arrays are as large on all ranks."""
        return [
            piece_of(elements, readable, message)
            for readable, message in zip(self._readable, self.gradients, strict=True)
            for elements in Interval(0, message.size).split(PIECE // message.itemsize)
        ]


@final
class DevicePartsPlan(DevicePlan):
    """The plan of an update of which each rank makes its part.

    A second message follows that of all gradients: the sums of this rank's part.

    Args:
        order, update, communicator: see `DevicePlan`.
        rank_parts: each rank's part.
        readable: what programs read on this rank.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        communicator: DeviceCommunicator,
        rank_parts: Sequence[RankPart],
        readable: Readable,
    ) -> None:
        self._own = rank_parts[communicator.rank].layout
        self._slices = rank_slices(order, rank_parts)
        self._readable = readable
        super().__init__(order, update, communicator)

    def _drop(self) -> None:
        super()._drop()
        self._own_message: Array = None
        self._own_gradients: list[Array] = []  # by dtype
        self._new: NewValues | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of both messages."""
        # With the gap after this rank's last element: if parts are equal, a reduce-scatter writes a
        # whole part, also for a rank whose last variable ends before.
        return round_up(super().nbytes, ALIGNMENT) + round_up(self._own.nbytes, ALIGNMENT)

    def take(self, memory: Array) -> None:
        """Makes both messages and their views, in some bytes on this rank's device."""
        super().take(memory)
        self._own_message = memory[round_up(super().nbytes, ALIGNMENT) : self.nbytes]
        self._own_gradients = [group.of(self._own_message) for group in self._own.groups]

    def _prepare_sums(self, variables: Collection[int]) -> list[Move]:
        slices = slices_of(self.order, self._slices, variables)
        groups = zip(self.gradients, self._own_gradients, slices, strict=True)
        return [
            move
            for gradients, own, of_dtype in groups
            if of_dtype
            for move in self.communicator.prepare_reduce_scatter(gradients, own, of_dtype)
        ]

    def _reduce(self, k: int, source: Array, op: Aggregation) -> None:
        communicator, out, slices = self.communicator, self._own_gradients[k], self._slices[k]
        if op is ReduceOp.SUM:
            communicator.reduce_scatter_flat(source, out, slices)
            return
        # Only optimizers' variables have slots, and optimizers use no other `op`.
        assert op is FIRST_REPLICA
        communicator.broadcast_flat(source, 0)
        for rank, elements, own in slices:
            if rank == communicator.rank:
                out[own.slice] = source[elements.slice]

    @span(UPDATE, _on_stream("update"))
    def run(self, rule: UpdateRule) -> None:
        """See `DevicePlan.run`."""
        self.update.run(rule, [self._own_message], add_up=self._add_up)

    def _add_up(self, sums: Array) -> Array:
        """The sums over whole variables, from those over this rank's shards; see `Update.run`."""
        flat = sums.reshape(-1)
        self.communicator.all_reduce_flat(flat, flat, ReduceOp.SUM)
        return sums

    def send_values(self) -> None:
        """Sends each rank's to all ranks."""
        if self._new is None:
            self._new = self._prepare_values()
        self._new.send(self.communicator, sends=True, receives=True)

    def _prepare_values(self) -> NewValues:
        moves: list[Move] = []
        copies: list[tuple[Array, Array]] = []
        for readable, message, slices in zip(
            self._readable, self.gradients, self._slices, strict=True
        ):
            # In one piece: slices of the ranks are of all elements.
            array, of_dtype = piece_of(Interval(0, message.size), readable, message)
            moves += self.communicator.prepare_all_gather(array, slices)
            copies += of_dtype
        return NewValues(moves, copies)
