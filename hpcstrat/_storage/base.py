"""Storage: the interface to the places where a strategy stores its variables."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._core.arrays import checksum
from hpcstrat._core.call_name import current_call
from hpcstrat._core.timeline import UPDATE, span
from hpcstrat._core.types import Aggregation, Array
from hpcstrat._memory.allocator import Block
from hpcstrat._memory.intervals import Interval
from hpcstrat._storage.local import LocalBlocks, fill
from hpcstrat._storage.plan import Plan
from hpcstrat._update.formula import Kernel
from hpcstrat._update.rows import update_rows
from hpcstrat._update.rule import UpdateRule


class Storage(abc.ABC):
    """Stores variables. Methods that make, change or publish them are collective.

    Attributes:
        communicator: the ranks that share the variables.
        local: this rank's blocks.
        is_central: whether there is one copy for all ranks, which one of them writes as a whole.
        has_all_blocks: whether every rank can read every block, and not only the parameter rank.
        updates_here: whether this rank updates variables, and has their slots.
    """

    is_central: bool = False
    has_all_blocks: bool = True

    def __init__(self, communicator: Communicator, local: LocalBlocks) -> None:
        self.communicator = communicator
        self.local = local
        self.updates_here: bool = True
        self._number = communicator.calls.count_storage()
        self._created = 0
        self._has_interrupted = False
        self._prepared: set[tuple[Kernel | None, np.dtype[Any]]] = set()  # for updates of rows

    def create(self, initial: Array) -> Block:
        """A new block with the parameter rank's value; all ranks pass equal shapes and dtypes."""
        with self.communicator.change():
            block = self._register(self._create(initial))
        if self.communicator.checks:
            self._note_change([block])
        return block

    def _register(self, block: Block) -> Block:
        # Counted after all ranks have made it: the numbers must stay equal on all ranks.
        self._created += 1
        block.number, block.storage = self._created, self._number
        # A variable is made by the call "Variable 'w'", a slot by "SGD: momentum of 'w'".
        block.name = current_call().removeprefix("Variable ")
        return block

    @abc.abstractmethod
    def _create(self, initial: Array) -> Block: ...

    def create_slot(self, variable: Block, value: float) -> Block:
        """A new block for a slot, like the variable and filled with `value`.

        It can be read and written only where updates run.
        """
        with self.communicator.change():
            return self._register(self._create_slot(variable, value))

    def _create_slot(self, variable: Block, value: float) -> Block:
        """Each rank that updates the variable makes its own."""
        communicator, local, array = self.communicator, self.local, variable.array
        with communicator.raise_together(), local.current():
            if self.updates_here:
                block = local.new_block(array.shape, array.dtype)
                fill(block.array, local.here(np.array(value, array.dtype)))
            else:
                # It has a number, so that all ranks count the same, but no memory: slots are as
                # large as the model.
                block = Block(None, None, Interval(0, 0))
            facts = (f"initial value={value}", variable.identity())
            communicator.exchange(signature_of(current_call(), *facts))
        return block

    @abc.abstractmethod
    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates of these variables, each with its slots."""

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
        in_buffers = plan.buffers.are(values)
        signature = plan.signature(op, rule.agreed, in_buffers)
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

    @abc.abstractmethod
    def make_buffers(self, plan: Plan) -> None:
        """Makes buffers for a plan, from which the gradients of its variables are not copied."""

    def prepare_rows(self, variables: Sequence[Block], rule: UpdateRule) -> None:
        """Does `Update.prepare` for `update_rows` of these variables."""
        for variable in variables if self.updates_here else ():
            kernel = rule.kernel, variable.array.dtype
            if kernel not in self._prepared:
                self.local.prepare_rows(rule, variable)
                self._prepared.add(kernel)

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
            gradient: of shape `(k, ...)` and the variable's dtype, the same on every rank. With
                fewer dimensions than the variable, `rows` are rows of `row_view`.
            rule: how they change. It clips no norm.
        """
        communicator, blocks = self.communicator, (variable, *slots)
        if communicator.checks:
            self._check_unchanged([variable])
        try:
            signature = signature_of(current_call(), rows.shape, variable.identity())
            # The ranks gathered the rows and the gradient, so these are the same on every rank;
            # only the variable is compared.
            communicator.exchange(
                signature.with_numbers(tuple(rule.agreed.values()), tuple(rule.agreed))
            )
            with np.errstate(all="ignore"):
                self._update_rows(blocks, rows, gradient, rule)
            if communicator.checks:
                self._note_change([variable])
        except BaseException as error:
            self.mark_interrupted(error, blocks)
            raise

    def _update_rows(
        self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule
    ) -> None:
        """Each rank updates all rows."""
        local = self.local
        with local.current():
            rows, gradient = local.here(rows), local.here(gradient)
            update_rows([block.array for block in blocks], rows, gradient, rule)

    def publish(self, blocks: Sequence[Block]) -> None:
        """Makes the parameter rank's writes readable everywhere, if ranks did not all write."""
        for block in blocks:  # other ranks wrote too: there is nothing to compare with
            block.checksum = None
