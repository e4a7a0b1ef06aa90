"""A communicator of one rank: nothing has to travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._communicators.base import Bytes, Write
from hpcstrat._communicators.messages import MessageCommunicator
from hpcstrat._communicators.packing import Layout
from hpcstrat._communicators.records import Signature
from hpcstrat._types import ReduceOp


@final
class SoloCommunicator(MessageCommunicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _count(self, agreed: Signature) -> None:
        # Several threads may be here at once: nobody waits for them.
        if self._calls.barred:
            self._calls.refuse(agreed.call)
        self._calls.number += 1
        self._calls.agreed = agreed

    def _post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(record)]

    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        message = np.empty(sizes[0], np.uint8)  # a fresh one, because several threads may each be here
        if write is not None:
            write(message)
        return [message]

    def reduce_message(self, agreed: Signature, form: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """The message is the result."""
        self._count(agreed)
        write(out)
