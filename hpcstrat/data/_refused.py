"""Names that only `tf.data` has, each with the reason and with what to write instead."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

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
