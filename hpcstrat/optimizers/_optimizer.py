"""The base class of optimizers: sums the replicas' gradients and updates the variables once."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hpcstrat._calls.records import signature_of
from hpcstrat._core.call_name import current_call, enter_call, leave_call, names_call
from hpcstrat._core.types import FIRST_REPLICA, ReduceOp
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._update.formula import Formula
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers import _gradients, _options, _steps
from hpcstrat.optimizers._options import Check, CommonOptions, LearningRate
from hpcstrat.optimizers._state import (
    GradientBuffers,
    OptimizerState,
    OptimizerVariable,
    list_variables,
)
from hpcstrat.optimizers._steps import BY_OPTION, EMA, NORM_CLIPPING, UpdateStep, overrides

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


_COMPOSED = (
    *("_state", "_all_steps", "_collecting", "_transforming", "_clipping"),
    *("_rule_is_complete", "_formula", "_formula_of_clipped", "_rate"),
)
"""What a copy of an optimizer makes anew from its other attributes."""


class Optimizer(metaclass=_options.OptimizerType):
    """Changes variables by their gradients.

    Args:
        learning_rate: a number of at least 0; or a variable, or a callable that returns it, which
            are read in each step. It is called without arguments or with the number of steps done.
        global_clipnorm: the largest norm of all gradients together, summed over the replicas;
            larger gradients are scaled down. `None`: no limit.
        name: a name; by default the class's.
        **options: see `CommonOptions`.

    Raises:
        ValueError: an argument is out of range, or excludes another.
        TypeError: an argument is unknown, or not a number; `formula` takes a number by position.
    """

    clipnorm: float | None
    clipvalue: float | None
    weight_decay: Any  # a float or `None`, or what a subclass makes of it
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None
    steps: tuple[UpdateStep, ...]

    # Of attributes that a class sets in its `__init__`; applied there, and to later values.
    _checks: ClassVar[Mapping[str, Check]] = MappingProxyType({})

    def __init__(
        self,
        learning_rate: LearningRate,
        global_clipnorm: float | None = None,
        name: str | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        owner = type(self).__name__
        self.name: str = owner if name is None else name
        self.global_clipnorm: float | None
        given = {"global_clipnorm": global_clipnorm, **options}
        for option, value in _options.check_options(type(self), given).items():
            # A subclass may have set its own already, such as its decay.
            if option in options or option not in vars(self):
                setattr(self, option, value)
        self._has_own_rule = type(self).update_rule is not Optimizer.update_rule
        if self._has_own_rule:
            _options.check_without_formula(owner, options)
        self.learning_rate = learning_rate
        self._state = OptimizerState()
        self._compose()

    def _compose(self) -> None:
        """Puts its steps together, after a change of its options."""
        self._all_steps = steps = _steps.steps_of(self)
        self._collecting = [step for step in steps if overrides(step, "collect")]
        # The formula clips norms, in its one pass over memory; but rows must be clipped before.
        in_formula = () if self._has_own_rule else NORM_CLIPPING
        self._clipping = [step for step in steps if step in in_formula]
        self._transforming = [
            step for step in steps if overrides(step, "transform") and step not in in_formula
        ]
        # A formula's rule has the steps' numbers, on which the ranks must agree; one of a program's
        # own has not.
        self._rule_is_complete = not (self._has_own_rule and steps)
        call = f"{type(self).__name__}.formula"
        self._formula, self._formula_of_clipped = [
            _steps.combine_formulas(call, self.formula, steps, clips)
            for clips in (bool(self._clipping), False)
        ]

    # ---- for subclasses

    @property
    @abc.abstractmethod
    def slots(self) -> Mapping[str, float]:
        """Initial values of the slots by name: arrays of each variable's shape and dtype.

        Examples:
            >>> hs.optimizers.Adam().slots
            {'m': 0.0, 'v': 0.0}
        """

    @staticmethod
    def formula(value: Any, gradient: Any, *slots: Any, **numbers: Any) -> Any:
        """Updates one element: returns its new value, and the new values of its slots.

        It is run once, with symbols, and becomes NumPy's operations on the host and one kernel on a
        GPU, with the same results. So it may use only `+ - * /`, comparisons, and `numpy`'s `sqrt`,
        `square`, `absolute`, `sign`, `maximum`, `minimum` and `where`; anything else raises a
        TypeError that names the line. `numpy.linalg.norm` of an element is a number: the norm of
        the whole variable, for which a step reads memory once more.

        Args:
            value: the variable's element.
            gradient: its gradient, summed over the replicas.
            *slots: an element of each slot, in the order of `slots`.
            **numbers: the keyword-only parameters: `learning_rate`, `step`, counted from 1, and
                any attribute by its name. They may change from step to step, and `**`, `numpy.exp`
                and `numpy.log` apply to them too. A `bool` is passed as it is.

        Returns:
            The new value, or a tuple of it and the new value of each slot.

        Examples:
            >>> hs.optimizers.SGD.formula(5.0, 2.0, learning_rate=0.5, momentum=0.0, nesterov=False)
            4.0
        """
        raise NotImplementedError("an optimizer must have a `formula` or its own `update_rule`")

    def update_rule(self, learning_rate: float, step: int) -> UpdateRule:
        """The update of step number `step`, counted from 1; by default from `formula`.

        Called in every step. Override it for what a formula cannot express.

        Examples:
            >>> hs.optimizers.SGD(0.5).update_rule(0.25, step=3).constants["learning_rate"]
            0.25
        """
        return self._formula.rule(self, learning_rate, step)

    @property
    def all_slots(self) -> dict[str, float | None]:
        """`slots`, and those of its steps; `None` for a slot that starts as the variable.

        Examples:
            >>> hs.optimizers.Adam(use_ema=True).all_slots
            {'m': 0.0, 'v': 0.0, 'ema': None}
        """
        return _steps.join_slots(type(self).__name__, self.slots, self._all_steps)

    # ---- properties

    @property
    def iterations(self) -> int:
        """The number of steps done.

        Examples:
            >>> optimizer = hs.optimizers.SGD(gradient_accumulation_steps=2)
            >>> w = hs.Variable(np.zeros(1))
            >>> for _ in range(5):  # two pairs, and one more
            ...     optimizer.apply_gradients([(np.ones(1), w)])
            >>> optimizer.iterations
            2
        """
        self._require_eager("iterations")
        return self._state.iterations

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            self._require_eager(name)
            value = _options.check_attribute(self, self._checks, name, value)
            if "_formula" in vars(self) and type(getattr(self, name, None)) is not type(value):
                self._formula.forget()
                self._formula_of_clipped.forget()
        super().__setattr__(name, value)
        is_composed = name in BY_OPTION and "_all_steps" in vars(self)
        if is_composed and _steps.steps_of(self) != self._all_steps:
            self._compose()

    def __repr__(self) -> str:
        shown = _options.arguments_of(self) | {"iterations": self.iterations}
        arguments = ", ".join(f"{name}={value!r}" for name, value in shown.items())
        return f"{type(self).__name__}({arguments})"

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

    @property
    def learning_rate(self) -> Any:
        """The learning rate as you set it: a number, a variable or a callable.

        Examples:
            >>> w = hs.Variable(np.zeros(1))
            >>> optimizer = hs.optimizers.SGD(lambda step: 1 / (1 + step))
            >>> for _ in range(2):  # 1 and 1/2
            ...     optimizer.apply_gradients([(np.ones(1), w)])
            >>> optimizer.learning_rate = hs.Variable(0.25)  # from the next step on
            >>> optimizer.apply_gradients([(np.ones(1), w)])
            >>> w.numpy()
            array([-1.75])
        """
        self._require_eager("learning_rate")
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._rate = _options.rate_of(type(self).__name__, value)
        self._learning_rate = value

    def _require_eager(self, name: str) -> None:
        """Refuses what a replica function reads or sets while it becomes a CUDA graph."""
        context = contexts.current.get()
        if context is None or (stream := context.group.stream) is None:
            return
        # The rule of a step may read it: it is made anew before each launch.
        if stream.capture is not None and not current_call().endswith(".apply_gradients"):
            stream.require_eager(f"{self.name}.{name}, a value on the host,")

    def _rate_now(self) -> float:
        return float(self._rate(self._state.iterations)) if callable(self._rate) else self._rate

    @property
    def lr(self) -> Any:
        """`learning_rate`, by its name in Keras 2.

        Examples:
            >>> hs.optimizers.SGD(0.5).lr
            0.5
        """
        return self.learning_rate

    @lr.setter
    def lr(self, value: LearningRate) -> None:
        self.learning_rate = value

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`, as JSON can hold them; without steps and slots.

        Raises:
            ValueError: it has `steps`, or a learning rate that is a function of the program.

        Examples:
            >>> hs.optimizers.Lion(0.5, clipnorm=1.0).get_config()
            {'name': 'Lion', 'learning_rate': 0.5, 'beta_1': 0.9, 'beta_2': 0.99, 'clipnorm': 1.0}
        """
        from hpcstrat.optimizers import schedules  # not before a program has one

        owner, rate = type(self).__name__, self.learning_rate
        if isinstance(rate, schedules.LearningRateSchedule):
            rate = {"class_name": type(rate).__name__, "config": rate.get_config()}
        elif callable(rate):
            raise ValueError(
                f"{owner}: learning_rate is {rate!r}, which a config cannot hold; use a number, a "
                "schedule of hs.optimizers.schedules, or your own LearningRateSchedule"
            )
        else:
            rate = float(rate)
        if self.steps:
            raise ValueError(
                f"{owner}: a config cannot hold steps; make the optimizer without get_config, from "
                "its arguments"
            )
        return {"name": self.name} | _options.arguments_of(self) | {"learning_rate": rate}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """A new optimizer from what `get_config` returned; `custom_objects`: schedules by name.

        Examples:
            >>> rate = hs.optimizers.schedules.CosineDecay(0.5, decay_steps=100)
            >>> config = hs.optimizers.SGD(rate, weight_decay=0.1).get_config()
            >>> copy = hs.optimizers.SGD.from_config(config)
            >>> copy.weight_decay, copy.learning_rate == rate, copy.iterations
            (0.1, True, 0)
        """
        from hpcstrat.optimizers import schedules

        arguments = dict(config)
        if isinstance(given := config.get("learning_rate"), Mapping):
            name = given["class_name"]
            kind = (custom_objects or {}).get(name) or getattr(schedules, name, None)
            if kind is None:
                raise ValueError(
                    f"{cls.__name__}.from_config: the schedule {name} is not of "
                    f"hs.optimizers.schedules; pass custom_objects={{{name!r}: {name}}}"
                )
            arguments["learning_rate"] = kind.from_config(given["config"])
        return cls(**arguments)

    @property
    def ema_overwrites(self) -> float | None:
        """1 if the next step overwrites variables by their averages, else 0; `None`: none does.

        Examples:
            >>> hs.optimizers.SGD(use_ema=True, ema_overwrite_frequency=2).ema_overwrites
            0.0
        """
        frequency = self.ema_overwrite_frequency
        return None if frequency is None else float((self.iterations + 1) % frequency == 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        # It continues from here, with copies of the variables: collective, as these.
        other, state = copy.copy(self), self._state
        memo[id(self)] = other
        pairs = [(v, copy.deepcopy(v, memo)) for v in state.variables()]
        own = {name: value for name, value in vars(self).items() if name not in _COMPOSED}
        vars(other).update({name: copy.deepcopy(value, memo) for name, value in own.items()})
        vars(other)["_state"] = copied = OptimizerState()
        copied.copy_from(self, pairs)
        other.learning_rate = other._learning_rate
        other._compose()
        return other

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
            state, are_summed = self._state, skip_gradients_aggregation
            pairs: Sequence[tuple[Any, Variable]] | None = list(grads_and_vars)
            if name is not None and not isinstance(name, str):
                raise TypeError(
                    f"{current_call()}: name is {name!r}; pass skip_gradients_aggregation by its "
                    "name, and gradients with their variables as zip(gradients, variables)"
                )
            if state.marked is not None:
                state.check_marked(pairs, are_summed)
            if self._collecting and pairs:
                pairs = _steps.collect(self, self._collecting, pairs)
            if pairs is not None and not self._apply_as_before(pairs, are_summed):
                self._apply(pairs, are_summed)
            if state.marked is not None:
                state.end_marks()
        finally:
            leave_call(outer)

    def _apply_as_before(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> bool:
        """The fast path: arrays in a replica, known variables, no step that transforms them.

        It only leaves out checks whose outcome is known: 16 % of a step of two small variables.
        Returns `False`, and has done nothing, for any other step.
        """
        context = contexts.current.get()
        state = self._state
        if type(context) is not InReplica or self._transforming:
            return False
        if not self._rule_is_complete:
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
            rate = self._rate  # inlines `_rate_now`
            rate = float(rate(state.iterations)) if callable(rate) else rate
            rule = self.update_rule(rate, state.iterations + 1)
            if "learning_rate" not in rule.constants:
                rule = _with_rate(rule, rate)
            if group.stream is not None and group.stream.updates is not None:
                rule = group.stream.updates(rule, state, self._next_rule)
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

    def _next_rule(self) -> UpdateRule | None:
        """The rule of the next step, if that can be taken as the fast path takes it."""
        if self._collecting or self._transforming or not self._rule_is_complete:
            return None
        return self.update_rule(self._rate_now(), self._state.iterations + 1)

    def _apply(self, pairs: Sequence[tuple[Any, Variable]], are_summed: bool) -> None:
        """Any step: checks the gradients, sums them over the replicas, clips them, and updates."""
        _gradients.check_pairs(pairs)
        if not pairs:
            contexts.group().communicator.exchange(signature_of(current_call(), "no variable"))
            return
        group = _gradients.group_of_variable(pairs[0][1], "to")
        if group.stream is not None and group.stream.capture is not None:
            given = [pair for pair in pairs if pair[0] is not None]
            others = [v for gradient, v in given if getattr(gradient, "dtype", None) != v.dtype]
            said = f", given a gradient that is not a {others[0].dtype} array," if others else ""
            group.stream.require_eager(f"this step of {self.name}{said}")
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
            rate, step = self._rate_now(), state.iterations + 1
            clipping, clipped = self._clipping if sparse else [], self._formula_of_clipped
            rule = clipped.rule(self, rate, step) if clipping else self.update_rule(rate, step)
            if "learning_rate" not in rule.constants:
                rule = _with_rate(rule, rate)
            if not self._rule_is_complete:
                numbers = _steps.numbers_to_agree(self, self._all_steps)
                rule = rule._replace(constants={**rule.constants, **numbers})
            if sparse and rule.norms is not None:
                raise ValueError(
                    f"{current_call()}: the update takes norms of whole variables, but the "
                    f"gradient of {sparse[0][1].name!r} is an IndexedSlices; pass an array"
                )
            if sparse:
                blocks = [state_of(v).block for _, v in sparse]
                group.storage.prepare_rows(blocks, len(self.all_slots), rule)
        are_summed = are_summed or not isinstance(contexts.context(), InReplica)
        if are_summed:
            group.communicator.require_equal(gradients)
        rows = [_gradients.sum_rows(group, slices, v, are_summed) for slices, v in sparse]
        if steps := [*self._transforming, *clipping]:
            if not are_summed:
                gradients = group.communicator.all_reduce(gradients, ReduceOp.SUM)
                are_summed = True
            gradients, rows = _steps.transform(self, steps, group, variables, gradients, rows)
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

    def minimize(
        self,
        loss: Callable[[], tuple[Any, Iterable[Any]]],
        var_list: Iterable[Variable],
        tape: None = None,
    ) -> Any:
        """Computes a loss and its gradients, and passes these to `apply_gradients`. Collective.

        Args:
            loss: a function without arguments that returns the loss and a gradient for each
                variable, such as `lambda: jax.value_and_grad(f)([v.value() for v in variables])`.
            var_list: the variables, in the order of the gradients.
            tape: `None`: no tape records the loss.

        Returns:
            The loss that the function returned.

        Raises:
            TypeError: `loss` is not a function, or returns something else; a tape.
            ValueError: there are more gradients than variables, or fewer; or as `apply_gradients`.

        Examples:
            >>> w = hs.Variable(np.array([3.0]))
            >>> def loss_and_gradients():
            ...     return float((w**2).sum()), [2 * w]
            >>> hs.optimizers.SGD(0.25).minimize(loss_and_gradients, [w]), w.numpy()
            (9.0, array([1.5]))
        """
        variables, call = list(var_list), f"{self.name}.minimize"
        if tape is not None:
            raise TypeError(
                f"{call}: tape is of type {type(tape).__name__}; leave it out, because nothing is "
                "recorded here: loss() returns the loss and its gradients"
            )
        if not callable(loss):
            raise TypeError(
                f"{call}: loss is of type {type(loss).__name__}; it must be a function without "
                "arguments that returns the loss and its gradients, because NumPy computes none"
            )
        result: Any = loss()
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(
                f"{call}: loss() returned {type(result).__name__}; it must return (loss, gradients)"
            )
        value, gradients = result[0], list(result[1])
        if len(gradients) != len(variables):
            raise ValueError(
                f"{call}: {len(gradients)} gradients for {len(variables)} variables; return one "
                "for each"
            )
        self.apply_gradients(zip(gradients, variables, strict=True))
        return value

    @names_call(lambda self, _: f"{self.name}.finalize_variable_values")
    def finalize_variable_values(self, var_list: Iterable[Variable]) -> None:
        """Overwrites variables by their moving averages, after training. Collective.

        Raises:
            ValueError: the optimizer was made without `use_ema` and keeps no averages.

        Examples:
            >>> optimizer = hs.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.75)
            >>> w = hs.Variable(np.array([8.0]))
            >>> optimizer.apply_gradients([(np.array([4.0]), w)])
            >>> optimizer.finalize_variable_values([w])  # 0.75 * 8 + 0.25 * 4
            >>> w.numpy()
            array([7.])
        """
        if not self.use_ema:
            raise ValueError(
                f"{current_call()}: there are no moving averages; pass use_ema=True to the "
                "optimizer"
            )
        if not (variables := list(var_list)):
            return
        group = _gradients.group_of_variable(variables[0], "of")
        with group.communicator.raise_together():
            _gradients.check_variables(group, variables)
            with group.on_stream():
                nothing = [group.xp.zeros(v.shape, v.dtype) for v in variables]
        plan = self._state.plan_of(self, group, variables)
        place = list(self.all_slots).index(EMA)
        taking = Formula(current_call(), lambda value, gradient, *slots: (slots[place], *slots))
        group.storage.update(plan, nothing, FIRST_REPLICA, taking.rule(self, 0.0, 0))

    @names_call(lambda self, _: f"{self.name}.gradient_buffers")
    def gradient_buffers(self, variables: Iterable[Variable]) -> GradientBuffers:
        """Arrays to write gradients to, which `apply_gradients` then need not copy. Collective.

        For steps that copying gradients slows down: `np.matmul(x.T, d, out=buffer)` instead of
        `x.T @ d`. Pass all of them to `apply_gradients`, with the same variables in the same order:
        `apply_gradients(zip(buffers, variables))`. What they hold after it is undefined. They are
        made once and live as long as the optimizer.

        Args:
            variables: trainable variables of one strategy, each once.

        Returns:
            A list of arrays, one for each variable, of its shape and dtype, on this replica's
            device, zeros at first. Its method `ready` starts the sum of gradients that are
            complete while you compute the others.

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
        if not plan.buffers.arrays:
            group.storage.make_buffers(plan)
        return GradientBuffers(state, group, plan, variables, self._sums_early)

    def _sums_early(self) -> bool:
        """Whether gradients that are marked can be summed before the step."""
        return not (self._collecting or self._transforming or self._clipping)


def _with_rate(rule: UpdateRule, rate: float) -> UpdateRule:
    """A program's own rule, with the learning rate among what the ranks must agree on."""
    return rule._replace(constants={"learning_rate": rate, **rule.constants})
