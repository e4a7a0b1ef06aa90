"""UpdateStep: what an optimizer does besides its formula; its options are steps, put together."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core import gpu
from hpcstrat._core.arrays import as_number
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._update.formula import Formula
from hpcstrat._update.symbols import global_norm
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers import _gradients
from hpcstrat.optimizers._state import state_of_optimizer

EMA = "ema"
"""The slot of `use_ema`: the moving average, which starts as the variable's value."""

Pairs: TypeAlias = "Sequence[tuple[Any, Variable]]"

_RATE = "learning_rate"


class UpdateStep:
    """What an optimizer does besides its formula, such as clipping.

    Subclass it, override some of its methods, and pass it: `Adam(steps=[MyStep()])`. The options of
    optimizers are such steps. In `apply_gradients` every step collects, then gradients are summed
    over the replicas, then every step transforms, and then one pass over memory updates each
    element: the formulas of the steps, each around the next, and in the middle the optimizer's. The
    steps in `steps` come first, in their order, and the options follow.

    What a step keeps in attributes is not in checkpoints; its slots are.

    Attributes:
        numbers: names of attributes, its own or the optimizer's, that the ranks must agree on
            although its formula does not take them.

    Examples:
        >>> import numpy as np, hpcstrat as hs
        >>> class L1(hs.optimizers.UpdateStep):
        ...     def __init__(self, penalty):
        ...         self.penalty = penalty
        ...     @staticmethod
        ...     def formula(update, value, gradient, *, penalty):
        ...         return update(value, gradient + penalty * np.sign(value))
        >>> strategy = hs.MirroredStrategy()
        >>> with strategy.scope():
        ...     w = hs.Variable(np.array([1.0, -2.0]))
        ...     optimizer = hs.optimizers.SGD(0.5, steps=[L1(0.25)])
        >>> optimizer.apply_gradients([(np.zeros(2), w)])
        >>> w.numpy()
        array([ 0.875, -1.875])
    """

    numbers: Sequence[str] = ()

    @property
    def slots(self) -> Mapping[str, float | None]:
        """Initial values of its own slots by name; `None`: the variable's value.

        They are arrays of each variable's shape and dtype. No two slots of an optimizer have the
        same name.

        Examples:
            A count of the steps in which an element's gradient was not 0:

            >>> class Count(hs.optimizers.UpdateStep):
            ...     @property
            ...     def slots(self):
            ...         return {"count": 0.0}
            ...     @staticmethod
            ...     def formula(update, value, gradient, count):
            ...         return update(value, gradient), count + np.absolute(np.sign(gradient))
            >>> optimizer, w = hs.optimizers.SGD(1.0, steps=[Count()]), hs.Variable(np.zeros(2))
            >>> for gradient in [0.0, 3.0], [1.0, 3.0]:
            ...     optimizer.apply_gradients([(np.array(gradient), w)])
            >>> optimizer.variables[-1].numpy()
            array([1., 2.])
        """
        return {}

    def collect(self, grads_and_vars: Pairs, optimizer: Any) -> Pairs | None:
        """Takes this replica's gradients of one call, before they are summed. Not collective.

        Args:
            grads_and_vars: what `apply_gradients` was given, or the step before returned.
            optimizer: the optimizer.

        Returns:
            The pairs to go on with, or `None` if this call changes no variable, on any replica.

        Examples:
            >>> class EverySecond(hs.optimizers.UpdateStep):
            ...     calls = 0
            ...     def collect(self, grads_and_vars, optimizer):
            ...         self.calls += 1
            ...         return grads_and_vars if self.calls % 2 == 0 else None
            >>> optimizer = hs.optimizers.SGD(1.0, steps=[EverySecond()])
            >>> w = hs.Variable(np.zeros(1))
            >>> for gradient in 1.0, 2.0, 4.0, 8.0:
            ...     optimizer.apply_gradients([(np.array([gradient]), w)])
            >>> w.numpy(), optimizer.iterations
            (array([-10.]), 2)
        """
        return grads_and_vars

    def transform(self, grads_and_vars: Pairs, optimizer: Any) -> Pairs:
        """Changes the gradients after their sum over the replicas. Not collective.

        Overriding it costs time: every replica gets all sums, and marked gradient buffers are
        summed in `apply_gradients`.

        Args:
            grads_and_vars: pairs of a gradient and its variable. A gradient is an array of the
                variable's shape and dtype on this replica's device, or an `IndexedSlices` in which
                each row occurs once. Do not write to them.
            optimizer: the optimizer.

        Returns:
            As many pairs, with the same variables in the same order and gradients of the same
            kinds; equal on all ranks.

        Examples:
            >>> class Centralize(hs.optimizers.UpdateStep):
            ...     def transform(self, grads_and_vars, optimizer):
            ...         return [(gradient - gradient.mean(), v) for gradient, v in grads_and_vars]
            >>> optimizer = hs.optimizers.SGD(1.0, steps=[Centralize()])
            >>> w = hs.Variable(np.zeros(2))
            >>> optimizer.apply_gradients([(np.array([1.0, 5.0]), w)])
            >>> w.numpy()
            array([ 2., -2.])
        """
        return grads_and_vars

    @staticmethod
    def formula(
        update: Callable[[Any, Any], Any], value: Any, gradient: Any, *slots: Any, **numbers: Any
    ) -> Any:
        """Wraps the update of one element; runs with symbols, as `Optimizer.formula` does.

        Args:
            update: takes a value and a gradient and returns the new value, by the formulas of the
                next steps and of the optimizer. Call it once.
            value: the variable's element.
            gradient: its gradient, summed over the replicas.
            *slots: an element of each slot of this step, in the order of `slots`.
            **numbers: the keyword-only parameters: `learning_rate`, `step`, counted from 1, and any
                attribute of the step, or else of the optimizer, by its name.

        Returns:
            The new value, or a tuple of it and the new value of each of this step's slots.

        Examples:
            Cautious updates: no step against the gradient, whatever the momentum.

            >>> class Cautious(hs.optimizers.UpdateStep):
            ...     @staticmethod
            ...     def formula(update, value, gradient):
            ...         new = update(value, gradient)
            ...         return np.where((new - value) * gradient < 0, new, value)
            >>> optimizer = hs.optimizers.SGD(1.0, momentum=0.5, steps=[Cautious()])
            >>> w = hs.Variable(np.zeros(2))
            >>> for gradient in [4.0, 4.0], [1.0, -1.0]:
            ...     optimizer.apply_gradients([(np.array(gradient), w)])
            >>> w.numpy()  # 4 + 3, and 4 alone: 0.5 * 4 - 1 goes up the slope
            array([-7., -4.])
        """
        return update(value, gradient)


def overrides(step: UpdateStep, method: str) -> bool:
    """Whether a step has its own version of a method."""
    return getattr(type(step), method) is not getattr(UpdateStep, method)


def numbers_of(formula: Callable[..., Any]) -> list[str]:
    """The names of the numbers that a formula takes."""
    parameters = inspect.signature(formula).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]


# ---- the options


class GlobalNormClipping(UpdateStep):
    """Scales gradients down to the largest norm of all together."""

    @staticmethod
    def formula(update: Any, value: Any, gradient: Any, *, global_clipnorm: Any) -> Any:
        """See `UpdateStep.formula`."""
        return update(value, gradient * _scale(global_clipnorm, global_norm(gradient)))

    def transform(self, grads_and_vars: Pairs, optimizer: Any) -> Pairs:
        """See `UpdateStep.transform`."""
        return _scale_down(optimizer.global_clipnorm, grads_and_vars)


class NormClipping(UpdateStep):
    """Scales each gradient down to the largest norm."""

    @staticmethod
    def formula(update: Any, value: Any, gradient: Any, *, clipnorm: Any) -> Any:
        """See `UpdateStep.formula`."""
        return update(value, gradient * _scale(clipnorm, np.linalg.norm(gradient)))

    def transform(self, grads_and_vars: Pairs, optimizer: Any) -> Pairs:
        """See `UpdateStep.transform`."""
        most = optimizer.clipnorm
        return [pair for each in grads_and_vars for pair in _scale_down(most, [each])]


class ValueClipping(UpdateStep):
    """Limits the magnitude of each element of a gradient."""

    @staticmethod
    def formula(update: Any, value: Any, gradient: Any, *, clipvalue: Any) -> Any:
        """See `UpdateStep.formula`."""
        return update(value, np.maximum(np.minimum(gradient, clipvalue), -clipvalue))


class WeightDecay(UpdateStep):
    """Makes weights smaller before each update."""

    @staticmethod
    def formula(
        update: Any, value: Any, gradient: Any, *, weight_decay: Any, learning_rate: Any
    ) -> Any:
        """See `UpdateStep.formula`."""
        return update(value * (1 - weight_decay * learning_rate), gradient)


class MovingAverages(UpdateStep):
    """Keeps a moving average of each variable, which may overwrite it in some steps."""

    @property
    def slots(self) -> Mapping[str, float | None]:
        """See `UpdateStep.slots`."""
        return {EMA: None}

    @staticmethod
    def formula(
        update: Any,
        value: Any,
        gradient: Any,
        average: Any,
        *,
        ema_momentum: Any,
        ema_overwrites: Any,
    ) -> Any:
        """See `UpdateStep.formula`."""
        new = update(value, gradient)
        average = ema_momentum * average + (1 - ema_momentum) * new
        if ema_overwrites is not None:
            new = new + ema_overwrites * (average - new)
        return new, average


class Accumulation(UpdateStep):
    """Adds up the gradients of several calls on this replica."""

    numbers = ("gradient_accumulation_steps",)  # so that all ranks take a step in the same calls

    def collect(self, grads_and_vars: Pairs, optimizer: Any) -> Pairs | None:
        """Adds the gradients of a call; returns their means after the last call, else `None`."""
        state, calls = state_of_optimizer(optimizer), optimizer.gradient_accumulation_steps
        gradients, dense, sparse = _gradients.prepare_pairs(grads_and_vars)
        if variables := [*dense, *(v for _, v in sparse)]:
            group = _gradients.group_of_variable(variables[0], "to")
            _gradients.check_variables(group, variables)
            gradients += [_gradients.as_dense(slices, v) for slices, v in sparse]
            with group.on_stream():
                for gradient, v in zip(gradients, variables, strict=True):
                    if v in state.sums:
                        state.sums[v] += gradient
                    else:
                        state.sums[v] = gradient.astype(accumulator(v.dtype))
        state.calls += 1
        if state.calls < calls:
            return None
        means: list[tuple[Any, Variable]] = []
        for v, total in state.sums.items():
            with state_of(v).group.on_stream():
                means.append(((total / calls).astype(v.dtype, copy=False), v))
        state.drop_sums()
        return means


BY_OPTION: Mapping[str, UpdateStep] = {
    "global_clipnorm": GlobalNormClipping(),
    "clipnorm": NormClipping(),
    "clipvalue": ValueClipping(),
    "weight_decay": WeightDecay(),
    "use_ema": MovingAverages(),
    "gradient_accumulation_steps": Accumulation(),
}

NORM_CLIPPING = (BY_OPTION["global_clipnorm"], BY_OPTION["clipnorm"])
"""Their formulas come around all others. They transform what a formula cannot clip: rows, and
gradients for an optimizer's own `update_rule`."""


def _scale(most: Any, norm: Any) -> Any:
    return np.where(norm < math.inf, np.where(norm > most, most / norm, 1.0), math.nan)


def _scale_down(most: float, grads_and_vars: Pairs) -> list[tuple[Any, Variable]]:
    gradients = [gradient for gradient, _ in grads_and_vars]
    arrays = [g.values if isinstance(g, IndexedSlices) else g for g in gradients]
    xp = gpu.array_module(arrays[0])
    with np.errstate(all="ignore"):  # as in the update: infinite gradients stop no rank
        # In float64, where the squares of large float32 numbers do not overflow.
        squares = sum(xp.sum(_in_float64(a) ** 2) for a in arrays)
        if xp is np:  # numbers cost less than arrays without dimensions
            norm = math.sqrt(squares)
            scale = most / norm if norm > most else 1.0
            if not math.isfinite(norm):
                scale = math.nan
            scaled = [a if scale == 1 else a * a.dtype.type(scale) for a in arrays]
        else:
            norm = xp.sqrt(squares)
            scale = xp.where(xp.isfinite(norm), xp.where(norm > most, most / norm, 1.0), np.nan)
            scaled = [a * scale.astype(a.dtype) for a in arrays]
    return [
        (IndexedSlices(new, g.indices) if isinstance(g, IndexedSlices) else new, v)
        for (g, v), new in zip(grads_and_vars, scaled, strict=True)
    ]


def _in_float64(array: Array) -> Array:
    magnitudes = abs(array) if array.dtype.kind == "c" else array
    return magnitudes.astype(np.float64)


# ---- how the steps of an optimizer are put together


def steps_of(optimizer: Any) -> tuple[UpdateStep, ...]:
    """The steps given, and those of the options that are set."""
    steps, taken = [*optimizer.steps], numbers_of(optimizer.formula)
    for option, step in BY_OPTION.items():
        value = getattr(optimizer, option)
        # An optimizer whose formula takes an option applies it there.
        is_applied = option in taken and overrides(step, "formula")
        if value is not None and value is not False and not is_applied:
            steps.append(step)
    return tuple(steps)


def join_slots(
    owner: str, slots: Mapping[str, float], steps: Sequence[UpdateStep]
) -> dict[str, float | None]:
    """The slots of an optimizer and of its steps, in the order in which formulas take them."""
    joined: dict[str, float | None] = {**slots}
    for step in reversed(steps):
        if taken := joined.keys() & step.slots.keys():
            raise ValueError(
                f"{owner}: {type(step).__name__} has the slot {min(taken)!r}, and so has the "
                "optimizer or another of its steps; give it another name"
            )
        joined |= step.slots
    return joined


def collect(optimizer: Any, steps: Sequence[UpdateStep], pairs: Pairs) -> Pairs | None:
    """What the steps make of the gradients of one call, or `None`."""
    group = contexts.group()
    if group.stream is not None and group.stream.capture is not None:
        group.stream.require_eager("a step that collects gradients, such as their accumulation,")
    with group.communicator.raise_together():
        for step in steps:
            _gradients.check_pairs(pairs)
            collected = step.collect(pairs, optimizer)
            if collected is None:
                return None
            pairs = list(collected)
    return pairs


def transform(
    optimizer: Any,
    steps: Sequence[UpdateStep],
    group: ReplicaGroup,
    variables: Sequence[Variable],
    gradients: Sequence[Array],
    rows: Sequence[tuple[Array, Array]],
) -> tuple[list[Array], list[tuple[Array, Array]]]:
    """What the steps make of the summed gradients: arrays, and rows with their values."""
    slices = [IndexedSlices(values, indices) for indices, values in rows]
    changed = pairs = [*zip([*gradients, *slices], variables, strict=True)]
    own = [step for step in steps if step in optimizer.steps]
    with group.communicator.raise_together(), group.on_stream():
        for step in steps:
            changed = list(step.transform(changed, optimizer))
            if step in own:
                _check_transformed(step, changed, pairs)
        arrays, _, sparse = _gradients.prepare_pairs(changed)
        new_rows = [_rows(group, new, old, v) for (new, v), old in zip(sparse, slices, strict=True)]
    if own:
        group.communicator.require_equal([*arrays, *[values for _, values in new_rows]])
    return arrays, new_rows


def _check_transformed(step: UpdateStep, changed: Pairs, pairs: Pairs) -> None:
    with call_named(f"{current_call()}, {type(step).__name__}.transform"):
        _gradients.check_pairs(changed)
        if [*map(_kind, changed)] != [*map(_kind, pairs)]:
            raise ValueError(
                f"{current_call()}: it must return a gradient of the same kind, an array or "
                "IndexedSlices, for each of the same variables in the same order"
            )


def _kind(pair: tuple[Any, Variable]) -> tuple[bool, bool, int]:
    return pair[0] is None, isinstance(pair[0], IndexedSlices), id(pair[1])


def _rows(
    group: ReplicaGroup, slices: IndexedSlices, old: IndexedSlices, v: Variable
) -> tuple[Array, Array]:
    """The rows that a step returned, each once."""
    new, before = slices.values, old.values
    if (
        slices.indices is old.indices
        and type(new) is type(before)
        and (new.shape, new.dtype) == (before.shape, before.dtype)
    ):
        return slices.indices, new
    return _gradients.sum_rows(group, slices, v, are_summed=True)


def combine_formulas(
    call: str, formula: Callable[..., Any], steps: Sequence[UpdateStep], clips: bool
) -> Formula:
    """The formula of an optimizer inside those of its steps: one pass over memory for all.

    The first step's formula is the outermost. The slots are the optimizer's, then those of the last
    step, and so on to the first. `clips`: whether norms are clipped, before all other formulas.
    """
    own, readers = numbers_of(formula), dict[str, Callable[[], Any]]()
    names = [_name_numbers(step, readers) for step in steps]
    # The ranks must agree on the learning rate in any case.
    every = dict.fromkeys([*own, *[name for each in names for name in each.values()], _RATE])
    parameters = inspect.signature(formula).parameters
    for name in (*every, *BY_OPTION, "step"):
        if name in parameters and name not in own:
            raise TypeError(
                f"{call} takes {name} by position; numbers come after `*`: def formula(value, "
                f"gradient, *, {name})"
            )

    def combined(value: Any, gradient: Any, /, *slots: Any, **numbers: Any) -> Any:
        taken = {name: numbers[name] for name in own}
        return formula(value, gradient, *slots, **taken)

    whole: Callable[..., Any] = combined
    pairs = [*zip(steps, names, strict=True)]
    clipping = [pair for pair in pairs if clips and pair[0] in NORM_CLIPPING]
    others = [pair for pair in pairs if pair[0] not in NORM_CLIPPING]
    for step, of_step in reversed([*clipping, *others]):
        if overrides(step, "formula"):
            whole = functools.partial(_run_step, step, of_step, whole)
    return Formula(call, whole, tuple(every), readers)


def _name_numbers(step: UpdateStep, readers: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """Names a step's numbers in the combined formula, and adds what reads its own to `readers`.

    A step without numbers has one all the same, because the ranks must agree on the steps too.
    """
    kind = type(step).__name__
    names: dict[str, str] = {}
    for number in dict.fromkeys([*numbers_of(step.formula), *step.numbers]) or [""]:
        if number in (_RATE, "step") or (number and not hasattr(step, number)):
            names[number] = number
            continue
        first = f"{kind}_{number}" if number else kind
        again = sum(name == first or name.startswith(f"{first}__") for name in readers)
        names[number] = f"{first}__{again + 1}" if again else first  # several steps of one class
        reader = functools.partial(getattr, step, number) if number else lambda: True
        readers[names[number]] = reader
    return names


def numbers_to_agree(optimizer: Any, steps: Sequence[UpdateStep]) -> dict[str, float]:
    """The steps' numbers by name, for an optimizer whose own `update_rule` does not have them."""
    readers = dict[str, Callable[[], Any]]()
    for name in [name for step in steps for name in _name_numbers(step, readers).values()]:
        if name not in (*readers, _RATE, "step"):
            readers[name] = functools.partial(getattr, optimizer, name)
    owner, values = type(optimizer).__name__, {name: read() for name, read in readers.items()}
    return {name: as_number(owner, name, n) for name, n in values.items() if n is not None}


def _run_step(
    step: UpdateStep,
    names: Mapping[str, str],
    inner: Callable[..., Any],
    value: Any,
    gradient: Any,
    /,
    *slots: Any,
    **numbers: Any,
) -> tuple[Any, ...]:
    """The formula of a step around an inner one: the new value, the inner's slots, its own."""
    first = len(slots) - len(step.slots)
    inner_slots: list[Sequence[Any]] = []

    def update(value: Any, gradient: Any) -> Any:
        new, *others = _as_tuple(inner(value, gradient, *slots[:first], **numbers))
        inner_slots.append(others)
        return new

    taken = {number: numbers[names[number]] for number in numbers_of(step.formula)}
    new, *own = _as_tuple(step.formula(update, value, gradient, *slots[first:], **taken))
    if len(inner_slots) != 1 or len(own) != len(step.slots):
        raise TypeError(
            f"{type(step).__name__}.formula called `update` {len(inner_slots)} times and returned "
            f"{1 + len(own)} values; it must call it once, and return the new value and "
            f"{len(step.slots)} new slots"
        )
    return new, *inner_slots[0], *own


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
