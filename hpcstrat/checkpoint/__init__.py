"""Checkpoints: files that a kill cannot damage, and a last checkpoint before a preemption."""

from hpcstrat.checkpoint._checkpoint import Checkpoint as Checkpoint
from hpcstrat.checkpoint._manager import CheckpointManager as CheckpointManager
from hpcstrat.checkpoint._restoring import Restored as Restored

__all__ = ["Checkpoint", "CheckpointManager", "Restored"]
