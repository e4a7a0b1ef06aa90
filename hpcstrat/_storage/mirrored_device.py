"""A copy of every variable on each replica's device, where some are GPUs.

With one replica: the only copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._calls.records import CallSignature
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, Array, ReduceOp
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.base import UpdateRule
from hpcstrat._storage.device import DevicePlan, DeviceStorage
from hpcstrat._storage.marks import MarkedRange
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rows import update_rows


class MirroredDeviceStorage(DeviceStorage):
    """Each rank keeps, and updates, all numbers itself.

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
        communicator = self._communicator
        with self._current():
            # Everything is queued on one stream, and the host waits for nothing: the next step's
            # Python runs while the GPU works.
            sources = self._begin(signature, plan, values, op is not FIRST_REPLICA)
            if plan.marks.begun:
                self._sum_rest(plan)
            else:
                for source, gradient in zip(sources, plan.gradients, strict=True):
                    if op is FIRST_REPLICA:
                        communicator.broadcast_flat(gradient, 0)
                    else:
                        communicator.all_reduce_flat(source, gradient, op)
            self._apply(plan, rule)

    def _sum_range(self, plan: DevicePlan, one: MarkedRange) -> None:
        part = plan.gradients[one.group][one.start : one.stop]
        self._communicator.all_reduce_flat(part, part, ReduceOp.SUM)

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        with self._current():
            update_rows(blocks, self.on_device(rows), self.on_device(gradient), rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """See `Storage.publish`. Every rank wrote to its own."""
