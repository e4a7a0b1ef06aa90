"""What is passed to `Strategy.run`: whether it is equal where it must be, and whether a replica got elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat import _failure, _gpu, _nest
from hpcstrat._arrays import host_copy, is_foreign
from hpcstrat._communicators.base import Communicator
from hpcstrat._errors import ReplicaMismatchError
from hpcstrat._values import DistributedValues, component_of
from hpcstrat._variables import Variable
from hpcstrat.data._checksum import of_array

_CALL = "Strategy.run"


def require_equal_arguments(communicator: Communicator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks that the arrays and numbers among arguments that are no distributed values are equal. Collective.

    Raises:
        ReplicaMismatchError: They are not.
    """
    names = [f"args[{i}]" for i in range(len(args))] + [f"kwargs[{name!r}]" for name in kwargs]
    with communicator.raise_together(_CALL):
        own = {name: list(_facts(value)) for name, value in zip(names, (*args, *kwargs.values()), strict=True)}
    everyones = communicator.all_gather_obj(_CALL, own)
    for name in dict.fromkeys(name for one in everyones for name in one):
        found = [one.get(name, "nothing") for one in everyones]
        if any(one != found[0] for one in found):
            seen = "; ".join(f"rank {rank} {one}" for rank, one in enumerate(found))
            raise ReplicaMismatchError(
                f"{_CALL}: {name} differs between ranks (HPCSTRAT_CHECK): {seen}. What is no distributed value must be "
                "equal on all ranks. Give what is random a seed, pass rank 0's to all by hs.broadcast_object, or, "
                "where each replica is to have its own, make it with "
                "Strategy.experimental_distribute_values_from_function or in the function"
            )


def explain_empty_part(error: BaseException, args: Any, kwargs: Any) -> None:
    """Adds a note to what leaves a replica function where a distributed value among its arguments is empty here."""
    leaves, _ = _nest.flatten((args, kwargs))
    parts = [component_of(leaf) for leaf in leaves if isinstance(leaf, DistributedValues)]
    if isinstance(error, Exception) and any(np.shape(part)[:1] == (0,) for part in parts if hasattr(part, "shape")):
        _failure.add_note(
            error,
            f"{_CALL}: this replica's part of the batch has no elements: the batch had too few for all replicas. Leave "
            "it out by Dataset.batch(..., drop_remainder=True), split batches evenly by "
            "InputOptions(even_batches=True), or write the function so that it takes arrays of first dimension 0",
        )


def _facts(nest: Any) -> Iterator[str]:
    """A description of each array and number in a nest, equal where they are."""
    for leaf in _nest.flatten(nest)[0]:
        if isinstance(leaf, (bool, int, float, complex)):
            yield repr(leaf)
        elif isinstance(leaf, (np.ndarray, np.generic)) or _gpu.is_on_gpu(leaf) or _is_tensor(leaf):
            array = host_copy(_CALL, leaf)
            yield f"{array.dtype}{list(array.shape)} of checksum {of_array(array):08x}"


def _is_tensor(leaf: Any) -> bool:
    return is_foreign(leaf) and not isinstance(leaf, Variable)
