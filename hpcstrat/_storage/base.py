"""The one interface to where a strategy keeps its variables' numbers."""

from __future__ import annotations

import abc
import itertools
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from hpcstrat._calls.records import CallSignature, signature_of
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.checked_exchange import Write
from hpcstrat._core.call_name import current_call
from hpcstrat._core.span import UPDATE, Details, span
from hpcstrat._core.types import Aggregation, ReduceOp
from hpcstrat._core.types import Array as Array
from hpcstrat._core.types import Bytes as Bytes
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._storage.marks import FEWEST_BYTES
from hpcstrat._storage.plan import Plan
from hpcstrat._update.rule import UpdateRule as UpdateRule

# A model that fills the memory can still be saved and restored, because never more than a part of
# it is in memory twice.
PART = 1 << 22
"""Bytes of a block that are read or written at once at most."""


class Storage(abc.ABC):
    """Keeps variables' numbers. Its methods are collective: all ranks call them.

    Attributes:
        reads_everywhere: whether every rank can read every block, or its part of a split one; else
            the parameter rank.
    """

    reads_everywhere: bool = True

    def __init__(self, communicator: Communicator) -> None:
        self._number = communicator.count_storage()
        self._has_interrupted = False
        self._marked: weakref.WeakSet[Plan] = weakref.WeakSet()  # with marks in this step

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
        # The call that makes a variable is "Variable 'w'", and that of a slot "SGD: momentum of
        # 'w'".
        block.name, block.storage = current_call().removeprefix("Variable "), self._number
        return block

    @abc.abstractmethod
    def _create(self, initial: Array) -> Block: ...

    def split(self, variables: Sequence[Block]) -> Sequence[Cuts | None]:
        """How slots of these variables are split over the ranks; `None` for those that are not."""
        return [None] * len(variables)

    def create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        """A new block for an optimizer's numbers beside a variable, of its shape and dtype, filled with `value`.

        It can be read and written where updates run only: on the parameter rank, or on every rank
        for mirrors.

        Args:
            variable: its block.
            value: of all elements.
            cuts: from `split`, of this variable among all those that get their slots together.

        Raises:
            MemoryError: there is no room for it.
        """
        with self.communicator.change():
            return self._named(self._create_slot(variable, value, cuts))

    def _create_slot(self, variable: Block, value: float, cuts: Cuts | None) -> Block:
        return self._create(slot_values(variable, value))

    @abc.abstractmethod
    def plan(self, variables: Sequence[Block], slots: Sequence[Sequence[Block]]) -> Plan:
        """The plan of updates of these variables, each with its slots."""

    @span(UPDATE, lambda _, plan, *__, **___: Details(current_call(), plan.layout.nbytes))
    # An overflow gives inf, as on a GPU. It must not become an exception on the one rank that meets
    # it.
    @np.errstate(all="ignore")
    def update(
        self,
        plan: Plan,
        values: Sequence[Array],
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        """Reduces the replicas' `values` by `op` and applies `rule` once.

        Afterwards every rank reads the result.

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
        # Only then: reading every block's view would cost each step what nearly no program needs.
        if self._has_interrupted:
            plan.require_whole()
        # Part of the signature: a rank whose gradients are in its buffers sends none, and the
        # others must expect that.
        in_buffers = plan.are_in_buffers(values)
        if plan.marks.begun and not (in_buffers and op is ReduceOp.SUM):
            with communicator.raise_together():
                raise RuntimeError(
                    f"{current_call()}: its gradient buffers are being summed, since some were "
                    "marked ready in this step; it must take these buffers, and sum them over the "
                    "replicas"
                )
        signature = plan.signature(op, rule.constants, in_buffers)
        try:
            self._update(signature, plan, None if in_buffers else values, op, rule)
            if communicator.checks:
                self._note_change(plan.blocks)
        except BaseException as error:  # a signal's, say, at any moment
            self.mark_interrupted(error, plan.blocks)
            raise

    def mark_interrupted(self, error: BaseException, blocks: Sequence[Block]) -> None:
        """Forbids the use of blocks that this call, which an exception interrupted, may have changed in part.

        Not where all ranks raised alike, which they do before anything changes.
        """
        # An error that all ranks raised came before anything changed, and leaves the blocks as they
        # are.
        if self.communicator.mark_interrupted(error):
            self._has_interrupted = True
            for block in blocks:
                block.mark_interrupted(current_call())

    @abc.abstractmethod
    def _check_unchanged(self, blocks: Sequence[Block]) -> None:
        """Checks that the program has not written to what this rank reads of the variables.

        Collective.

        Raises:
            RuntimeError: it has, on this rank or another.
            ReplicaMismatchError: it has, and so the ranks' copies differ.
        """

    @abc.abstractmethod
    def _note_change(self, blocks: Sequence[Block]) -> None:
        """Notes that an update has changed the variables, on all ranks."""

    @abc.abstractmethod
    def _update(
        self,
        signature: CallSignature,
        plan: Plan,
        values: Sequence[Array] | None,
        op: Aggregation,
        rule: UpdateRule,
    ) -> None:
        """`update`; the values are `None` where they lie in the plan's buffers."""

    def mark(self, plan: Plan, places: Sequence[int], begins: bool) -> None:
        """Marks gradients in the plan's buffers as complete; the update that follows sums them over the replicas.

        Args:
            plan: with buffers.
            places: of the gradients in a message, in order; not marked yet.
            begins: whether their sums may begin. Equal on all ranks.

        Raises:
            MemoryError: there is no room for sums, on any rank.
            ReplicaMismatchError: the ranks mark different ones.
        """
        communicator, marks = self.communicator, plan.marks
        with communicator.raise_together():
            communicator.exchange(plan.signature_of_marks(places))
        marks.marked.update(places)
        self._marked.add(plan)
        new = marks.marked - marks.begun
        # Small sums go in one message, and a message of few bytes in one with the rest.
        if begins and sum(plan.nbytes_of(place) for place in new) >= FEWEST_BYTES:
            marks.begun |= new if self._begin_sums(plan, sorted(new)) else set()

    def _begin_sums(self, plan: Plan, places: Sequence[int]) -> bool:
        """Begins to sum some of the plan's buffers over the replicas.

        Whether it does: not where that gains nothing.
        """
        return False

    def end_marks(self, plan: Plan) -> None:
        """Forgets the marks of a plan whose variables were updated."""
        self._marked.discard(plan)
        plan.marks.clear()

    def drop_marks(self) -> None:
        """Forgets all marks, after an error. When it returns nobody reads the buffers any more.

        Not collective.
        """
        if not self._marked:
            return
        try:
            self._finish_sums()
        except Exception as error:
            self.communicator.mark_interrupted(error)
        for plan in [*self._marked]:
            self.end_marks(plan)

    def _finish_sums(self) -> None:  # noqa: B027
        """Waits for the sums that are under way; on a GPU, its stream does.

        Raises:
            Exception: one failed.
        """

    @abc.abstractmethod
    def make_buffers(self, plan: Plan) -> None:
        """Gives a plan buffers from which the gradients of its variables need not be copied.

        Collective.

        Raises:
            MemoryError: there is no room for them.
        """

    @span(
        UPDATE,
        lambda _, variable, slots, rows, gradient, *__, **___: Details(
            current_call(), gradient.nbytes
        ),
    )
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
            gradient: of shape `(k, ...)` and the variable's dtype, the same on every rank. With
                fewer dimensions than the variable, `rows` count those of `row_view`.
            rule: how they change. Its constants must be equal on all ranks.

        Raises:
            ReplicaMismatchError: the ranks update different variables, or with different constants.
        """
        communicator, blocks = self.communicator, (variable, *slots)
        if communicator.checks:
            self._check_unchanged([variable])
        try:
            signature = signature_of(current_call(), rows.shape, variable.held())
            # The rows and the gradient are the same on every rank already (the ranks gathered
            # them), so only what is updated is compared.
            communicator.exchange(
                signature.with_numbers(tuple(rule.constants.values()), tuple(rule.constants))
            )
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
    def write(self, block: Block, new: Array, rule: UpdateRule) -> None:
        """Changes a variable on this rank alone, which is not collective."""

    @abc.abstractmethod
    def parts(self, block: Block, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The bytes of a block as this rank has it, in host memory, at most `PART` of them at once.

        Each part is read-only by convention and valid until the next. Not collective.

        Args:
            block: of which a rank has its part only, where it is split.
            start: the first byte.
            stop: the byte after the last one; `None` for all.
        """

    def all_parts(self, block: Block) -> Iterator[Bytes]:
        """`parts` of all ranks, in rank order, of a block that is split over them.

        Collective, part by part.
        """
        assert block.cuts is not None
        communicator, itemsize = self.communicator, block.array.dtype.itemsize
        own = self.parts(block)
        for rank, cuts in enumerate(itertools.pairwise(block.cuts)):
            start, stop = (cut * itemsize for cut in cuts)
            for begin in range(start, stop, PART):
                nbytes = min(PART, stop - begin)
                signature = signature_of(f"{current_call()}: {block.name}", rank, begin)
                with communicator.raise_together():
                    part = next(own) if communicator.rank == rank else flat(np.empty(0))
                    messages = communicator.exchange(signature, part.size, _writer_of(part))
                yield messages[rank][:nbytes]

    def write_part(self, block: Block, start: int, part: Bytes) -> None:
        """Writes bytes, in host memory, to a block from its byte `start` on; on this rank alone, not collective.

        Of a block that is split over the ranks, `start` counts in all of it, and this rank takes
        what is its own.
        """
        if block.cuts is not None:
            first, last = (cut * block.array.dtype.itemsize for cut in self._own_cuts(block.cuts))
            part = part[max(first - start, 0) : max(last - start, 0)]
            start = max(start - first, 0)
        if part.size:
            self._write_part(block, start, part)

    def _own_cuts(self, cuts: Cuts) -> Cuts:
        rank = self.communicator.rank
        return cuts[rank : rank + 2]

    @abc.abstractmethod
    def _write_part(self, block: Block, start: int, part: Bytes) -> None: ...

    @abc.abstractmethod
    def publish(self, blocks: Sequence[Block]) -> None:
        """Makes readable on every rank what the parameter rank alone wrote to these variables."""

    @abc.abstractmethod
    def has(self, array: Array) -> bool:
        """Whether an array, NumPy's or CuPy's, lies in this storage's memory, which changes.

        Not collective.
        """


def slot_values(variable: Block, value: float) -> Array:
    """The initial value of a slot, as a host array."""
    dtype = variable.array.dtype
    # One element seen many times: a slot is as large as its variable, and must not cost that twice.
    return np.broadcast_to(dtype.type(value), variable.array.shape)


def _writer_of(part: Bytes) -> Write:
    def write(message: Bytes) -> None:
        message[: part.size] = part

    return write


def flat(array: Array) -> Bytes:
    """The bytes of an array of storage, in place."""
    return array.reshape(-1).view(np.uint8)


def host_parts(array: Array, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
    """The bytes of an array in host memory, from `start` to `stop`, in place and in parts."""
    # In place: what is saved is read where it lies, and never copied.
    wanted = flat(array)[start:stop]
    for begin in range(0, wanted.size, PART):
        yield wanted[begin : begin + PART]
