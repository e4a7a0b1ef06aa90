"""The plan of an update by a message on a GPU, and the memory that messages share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.timeline import COMMUNICATION, span
from hpcstrat._core.types import Array
from hpcstrat._memory.packing import PackKernel, packings_of
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import Plan
from hpcstrat._transports.device import Move
from hpcstrat._update.update import Update


@final
class GpuPlan(Plan):
    """A plan whose message is on this rank's GPU.

    Args:
        order: see `Plan`.
        update: see `Plan`.
        stream: the stream of the GPU.

    Attributes:
        stream: as above.
        message: the message of the gradients.
        gradients: the message by dtype.
        sums: prepared calls that sum the gradients, all floats, over the ranks.
        new_values: prepared calls that send new values to ranks that have not computed them.
        prepared: the kernels of rules, with how they clip, that `Update.prepare` has had.
    """

    def __init__(self, order: MessageOrder, update: Update, stream: gpu.Stream) -> None:
        super().__init__(order, update)
        self.stream = stream
        self.sums: Sequence[Move] = ()
        self.new_values: Sequence[Move] = ()
        self.prepared: set[Any] = {None}  # a rule without a kernel needs nothing
        # Kernels, views and addresses are made once: a steady step only launches.
        self._packings: list[PackKernel] = []

    def attach(self, memory: Array) -> None:
        """See `Plan.attach`."""
        super().attach(memory)
        layout = self.order.layout
        self.message: Array = None if memory is None else memory[: layout.nbytes]
        self.gradients = [] if memory is None else [g.of(self.message) for g in layout.groups]

    @span(COMMUNICATION, "pack")
    def pack(self, values: Sequence[Array]) -> None:
        """Copies values to the message. The stream is current.

        Args:
            values: in the order of the message, on any device; cast to the variables' dtypes.
        """
        stream, arrays = self.stream, [*values]
        if not self._packings:
            self._packings = packings_of(self.order.layout)
        for group, pack in zip(self.order.layout.groups, self._packings, strict=True):
            for i in group.members:
                array = arrays[i]
                # Mostly it is here, which is asked without a call.
                if type(array) is not stream.xp.ndarray or array.data.device_id != stream.ordinal:
                    array = stream.here(array)
                # The kernel copies words, and converts nothing.
                if array.dtype != group.dtype:
                    array = array.astype(group.dtype)
                # Buffers are in the message, which would be overwritten where the order is another.
                if self.buffers is not None and stream.xp.may_share_memory(array, self.message):
                    array = array.copy()
                arrays[i] = array
            pack(arrays, self.message)


@final
class MessageMemory:
    """A GPU's memory for messages. All plans without buffers share it: updates follow one another.

    Args:
        stream: the stream of the GPU.
    """

    def __init__(self, stream: gpu.Stream) -> None:
        self._stream = stream
        self._memory: Array = None
        self._users: weakref.WeakSet[GpuPlan] = weakref.WeakSet()

    def lend(self, plan: GpuPlan) -> None:
        """Attaches the memory to a plan, or more if it is too small. The stream is current."""
        nbytes = plan.order.layout.nbytes
        if self._memory is None or self._memory.size < nbytes:
            # Plans hold views of the memory. They drop it before more is allocated, or there would
            # have to be room for both.
            for user in self._users:
                if user.buffers is None:
                    user.attach(None)
            self._users.clear()
            self._memory = None
            self._memory = self.allocate(nbytes)
        plan.attach(self._memory)
        self._users.add(plan)

    def allocate(self, nbytes: int) -> Array:
        """Memory for one plan's message alone. The stream is current."""
        self._stream.refuse_in_graph("memory for a larger message")
        return self._stream.xp.zeros(nbytes, np.uint8)
