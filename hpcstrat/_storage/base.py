"""The one interface to where a strategy keeps its variables' numbers."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.protocol import CallSignature, signature
from hpcstrat._edge import current_call
from hpcstrat._memory.blocks import Block
from hpcstrat._spans import UPDATE, Details, span
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.rule import UpdateRule as UpdateRule
from hpcstrat._types import Aggregation
from hpcstrat._types import Array as Array
from hpcstrat._types import Bytes as Bytes

PART = 1 << 22
"""Bytes of a block that are read or written at once at most."""


class Storage(abc.ABC):
    """Keeps variables' numbers. Its methods are collective: all ranks call them."""

    def __init__(self, communicator: Communicator) -> None:
        self._number = communicator.count_storage()
        self._has_torn = False

    @property
    @abc.abstractmethod
    def communicator(self) -> Communicator:
        """The ranks that share the variables."""

    def create(self, initial: Array) -> Block:
        """A new block with the value that the parameter rank passes; the shapes and dtypes of all ranks are equal.

        Raises:
            MemoryError: there is no room for it.
            ReplicaMismatchError: shapes or dtypes differ.
        """
        with self.communicator.change():
            block = self._named(self._create(initial))
        if self.communicator.checks:
            self._note_change([block])
        return block

    def _named(self, block: Block) -> Block:
        # The call that makes a variable is "Variable 'w'", and that of a slot "SGD: momentum of 'w'".
        block.name, block.storage = current_call().removeprefix("Variable "), self._number
        return block

    @abc.abstractmethod
    def _create(self, initial: Array) -> Block: ...

    def create_slot(self, variable: Block, value: float) -> Block:
        """A new block for an optimizer's numbers beside a variable, of its shape and dtype, filled with `value`.

        It can be read and written where updates run only: on the parameter rank, or on every rank for mirrors.

        Raises:
            MemoryError: there is no room for it.
        """
        with self.communicator.change():
            return self._named(self._create_slot(variable, value))

    def _create_slot(self, variable: Block, value: float) -> Block:
        return self._create(slot_values(variable, value))

    @abc.abstractmethod
    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates of these variables, each with its slots."""

    @span(UPDATE, lambda _, plan, *__, **___: Details(current_call(), plan.layout.nbytes))
    def update(
        self,
        plan: Plan,
        values: Sequence[Array],
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        """Reduces the replicas' `values` by `op` and applies `rule` once. Afterwards every rank reads the result.

        Args:
            plan: of the variables.
            values: one array a variable, of its shape; cast to its dtype.
            op: how the replicas' values become one; `FIRST_REPLICA` takes those of rank 0.
            rule: how they change the variables. Its constants must be equal on all ranks.

        Raises:
            ReplicaMismatchError: the ranks update different variables, or with different constants.
        """
        communicator = self.communicator
        if communicator.checks:
            self._check_unchanged(plan.blocks)
        if self._has_torn:
            plan.require_whole()
        in_buffers = plan.are_in_buffers(values)
        agreed = plan.signature(op, rule.constants, in_buffers)
        try:
            # An overflow gives inf, as on a GPU. It must not become an exception on the one rank that meets it.
            with np.errstate(all="ignore"):
                self._update(agreed, plan, None if in_buffers else values, op, rule)
            if communicator.checks:
                self._note_change(plan.blocks)
        except BaseException as error:  # a signal's, say, at any moment
            self.tear(error, plan.blocks)
            raise

    def tear(self, error: BaseException, blocks: Sequence[Block]) -> None:
        """Forbids the use of blocks that this call, which an exception broke off, may have changed in part.

        Not where all ranks raised alike, which they do before anything changes.
        """
        if self.communicator.tear(error):
            self._has_torn = True
            for block in blocks:
                block.tear(current_call())

    @abc.abstractmethod
    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Checks that the program has not written to what this rank reads of the variables. Collective.

        Raises:
            RuntimeError: it has, on this rank or another.
            ReplicaMismatchError: it has, and so the ranks' copies differ.
        """

    @abc.abstractmethod
    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes that an update has changed the variables, on all ranks."""

    @abc.abstractmethod
    def _update(
        self, agreed: CallSignature, plan: Plan, values: Sequence[Array] | None, op: Aggregation, rule: UpdateRule
    ) -> None:
        """`update`; the values are `None` where they lie in the plan's buffers."""

    @abc.abstractmethod
    def make_buffers(self, plan: Plan) -> None:
        """Gives a plan buffers from which the gradients of its variables need not be copied. Collective.

        Raises:
            MemoryError: there is no room for them.
        """

    @span(UPDATE, lambda _, variable, slots, rows, gradient, *__, **___: Details(current_call(), gradient.nbytes))
    def update_rows(
        self,
        variable: Block,
        slots: Sequence[Block],
        rows: Array,
        gradient: Array,
        rule: UpdateRule,
    ) -> None:
        """Applies `rule` to some rows of a variable and of its slots; the others are neither read nor written.

        Args:
            variable: its block, of shape `(n, ...)`.
            slots: its slots' blocks.
            rows: integers of shape `(k,)`, all different and the same on every rank.
            gradient: of shape `(k, ...)` and the variable's dtype, the same on every rank.
            rule: how they change. Its constants must be equal on all ranks.

        Raises:
            ReplicaMismatchError: the ranks update different variables, or with different constants.
        """
        communicator, blocks = self.communicator, (variable, *slots)
        if communicator.checks:
            self._check_unchanged([variable])
        try:
            agreed = signature(current_call(), rows.shape, variable.held())
            communicator.exchange(agreed.with_numbers(tuple(rule.constants.values()), tuple(rule.constants)))
            with np.errstate(all="ignore"):
                self._update_rows(blocks, rows, gradient, rule)
            if communicator.checks:
                self._note_change([variable])
        except BaseException as error:
            self.tear(error, blocks)
            raise

    @abc.abstractmethod
    def _update_rows(self, blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule) -> None: ...

    @abc.abstractmethod
    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes a variable on this rank alone, which is not collective."""

    @abc.abstractmethod
    def parts(self, block: Block) -> Iterator[Bytes]:
        """The bytes of a block as this rank has it, in host memory, at most `PART` of them at once.

        Each part is read-only by convention and valid until the next. Not collective.
        """

    @abc.abstractmethod
    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """Writes bytes, in host memory, to a block from its byte `start` on; on this rank alone, not collective."""

    @abc.abstractmethod
    def publish(self, blocks: Sequence[Block]) -> None:
        """Makes readable on every rank what the parameter rank alone wrote to these variables."""

    @abc.abstractmethod
    def has(self, array: Array) -> bool:
        """Whether an array, NumPy's or CuPy's, lies in this storage's memory, which changes. Not collective."""


def slot_values(variable: Block, value: float) -> Array:
    """The initial value of a slot, as a host array."""
    dtype = variable.array.dtype
    return np.broadcast_to(dtype.type(value), variable.array.shape)


def flat(array: Array) -> Bytes:
    """The bytes of an array of storage, in place."""
    return array.reshape(-1).view(np.uint8)


def host_parts(array: Array) -> Iterator[Bytes]:
    """The bytes of an array in host memory, in place and in parts."""
    everything = flat(array)
    for start in range(0, everything.size, PART):
        yield everything[start : start + PART]


def update_rows(blocks: Sequence[Block], rows: Array, gradient: Array, rule: UpdateRule) -> None:
    """Applies a rule to these rows of a variable, the first of the blocks, and of its slots, on this rank."""
    values = [block.array[rows] for block in blocks]
    value, *slots = [value.reshape(-1) for value in values]
    gradient = gradient.reshape(-1).copy()
    if _gpu.is_on_gpu(value):
        rule.on_gpu(value, gradient, slots)
    else:
        rule.apply(value, gradient, slots, np.empty_like(gradient))
    for block, new in zip(blocks, values, strict=True):
        block.array[rows] = new
