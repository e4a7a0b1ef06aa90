"""What a file and a program's objects must have in common, so that the file can be restored.

Of ON_READ variables a file has the values of all replicas, and any number of replicas restores it.
A new aggregation is added to `_on_read_problem` and `own_share`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._communicators.reduction import accumulator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._variable.options import VariableAggregation
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.checkpoint._format import Entry
from hpcstrat.checkpoint._names import CheckpointObjects, entry_of, slot_name
from hpcstrat.data._resuming import Position
from hpcstrat.optimizers._optimizer import Optimizer

_MOST_NAMES = 8  # in a message
_MOST_PROBLEMS = 12


class Restored(NamedTuple):
    """What `Checkpoint.restore` did not restore; both are empty unless `partial=True`.

    Attributes:
        missing: the names of objects that are not in the file and so are unchanged.
        left_over: the names in the file that are not among the objects.
    """

    missing: tuple[str, ...]
    left_over: tuple[str, ...]


def require_compatible(
    path: str,
    objects: CheckpointObjects,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, Any],
    partial: bool,
) -> tuple[frozenset[str], Restored]:
    """Compares the objects with what a file holds.

    Args:
        path: the file's name, for the message.
        objects: the program's objects.
        entries: the file's arrays.
        metadata: what the file has in addition to them.
        partial: whether names may be missing or left over.

    Returns:
        The names of arrays and objects that both have, and the other names.

    Raises:
        ValueError: they do not fit.
    """
    arrays = _possible_slots(objects) | objects.variables
    in_file, known = entries.keys() | metadata.keys(), objects.kinds.keys() | arrays.keys()
    common = frozenset(in_file & known)
    missing = tuple(sorted(objects.kinds.keys() - in_file))
    left_over = tuple(sorted(in_file - known))
    try:
        found = [
            _problem(name, objects, arrays, entries.get(name), metadata.get(name, {}))
            for name in sorted(common)
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{current_call()}: the description of the objects in {path} makes no sense: "
            f"{error!r}; pass another file"
        ) from error
    problems = [problem for problem in found if problem is not None]
    hint = "" if problems else "\nrestore(path, partial=True) restores what both have."
    if missing and not partial:
        problems.append(f"missing in the file: {_list_names(missing)}")
    if left_over and not partial:
        problems.append(f"left over in the file: {_list_names(left_over)}")
    if problems:
        raise ValueError(
            f"{current_call()}: {path} does not fit the objects. Nothing was changed; pass objects "
            f"like those that were saved.{_list_problems(problems)}{hint}"
        )
    return common, Restored(missing, left_over)


def position_of(metadata: Mapping[str, Any]) -> Position:
    """The saved position.

    Raises:
        ValueError: it has a number that is not a count.
    """
    shuffles = tuple([(_count(seed), _count(number)) for seed, number in metadata["shuffles"]])
    taken = None if metadata["taken"] is None else _count(metadata["taken"])
    return Position(str(metadata["pipeline"]), shuffles, taken)


def all_values(v: Variable) -> np.ndarray[Any, Any]:
    """All replicas' values, of shape `(replicas, ...)`, in host memory. Collective."""
    state = state_of(v)
    with state.group.on_stream():
        return gpu.to_host(
            state.group.communicator.all_gather([state.block.view[np.newaxis]], 0)[0]
        )


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


def _possible_slots(objects: CheckpointObjects) -> dict[str, Variable]:
    """The variable of each slot that could exist: before the first step usually none does."""
    return {
        slot_name(name, slot, of): v
        for name, optimizer in objects.optimizers.items()
        for slot in optimizer.all_slots
        for of, v in objects.variables.items()
    }


def _problem(
    name: str,
    objects: CheckpointObjects,
    arrays: Mapping[str, Variable],
    entry: Entry | None,
    saved: Mapping[str, Any],
) -> str | None:
    """How a file's array `entry` and metadata `saved` differ from the object with this name."""
    kind, saved_kind = objects.kinds.get(name), saved.get("kind")
    if kind != saved_kind:
        return f"{name} is {_kind_text(kind)} here and {_kind_text(saved_kind)} in the file"
    if name in objects.optimizers:
        return _optimizer_problem(name, objects.optimizers[name], saved)
    if name in objects.positions:
        problem = objects.positions[name]._incompatibility(position_of(saved))
        return None if problem is None else f"{name}: {problem}"
    if name in objects.on_read:
        return _on_read_problem(name, objects.on_read[name], entry)
    own = entry_of(arrays[name])
    return None if entry == own else f"{name} is {own} here and {entry} in the file"


def _optimizer_problem(name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> str | None:
    slots, saved_slots = sorted(optimizer.all_slots), sorted(saved["slots"])
    _count(saved["iterations"])
    if slots == saved_slots:
        return None
    return (
        f"{name} has the slots {slots} here and {saved_slots} in the file; make the optimizer with "
        "the same arguments"
    )


def _on_read_problem(name: str, v: Variable, entry: Entry | None) -> str | None:
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


def _count(number: Any) -> int:
    """A count from a file, after a check: any program may have written the file."""
    if type(number) is not int or not 0 <= number < 2**64:
        raise ValueError(f"{number!r} is not a count")
    return number


def _kind_text(kind: str | None) -> str:
    return "a variable" if kind is None else kind


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _list_problems(problems: Sequence[str]) -> str:
    """A line for each problem."""
    lines = [f"\n  {problem}" for problem in problems[:_MOST_PROBLEMS]]
    if len(problems) > _MOST_PROBLEMS:
        lines.append(f"\n  and {len(problems) - _MOST_PROBLEMS} more")
    return "".join(lines)
