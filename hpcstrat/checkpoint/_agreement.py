"""What all ranks agree on before they save or restore: the objects, and which rank has them."""

from __future__ import annotations

from collections.abc import Mapping

from hpcstrat._calls.records import ManyValues, new_signature
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn, default_group
from hpcstrat._variable.variable import state_of
from hpcstrat.checkpoint._names import CheckpointObjects
from hpcstrat.checkpoint._safetensors import Entry


def require_cross_replica(objects: CheckpointObjects) -> None:
    """Raises RuntimeError unless called outside replica functions and other scopes."""
    context = contexts.context()
    if isinstance(context, (contexts.InReplica, contexts.InUpdate)):
        raise RuntimeError(
            f"{current_call()} was called inside a replica function or an update; call it at "
            "the top level of the script, outside Strategy.run"
        )
    for group in _groups(objects):
        # Variables that were made outside every scope may be saved anywhere.
        if group is not default_group():
            contexts.require_cross_replica(group)


def parameter_rank(objects: CheckpointObjects) -> int:
    """The rank that makes the file, because it has all optimizers' slots.

    Raises:
        ValueError: the slots are on different ranks.
    """
    roots = {group.root for group in _groups(objects) if group.updates_on is UpdatesOn.ROOT}
    if len(roots) > 1:
        raise ValueError(
            f"{current_call()}: the objects belong to strategies whose variables live on the "
            f"ranks {sorted(roots)}, but one rank writes the file; make a checkpoint for each "
            "strategy"
        )
    return roots.pop() if roots else 0


def agree(objects: CheckpointObjects, entries: Mapping[str, Entry], *where: str) -> int:
    """Checks that all ranks have the same objects and arrays; returns the parameter rank.

    Collective.

    Args:
        objects: the objects.
        entries: their arrays.
        where: file and options, which must be equal on all ranks too.

    Raises:
        ReplicaMismatchError: the ranks differ.
        ValueError: as `parameter_rank`.
    """
    root = parameter_rank(objects)
    arrays = [
        f"{name} ({entry.dtype} of shape {entry.shape})" for name, entry in sorted(entries.items())
    ]
    others = [name for name in objects.kinds if name not in entries]
    names = ManyValues((*arrays, *others))
    # `new_signature`, because `signature_of` would keep the names of all arrays for a rare call.
    # All ranks of the program, not of a strategy: the objects may belong to several strategies.
    connect().exchange(new_signature(current_call(), *where, f"by rank {root}", names))
    return root


def _groups(objects: CheckpointObjects) -> list[ReplicaGroup]:
    """The groups of replicas that the variables belong to, in the same order on all ranks."""
    variables = [*objects.variables.values(), *objects.on_read.values()]
    return list(dict.fromkeys(state_of(v).group for v in variables))
