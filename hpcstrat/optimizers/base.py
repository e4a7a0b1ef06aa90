"""What all optimizers share: gradients of the replicas in, one update of the variables out."""

from __future__ import annotations

import abc
import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from hpcstrat import _context
from hpcstrat._communicators.protocol import signature
from hpcstrat._context import InReplica
from hpcstrat._edge import call_named, current_call, enter_call, leave_call, names_call
from hpcstrat._group import ReplicaGroup
from hpcstrat._memory.blocks import Block
from hpcstrat._storage.base import Storage, UpdateRule
from hpcstrat._storage.rows import sum_rows
from hpcstrat._types import FIRST_REPLICA, Array, IndexedSlices, ReduceOp
from hpcstrat._variables import Variable, state_of
from hpcstrat.optimizers._formula import Formulas
from hpcstrat.optimizers._gradients import check_pair, checked_slices, clipped, sorted_pairs
from hpcstrat.optimizers._state import OptimizerState, key

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

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
        self._state = OptimizerState()
        self._formulas = Formulas(f"{type(self).__name__}.formula", self.formula)

    # ---- what a kind of optimizer fills in

    @property
    @abc.abstractmethod
    def slots(self) -> Mapping[str, float]:
        """Name and initial value of each slot: an array beside each variable, of its shape and dtype."""

    @staticmethod
    def formula(value: Any, gradient: Any, *slots: Any, **numbers: Any) -> Any:
        """The update of one element, by operators and NumPy's functions: its new value, and those of its slots.

        It is run once, with symbols, and becomes NumPy's operations on the host and one kernel on a GPU, with the same
        results. So it must be made of `+ - * /`, comparisons, and `numpy`'s `sqrt`, `square`, `absolute`, `sign`,
        `maximum`, `minimum` and `where`; what else it does is a TypeError that names the line. `numpy.linalg.norm` of
        an element is a number: the norm over the whole variable, for which a step goes over memory once more.

        Args:
            value: the variable's element.
            gradient: its gradient, summed over the replicas.
            *slots: an element of each slot, in the order of `slots`.
            **numbers: what the formula takes by keyword only: `learning_rate` and `step`, counted from 1, as the step
                has them, anything else as the attribute of that name. Numbers may differ from step to step, and `**`,
                `numpy.exp` and `numpy.log` may be taken of them. A `bool` is passed as it is.

        Returns:
            The new value, or a tuple of it and the new value of each slot.
        """
        raise NotImplementedError("an optimizer must have a `formula`, or an `update_rule` of its own")

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """The update of step number `step`, counted from 1; by default from `formula`. Called in every step.

        Override it for what a formula cannot say.
        """
        return self._formulas.rule(self, learning_rate, step)

    # ---- facts

    @property
    def iterations(self) -> int:
        """The number of steps done."""
        return self._state.iterations

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
            self._current_rate: Callable[[], float] = (lambda: rate(self._state.iterations)) if takes_step else rate
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
        state = other._state = OptimizerState(self._state.iterations)
        other.learning_rate = copy.deepcopy(self._learning_rate, memo)
        pairs = [(v, copy.deepcopy(v, memo)) for v in self._state.variables()]
        state.make_slots([v for _, v in pairs], self.name, self.slots)
        for old, new in pairs:
            group = state_of(new).group
            if group.updates_here:
                for own, copied in zip(self._state.slots[id(old)][1], state.slots[id(new)][1], strict=True):
                    _copy(group.storage, own, copied)
        return other

    def _not_negative(self, argument: str, value: Any) -> float:
        """The value of an argument as a float.

        Raises:
            TypeError: it is not a number.
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
        outer = enter_call(f"{self.name}.apply_gradients")
        try:
            pairs = list(grads_and_vars)
            if skip_gradients_aggregation or not self._apply_as_before(pairs):
                self._apply(pairs, skip_gradients_aggregation)
        finally:
            leave_call(outer)

    def _apply(self, pairs: Sequence[tuple[Any, Variable]], skip_gradients_aggregation: bool) -> None:
        if not pairs:
            _context.group().communicator.exchange(signature(current_call(), "no variable"))
            return
        for pair in pairs:
            check_pair(pair)
        group = _group_of(pairs[0][1], "to")
        communicator = group.communicator
        with communicator.raise_together():
            gradients, dense, sparse = sorted_pairs(pairs)
            if not gradients and not sparse:
                communicator.exchange(signature(current_call(), "no gradient"))
                communicator.settle()
                raise ValueError(
                    f"{current_call()}: none of the {len(pairs)} variables has a gradient; pass at least one"
                )
            if sparse or key(group, dense) not in self._state.plans:
                self._check_variables(group, [*dense, *(v for _, v in sparse)])
            rule = self._current_rule(sparse)
        summed = skip_gradients_aggregation or not isinstance(_context.context(), InReplica)
        op = FIRST_REPLICA if summed else ReduceOp.SUM
        if summed:
            communicator.require_equal(gradients)
        rows = [self._summed_rows(group, slices, v, summed) for slices, v in sparse]
        if self.global_clipnorm is not None:
            if op is not FIRST_REPLICA:
                gradients, op = communicator.all_reduce(gradients, op), FIRST_REPLICA
            with group.on_stream():
                gradients, rows = clipped(group.xp, self.global_clipnorm, gradients, rows)
        try:  # all variables and the number of steps change, or none
            if dense:
                plan = self._state.plan_of(group, dense, self.name, self.slots)
                group.storage.update(plan, gradients, op, rule)
            for (_, v), (indices, values) in zip(sparse, rows, strict=True):
                slots = self._state.slots_of(group, [v], self.name, self.slots)[0]
                group.storage.update_rows(state_of(v).block, slots, indices, values, rule)
            self._state.iterations += 1
        except BaseException as error:
            group.storage.tear(error, [state_of(v).block for v in (*dense, *(v for _, v in sparse))])
            raise

    def _current_rule(self, sparse: Sequence[tuple[IndexedSlices, Variable]]) -> UpdateRule:
        rule = self.update_rule(float(self._current_rate()), self._state.iterations + 1)
        if sparse and rule.norms is not None:
            raise ValueError(
                f"{current_call()}: the update takes norms of whole variables, and {sparse[0][1].name!r} has an "
                "IndexedSlices for its gradient; pass an array"
            )
        return rule

    def _apply_as_before(self, pairs: Sequence[tuple[Any, Variable]]) -> bool:
        """The way of nearly all steps: a replica's arrays for variables that were seen, by a rate that cannot fail.

        Whether this is one; if not, nothing has happened. It only leaves out checks whose outcome is known.
        """
        context = _context.current.get()
        if type(context) is not InReplica or self._constant_rate is None or self.global_clipnorm is not None:
            return False
        group = context.group
        try:
            plan = self._state.plans.get((id(group), *[id(variable) for _, variable in pairs]))  # `key`, without a call
        except (TypeError, ValueError):  # no pairs
            return False
        if plan is None:
            return False
        gradients = [gradient for gradient, _ in pairs]
        if not plan.fits(gradients):
            return False
        rule = self.update_rule(self._constant_rate, self._state.iterations + 1)
        try:
            group.storage.update(plan, gradients, ReduceOp.SUM, rule)
            self._state.iterations += 1
        except BaseException as error:  # a signal's may come between the two
            group.storage.tear(error, plan.blocks)
            raise
        return True

    @names_call(lambda self, _: f"{self.name}.gradient_buffers")
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
        variables = list(variables)
        if not variables or not all(isinstance(v, Variable) for v in variables):
            raise ValueError(
                f"{current_call()}: it takes variables, at least one, and got {variables!r}; pass them in a list"
            )
        group = _group_of(variables[0], "of")
        with group.communicator.raise_together():
            self._check_variables(group, variables)
            group.communicator.exchange(signature(current_call(), *[state_of(v).block.held() for v in variables]))
        plan = self._state.plan_of(group, variables, self.name, self.slots)
        if plan.buffers is None:
            group.storage.make_buffers(plan)
        assert plan.buffers is not None
        return list(plan.buffers)

    def _check_variables(self, group: ReplicaGroup, variables: Sequence[Variable]) -> None:
        call = current_call()
        if len({id(v) for v in variables}) < len(variables):
            raise ValueError(f"{call}: a variable occurs twice; add its gradients up first")
        for v in variables:
            state = state_of(v)
            if state.group is not group:
                raise ValueError(f"{call}: the variables belong to different strategies; make them in one scope")
            if v.dtype.kind not in "fc" and v.dtype.name != "bfloat16":
                raise ValueError(
                    f"{call}: the variable {v.name!r} is of dtype {v.dtype.name}, and only floats have gradients; "
                    "leave it out"
                )
            if state.is_on_read:
                raise ValueError(
                    f"{call}: the variable {v.name!r} is ON_READ, one value a replica; make it an ordinary one"
                )

    # ---- help

    def _summed_rows(
        self, group: ReplicaGroup, slices: IndexedSlices, variable: Variable, summed: bool
    ) -> tuple[Array, Array]:
        """The rows that occur in any replica's slices, each once, and their gradients, summed in rank order."""
        communicator = group.communicator
        with communicator.raise_together():
            indices, values = checked_slices(slices, variable)
        if not summed:
            rows = f"rows of {variable.name!r}, variable {state_of(variable).block.number}"
            with call_named(f"{current_call()} of {rows}"):
                indices, values = communicator.all_gather([indices, values], 0)
        with group.on_stream():
            return sum_rows(indices, values)


def state_of_optimizer(optimizer: Optimizer) -> OptimizerState:
    """What an optimizer keeps from step to step."""
    return optimizer._state


def _group_of(variable: Variable, preposition: str) -> ReplicaGroup:
    """The variable's group, which must be that of this line's context."""
    with call_named(f"{current_call()} {preposition} {variable.name!r}"):
        state_of(variable).require_strategy()
    return state_of(variable).group


def _copy(storage: Storage, source: Block, target: Block) -> None:
    start = 0
    for part in storage.parts(source):
        storage.write_part(target, start, part)
        start += part.size
