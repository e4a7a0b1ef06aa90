"""The plan of an update whose message is on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from hpcstrat._communicators.device import DeviceCommunicator, Move
from hpcstrat._core import gpu
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.intervals import Interval
from hpcstrat._memory.layout import PackKernel, packings_of
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import Update

PIECE = 1 << 24
"""Bytes of new values that one call sends. Ranks need not agree on where a run of variables in
memory ends: only pieces in which one does are copied to the message."""

Copies: TypeAlias = "Sequence[tuple[Array, Array]]"
"""Arrays, each with the one that is copied to it."""

Readable: TypeAlias = "Sequence[Sequence[tuple[Interval, Array]]]"
"""What programs read on this rank; see `LocalBlocks.to_read`."""


class DevicePlan(Plan):
    """The plan of an update that every rank makes, or the root alone, by a flat message.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update: see `Plan`.
        communicator: the ranks.
        root: the only rank that makes the update; `None` if every rank does.
        readable: what programs read on this rank, if a root makes the update.

    Attributes:
        message: the message of the gradients, on this rank's GPU, and of their sums.
        gradients: the message by dtype.
        has_integers: whether some of the variables are integers: NCCL casts these to sum them.
        prepared: the kernels of rules, with how they clip, that `prepare` has had.
    """

    def __init__(
        self,
        order: MessageOrder,
        update: Update,
        communicator: DeviceCommunicator,
        root: int | None = None,
        readable: Readable = (),
    ) -> None:
        super().__init__(order, update)
        self.communicator = communicator
        self._root = root
        self._readable = readable
        self.has_integers: bool = any(group.dtype.kind in "iu" for group in order.layout.groups)
        self.prepared: set[Any] = {None}  # a rule without a kernel needs nothing
        self._packings: list[PackKernel] = []  # on a GPU
        self._drop()

    def _drop(self) -> None:
        self.message: Array = None
        self.gradients: list[Array] = []
        for prepared in ("all_sums", "new_values"):
            self.__dict__.pop(prepared, None)

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

    @functools.cached_property
    def all_sums(self) -> Sequence[Move]:
        """The sums of all gradients in the message, which are floats."""
        prepare, root = self.communicator.prepare_reduce, self._root
        gradients = self.order.views_of(range(len(self.order.blocks)), self.message)
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
        if op is not FIRST_REPLICA:
            self.communicator.reduce_flat(source, self.gradients[k], op, self._root)
        elif self._root != 0:  # the first replica is rank 0
            self.communicator.broadcast_flat(source, 0)

    def prepare(self, rule: UpdateRule) -> None:
        """See `Update.prepare`."""
        self.update.prepare(rule)

    def run(self, rule: UpdateRule) -> None:
        """Updates this rank's shards."""
        self.update.run(rule, [self.message])

    @functools.cached_property
    def new_values(self) -> NewValues | None:
        """How new values reach the ranks that have not computed them; `None` if all have."""
        root = self._root
        if root is None:
            return None
        pieces, send = self.pieces(), self.communicator.prepare_broadcast
        # One group of calls for all variables: a message's latency counts more than its bytes.
        moves = [move for array, _ in pieces for move in send(array, root)]
        from_message = [copy for _, copies in pieces for copy in copies]
        if self.communicator.rank == root:
            return NewValues(_reversed(from_message), moves, [])
        return NewValues([], moves, from_message)

    def pieces(self) -> list[tuple[Array, Copies]]:
        """All new values. The arrays are as large on all ranks."""
        return [
            piece_of(elements, readable, message)
            for readable, message in zip(self._readable, self.gradients, strict=True)
            for elements in Interval(0, message.size).split(PIECE // message.itemsize)
        ]


class NewValues(NamedTuple):
    """Prepared calls that send new values to other ranks.

    What is contiguous in a rank's memory is sent or received in place. That may differ from rank to
    rank, because memory is freed at different moments; the calls may not.

    Attributes:
        before: arrays that are copied before the calls, each to the array before it.
        moves: the calls.
        after: what is copied after them.
    """

    before: Copies
    moves: Sequence[Move]
    after: Copies

    def send(self, communicator: DeviceCommunicator) -> None:
        """Makes the calls and copies."""
        for target, source in self.before:
            target[...] = source
        communicator.launch("the new values", self.moves)
        for target, source in self.after:
            target[...] = source


def _reversed(copies: Copies) -> Copies:
    return [(source, target) for target, source in copies]


def piece_of(
    elements: Interval, readable: Sequence[tuple[Interval, Array]], message: Array
) -> tuple[Array, Copies]:
    """The new values of some elements of a dtype, of which programs read these runs.

    Returns:
        The variables in place if they are contiguous. Else that part of the message, and the
        variables, to be copied from their parts of it.
    """
    copies = [
        (value[both.shift(-of_run.start).slice], message[both.slice])
        for of_run, value in readable
        if (both := of_run & elements)
    ]
    if len(copies) == 1 and copies[0][0].size == elements.size:
        return copies[0][0], []
    return message[elements.slice], copies
