"""What all optimizers share: gradients of the replicas in, one update of the variables out."""

from __future__ import annotations

import abc
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat import _context
from hpcstrat._communicators.records import signature
from hpcstrat._context import InReplica
from hpcstrat._group import ReplicaGroup
from hpcstrat._storage.base import Array, Storage, UpdateRule
from hpcstrat._storage.memory import Block
from hpcstrat._storage.plan import Plan
from hpcstrat._storage.rows import sum_rows
from hpcstrat._types import IndexedSlices, ReduceOp
from hpcstrat._values import DistributedValues
from hpcstrat._variable_values import as_operand
from hpcstrat._variables import Variable

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_MOST_PLANS = 16  # each for a subset of the variables; a program may draw its subsets at random

LearningRate: TypeAlias = "float | Callable[[], float] | Callable[[int], float]"


class Optimizer(abc.ABC):
    """Changes variables by their gradients.

    Args:
        learning_rate: a number of at least 0, or a callable that gives one, without arguments or of the number of steps
            done.
        global_clipnorm: if given, the gradients, summed over the replicas, are scaled down together so that their norm,
            over all variables, is at most this.
        name: a name.
    """

    def __init__(
        self, learning_rate: LearningRate, global_clipnorm: float | None = None, name: str | None = None
    ) -> None:
        if global_clipnorm is not None and not global_clipnorm > 0:
            raise ValueError(
                f"{type(self).__name__}: global_clipnorm is {global_clipnorm!r}; it must be positive or None"
            )
        self.name: str = type(self).__name__ if name is None else name
        self.global_clipnorm = global_clipnorm
        self.learning_rate = learning_rate
        self._iterations = 0
        self._slots: dict[int, tuple[Variable, tuple[Block, ...]]] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}

    # ---- what a kind of optimizer fills in

    @property
    @abc.abstractmethod
    def slots(self) -> Mapping[str, float]:
        """Name and initial value of each slot: an array beside each variable, of its shape and dtype."""

    @abc.abstractmethod
    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """The update of step number `step`, counted from 1. Called on every rank, in every step."""

    # ---- facts

    @property
    def iterations(self) -> int:
        """The number of steps done."""
        return self._iterations

    @property
    def learning_rate(self) -> Any:
        """The learning rate as it was set: a number or a callable."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        if callable(value):
            # A parameter with a default is the callable's own, such as a factor, and not the step.
            takes_step = any(
                parameter.default is parameter.empty and parameter.kind in _POSITIONAL
                for parameter in inspect.signature(value).parameters.values()
            )
            rate: Any = value
            self._current_rate: Callable[[], float] = (lambda: rate(self._iterations)) if takes_step else rate
        else:
            constant = self._not_negative("learning_rate", value)
            self._current_rate = lambda: constant
        self._constant_rate: float | None = None if callable(value) else self._current_rate()
        self._learning_rate = value

    def __repr__(self) -> str:
        names = [name for name in inspect.signature(type(self)).parameters if hasattr(self, name)]
        arguments = [f"{name}={getattr(self, name)!r}" for name in (*names, "iterations")]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        # One that goes on from here with copies of its variables; as collective as making them is.
        other = copy.copy(self)
        memo[id(self)] = other
        other._slots, other._plans = {}, {}
        other.learning_rate = copy.deepcopy(self._learning_rate, memo)
        pairs = [(v, copy.deepcopy(v, memo)) for v, _ in sorted(self._slots.values(), key=_number_of)]
        other._make_slots([v for _, v in pairs])
        for old, new in pairs:
            group = new._group
            if group.updates_here:
                for own, copied in zip(self._slots[id(old)][1], other._slots[id(new)][1], strict=True):
                    _copy(group.storage, own, copied)
        return other

    def _not_negative(self, argument: str, value: Any) -> float:
        """The value of an argument as a float.

        Raises:
            TypeError: it is no number.
            ValueError: it is negative, infinite or nan.
        """
        is_number = hasattr(value, "__float__")
        if not is_number or not 0 <= float(value) < math.inf:
            error = ValueError if is_number else TypeError
            also = ", or a callable" if argument == "learning_rate" else ""
            raise error(f"{type(self).__name__}: {argument} is {value!r}; it must be a number of at least 0{also}")
        return float(value)

    # ---- the step

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Variable]], skip_gradients_aggregation: bool = False
    ) -> None:
        """Updates variables by their gradients, once. Collective: all ranks call this.

        In a replica context the gradients are summed over the replicas; in the cross-replica context they are plain
        arrays, the same on every rank. When it returns, every rank reads the new values.

        Args:
            grads_and_vars: pairs of a gradient and its variable. A gradient is an array, of any library, of the
                variable's shape whose dtype casts to the variable's, an `IndexedSlices`, or `None` for a variable that
                is left as it is. Without any pair nothing happens.
            skip_gradients_aggregation: the gradients are summed over the replicas already.

        Raises:
            ValueError: no gradient of any of the variables, a gradient of a wrong shape or dtype, a variable that no
                optimizer can change, or that occurs twice. Nothing has changed.
            ReplicaMismatchError: the replicas pass gradients of different variables, or different learning rates.
            RuntimeError: the variables belong to another strategy than the one this line runs in.
        """
        call = f"{self.name}.apply_gradients"
        pairs = list(grads_and_vars)
        if not skip_gradients_aggregation and self._apply_as_before(call, pairs):
            return
        if not pairs:
            _context.group().communicator.exchange(signature(call, "no variable"))
            return
        for pair in pairs:
            _check_pair(call, pair)
        group = pairs[0][1]._group_here(f"{call} to {pairs[0][1].name!r}")
        communicator = group.communicator
        with communicator.joint(call):
            gradients, dense, sparse = _sorted(call, pairs)
            if not gradients and not sparse:
                communicator.exchange(signature(call, "no gradient"))
                communicator.settle()
                raise ValueError(f"{call}: none of the {len(pairs)} variables has a gradient; pass at least one")
            key = tuple([id(v) for v in dense])
            if sparse or key not in self._plans:
                self._check_variables(call, group, [*dense, *(v for _, v in sparse)])
            rate = float(self._current_rate())
        summed = skip_gradients_aggregation or not isinstance(_context.context(), InReplica)
        op = None if summed else ReduceOp.SUM
        if summed:
            communicator.require_equal(call, gradients)
        rows = [self._summed_rows(call, group, slices, v, summed) for slices, v in sparse]
        if self.global_clipnorm is not None:
            if op is not None:
                gradients, op = communicator.all_reduce(call, gradients, op), None
            with group.on_stream():
                gradients, rows = _clipped(group.xp, self.global_clipnorm, gradients, rows)
        rule = self.update_rule(rate, self._iterations + 1)
        try:  # all variables and the number of steps change, or none
            if dense:
                plan = self._plan(group, dense)
                group.storage.update(call, plan, gradients, op, rule)
            for (_, v), (indices, values) in zip(sparse, rows, strict=True):
                slots = self._slots_of(group, [v])[0]
                group.storage.update_rows(call, v._block, slots, indices, values, rule)
            self._iterations += 1
        except BaseException as error:
            group.storage.tear(call, error, [v._block for v in (*dense, *(v for _, v in sparse))])
            raise

    def _apply_as_before(self, call: str, pairs: Sequence[tuple[Any, Variable]]) -> bool:
        """The way of nearly all steps: a replica's arrays for variables that were seen, by a rate that cannot fail.

        Whether this is one; if not, nothing has happened. It only leaves out checks whose outcome is known.
        """
        context = _context.current.get()
        if type(context) is not InReplica or self._constant_rate is None or self.global_clipnorm is not None:
            return False
        try:
            plan = self._plans.get(tuple([id(variable) for _, variable in pairs]))
        except (TypeError, ValueError):  # no pairs
            return False
        group = context.group
        if plan is None or pairs[0][1]._group is not group:
            return False
        gradients = [gradient for gradient, _ in pairs]
        if not plan.fits(gradients):
            return False
        rule = self.update_rule(self._constant_rate, self._iterations + 1)
        try:
            group.storage.update(call, plan, gradients, ReduceOp.SUM, rule)
            self._iterations += 1
        except BaseException as error:  # a signal's may come between the two
            group.storage.tear(call, error, plan.blocks)
            raise
        return True

    def gradient_buffers(self, variables: Iterable[Variable]) -> list[Any]:
        """Arrays to write the gradients of these variables to, which `apply_gradients` then need not copy.

        For steps that copying gradients slows down: `np.matmul(x.T, d, out=buffer)` instead of `x.T @ d`. Pass them to
        `apply_gradients`, all of them, with the same variables in the same order:
        `apply_gradients(zip(buffers, variables))`. What they hold after it is undefined. They are made once and live as
        long as the optimizer. Collective: all ranks call this.

        Args:
            variables: trainable variables of one strategy, each once.

        Returns:
            For each variable an array of its shape and dtype on this replica's device, zeros at first.

        Raises:
            ValueError: no variable, one that no optimizer can change, or that occurs twice.
            MemoryError: there is no room for them, on any rank.
            ReplicaMismatchError: the replicas pass different variables.
        """
        call = f"{self.name}.gradient_buffers"
        variables = list(variables)
        if not variables or not all(isinstance(v, Variable) for v in variables):
            raise ValueError(f"{call}: it takes variables, at least one, and got {variables!r}; pass them in a list")
        group = variables[0]._group_here(f"{call} of {variables[0].name!r}")
        with group.communicator.joint(call):
            self._check_variables(call, group, variables)
            group.communicator.exchange(signature(call, *[v._block.held() for v in variables]))
        plan = self._plan(group, variables)
        if plan.buffers is None:
            group.storage.make_buffers(call, plan)
        assert plan.buffers is not None
        return list(plan.buffers)

    def _check_variables(self, call: str, group: ReplicaGroup, variables: Sequence[Variable]) -> None:
        if len({id(v) for v in variables}) < len(variables):
            raise ValueError(f"{call}: a variable occurs twice; add its gradients up first")
        for v in variables:
            if v._group is not group:
                raise ValueError(f"{call}: the variables belong to different strategies; make them in one scope")
            if v.dtype.kind not in "fc" and v.dtype.name != "bfloat16":
                raise ValueError(
                    f"{call}: the variable {v.name!r} is of dtype {v.dtype.name}, and only floats have gradients; "
                    "leave it out"
                )
            if v._is_on_read:
                raise ValueError(
                    f"{call}: the variable {v.name!r} is ON_READ, one value a replica; make it an ordinary one"
                )

    def _plan(self, group: ReplicaGroup, variables: Sequence[Variable]) -> Plan:
        """The plan for these variables, kept; of those without buffers only the newest few are."""
        key = tuple([id(v) for v in variables])
        if key not in self._plans:
            plan = group.storage.plan([v._block for v in variables], self._slots_of(group, variables))
            droppable = [other for other, old in self._plans.items() if old.buffers is None]
            for other in droppable[: len(droppable) + 1 - _MOST_PLANS]:
                del self._plans[other]
            self._plans[key] = plan
        return self._plans[key]

    def _slots_of(self, group: ReplicaGroup, variables: Sequence[Variable]) -> list[tuple[Block, ...]]:
        """Each variable's slots, made when it is first seen, which is at the same call on all ranks."""
        new = sorted([v for v in variables if id(v) not in self._slots], key=lambda v: v._block.number)
        if new:
            # One kind after the other, in the order of the variables: so each kind lies in a row, as they do.
            kinds = [
                [group.storage.create_slot(f"{self.name}: {name} of {v.name!r}", v._block, value) for v in new]
                for name, value in self.slots.items()
            ]
            for i, v in enumerate(new):
                self._slots[id(v)] = (v, tuple(kind[i] for kind in kinds))
        return [self._slots[id(v)][1] for v in variables]

    # ---- what a checkpoint saves

    def _named_slots(self) -> list[tuple[Variable, dict[str, Block]]]:
        """The variables that have slots, each with these by name."""
        return [(v, dict(zip(self.slots, blocks, strict=True))) for v, blocks in self._slots.values()]

    def _make_slots(self, variables: Sequence[Variable]) -> None:
        """Makes the slots of variables that have none yet. Collective: all ranks pass the same variables.

        Raises:
            MemoryError: there is no room for them, on any rank.
        """
        for group in dict.fromkeys(v._group for v in variables):
            self._slots_of(group, [v for v in variables if v._group is group])

    # ---- help

    def _summed_rows(
        self, call: str, group: ReplicaGroup, slices: IndexedSlices, variable: Variable, summed: bool
    ) -> tuple[Array, Array]:
        """The rows that occur in any replica's slices, each once, and their gradients, summed in rank order."""
        communicator = group.communicator
        with communicator.joint(call):
            indices, values = _checked_slices(call, slices, variable)
        if not summed:
            agreed = f"{call} of rows of {variable.name!r}, variable {variable._block.number}"
            indices, values = communicator.all_gather(agreed, [indices, values], 0)
        with group.on_stream():
            return sum_rows(indices, values)


def _number_of(slots: tuple[Variable, tuple[Block, ...]]) -> int:
    return slots[0]._block.number


def _copy(storage: Storage, source: Block, target: Block) -> None:
    start = 0
    for part in storage.parts(source):
        storage.write_part(target, start, part)
        start += part.size


def _clipped(
    xp: Any, most: float, gradients: Sequence[Array], rows: Sequence[tuple[Array, Array]]
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """All gradients, scaled down together so that their norm is at most `most`."""
    arrays = [*gradients, *(values for _, values in rows)]
    with np.errstate(all="ignore"):  # as in the update: infinite gradients are no reason to stop on one rank
        # In float64, where the squares of large float32 numbers do not overflow.
        norm = xp.sqrt(sum(xp.sum(xp.abs(g).astype(np.float64) ** 2) for g in arrays))
        scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
        return [g * scale.astype(g.dtype) for g in gradients], [(i, v * scale.astype(v.dtype)) for i, v in rows]


def _checked_slices(call: str, slices: IndexedSlices, variable: Variable) -> tuple[Array, Array]:
    group = variable._group
    on_gpu = group.stream is not None
    indices, values = (as_operand(call, array, on_gpu) for array in (slices.indices, slices.values))
    if on_gpu:
        indices, values = group.xp.asarray(indices), group.xp.asarray(values)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or values.shape != (*indices.shape, *variable.shape[1:]):
        raise ValueError(
            f"{call}: the IndexedSlices for {variable.name!r} has values of shape {values.shape} and indices of shape "
            f"{indices.shape} and dtype {indices.dtype.name}; for k rows of a variable of shape {variable.shape} "
            f"they must be {('k', *variable.shape[1:])} and ('k',), of integers"
        )
    indices = indices.astype(np.int64)
    if indices.size and int(indices.view(np.uint64).max()) >= variable.shape[0]:  # negative ones are large ones there
        raise ValueError(f"{call}: an index for {variable.name!r} is not in 0..{variable.shape[0] - 1}; all must be")
    if not np.can_cast(values.dtype, variable.dtype, "same_kind"):
        raise ValueError(
            f"{call}: the gradient of {variable.name!r} is {values.dtype.name}, which does not go into "
            f"{variable.dtype.name}; cast it first"
        )
    return indices, values.astype(variable.dtype, copy=False)


def _check_pair(call: str, pair: Any) -> None:
    is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
    if is_pair and isinstance(pair[1], Variable):
        return
    if is_pair and isinstance(pair[0], Variable):
        raise ValueError(
            f"{call}: it takes (gradient, variable) pairs, and in one {pair[0].name!r} comes first; pass the variable "
            "second"
        )
    kind = f"({', '.join(type(one).__name__ for one in pair)})" if is_pair else type(pair).__name__
    raise ValueError(f"{call}: it takes (gradient, variable) pairs, and one is {kind}; pass zip(gradients, variables)")


def _sorted(
    call: str, pairs: Sequence[tuple[Any, Variable]]
) -> tuple[list[Array], list[Variable], list[tuple[IndexedSlices, Variable]]]:
    """The gradients that are arrays, their variables, and the pairs whose gradients are slices."""
    gradients: list[Array] = []
    dense: list[Variable] = []
    sparse: list[tuple[IndexedSlices, Variable]] = []
    for gradient, variable in pairs:
        if gradient is None:
            continue
        if isinstance(gradient, IndexedSlices):
            sparse.append((gradient, variable))
            continue
        view = variable._block.view
        if type(gradient) is not type(view) or gradient.shape != view.shape or gradient.dtype != view.dtype:
            gradient = _checked(call, gradient, variable)
        gradients.append(gradient)
        dense.append(variable)
    return gradients, dense, sparse


def _checked(call: str, gradient: Any, variable: Variable) -> Array:
    if isinstance(gradient, DistributedValues):
        raise ValueError(
            f"{call}: the gradient of {variable.name!r} is a {type(gradient).__name__}, one value a replica; apply it "
            "inside Strategy.run, or reduce it first: strategy.reduce(ReduceOp.SUM, gradient, axis=None)"
        )
    view = variable._block.view
    array = as_operand(call, gradient, variable._group.stream is not None)
    if array.shape != view.shape:
        raise ValueError(
            f"{call}: the gradient of {variable.name!r} has shape {array.shape} and the variable {view.shape}; "
            "they must be equal"
        )
    if array.dtype != view.dtype and not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise ValueError(
            f"{call}: the gradient of {variable.name!r} is {array.dtype.name}, which does not go into "
            f"{view.dtype.name}; cast it first"
        )
    return array if isinstance(view, np.ndarray) else variable._group.xp.asarray(array)
