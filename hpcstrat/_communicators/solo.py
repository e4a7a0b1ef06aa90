"""A communicator of one rank: nothing has to travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from hpcstrat._communicators import records
from hpcstrat._communicators.base import Bytes, Communicator, Write
from hpcstrat._communicators.packing import Layout
from hpcstrat._communicators.records import Signature
from hpcstrat._types import ReduceOp


@final
class SoloCommunicator(Communicator):
    """One rank alone, with or without MPI."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self._buffer: Bytes = np.empty(0, np.uint8)

    def _post(self, head: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return [memoryview(records.pack(head, nbytes))]

    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if self._buffer.size < sizes[0]:
            self._buffer = np.empty(max(sizes[0], 2 * self._buffer.size), np.uint8)
        if write is not None:
            write(self._buffer)
        return [self._buffer[: sizes[0]]]

    def reduce_message(self, agreed: Signature, form: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """The message is the result."""
        self._count(agreed)
        write(out)
