"""The communicator of ranks on one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from hpcstrat._agreement.agreement import Write
from hpcstrat._agreement.records import CallSignature
from hpcstrat._core.types import Bytes, ReduceOp
from hpcstrat._memory.layout import Layout
from hpcstrat._transports.mailboxes import Mailboxes
from hpcstrat._transports.slices import SlicingCommunicator


@final
class SharedMemoryCommunicator(SlicingCommunicator):
    """Ranks of one host, whose memory can hold one copy of each variable for all of them.

    Args:
        comm: an MPI communicator that only this object uses.

    Raises:
        RuntimeError: its ranks do not share memory.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__(comm.rank, comm.size)
        self.slices = comm.size
        try:
            self.mailboxes = Mailboxes(comm, self.calls)
        except MemoryError as error:
            raise RuntimeError(f"hpcstrat cannot connect the ranks: {error}") from None

    def exchange_records(self, record: bytes, nbytes: int, write: Write | None) -> list[memoryview]:
        return self.mailboxes.post(record, nbytes, write)

    def collect_messages(self, sizes: Sequence[int], write: Write | None) -> list[Bytes]:
        return self.mailboxes.collect(sizes, write)

    def exchange_slices(
        self,
        signature: CallSignature,
        layout: Layout,
        op: ReduceOp,
        write: Write,
        shared: Sequence[Bytes] = (),
    ) -> Sequence[Bytes]:
        """See `SlicingCommunicator.exchange_slices`: all ranks' messages."""
        if shared:
            self.exchange(signature)
            return shared
        return self.exchange(signature, layout.nbytes, write)
