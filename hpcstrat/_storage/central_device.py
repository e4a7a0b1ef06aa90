"""Central storage with GPUs: one master copy, and read copies that are updated by broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.device import DeviceCommunicator, Move
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.allocator import Block
from hpcstrat._storage.device import DeviceStorage
from hpcstrat._storage.plan import DevicePlan
from hpcstrat._update.rows import row_view, update_rows
from hpcstrat._update.rule import UpdateRule


@final
class CentralDeviceStorage(DeviceStorage):
    """Only the parameter rank updates variables and has their slots; every rank reads a copy.

    An update: each rank packs its gradients into one flat message; one reduction per dtype to the
    parameter rank; one fused kernel per run of variables there; one call that broadcasts the new
    values. All of it is queued on the strategy's stream, and the host does not wait, unless the
    master copy is in host memory.
    """

    has_all_blocks = False

    def __init__(self, communicator: DeviceCommunicator, root: int, on_host: bool = False) -> None:
        super().__init__(communicator, root, on_host)
        self.updates_here = communicator.rank == root

    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> DevicePlan:
        """The plan of updates, with slots on the parameter rank only."""
        return super().plan(variables, slots if self.updates_here else [()] * len(variables))

    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        if op is not FIRST_REPLICA:
            self.communicator.reduce_flat(source, out, op, self._root)
        elif self._root != 0:
            # The first replica is rank 0; another parameter rank needs its values.
            self.communicator.broadcast_flat(out, 0)

    def _prepare_reductions(self, plan: DevicePlan) -> list[Move]:
        prepare = self.communicator.prepare_reduce
        return [move for g in plan.gradients for move in prepare(g, ReduceOp.SUM, self._root)]

    def _share(self, plan: DevicePlan) -> None:
        """Sends the master copy of the plan's variables to all read copies.

        Pieces of which a rank's variables are contiguous are sent or received in place. That may
        differ from rank to rank, because memory is freed at different moments; pieces may not.
        """
        # One call for all variables: a message's latency counts more than its bytes.
        if plan.sharing is None:
            prepare = self.communicator.prepare_broadcast
            plan.sharing = [m for flat, _ in plan.transfers for m in prepare(flat, self._root)]
        if self.updates_here:
            for _, parts in plan.transfers:
                for value, part in parts:
                    part[...] = value
        self.communicator.launch("the broadcast of new values", plan.sharing)
        if not self.updates_here:
            for _, parts in plan.transfers:
                for value, part in parts:
                    value[...] = part

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        variable, arrays = blocks[0], [block.array for block in blocks]
        with self.local.current():
            rows, gradient = self.local.here(rows), self.local.here(gradient)
            if self.updates_here and variable.copy is not None:
                # The master copy is in host memory, and only the new rows travel to the GPU.
                host_rows = gpu.to_host(rows)
                update_rows(arrays, host_rows, gpu.to_host(gradient), rule)
                new = self.local.here(row_view(variable.array, gradient.ndim - 1)[host_rows])
            else:
                if self.updates_here:
                    update_rows(arrays, rows, gradient, rule)
                new = row_view(variable.array, gradient.ndim - 1)[rows]
            self.communicator.broadcast_flat(new.reshape(-1), self._root)
            row_view((variable.copy or variable).array, gradient.ndim - 1)[rows] = new

    def publish(self, blocks: Sequence[Block]) -> None:
        """Broadcasts the parameter rank's values."""
        if blocks:
            self.communicator.exchange(
                signature_of(current_call(), "publish", *[block.identity() for block in blocks])
            )
            with self.local.current():
                for block in blocks:
                    self.communicator.broadcast_flat(
                        (block.copy or block).array.reshape(-1), self._root
                    )
