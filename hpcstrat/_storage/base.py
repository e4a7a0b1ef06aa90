"""Storage: the interface to the places where a strategy stores its variables.

| ranks compute on            | `CentralStorageStrategy`             | `MirroredStrategy`          |
|-----------------------------|--------------------------------------|-----------------------------|
| CPUs                        | `HostStorage`: one copy on each host, which all its ranks update   |
| GPUs                        | `GpuStorage`: the parameter rank     | `GpuStorage`: each rank     |
|                             | updates, each rank has a copy to read| updates a copy of its own   |
| GPUs, parameters on `CPU:0` | `HostStorage`, and each rank has a   |                             |
|                             | copy to read on its GPU              |                             |
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import numpy as np

from hpcstrat._agreement.records import CallSignature, signature_of
from hpcstrat._core import gpu
from hpcstrat._core.arrays import checksum
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import UPDATE, span
from hpcstrat._core.types import Aggregation, Array, Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.parts import fill, flat, gpu_parts, host_parts
from hpcstrat._storage.plan import Plan
from hpcstrat._transports.verbs import Communicator
from hpcstrat._update.rule import UpdateRule


class Storage(abc.ABC):
    """Stores variables. Methods that make, change or publish them are collective.

    Args:
        communicator: the ranks that share the variables.
        stream: the stream of this rank's GPU; `None` if it computes on the CPU.

    Attributes:
        communicator, stream: as above.
        copies: how many copies of a variable the ranks write, each on its own.
        writes_here: whether this rank writes one of them.
        has_all_slots: whether every rank can read every slot, and not only the parameter rank.
    """

    copies: int = 1
    writes_here: bool = True
    has_all_slots: bool = True

    def __init__(self, communicator: Communicator, stream: gpu.Stream | None = None) -> None:
        self.communicator = communicator
        self.stream = stream
        self._number = communicator.calls.count_storage()
        self._created = 0
        self._has_interrupted = False

    # ---- blocks

    def create(self, initial: Array, per_replica: bool = False) -> Block:
        """A new block with the parameter rank's value; all ranks pass equal shapes and dtypes.

        Args:
            initial: the value.
            per_replica: whether each replica has a block of its own, on its own device.
        """
        communicator = self.communicator
        with communicator.change():
            # All agree before any makes memory: they may make it together.
            what = initial.dtype, initial.shape, self._number
            communicator.exchange(signature_of(current_call(), what))
            block = self._register(self._create(initial, per_replica))
        if communicator.checks:
            self._note_change([block])
        return block

    def create_slot(self, variable: Block, value: float) -> Block:
        """A new block for a slot, like the variable and filled with `value`.

        It can be read and written only where updates run.
        """
        communicator = self.communicator
        with communicator.change():
            communicator.exchange(
                signature_of(current_call(), f"initial value={value}", variable.identity())
            )
            return self._register(self._create_slot(variable, value))

    def _register(self, block: Block) -> Block:
        # Counted after all ranks have made it: the numbers must stay equal on all ranks.
        self._created += 1
        block.number, block.storage = self._created, self._number
        # A variable is made by the call "Variable 'w'", a slot by "SGD: momentum of 'w'".
        block.name = current_call().removeprefix("Variable ")
        return block

    @abc.abstractmethod
    def _create(self, initial: Array, per_replica: bool) -> Block: ...

    @abc.abstractmethod
    def _create_slot(self, variable: Block, value: float) -> Block: ...

    # ---- this rank's memory; nothing here is collective

    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes a variable here by an array of its shape, and a rule without a kernel."""
        # The library itself writes: the next check of checksums has nothing to compare with.
        block.checksum = None
        if type(block.array) is np.ndarray:
            # Metrics write here in each step: no call that is not needed.
            rule.assign(block.array, new if type(new) is np.ndarray else gpu.to_host(new))
            if block.copy is not None:
                self.refresh([block])
            return
        assert self.stream is not None
        with self.stream.current():
            rule.assign(block.array, self.stream.here(new))

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """Writes host bytes to a block, from its byte `start` on, but not to its `copy`."""
        block.checksum = None
        target = flat(block.array)[start : start + part.size]
        if type(target) is np.ndarray:
            target[...] = part
            return
        assert self.stream is not None
        with self.stream.current():
            fill(target, part)
            self.stream.synchronize()  # the caller may change `part`

    def refresh(self, blocks: Sequence[Block]) -> None:
        """Brings this rank's copies, if it reads any on its GPU, up to date."""
        for block in blocks:
            if block.copy is not None:
                assert self.stream is not None
                with self.stream.current():
                    fill(block.copy.array, block.array)

    def parts(self, block: Block) -> Iterator[Bytes]:
        """The bytes of a block in host memory.

        At most `PART` of them come at once, read-only by convention and valid until the next.
        """
        if type(block.array) is np.ndarray:
            return host_parts(block.array)
        assert self.stream is not None
        return gpu_parts(self.stream, block.array)

    # ---- updates

    @abc.abstractmethod
    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates of these variables, each with its slots."""

    @abc.abstractmethod
    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers for a plan, from which the gradients of its variables are not copied."""

    @span(UPDATE, lambda _, plan, *__, **___: (current_call(), plan.order.layout.nbytes))
    # An overflow results in inf, as on a GPU. It must not become an exception on one rank only.
    @np.errstate(all="ignore")
    def update(
        self, plan: Plan, values: Sequence[Array], op: Aggregation, rule: UpdateRule
    ) -> None:
        """Reduces the replicas' `values` by `op` and applies `rule` once; all read the result.

        Args:
            plan: of the variables. All ranks must update the same.
            values: one array per variable, of its shape, in the order of the call; cast to its
                dtype.
            op: how the replicas' values are reduced; `FIRST_REPLICA` takes those of rank 0.
            rule: how they change the variables.
        """
        communicator = self.communicator
        if communicator.checks:
            self._check_unchanged(plan.order.blocks)
        # Guarded by a flag: reading every block's view would cost time in each step.
        if self._has_interrupted:
            plan.require_whole()
        # Part of the signature: a rank whose gradients are in its buffers sends none, and the
        # others must expect that.
        in_buffers = plan.buffers is not None and plan.buffers.are(values)
        signature = plan.signature(op, rule, in_buffers)
        try:
            if in_buffers:
                given = None
            else:
                given = values if plan.order.is_of_call else plan.order.to_message(values)
            self._update(signature, plan, given, op, rule)
            if communicator.checks:
                self._note_change(plan.order.blocks)
        except BaseException as error:  # a signal's, for example, at any moment
            self.mark_interrupted(error, plan.order.blocks)
            raise

    @abc.abstractmethod
    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        """`update` by values in the order of the message; `None` if they are in the buffers."""

    def prepare_rows(self, variables: Sequence[Block], rule: UpdateRule) -> None:  # noqa: B027
        """Does `Update.prepare` for `update_rows` of these variables."""

    @span(UPDATE, lambda *args, **_: (current_call(), args[4].nbytes))
    def update_rows(
        self,
        variable: Block,
        slots: Sequence[Block],
        rows: Array,
        gradient: Array,
        rule: UpdateRule,
    ) -> None:
        """Applies `rule` to some rows of a variable and of its slots, without using other rows.

        Args:
            variable: its block, of shape `(n, ...)`.
            slots: the blocks of its slots.
            rows: integers of shape `(k,)`, all different and the same on every rank.
            gradient: of shape `(k, ...)` and the variable's dtype, the same on every rank.
            rule: how they change. It clips no norm.
        """
        communicator, blocks = self.communicator, (variable, *slots)
        if communicator.checks:
            self._check_unchanged([variable])
        try:
            signature = signature_of(current_call(), rows.shape, variable.identity())
            # The ranks gathered the rows and the gradient, so these are the same on every rank;
            # only the variable is compared.
            communicator.exchange(signature.with_numbers(rule.agreed, rule.names))
            with np.errstate(all="ignore"):
                self._update_rows(blocks, rows, gradient, rule)
            if communicator.checks:
                self._note_change([variable])
        except BaseException as error:
            self.mark_interrupted(error, blocks)
            raise

    @abc.abstractmethod
    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None: ...

    @abc.abstractmethod
    def publish(self, blocks: Sequence[Block]) -> None:
        """Makes what the parameter rank has written readable on all ranks."""

    # ---- updates that were interrupted, and what else writes to variables

    def mark_interrupted(self, error: BaseException, blocks: Sequence[Block]) -> None:
        """Forbids the use of blocks that an interrupted call may have changed in part."""
        # An error that all ranks raise comes before anything changes.
        if self.communicator.calls.mark_interrupted(error):
            self._has_interrupted = True
            for block in blocks:
                block.mark_interrupted(current_call())

    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Raises if the program has written to what a rank reads of the variables.

        On a host checksums are compared, because NumPy's `at` writes to read-only arrays, too.
        """
        with self.communicator.raise_together():
            for block in blocks:
                # Cleared at once, so that a foreign write is reported once and not at every later
                # update.
                seen, block.checksum = block.checksum, None
                if seen not in (None, checksum(block.array)):
                    raise RuntimeError(
                        f"{current_call()}: since the last update something else wrote to the "
                        f"memory of a variable of shape {block.array.shape} and dtype "
                        f"{block.array.dtype.name} (HPCSTRAT_CHECK); pass functions that write in "
                        "place, such as np.add.at, a copy: read_value() instead of value()"
                    )

    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes that an update has changed the variables, on all ranks."""
        for block in blocks:
            block.checksum = checksum(block.array)
