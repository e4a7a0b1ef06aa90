"""What a file and a program's objects must have in common, so that the file can be restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcstrat._core.call_name import current_call
from hpcstrat._variable.variable import Variable
from hpcstrat.checkpoint import _on_read
from hpcstrat.checkpoint._names import CheckpointObjects, entry_of, slot_name
from hpcstrat.checkpoint._safetensors import Entry
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
        return _on_read.problem_of(name, objects.on_read[name], entry)
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
