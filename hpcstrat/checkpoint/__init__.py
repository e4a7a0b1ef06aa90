"""Checkpoints: files that a kill cannot damage, and a last checkpoint before a preemption."""

from typing import TYPE_CHECKING, Any

from hpcstrat._core.public_names import missing_in_module as _missing_in_module
from hpcstrat._core.public_names import set_module as _set_module
from hpcstrat.checkpoint._checkpoint import Checkpoint as Checkpoint
from hpcstrat.checkpoint._compatibility import Restored as Restored
from hpcstrat.checkpoint._manager import CheckpointManager as CheckpointManager
from hpcstrat.checkpoint._preemption import PreemptionHandler as PreemptionHandler

__all__ = ["Checkpoint", "CheckpointManager", "PreemptionHandler", "Restored"]

_set_module(globals())

if not TYPE_CHECKING:  # hidden from type checkers: they report an unknown name by themselves

    def __getattr__(name: str) -> Any:
        raise _missing_in_module(__name__, name)
