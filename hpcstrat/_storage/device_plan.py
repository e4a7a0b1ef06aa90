"""The plan of an update on a rank's device, with the flat message of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.layout import PackKernel
from hpcstrat._storage.message_order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._update.chunks import Chunk
from hpcstrat._update.update import Update


class Transfer(NamedTuple):
    """The new values of one dtype, as one call sends or receives them.

    Attributes:
        flat: the array that is sent or received: the variables in place where they are contiguous,
            else a part of the message.
        parts: in the latter case, each run of the variables and its part of `flat`.
    """

    flat: Array
    parts: list[tuple[Array, Array]]


class DevicePlan(Plan):
    """A plan with the flat message of its updates on this rank's device, and views of its parts.

    The message is taken later, and may change: `MessagePool` lends one to all plans.

    Args:
        order: see `Plan`. Its message has the same gaps as the memory, so that a run of variables
            is also a run of the message.
        update: see `Plan`.
        readable: the runs of the variables that this rank reads.

    Attributes:
        taken: the bytes that the plan has taken, `nbytes` or more; `None` before.
        message: the message of the gradients, in them.
        update_message: the message by which this rank updates its shards; here the same.
        gradients: the message by dtype.
        transfers: how new values reach the other ranks, by dtype.
    """

    def __init__(self, order: MessageOrder, update: Update, readable: Sequence[Chunk]) -> None:
        super().__init__(order, update)
        self._readable = readable
        self.taken: Array = None
        self.message: Array = None
        self.update_message: Array = None
        self.gradients: list[Array] = []
        self.transfers: list[Transfer] = []
        self._packings: list[PackKernel] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the plan takes."""
        return self.order.layout.nbytes

    def take(self, memory: Array) -> None:
        """Makes the message and all views of it, in some bytes on this rank's device."""
        layout = self.order.layout
        self.taken = memory
        self.message = self.update_message = memory[: layout.nbytes]
        self.gradients = [group.of(self.message) for group in layout.groups]
        # Kernels, views and addresses are made once per message: a steady step only launches.
        if gpu.is_on_gpu(memory):
            self._packings = [PackKernel(layout, group, self.message) for group in layout.groups]
        self.transfers = []
        for group, whole in zip(layout.groups, self.gradients, strict=True):
            runs = [
                (value, whole[group.within(shard.message).slice])
                for shard, value, _ in self._readable
                if shard.dtype == group.dtype
            ]
            is_one = len(runs) == 1
            self.transfers.append(Transfer(runs[0][0], []) if is_one else Transfer(whole, runs))

    def forget_message(self) -> None:
        """Drops the message, which would otherwise live as long as the plan."""
        self.taken = self.message = self.update_message = None
        self.gradients, self.transfers, self._packings = [], [], []
        self.forget_messages()

    def pack(self, values: Sequence[Array], is_reduced: bool) -> list[Array]:
        """Copies values, on this rank's device and in the order of the message, to the message.

        Args:
            values: the values.
            is_reduced: whether they are reduced over the ranks before they are used.

        Returns:
            For each dtype the flat array with the values: a part of the message or, if they are
            reduced, perhaps the array that was passed.
        """
        if not self._packings:
            self.order.write(self.message, values)
            return self.gradients
        arrays, sources = list(values), list(self.gradients)
        for index, group in enumerate(self.order.layout.groups):
            for i in group.members:
                # The packing kernel copies words, and converts nothing.
                if arrays[i].dtype != group.dtype:
                    arrays[i] = arrays[i].astype(group.dtype)
            first = arrays[group.members[0]]
            # A single gradient is its own message: NCCL reads it in place, which saves the copy.
            if is_reduced and len(group.members) == 1 and first.flags.c_contiguous:
                sources[index] = first.reshape(-1)
            else:
                self._packings[index](arrays)
        return sources


@final
class MessagePool:
    """Lends its memory to all plans without buffers: updates come one after the other.

    Args:
        zeros: makes memory of some bytes on this rank's device.
    """

    def __init__(self, zeros: Callable[[int], Array]) -> None:
        self._zeros = zeros
        self._memory: Array = None
        # The plans that have it. Weak, because the pool outlives variables and their plans.
        self._plans: weakref.WeakSet[DevicePlan] = weakref.WeakSet()

    def lend(self, plan: DevicePlan) -> None:
        """Makes a plan take the memory, unless it has this or, with buffers, its own."""
        if plan.taken is not None and (plan.taken is self._memory or plan.buffers is not None):
            return
        if self._memory is None or self._memory.size < plan.nbytes:
            # Plans hold views of the memory. They drop it before more is allocated, or the GPU
            # would need room for both.
            for other in self._plans:
                if other.taken is self._memory:  # others have got buffers since
                    other.forget_message()
            self._plans.clear()
            self._memory = None
            self._memory = self._zeros(plan.nbytes)
        plan.take(self._memory)
        self._plans.add(plan)
