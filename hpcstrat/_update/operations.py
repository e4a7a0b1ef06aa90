"""A traced formula as NumPy operations: Python functions, made from text like a GPU's kernel."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat._core.types import Array
from hpcstrat._update.rule import Apply
from hpcstrat._update.symbols import AS_OPERATIONS, ELEMENT, NUMBER, ON_NUMBERS, WITHOUT_OUT, Symbol

GRADIENT, VALUE = 0, 1
"""The first arrays of an operation, followed by the slots and the scratch arrays."""


def operations(
    names: Sequence[str],
    norms: Sequence[Symbol],
    numbers: Sequence[Symbol],
    given: Sequence[Symbol],
    order: Sequence[Symbol],
    results: Sequence[Symbol],
) -> Callable[..., tuple[Apply, tuple[float, ...]]]:
    """A function that binds the formula's numbers and norms to its NumPy operations.

    It returns the operations, and the numbers that they take, computed in float64. It is made from
    text, like the kernel: a loop over a table of operations takes twice as long on small variables.
    """
    functions: dict[str, Any] = {
        "wide": _wide,
        "empty_like": np.empty_like,
        "as_arrays": _as_arrays,
    }
    arrays, steps = _assign_arrays(given, order, results)

    def format_step(function: Any, operands: Sequence[Symbol | int], out: int) -> str:
        taken = [f"a{o}" if isinstance(o, int) else f"n{numbers.index(o)}" for o in operands]
        text = _format_call(function, taken, functions)
        return f"a{out} = {text})" if function in WITHOUT_OUT else f"{text}, out=a{out})"

    slots = len(given) - 2
    lines = [
        *_format_bind(names, norms, numbers, functions),
        "    kept = {}",
        f"    def apply(a{VALUE}, a{GRADIENT}, slots, a{slots + 2}):",
        f"        dtype = a{VALUE}.dtype",
        f"        if dtype.itemsize == 2: return wide(apply, a{VALUE}, a{GRADIENT}, slots)",
        "        cast = kept.get(dtype)",
        "        if cast is None: cast = kept[dtype] = as_arrays(numbers, dtype)",
        _format_unpacking("n", len(numbers), "cast"),
        _format_unpacking("a", slots, "slots", 2),
        *[f"        a{i} = empty_like(a{VALUE})" for i in range(slots + 3, arrays)],
        *[f"        {format_step(*step)}" for step in steps],
        "    return apply, numbers",
    ]
    exec("\n".join(lines), functions)  # only names, numbers, and functions in the tables
    return functions["bind"]


def norm_terms(
    names: Sequence[str],
    numbers: Sequence[Symbol],
    given: Sequence[Symbol],
    order: Sequence[Symbol],
    wanted: Sequence[Symbol],
) -> Callable[
    ..., tuple[Callable[[Array, Array, Sequence[Array]], list[Array]], tuple[float, ...]]
]:
    """A function that binds the numbers to the operations for the norms' terms; changes nothing."""
    functions: dict[str, Any] = {"float32": np.float32}
    places = {id(symbol): f"a{i}" for i, symbol in enumerate(given)}
    places |= {id(number): f"n{i}" for i, number in enumerate(numbers)}
    places |= {id(symbol): f"s{i}" for i, symbol in enumerate(order)}
    steps = [
        f"{places[id(symbol)]} = "
        + _format_call(
            symbol.function, [places[id(operand)] for operand in symbol.operands], functions
        )
        for symbol in order
    ]
    lines = [
        *_format_bind(names, (), numbers, functions),
        f"    def terms(a{VALUE}, a{GRADIENT}, slots):",
        f"        dtype = a{VALUE}.dtype",
        "        if dtype.itemsize == 2:",
        f"            a{VALUE}, a{GRADIENT}, *slots = [a.astype(float32) for a in (a{VALUE}, "
        f"a{GRADIENT}, *slots)]",
        f"            dtype = a{VALUE}.dtype",
        # NumPy scalars, which CuPy's functions take.
        _format_unpacking("n", len(numbers), "[dtype.type(number) for number in numbers]"),
        _format_unpacking("a", len(given) - 2, "slots", 2),
        *[f"        {step})" for step in steps],
        f"        return [{', '.join(places[id(symbol)] for symbol in wanted)}]",
        "    return terms, numbers",
    ]
    exec("\n".join(lines), functions)
    return functions["bind"]


def _format_bind(
    names: Sequence[str],
    norms: Sequence[Symbol],
    numbers: Sequence[Symbol],
    functions: dict[str, Any],
) -> list[str]:
    """The first lines of the function, which compute the numbers once rather than per chunk."""
    places = {id(norm): f"norm_{i}" for i, norm in enumerate(norms)}
    functions |= {"inf": math.inf, "nan": math.nan}  # literals in the text

    def format_number(number: Symbol) -> str:
        if id(number) in places:
            return places[id(number)]
        if number.function is None:
            operand = number.operands[0]
            return repr(operand) if isinstance(operand, float) else f"given_{operand}"
        name = f"of_{number.function.__name__}"
        functions[name] = ON_NUMBERS[number.function]
        return f"{name}({', '.join(map(format_number, number.operands))})"

    return [
        f"def bind({', '.join([f'given_{name}' for name in names] + list(places.values()))}):",
        f"    numbers = ({''.join(f'{format_number(number)}, ' for number in numbers)})",
    ]


def _format_unpacking(prefix: str, count: int, of: str, first: int = 0) -> str:
    return (
        f"        {''.join(f'{prefix}{i + first}, ' for i in range(count))}= {of}" if count else ""
    )


def _as_arrays(numbers: Sequence[float], dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    # NumPy takes a zero-dimensional array in half the time of a scalar, which dominates a small
    # update.
    return [np.array(number, dtype) for number in numbers]


def _format_call(function: Any, operands: Sequence[str], functions: dict[str, Any]) -> str:
    """A call of one of NumPy's functions, up to the closing bracket."""
    functions[function.__name__] = AS_OPERATIONS.get(function, function)
    return f"{function.__name__}({', '.join(operands)}"


def _assign_arrays(
    given: Sequence[Symbol], order: Sequence[Symbol], results: Sequence[Symbol]
) -> tuple[int, list[tuple[Any, list[Symbol | int], int]]]:
    """The number of arrays, and per operation its operands and the array for its result.

    Operands are numbers or the indices of arrays. A result goes to its place in storage as soon as
    the old content is no longer needed.
    """
    uses = collections.Counter(id(operand) for symbol in order for operand in symbol.operands)
    uses.update(map(id, results))  # results are needed to the end
    place = {id(symbol): i for i, symbol in enumerate(given)}
    homes = {id(result): i for i, result in enumerate(results, VALUE)}
    first = arrays = len(given)
    free = [] if uses[id(given[GRADIENT])] else [GRADIENT]
    steps: list[tuple[Any, list[Symbol | int], int]] = []
    for symbol in order:
        operands = [
            operand if operand.kind == NUMBER else place[id(operand)] for operand in symbol.operands
        ]
        for operand in symbol.operands:
            uses[id(operand)] -= 1
            at = place.get(id(operand), VALUE)
            if (
                not uses[id(operand)]
                and (at == GRADIENT or at >= first)
                and operand.kind == ELEMENT
            ):
                free.append(at)
        is_new = symbol.function in WITHOUT_OUT
        home = homes.get(id(symbol))
        if home is not None and not uses[id(given[home])] and not is_new:
            out = home
        elif free and not is_new:
            out = free.pop()
        else:
            out, arrays = arrays, arrays + 1
        place[id(symbol)] = out
        steps.append((symbol.function, operands, out))
    moved = [
        (place[id(result)], home)
        for home, result in enumerate(results, VALUE)
        if place[id(result)] != home
    ]
    for i, (at, home) in enumerate(moved):
        if at < first:  # another slot's place, which might be written first
            steps.append((np.positive, [at], arrays))
            moved[i], arrays = (arrays, home), arrays + 1
    return arrays, steps + [(np.positive, [at], home) for at, home in moved]


def _wide(apply: Apply, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
    """Updates 16-bit numbers as on a GPU: in float32, rounded once."""
    arrays = [array.astype(np.float32) for array in (value, gradient, *slots)]
    apply(arrays[0], arrays[1], arrays[2:], np.empty_like(arrays[0]))
    for array, new in zip((value, *slots), (arrays[0], *arrays[2:]), strict=True):
        array[...] = new
