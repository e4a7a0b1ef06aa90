"""Checks arguments of a dataset's methods, and says what to write for names it does not have."""

from __future__ import annotations

import abc
import operator
import os
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data._threads import AUTOTUNED

AUTOTUNE = -1
"""Leaves a size or a number to the library."""


def whole(number: Any, call: str, argument: str) -> int:
    """The argument as an int."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(number)}; it must be an int"
        ) from None


def positive(number: Any, call: str, argument: str) -> int:
    """The argument as an int that is at least 1."""
    number = whole(number, call, argument)
    if number < 1:
        raise ValueError(f"{call}: {argument} is {number}; it must be at least 1")
    return number


def seed_of(number: Any, call: str) -> int | None:
    """The argument `seed`, an int or `None`."""
    return None if number is None else whole(number, call, "seed")


def weights_of(weights: Any, call: str, count: int) -> list[float]:
    """The argument `weights`: one number for each of `count` datasets."""
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
    """The argument, which must be callable."""
    if not callable(function):
        raise TypeError(
            f"{call}: {argument} is {type(function).__name__}; it must be a function of an element"
        )
    return function


def path_of(path: Any, call: str, argument: str = "path") -> str:
    """The argument, a path, as text."""
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
    """Refuses arguments that only TensorFlow's file format has."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{call}: {name} is {value!r}, but elements are kept as they are in memory, one "
                "file per leaf; leave it None"
            )


# Names that only `tf.data` has, each with the reason and with what to write instead.
_METHODS = {
    "apply": "it only calls a function: write function(dataset)",
    "bucket_by_sequence_length": (
        "its batches depend on all elements before them, so no replica could skip the elements of "
        "others; sort by length before Dataset.from_tensor_slices, then Dataset.padded_batch and "
        "Dataset.shuffle"
    ),
    "counter": "write Dataset.range(start, sys.maxsize, step)",
    "from_sparse_tensor_slices": (
        "there are no sparse tensors; pass arrays to Dataset.from_tensor_slices"
    ),
    "get_single_element": "write next(iter(dataset))",
    "group_by_window": (
        "its groups depend on all elements before them, so no replica could skip the elements of "
        "others; make the groups in a generator function, and pass it to Dataset.from_generator"
    ),
    "ignore_errors": (
        "an element that fails would be lost silently; catch the error in the function of "
        "Dataset.map, and drop such elements with Dataset.filter"
    ),
    "ragged_batch": (
        "there are no ragged tensors; Dataset.padded_batch fills elements up to one shape"
    ),
    "random": (
        "write Dataset.range(n).map(lambda i: np.random.default_rng((seed, i)).random()), which is "
        "the same on any number of replicas"
    ),
    "rejection_resample": (
        "what it keeps depends on all elements before; draw with Dataset.sample_from_datasets from "
        "one dataset per class"
    ),
    "snapshot": "write Dataset.save once, then Dataset.load",
    "sparse_batch": (
        "there are no sparse tensors; Dataset.padded_batch fills elements up to one shape"
    ),
    "take_while": (
        "write Dataset.filter, or end a generator function and pass it to Dataset.from_generator"
    ),
    "unique": "call np.unique before Dataset.from_tensor_slices",
}
_MODULE = {
    "FixedLengthRecordDataset": (
        "map the file with np.memmap, and pass that to Dataset.from_tensor_slices"
    ),
    "TFRecordDataset": (
        "protocol buffers need TensorFlow; write arrays with np.save once, and pass "
        'np.load(..., mmap_mode="r") to Dataset.from_tensor_slices'
    ),
    "TextLineDataset": (
        "pass a generator function, such as lambda: open(path), to Dataset.from_generator"
    ),
    "experimental": "its tf.data.experimental counterparts are in hpcstrat.data itself",
}


def missing_in_module(name: str) -> AttributeError:
    """The error for a name that `hpcstrat.data` does not have."""
    if name in _MODULE:
        return AttributeError(f"hpcstrat.data.{name} does not exist: {_MODULE[name]}")
    return AttributeError(f"module 'hpcstrat.data' has no attribute {name!r}")


def missing_in_dataset(name: str, owner: str) -> AttributeError:
    """The error for a name that `Dataset`, or an instance of it, does not have."""
    if name in _METHODS:
        return AttributeError(f"Dataset.{name} does not exist: {_METHODS[name]}")
    return AttributeError(f"{owner} has no attribute {name!r}")


class NamesWhatIsMissing(abc.ABCMeta):
    """The metaclass of `Dataset`: also explains TensorFlow's static methods that are missing."""

    if not TYPE_CHECKING:  # hidden from type checkers: they report an unknown name by themselves

        def __getattr__(cls, name: str) -> Any:
            raise missing_in_dataset(name, f"type object {cls.__name__!r}")
