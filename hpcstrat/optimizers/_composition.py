"""How the steps of an optimizer are put together: in `apply_gradients`, and in its formula."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array, IndexedSlices
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._variable.variable import Variable
from hpcstrat.optimizers import _gradients
from hpcstrat.optimizers._steps import (
    BY_OPTION,
    NORM_CLIPPING,
    Pairs,
    UpdateStep,
    numbers_of,
    overrides,
)

Readers: TypeAlias = dict[str, Callable[[], Any]]
"""What reads the numbers of a combined formula that are not the optimizer's attributes."""

_RATE = "learning_rate"


def steps_of(optimizer: Any) -> tuple[UpdateStep, ...]:
    """The steps given, and those of the options that are set and that the formula does not take."""
    taken = numbers_of(optimizer.formula)
    values = {option: getattr(optimizer, option) for option in BY_OPTION if option not in taken}
    are_set = [name for name, value in values.items() if value is not None and value is not False]
    return (*optimizer.steps, *[BY_OPTION[option] for option in are_set])


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
    with contexts.group().communicator.raise_together():
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
) -> tuple[Callable[..., Any], Readers]:
    """The formula of an optimizer inside those of its steps: one pass over memory for all.

    The first step's formula is the outermost. The slots are the optimizer's, then those of the last
    step, and so on to the first. `clips`: whether norms are clipped, before all other formulas.
    """
    own, readers = numbers_of(formula), Readers()
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

    whole: Any = combined
    pairs = [*zip(steps, names, strict=True)]
    clipping = [pair for pair in pairs if clips and pair[0] in NORM_CLIPPING]
    others = [pair for pair in pairs if pair[0] not in NORM_CLIPPING]
    for step, of_step in reversed([*clipping, *others]):
        if overrides(step, "formula"):
            whole = functools.partial(_run_step, step, of_step, whole)
    whole = functools.partial(whole)
    whole.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in every]
    )
    return whole, readers


def _name_numbers(step: UpdateStep, readers: Readers) -> dict[str, str]:
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
        readers[names[number]] = functools.partial(getattr, step, number) if number else _true
    return names


def _true() -> bool:
    return True


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
