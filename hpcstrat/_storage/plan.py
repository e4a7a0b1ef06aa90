"""One update of several variables, planned once for all steps."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._update.rule import NO_CONSTANTS
from hpcstrat._update.update import Update


class Plan:
    """The update of some variables by the gradients, or new values, in a message.

    Args:
        order: the variables, and where they are in the message.
        update: what happens to this rank's shards of them.

    Attributes:
        order: as above.
        update: as above.
        buffers: arrays for the variables' gradients, in the order of the call, where
            `Storage.make_buffers` was called; else `None`.
        buffer_messages: on hosts, the messages that the buffers are in: all ranks', or only this
            rank's.
        marked: the variables whose gradients, in buffers, are complete in this step.
        started: those whose sums have started.
        sums: the storage's memory for these sums, if they are not in the buffers.
        norm_sums: per rank and variable, for updates with norms in central storage on a host.
    """

    def __init__(self, order: MessageOrder, update: Update) -> None:
        self.order = order
        self.update = update
        self.buffers: list[Array] | None = None
        self.buffer_messages: list[Array] = []
        self._buffers_owner: Block | None = None
        self.marked: set[int] = set()
        self.started: set[int] = set()
        self.sums: Array | None = None
        self.norm_sums: Block | None = None
        # The types, shapes and dtypes of a steady step's gradients, in the order of the call.
        in_call = order.to_call(order.blocks)
        self._expected = [(type(b.view), b.array.shape, b.array.dtype) for b in in_call]
        self._must_match = [block.identity() for block in order.blocks]
        # By call: `assign` and `assign_add` of a variable, for example, share a plan.
        self._signatures: dict[tuple[str, Aggregation], CallSignature] = {}

    def signature(
        self,
        op: Aggregation = FIRST_REPLICA,
        constants: Mapping[str, float] = NO_CONSTANTS,
        in_buffers: bool = False,
    ) -> CallSignature:
        """What the ranks must agree on for an update."""
        call = f"{current_call()} from buffers" if in_buffers else current_call()
        numbers = tuple(constants.values())
        signature = self._signatures.get((call, op))
        if signature is None or signature.numbers != numbers:
            signature = signature_of(
                call, *([] if op is FIRST_REPLICA else [op.name]), *self._must_match
            )
            if numbers:
                signature = signature.with_numbers(numbers, tuple(constants))
            self._signatures[call, op] = signature
        return signature

    def signature_of_marks(self, variables: Sequence[int]) -> CallSignature:
        """What the ranks must agree on to mark the gradients of these variables."""
        return signature_of(current_call(), *[self._must_match[i] for i in variables])

    def not_started(self) -> set[int]:
        """The variables whose gradients' sums have not started in this step."""
        return {*range(len(self.order.blocks))} - self.started

    def require_whole(self) -> None:
        """Refuses variables that an interrupted update left changed in part.

        Raises:
            RuntimeError: an update of one of the variables was interrupted.
        """
        for block in self.order.blocks:
            _ = block.view

    def forget_messages(self) -> None:
        """Drops what is kept for later updates by the same messages, and so the messages."""
        self.order.forget_messages()
        self.update.forget_messages()

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these, in the order of the call, are of the variables' kinds, shapes, dtypes."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._expected, strict=True):
            # Equal dtypes need not be identical; if they are not, the slow path checks them.
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return False
        return True

    def give_buffers(self, messages: list[Array], own: Array, owner: Block | None = None) -> None:
        """Makes the parts of a message the buffers, from which gradients need not be copied.

        Args:
            messages: the messages that an update reads: all ranks', or only this rank's.
            own: this rank's.
            owner: the block that contains them, which this plan keeps alive.
        """
        self.buffers = self.order.to_call(self.order.layout.views(own))
        self.buffer_messages = messages
        self._buffers_owner = owner

    def are_in_buffers(self, gradients: Sequence[Array]) -> bool:
        """Whether these, in the order of the call, are the buffers, and so need not be copied."""
        # By identity, which costs nothing: another array, even over the same memory, is copied like
        # any gradient.
        return self.buffers is not None and all(map(operator.is_, gradients, self.buffers))
