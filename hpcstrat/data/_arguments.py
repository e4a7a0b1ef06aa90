"""Checks of the arguments of a dataset's methods; their messages name the call and the argument."""

from __future__ import annotations

import operator
import os
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np


def whole(number: Any, call: str, argument: str) -> int:
    """The argument as an int.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(number)}; it must be an int"
        ) from None


def at_least_one(number: Any, call: str, argument: str) -> int:
    """The argument as an int from 1 up.

    Raises:
        TypeError: it is no int.
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
    """The argument `weights`, of so many datasets.

    Raises:
        TypeError: they are not numbers.
        ValueError: they are not as many, are negative, or all 0.
    """
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise TypeError(
            f"{call}: weights is {reprlib.repr(weights)}; it must be a sequence of numbers"
        )
    found = array.astype(float).tolist()
    if len(found) != count or min(found) < 0 or not 0 < sum(found) < np.inf:
        raise ValueError(
            f"{call}: weights is {found}; it must have one number for each of the {count} "
            "datasets, not negative and not all 0"
        )
    return found


def function_of(function: Any, call: str, argument: str) -> Callable[..., Any]:
    """The argument, if it can be called.

    Raises:
        TypeError: it cannot.
    """
    if not callable(function):
        raise TypeError(
            f"{call}: {argument} is {type(function).__name__}; it must be a function of an element"
        )
    return function


def path_of(path: Any, call: str, argument: str = "path") -> str:
    """The argument as text.

    Raises:
        TypeError: it is no path.
    """
    found = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(found, str):
        raise TypeError(f"{call}: {argument} is {reprlib.repr(path)}; it must be a path")
    return found
