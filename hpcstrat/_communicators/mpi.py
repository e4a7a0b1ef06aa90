"""The communicator of ranks on any hosts: records and messages by MPI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._communicators.base import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, HostCommunicator, describe_message
from hpcstrat._communicators.packing import Layout
from hpcstrat._communicators.protocol import HEADER, PAYLOAD, RECORD, WHOLE, CallSignature
from hpcstrat._communicators.reduction import reduce_flat, slice_of
from hpcstrat._spans import COMMUNICATION, WAITING, span
from hpcstrat._types import Bytes, ReduceOp


class MpiCommunicator(HostCommunicator):
    """Ranks anywhere, over mpi4py.

    Only bytes travel, and every rank reduces in rank order itself. So any dtype can be reduced, whatever MPI knows
    of it, and results are bit-identical on all ranks and from run to run.

    Args:
        comm: an MPI communicator, used by nobody else.
    """

    PIECE = (1 << 31) - 1
    """Bytes that one MPI call moves at most, over all ranks: MPI counts with 32 bits."""
    AGREED = 1 << 26
    """Bytes of messages from which on the ranks ask each other whether all have the memory."""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._record: Bytes = np.zeros(RECORD, np.uint8)
        self._records: Bytes = np.empty((comm.size, RECORD), np.uint8)
        self._views = [memoryview(record[:WHOLE]) for record in self._records]

    @span(WAITING, "the other ranks")
    def _post(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        self._record[: len(record)] = np.frombuffer(record, np.uint8)
        if write is not None and nbytes <= PAYLOAD:
            write(self._record[HEADER:])
        # It is the barrier too: nobody has all records before every rank has come.
        self._comm.Allgather(self._record, self._records)
        return self._views

    def _messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        if max(sizes) <= PAYLOAD:
            return [record[HEADER:] for record in self._records]
        messages = self._empty(sizes)
        if write is not None:
            write(messages[self.rank])
        self._all_gather(messages)
        return messages

    def _empty(self, sizes: Sequence[int]) -> list[Bytes]:
        """Memory for messages of these sizes, the same on all ranks."""
        if sum(sizes) < self.AGREED:
            return [np.empty(size, np.uint8) for size in sizes]
        messages, problem = [], ""
        try:
            messages = [np.empty(size, np.uint8) for size in sizes]
        except MemoryError as error:
            problem = f"rank {self.rank}: {error}"
        if problems := [one for one in self._comm.allgather(problem) if one]:
            self.settle()
            raise MemoryError(f"no memory for a message between replicas: {'; '.join(problems)}")
        return messages

    def _all_gather(self, parts: Sequence[Bytes]) -> None:
        """Fills in every rank's part but this rank's own, which is there already."""
        step = self.PIECE // self.size
        if sum(part.size for part in parts) <= step:  # small: one call
            whole = np.empty(sum(part.size for part in parts), np.uint8)
            counts = [part.size for part in parts]
            self._comm.Allgatherv(parts[self.rank], [whole, counts])
            for part, start in zip(parts, np.cumsum([0, *counts[:-1]]), strict=True):
                part[...] = whole[start : start + part.size]
            return
        for root, part in enumerate(parts):
            for start in range(0, part.size, self.PIECE):
                self._comm.Bcast(part[start : start + self.PIECE], root=root)

    @span(COMMUNICATION, describe_message)
    def reduce_message(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """Small messages every rank reduces itself. Large ones go by slices: each rank reduces one, all gather them."""
        if layout.nbytes <= SMALL_MESSAGE_BYTES:
            self._reduce_by_all(self.exchange(agreed, layout.nbytes, write), layout, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_slices(agreed, layout, write, op, out)

    def _reduce_by_slices(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        message = np.empty(layout.nbytes, np.uint8)
        write(message)
        # Before messages move: where sizes differ, MPI raises on one rank and gives another a wrong result.
        self.exchange(agreed)
        for group in layout.groups:
            values, result = group.of(message), group.of(out)
            slices = [slice_of(group.elements, rank, self.size) for rank in range(self.size)]
            parts = np.empty((self.size, slices[self.rank].stop - slices[self.rank].start), group.dtype)
            self._scatter([values[one].view(np.uint8) for one in slices], parts.view(np.uint8))
            reduce_flat(result[slices[self.rank]], list(parts), op)
            self._all_gather([result[one].view(np.uint8) for one in slices])

    def _scatter(self, ours: Sequence[Bytes], theirs: Bytes) -> None:
        """Sends `ours[r]` to each rank r; row r of `theirs` is what rank r sent here."""
        step = max(1, self.PIECE // self.size)
        longest = max(part.size for part in ours)
        for start in range(0, longest, step):
            sent = [part[start : start + step] for part in ours]
            received = theirs[:, start : start + step]
            flat = np.empty(received.size, np.uint8)
            counts = [part.size for part in sent]
            self._comm.Alltoallv([np.concatenate(sent), counts], [flat, [received.shape[1]] * self.size])
            received[...] = flat.reshape(received.shape)
