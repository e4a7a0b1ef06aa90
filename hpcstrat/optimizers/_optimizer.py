"""The base class of optimizers: sums the replicas' gradients and updates the variables once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, SupportsIndex

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import nests
from hpcstrat._core.arrays import as_number
from hpcstrat._core.call_name import current_call, enter_call, leave_call, names_call
from hpcstrat._core.types import FIRST_REPLICA, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._update.formula import Kernel, trace
from hpcstrat._update.rule import Clip, UpdateRule
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers import _gradients
from hpcstrat.optimizers._fields import (
    NOT_NEGATIVE_OR_NONE,
    POSITIVE_OR_NONE,
    checked,
    name_or_class,
    rate_of,
)
from hpcstrat.optimizers._state import OptimizerState, OptimizerVariable, list_variables

_CLIPPING = ("global_clipnorm", "clipnorm", "clipvalue")


class _Traced(NamedTuple):
    """An optimizer's formula, with weight decay and clipping, as a kernel.

    Attributes:
        kind: the names and the types of what `numbers` has returned.
        is_constant: whether none of them can change in place, as a variable does.
        are_floats: whether all are floats.
        options: those that are no numbers, with their values.
        kernel: the kernel.
        literals: its last numbers; see `trace`.
        clip: which norms are clipped before.
        names: of what the ranks must agree on: the rate, the numbers, options, and fields that
            every class has.
        lasting: those that are not numbers of a step.
    """

    kind: list[Any]
    is_constant: bool
    are_floats: bool
    options: dict[str, bool | None]
    kernel: Kernel
    literals: tuple[float, ...]
    clip: Clip | None
    names: tuple[str, ...]
    lasting: tuple[float, ...]


@dataclass(eq=False, repr=False)
class Optimizer:
    """Changes variables by their gradients.

    A dataclass, as its subclasses are: `Adam(0.1, clipnorm=1.0)`. After the first step only
    `learning_rate` can be set. A subclass of your own has `slots`, `numbers` and `formula`; see
    these. For an `IndexedSlices` all arguments apply to its rows and to no others.

    Args:
        learning_rate: a number of at least 0; or a variable, or a callable that returns it, which
            are read in each step. It is called without arguments or with the number of steps done.
        weight_decay: each step does `w -= learning_rate * weight_decay * w` first.
        clipnorm: the largest norm of each variable's gradient, summed over the replicas; larger
            gradients are scaled down.
        clipvalue: the largest magnitude of an element of a gradient, summed over the replicas.
        global_clipnorm: the largest norm of all gradients together, summed over the replicas;
            larger gradients are scaled down. At most one of the three is given.
        name: a name; by default the class's.

    Attributes:
        slots: the initial values of its slots by name, which are arrays of each variable's shape
            and dtype: `{'m': 0.0, 'v': 0.0}` of Adam. A subclass has a dict, or a property.

    Raises:
        ValueError: an argument is out of range, or excludes another.
        TypeError: an argument is unknown, or not a number.

    Examples:
        What clipping leaves of gradients of norms 5 and 12, by one step of SGD:

        >>> def one_step(**options):
        ...     v, w = hs.Variable(np.zeros(2)), hs.Variable(np.zeros(1))
        ...     optimizer = hs.optimizers.SGD(1.0, **options)
        ...     optimizer.apply_gradients([(np.array([-3.0, -4.0]), v), (np.array([-12.0]), w)])
        ...     return v.numpy(), w.numpy()
        >>> one_step()
        (array([3., 4.]), array([12.]))
        >>> one_step(clipnorm=10.0)  # each variable by itself
        (array([3., 4.]), array([10.]))
        >>> one_step(clipvalue=3.5)  # each element by itself
        (array([3. , 3.5]), array([3.5]))
        >>> one_step(global_clipnorm=6.5)  # all together: a norm of 13
        (array([1.5, 2. ]), array([6.]))

        Weight decay, of the value before the step:

        >>> v = hs.Variable(np.array([8.0]))
        >>> optimizer = hs.optimizers.SGD(0.5, weight_decay=0.25)
        >>> optimizer.apply_gradients([(np.array([2.0]), v)])
        >>> v.numpy()  # 8 - 0.5 * 0.25 * 8 - 0.5 * 2
        array([6.])
    """

    learning_rate: Any
    _: KW_ONLY
    weight_decay: float | None = checked(None, NOT_NEGATIVE_OR_NONE)
    clipnorm: float | None = checked(None, POSITIVE_OR_NONE)
    clipvalue: float | None = checked(None, POSITIVE_OR_NONE)
    global_clipnorm: float | None = checked(None, POSITIVE_OR_NONE)
    name: str | None = checked(None, name_or_class)

    if TYPE_CHECKING:
        slots: Any = dataclasses.field(init=False)  # which dicts and properties may override
    else:
        slots = MappingProxyType({})
    # Set by `vars(self)`: `__setattr__` is for what a program sets.
    _traced: ClassVar[_Traced | None] = None
    _last: ClassVar[tuple[float, list[Any], UpdateRule] | None] = None
    _rate: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        nests.leaf_types.add(cls)  # though a dataclass: each is a single value

    # Not made by `__init__`, which a subclass may replace.
    @functools.cached_property
    def _state(self) -> OptimizerState:
        return OptimizerState()

    # ---- for subclasses

    def numbers(self, rate: float, step: int) -> Mapping[str, Any]:
        """The numbers that `formula` takes in this step, by name; the ranks must agree on them.

        Plain Python, called in every step. A `bool` or `None` is an option: `formula` is given it
        as it is.

        Args:
            rate: the learning rate of this step.
            step: its number, counted from 1.

        Examples:
            >>> hs.optimizers.SGD(momentum=0.5).numbers(0.25, step=3)
            {'rate': 0.25, 'momentum': 0.5, 'nesterov': False}
        """
        return {"rate": rate}

    @staticmethod
    def formula(value: Any, gradient: Any, *slots: Any, **numbers: Any) -> Any:
        """Updates one element: returns its new value, and the new values of its slots.

        It is run once, with symbols, and becomes a loop in C, calls of NumPy's functions and one
        kernel on a GPU, with the same results. So it may use only `+ - * /`, comparisons, `** 2`,
        `** 0.5`, and `numpy`'s `sqrt`, `square`, `absolute`, `sign`, `maximum`, `minimum` and
        `where`; anything else raises a TypeError that names the line. What is computed from numbers
        alone belongs in `numbers`.

        Args:
            value: the variable's element.
            gradient: its gradient, summed over the replicas.
            *slots: an element of each slot, in the order of `slots`.
            **numbers: what `numbers` returns.

        Returns:
            The new value, or a tuple of it and the new value of each slot.

        Examples:
            >>> hs.optimizers.SGD.formula(5.0, 2.0, rate=0.5, momentum=0.0, nesterov=False)
            4.0
        """
        raise NotImplementedError("an optimizer must have a `formula`")

    # ---- fields and properties

    def __setattr__(self, name: str, value: Any) -> None:
        owner = type(self).__name__
        if any(field.name == name for field in dataclasses.fields(self)):
            self._refuse_in_graph(name)
            if name == "learning_rate":
                vars(self)["_rate"] = rate_of(owner, value)
            else:
                value = self._checked(owner, name, value)
                vars(self).update(_traced=None, _last=None)
        super().__setattr__(name, value)

    def _checked(self, owner: str, name: str, value: Any) -> Any:
        if self._state.slots or self._state.iterations:
            raise AttributeError(
                f"{owner}: {name} is {getattr(self, name)!r} and cannot change after the first "
                f"step, only learning_rate can; pass {name}={value!r} to a new optimizer"
            )
        if check := self.__dataclass_fields__[name].metadata.get("check"):
            value = check(owner, name, value)
        if name in _CLIPPING and value is not None:
            given = [one for one in _CLIPPING if one == name or vars(self).get(one) is not None]
            if len(given) > 1:
                raise ValueError(f"{owner}: {' and '.join(given)} exclude each other; pass one")
        return value

    def __repr__(self) -> str:
        usual = {"name": type(self).__name__}
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in sorted(dataclasses.fields(self), key=lambda field: field.kw_only is True)
            if not field.kw_only or getattr(self, field.name) != usual.get(field.name)
        ]
        return f"{type(self).__name__}({', '.join([*shown, f'iterations={self.iterations}'])})"

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: an optimizer is neither copied nor pickled, because its slots "
            "belong to the variables of this job; make a new one, by dataclasses.replace for the "
            "same arguments, and save and restore its slots by hs.checkpoint.Checkpoint"
        )

    @property
    def iterations(self) -> int:
        """The number of steps done.

        Examples:
            >>> optimizer, w = hs.optimizers.SGD(), hs.Variable(np.zeros(1))
            >>> for _ in range(2):
            ...     optimizer.apply_gradients([(np.ones(1), w)])
            >>> optimizer.iterations
            2
        """
        self._refuse_in_graph("iterations")
        return self._state.iterations

    @property
    def variables(self) -> list[OptimizerVariable]:
        """What it keeps between steps: the number of steps, the learning rate, and each slot.

        Examples:
            >>> optimizer, w = hs.optimizers.Adam(0.5), hs.Variable(np.zeros(2), name="w")
            >>> optimizer.apply_gradients([(np.ones(2), w)])
            >>> for each in optimizer.variables:
            ...     print(each.name, each.numpy().round(3))
            Adam/iterations 1
            Adam/learning_rate 0.5
            Adam/m/w [0.1 0.1]
            Adam/v/w [0.001 0.001]
        """
        return list_variables(self, self._rate_now())

    def _refuse_in_graph(self, name: str) -> None:
        """Refuses what a replica function reads or sets while it becomes a CUDA graph."""
        context = contexts.current.get()
        if context is None or (stream := context.group.stream) is None:
            return
        # A step may read it: its numbers are computed anew before each launch.
        if not current_call().endswith(".apply_gradients"):
            stream.refuse_in_graph(f"{self.name}.{name}, a value on the host,")

    def _rate_now(self) -> float:
        rate: Any = self._rate
        return rate if type(rate) is float else float(rate(self._state.iterations))

    # ---- the step

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Updates variables by their gradients, once. Collective: all ranks call this.

        In a replica context the gradients are summed over the replicas; in the cross-replica
        context they are plain arrays, the same on every rank. When it returns, every rank reads the
        new values.

        Args:
            grads_and_vars: pairs of a gradient and its variable. A gradient is an array, of any
                library, of the variable's shape, whose dtype casts to the variable's; an
                `IndexedSlices`; or `None` to leave the variable alone. No pairs: nothing happens.
            name: TensorFlow's name of an operation; changes nothing.
            skip_gradients_aggregation: the gradients are summed over the replicas already.

        Raises:
            ValueError: no variable has a gradient, a gradient has a wrong shape or dtype, or a
                variable occurs twice or cannot be changed by optimizers. Nothing has changed.
            TypeError: the name is not a string; or the update takes functions, such as
                `numpy.maximum`, that a GPU does not have for a complex variable.
            ReplicaMismatchError: the replicas pass gradients of different variables, or have
                different learning rates.
            RuntimeError: this line runs in another strategy than the variables'.

        Examples:
            Each replica passes its share, 6 divided by their number; the step is 6 on any number:

            >>> strategy = hs.MirroredStrategy()
            >>> with strategy.scope():
            ...     table, optimizer = hs.Variable(np.ones((3, 2))), hs.optimizers.SGD(1.0)
            >>> def step():
            ...     values = np.full((1, 2), 6.0) / strategy.num_replicas_in_sync
            ...     optimizer.apply_gradients([(hs.IndexedSlices(values, [2]), table)])
            >>> strategy.run(step)
            >>> table.numpy()
            array([[ 1.,  1.],
                   [ 1.,  1.],
                   [-5., -5.]])
        """
        outer = enter_call(f"{self.name}.apply_gradients")
        try:
            are_summed = skip_gradients_aggregation
            pairs: Sequence[tuple[Any, Variable]] = list(grads_and_vars)
            if name is not None and not isinstance(name, str):
                raise TypeError(
                    f"{current_call()}: name is {name!r}; pass skip_gradients_aggregation by its "
                    "name, and gradients with their variables as zip(gradients, variables)"
                )
            if not self._apply_as_before(pairs, are_summed):
                self._apply(pairs, are_summed)
        finally:
            leave_call(outer)

    def _apply_as_before(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> bool:
        """The fast path: arrays in a replica, of variables that have been updated together before.

        It only leaves out checks whose outcome is known. Returns `False`, and has done nothing, for
        any other step.
        """
        context = contexts.current.get()
        state = self._state
        if type(context) is not InReplica:
            return False
        group = context.group
        if are_summed and group.communicator.checks:  # that they are equal
            return False
        try:
            gradients, variables = zip(*pairs, strict=True)
            plan = state.plans.get((group, *variables))
        except (TypeError, ValueError):  # not pairs of an array and a variable
            return False
        if plan is None or not plan.fits(gradients):
            given = [pair for pair in pairs if pair[0] is not None]
            return 0 < len(given) < len(pairs) and self._apply_as_before(given, are_summed)
        try:
            numbers = group.graph_numbers
            rule = self._rule() if numbers is None else numbers.rule_of(state, self._rule)
        except Exception:  # the slow path gets it too, and raises it on all ranks
            return False
        try:
            op = FIRST_REPLICA if are_summed else ReduceOp.SUM
            group.storage.update(plan, gradients, op, rule)
            state.iterations += 1
        except BaseException as error:  # a signal's may come between these two lines
            group.storage.mark_interrupted(error, plan.order.blocks)
            raise
        return True

    def _apply(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
        """Any step: checks the gradients, sums them over the replicas, and updates."""
        _gradients.check_pairs(pairs)
        if not pairs:
            contexts.group().communicator.exchange(signature_of(current_call(), "no variable"))
            return
        group = _gradients.group_of_variable(pairs[0][1], "to")
        if group.stream is not None and group.stream.raw.is_capturing():
            given = [pair for pair in pairs if pair[0] is not None]
            others = [v for gradient, v in given if getattr(gradient, "dtype", None) != v.dtype]
            said = f", given a gradient that is not a {others[0].dtype} array," if others else ""
            group.stream.refuse_in_graph(f"this step of {self.name}{said}")
        state = self._state
        with group.communicator.raise_together():
            gradients, dense, sparse = _gradients.prepare_pairs(pairs)
            variables = [*dense, *(v for _, v in sparse)]
            if not variables:
                group.communicator.exchange(signature_of(current_call(), "no gradient"))
                group.communicator.calls.note_shared_error()
                raise ValueError(
                    f"{current_call()}: none of the {len(pairs)} variables has a gradient; pass at "
                    "least one"
                )
            if sparse or (group, *dense) not in state.plans:
                _gradients.check_variables(group, variables)
            rule = self._rule()
            if sparse:
                blocks = [state_of(v).block for _, v in sparse]
                group.storage.prepare_rows(blocks, rule)
        are_summed = are_summed or not isinstance(contexts.context(), InReplica)
        if are_summed:
            group.communicator.require_equal(gradients)
        if sparse:  # before the calls that depend on the options
            signature = signature_of(current_call()).with_numbers(rule.agreed, rule.names)
            group.communicator.exchange(signature)
        rows = [_gradients.sum_rows(group, slices, v, are_summed) for slices, v in sparse]
        if rule.clip is not None and sparse:
            with group.communicator.raise_together(), group.on_stream():
                pairs = [*zip(gradients, dense, strict=True)]
                gradients = [gradient.astype(v.dtype, copy=False) for gradient, v in pairs]
            if not are_summed:
                gradients = group.communicator.all_reduce(gradients, ReduceOp.SUM)
                are_summed = True
            with group.communicator.raise_together():
                gradients, rows = _gradients.clip_norms(group, rule.clip, gradients, rows)
            rule = rule._replace(numbers=(1.0, *rule.numbers), clip=None)
        try:  # all variables and the number of steps change, or nothing does
            if dense:
                plan = state.plan_of(self, group, dense)
                op = FIRST_REPLICA if are_summed else ReduceOp.SUM
                group.storage.update(plan, gradients, op, rule)
            for (_, v), (indices, values) in zip(sparse, rows, strict=True):
                state.make_slots(self, [v])
                block, slots = state_of(v).block, state.slots[v]
                group.storage.update_rows(block, slots, indices, values, rule)
            state.iterations += 1
        except BaseException as error:
            group.storage.mark_interrupted(error, [state_of(v).block for v in variables])
            raise

    def _rule(self) -> UpdateRule:
        """The update of the next step."""
        rate: Any = self._rate
        if type(rate) is not float:
            rate = self._rate_now()
        given = self.numbers(rate, self._state.iterations + 1)
        if type(given) is not dict and not isinstance(given, Mapping):
            raise TypeError(
                f"{type(self).__name__}.numbers returned {given!r}; it must return a dict of the "
                "numbers that formula takes, by name"
            )
        traced, last, values = self._traced, self._last, [*given.values()]
        kind = [*given, *map(type, values)]
        if traced is None or kind != traced.kind:
            traced = self._trace(given, kind)
        elif traced.is_constant and last is not None and last[0] == rate and last[1] == values:
            return last[2]
        elif traced.options and not traced.options.items() <= given.items():
            traced = self._trace(given, kind)
        numbers = values if traced.are_floats else self._as_numbers(given, traced.options)
        agreed = (rate, *numbers, *traced.lasting)
        decay = () if self.weight_decay is None else (1 - self.weight_decay * rate,)
        passed = (*numbers, *decay, *traced.literals)
        rule = UpdateRule(traced.kernel, passed, traced.names, agreed, traced.clip)
        own = vars(self)
        own["_traced"], own["_last"] = traced, (rate, values, rule)
        return rule

    def _as_numbers(self, given: Mapping[str, Any], options: Mapping[str, Any]) -> list[float]:
        call = f"{type(self).__name__}.numbers"
        return [
            one if type(one) is float else as_number(call, name, one)
            for name, one in given.items()
            if name not in options
        ]

    def _trace(self, given: Mapping[str, Any], kind: list[Any]) -> _Traced:
        """The formula for numbers and options of these names."""
        options = {name: one for name, one in given.items() if one is None or type(one) is bool}
        names = [name for name in given if name not in options]
        limit, bound, decay = self.global_clipnorm or self.clipnorm, self.clipvalue, "weight decay"
        clip = None if limit is None else Clip(limit, self.global_clipnorm is not None)
        scale = "gradient scale"  # as no number of a subclass is called

        def whole(value: Any, gradient: Any, *slots: Any, **numbers: Any) -> Any:
            if clip is not None:
                gradient = gradient * numbers.pop(scale)
            if bound is not None:
                gradient = np.maximum(np.minimum(gradient, bound), -bound)
            if self.weight_decay is not None:
                value = value * numbers.pop(decay)
            return self.formula(value, gradient, *slots, **numbers, **options)

        taken = [scale] * (clip is not None) + names + [decay] * (self.weight_decay is not None)
        owner, slots = type(self).__name__, self.slots
        if not isinstance(slots, Mapping):
            raise TypeError(
                f"{owner}.slots is {slots!r}; it must be a dict of initial values by name"
            )
        for name, value in slots.items():  # before the first of them is made
            as_number(f"{owner}.slots", name, value)
        kernel, literals = trace(f"{owner}.formula", whole, len(slots), taken)
        fields = ("weight_decay", *_CLIPPING)
        lasting = {name: float(value) for name, value in options.items() if value is not None}
        lasting |= {name: one for name in fields if (one := getattr(self, name)) is not None}
        all_names, values = ("learning_rate", *names, *lasting), tuple(lasting.values())
        types = {*map(type, given.values())}
        is_constant, are_floats = types <= {float, int, bool, type(None)}, types <= {float}
        of_kind = kind, is_constant, are_floats, options
        return _Traced(*of_kind, kernel, literals, clip, all_names, values)

    @names_call(lambda self, _: f"{self.name}.gradient_buffers")
    def gradient_buffers(self, variables: Iterable[Variable]) -> list[Any]:
        """Arrays to write gradients to, which `apply_gradients` then need not copy. Collective.

        For steps that copying gradients slows down: `np.matmul(x.T, d, out=buffer)` instead of
        `x.T @ d`. Pass all of them to `apply_gradients`, with the same variables in the same order:
        `apply_gradients(zip(buffers, variables))`. What they hold after it, also with other
        gradients for these variables, is undefined. They are made once and live as long as the
        optimizer.

        Args:
            variables: trainable variables of one strategy, each once.

        Returns:
            A list of arrays, one for each variable, of its shape and dtype, on this replica's
            device, zeros at first.

        Raises:
            ValueError: no variable; a variable occurs twice or cannot be changed by optimizers.
            MemoryError: cannot allocate them on some rank.
            ReplicaMismatchError: the replicas pass different variables.

        Examples:
            >>> x, w = np.array([[1.0, 2.0], [3.0, 4.0]]), hs.Variable(np.zeros(2))
            >>> optimizer = hs.optimizers.SGD(1.0)
            >>> (buffer,) = buffers = optimizer.gradient_buffers([w])
            >>> _ = np.matmul(x.T, np.ones(2), out=buffer)
            >>> optimizer.apply_gradients(zip(buffers, [w]))
            >>> w.numpy()
            array([-4., -6.])
        """
        variables = list(variables)
        group, state = _gradients.agree_on_group(variables), self._state
        plan = state.plan_of(self, group, variables)
        if plan.buffers is None:
            group.storage.make_buffers(plan)
        assert plan.buffers is not None
        return [*plan.buffers.arrays]
