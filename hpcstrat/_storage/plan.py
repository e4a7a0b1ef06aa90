"""One update of several variables, planned once for all steps: its message and buffers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, final

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._storage.order import MessageOrder
from hpcstrat._update.rule import UpdateRule
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace, KeptByMessage, Update

_NO_NUMBERS = UpdateRule()


@final
class Buffers:
    """Arrays for the gradients of a plan's variables, which are then not copied.

    Args:
        order: the variables.
        messages: those that an update from the buffers reads: all ranks', or only this rank's.
        own: this rank's message; the buffers are its parts.

    Attributes:
        arrays: the buffers, in the order of the call.
        messages: as above.
        own: as above.
    """

    def __init__(self, order: MessageOrder, messages: Sequence[Array], own: Array) -> None:
        self.arrays: list[Array] = order.to_call(order.layout.views(own))
        self.messages: Sequence[Array] = messages
        self.own: Array = own

    def are(self, gradients: Sequence[Array]) -> bool:
        """Whether these, in the order of the call, are the buffers, and so need not be copied."""
        # By identity, which costs nothing: another array, even over the same memory, is copied like
        # any gradient.
        return all(map(operator.is_, gradients, self.arrays))


class Plan:
    """The update of some variables by the gradients, or new values, in a message.

    Args:
        order: the variables, and where they are in the message.
        update: what happens to this rank's shards of them.

    Attributes:
        memory: of a message that this rank makes by itself; `None` until `attach`.
        buffers: for gradients that need not be copied; `None` if there are none.
    """

    def __init__(self, order: MessageOrder, update: Update) -> None:
        self.order: MessageOrder = order
        self.update: Update = update
        self.memory: Array = None
        self.buffers: Buffers | None = None
        # The types, shapes and dtypes of a steady step's gradients, in the order of the call.
        in_call = order.to_call(order.blocks)
        self._expected = [(type(b.view), b.array.shape, b.array.dtype) for b in in_call]
        # By call: `assign` and `assign_add` of a variable, for example, share a plan.
        self._signatures: dict[tuple[str, Aggregation, tuple[str, ...]], CallSignature] = {}
        self._views = KeptByMessage(lambda messages: order.layout.views(messages[0]))

    # ---- what the ranks agree on, and checks

    def signature(
        self,
        op: Aggregation = FIRST_REPLICA,
        rule: UpdateRule = _NO_NUMBERS,
        in_buffers: bool = False,
    ) -> CallSignature:
        """What the ranks must agree on for an update, or to make buffers."""
        call = f"{current_call()} from buffers" if in_buffers else current_call()
        signature = self._signatures.get((call, op, rule.names))
        if signature is None:
            must_match = [block.identity() for block in self.order.blocks]
            signature = signature_of(call, *([] if op is FIRST_REPLICA else [op.name]), *must_match)
        if signature.numbers != rule.agreed:  # they change from step to step
            signature = signature.with_numbers(rule.agreed, rule.names)
        self._signatures[call, op, rule.names] = signature
        return signature

    def require_whole(self) -> None:
        """Raises if an interrupted update left one of the variables changed in part."""
        for block in self.order.blocks:
            _ = block.view  # raises

    def fits(self, gradients: Sequence[Any]) -> bool:
        """Whether these, in the order of the call, are of the variables' kinds, shapes, dtypes."""
        for gradient, (kind, shape, dtype) in zip(gradients, self._expected, strict=True):
            # Equal dtypes need not be identical; if they are not, the slow path checks them.
            if type(gradient) is not kind or gradient.shape != shape or gradient.dtype is not dtype:
                return False
        return True

    # ---- messages

    def attach(self, memory: Array) -> None:
        """Takes memory of at least the message's bytes, on this rank's device; or drops it."""
        self.forget_messages()
        self.memory = memory

    def forget_messages(self) -> None:
        """Drops all that is kept for later updates by the same messages."""
        self._views.clear()
        self.update.forget_messages()

    def write(
        self, message: Array, values: Sequence[Array], in_place: InPlace = NOTHING_IN_PLACE
    ) -> None:
        """Copies gradients, or new values, into a message, except for what is read in place."""
        views = self._views.of([message])
        for i, (view, value) in enumerate(zip(views, values, strict=True)):
            if i in in_place:
                absent, gradient = in_place[i]
                flat = view.reshape(-1)
                flat[: absent.start] = gradient[: absent.start]
                flat[absent.stop :] = gradient[absent.stop :]
            else:
                view[...] = value
