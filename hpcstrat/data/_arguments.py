"""Checks the arguments of a dataset's methods; the messages name the call and the argument."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcstrat.data._threads import AUTOTUNED

AUTOTUNE = -1
"""Leaves a size or a number to the library."""


def whole(number: Any, call: str, argument: str) -> int:
    """The argument as an int.

    Raises:
        TypeError: it is not an int.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(number)}; it must be an int"
        ) from None


def positive(number: Any, call: str, argument: str) -> int:
    """The argument as an int that is at least 1.

    Raises:
        TypeError: it is not an int.
        ValueError: it is less than 1.
    """
    number = whole(number, call, argument)
    if number < 1:
        raise ValueError(f"{call}: {argument} is {number}; it must be at least 1")
    return number


def seed_of(number: Any, call: str) -> int | None:
    """The argument `seed`, an int or `None`.

    Raises:
        TypeError: it is neither.
    """
    return None if number is None else whole(number, call, "seed")


def weights_of(weights: Any, call: str, count: int) -> list[float]:
    """The argument `weights`, one number for each of `count` datasets.

    Raises:
        TypeError: they are not numbers.
        ValueError: their number is not `count`, a weight is negative, or all are 0.
    """
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{call}: weights is {reprlib.repr(weights)}; it must be a sequence of numbers"
        )
    numbers = array.astype(float).tolist()
    if len(numbers) != count or min(numbers) < 0 or not 0 < sum(numbers) < np.inf:
        raise ValueError(
            f"{call}: weights is {numbers}; it must have one number for each of the {count} "
            "datasets, not negative and not all 0"
        )
    return numbers


def function_of(function: Any, call: str, argument: str) -> Callable[..., Any]:
    """The argument, which must be callable.

    Raises:
        TypeError: it is not.
    """
    if not callable(function):
        raise TypeError(
            f"{call}: {argument} is {type(function).__name__}; it must be a function of an element"
        )
    return function


def path_of(path: Any, call: str, argument: str = "path") -> str:
    """The argument as text.

    Raises:
        TypeError: it is not a path.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"{call}: {argument} is {reprlib.repr(path)}; it must be a path")
    return text


def thread_count(calls: int | None, call: str) -> int:
    """The number of threads that `num_parallel_calls` asks for; 0 for `None`."""
    if calls is None:
        return 0
    return AUTOTUNED if calls == AUTOTUNE else positive(calls, call, "num_parallel_calls")


def refuse_arguments(call: str, **arguments: Any) -> None:
    """Refuses arguments that only TensorFlow's file format has.

    Raises:
        NotImplementedError: an argument is not `None`.
    """
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{call}: {name} is {value!r}, but elements are kept as they are in memory, one "
                "file per leaf; leave it None"
            )
