"""One update of several variables, planned once for all steps: its message and its buffers."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.allocator import Block
from hpcstrat._storage.order import MessageOrder
from hpcstrat._update.rule import NOTHING
from hpcstrat._update.update import NOTHING_IN_PLACE, InPlace, KeptByMessage, Update


@final
class Buffers:
    """Arrays for the gradients of a plan's variables, which are then not copied.

    Args:
        order: the variables.
        messages: those that an update from the buffers reads: all ranks', or only this rank's.
        own: this rank's message; the buffers are its parts. `None` if there are no buffers yet.
        owner: the block that the messages are in, if they are in one. It is kept alive.

    Attributes:
        arrays: the buffers, in the order of the call.
        messages: as above.
    """

    def __init__(
        self,
        order: MessageOrder,
        messages: Sequence[Array] = (),
        own: Array = None,
        owner: Block | None = None,
    ) -> None:
        self._owner = owner
        self.arrays: list[Array] = [] if own is None else order.to_call(order.layout.views(own))
        self.messages = messages

    def are(self, gradients: Sequence[Array]) -> bool:
        """Whether these, in the order of the call, are the buffers, and so need not be copied."""
        # By identity, which costs nothing: another array, even over the same memory, is copied like
        # any gradient.
        return bool(self.arrays) and all(map(operator.is_, gradients, self.arrays))


class Plan:
    """The update of some variables by the gradients, or new values, in a message.

    Args:
        order: the variables, and where they are in the message.
        update: what happens to this rank's shards of them.

    Attributes:
        memory: of its message on a device or of a single replica; else, in mirrored storage on a
            host, of the sums of gradients. Lent by a `MessagePool` or its own; `None` until then.
        buffers: for gradients that need not be copied. It has none at first.
    """

    def __init__(self, order: MessageOrder, update: Update) -> None:
        self.order = order
        self.update = update
        self.memory: Array = None
        self.buffers: Buffers = Buffers(order)
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
        constants: Mapping[str, float] = NOTHING,
        in_buffers: bool = False,
    ) -> CallSignature:
        """What the ranks must agree on for an update, or to make buffers."""
        call = f"{current_call()} from buffers" if in_buffers else current_call()
        names, numbers = tuple(constants), tuple(constants.values())
        signature = self._signatures.get((call, op, names))
        if signature is None:
            must_match = [block.identity() for block in self.order.blocks]
            signature = signature_of(call, *([] if op is FIRST_REPLICA else [op.name]), *must_match)
        if signature.numbers != numbers:  # they change from step to step
            signature = signature.with_numbers(numbers, names)
        self._signatures[call, op, names] = signature
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

    @property
    def nbytes(self) -> int:
        """Bytes that `take` needs."""
        return self.order.layout.nbytes

    def take(self, memory: Array) -> None:
        """Takes memory of at least `nbytes` bytes."""
        self.forget_message()
        self.memory = memory

    def forget_message(self) -> None:
        """Drops the memory, and all that is kept for later updates by messages."""
        self.memory = None
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


@final
class MessagePool:
    """Lends its memory to all plans without memory of their own: updates follow one another.

    Args:
        allocate: makes memory of some bytes, in a call of this signature.
    """

    def __init__(self, allocate: Callable[[int, CallSignature], Array]) -> None:
        self._allocate = allocate
        self._memory: Array = None
        # The plans that have it. Weak, because the pool outlives variables and their plans.
        self._plans: weakref.WeakSet[Plan] = weakref.WeakSet()

    def lend(self, plan: Plan, signature: CallSignature) -> None:
        """Makes a plan take the memory."""
        if self._memory is None or self._memory.size < plan.nbytes:
            # Plans hold views of the memory. They drop it before more is allocated, or there would
            # have to be room for both.
            for other in self._plans:
                if not self.has_own(other):
                    other.forget_message()
            self._plans.clear()
            self._memory = None
            self._memory = self._allocate(plan.nbytes, signature)
        plan.take(self._memory)
        self._plans.add(plan)

    def has_own(self, plan: Plan) -> bool:
        """Whether a plan has memory of its own."""
        return plan.memory is not None and plan.memory is not self._memory
