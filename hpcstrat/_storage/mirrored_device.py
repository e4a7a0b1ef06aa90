"""A copy of every variable on each replica's device, where some devices are GPUs.

With one replica it is the only copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._calls.records import CallSignature
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.device import DeviceStorage
from hpcstrat._storage.device_plan import DevicePlan
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule


class MirroredDeviceStorage(DeviceStorage):
    """Each rank stores and updates all variables.

    The same steps on the same sums keep the copies equal.
    """

    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        assert isinstance(plan, DevicePlan)
        with self.local.current():
            # Everything is queued on one stream, and the host does not wait: the next step's Python
            # code runs while the GPU works.
            sources = self._pack_and_agree(signature, plan, values, op is not FIRST_REPLICA)
            if plan.started:
                self._finish_sums()
                self._sum_parts(plan, plan.not_started())
            else:
                for source, gradient in zip(sources, plan.gradients, strict=True):
                    self._reduce(source, gradient, op)
            self.local.run(plan, rule)

    def _reduce(self, source: Array, out: Array, op: Aggregation) -> None:
        if op is FIRST_REPLICA:
            self.communicator.broadcast_flat(out, 0)
        else:
            self.communicator.all_reduce_flat(source, out, op)

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        with self.local.current():
            arrays = [block.array for block in blocks]
            update_rows(arrays, self.local.here(rows), self.local.here(gradient), rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """Does nothing: every rank wrote to its own copy."""
