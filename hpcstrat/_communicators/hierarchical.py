"""The communicator of ranks on several hosts: large messages move within each host first, then across hosts."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcstrat._communicators.base import Write
from hpcstrat._communicators.host import SMALL_MESSAGE_BYTES, describe_message
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.packing import Layout
from hpcstrat._communicators.protocol import CallSignature, signature
from hpcstrat._communicators.reduction import REDUCTIONS, accumulator
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._spans import COMMUNICATION, span
from hpcstrat._types import Bytes, ReduceOp


@final
class HierarchicalCommunicator(MpiCommunicator):
    """Ranks on several hosts, over mpi4py and each host's shared memory.

    A large reduction is made by the ranks of each host in shared memory; the hosts' first ranks reduce the results, so
    that each host sends one message instead of one a rank; and the ranks of a host copy what its first has. Sums are
    of each host's in rank order, then of the hosts in order: bit-identical on all ranks and from run to run. 16-bit
    floats, which are rounded once only, go between all ranks.

    Args:
        comm: an MPI communicator, used by nobody else.
        host_comm: the ranks of it that are on this host.
    """

    def __init__(self, comm: Any, host_comm: Any) -> None:
        from mpi4py import MPI

        super().__init__(comm)
        self._host = SharedMemoryCommunicator(host_comm.Dup())
        # What every host has room for. Not each host's own capacity: one may have grown where another could not.
        self._agreed_bytes = 0
        leads = comm.Split(0 if host_comm.rank == 0 else MPI.UNDEFINED, key=comm.rank)
        self._between = MpiCommunicator(leads) if host_comm.rank == 0 else None

    @span(COMMUNICATION, describe_message)
    def reduce_message(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        """Small messages every rank reduces itself. Large ones go inside the host, between hosts, and back."""
        is_short = any(accumulator(group.dtype) != group.dtype for group in layout.groups)
        if layout.nbytes <= SMALL_MESSAGE_BYTES or is_short:
            super().reduce_message(agreed, layout, write, op, out)
            return
        with self.calls.waiting:
            self._reduce_by_hosts(agreed, layout, write, op, out)

    def _reduce_by_hosts(self, agreed: CallSignature, layout: Layout, write: Write, op: ReduceOp, out: Bytes) -> None:
        # All ranks agree first: inside a host nobody would notice that another host makes a different call.
        self.exchange(agreed)
        if self._agreed_bytes < layout.nbytes:
            with self.raise_together():  # a host without the memory stops the others
                self._host.reserve(layout.nbytes)
                self.exchange(signature(f"{agreed.call}: memory"))
            self._agreed_bytes = layout.nbytes
        is_mean = REDUCTIONS[op].is_mean
        partial = ReduceOp.SUM if is_mean else op
        self._host.reduce_message(agreed, layout, write, partial, out)
        if self._between is not None:

            def write_sum(message: Bytes) -> None:
                message[: layout.nbytes] = out

            self._between.reduce_message(agreed, layout, write_sum, partial, out)
            self._host.exchange(agreed, layout.nbytes, write_sum)
        else:
            out[...] = self._host.exchange(agreed)[0][: layout.nbytes]
        if is_mean and self.size > 1:
            with np.errstate(all="ignore"):
                for group in layout.groups:
                    np.divide(group.of(out), self.size, out=group.of(out))
