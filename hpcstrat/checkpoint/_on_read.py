"""ON_READ variables: a file has the values of all replicas, and any number of replicas restores it.

A new aggregation is added to `problem_of` and `own_share`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core import gpu
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._names import entry_of
from hpcstrat.checkpoint._safetensors import Entry


def all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return gpu.to_host(
            state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0]
        )


def problem_of(name: str, v: Variable, entry: Entry | None) -> str | None:
    """Why these replicas cannot restore an array of a file; `None` if they can."""
    own = entry_of(v)
    if (
        entry is None
        or (entry.dtype, entry.shape[1:]) != (own.dtype, own.shape)
        or not entry.shape[0]
    ):
        return f"{name} is {own} on each replica here and {entry} for all replicas in the file"
    replicas = state_of(v).group.communicator.size
    integer_mean = v.aggregation is VariableAggregation.MEAN and v.dtype.kind not in "fcV"
    if entry.shape[0] != replicas and (v.aggregation is VariableAggregation.NONE or integer_mean):
        return (
            f"{name} has the values of {entry.shape[0]} replicas in the file, which its "
            f"aggregation, {v.aggregation.name} of {v.dtype.name}, cannot convert to {replicas}"
        )
    return None


@np.errstate(all="ignore")
def own_share(v: Variable, values: np.ndarray[Any, Any]) -> Any:
    """This replica's share of values that n replicas have saved as `(n, ...)`.

    With n replicas again, each gets its own value. With another number, reading the variable must
    still return the same: for a SUM variable the first replica gets the sum and the others zeros,
    because dividing the sum would round; for a MEAN variable all get the mean; otherwise all get
    the first value.
    """
    communicator = state_of(v).group.communicator
    if len(values) == communicator.size:
        return values[communicator.rank]
    if v.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return values[0]
    add = functools.partial(np.add, dtype=accumulator(v.dtype))  # as a read of the variable sums
    total = functools.reduce(add, values)
    if v.aggregation is VariableAggregation.MEAN:
        return (total / len(values)).astype(v.dtype)
    if v.aggregation is VariableAggregation.SUM:
        return total.astype(v.dtype) if communicator.rank == 0 else np.zeros(v.shape, v.dtype)
    raise NotImplementedError(
        f"Checkpoint: values of aggregation {v.aggregation.name} for another number of replicas"
    )
