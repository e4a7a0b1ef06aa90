"""Checkpoints: files that survive a kill at any moment, and a last one before a job is preempted."""

from hpcstrat.checkpoint._checkpoint import Checkpoint as Checkpoint
from hpcstrat.checkpoint._checkpoint import Restored as Restored
from hpcstrat.checkpoint._preemption import PreemptionHandler as PreemptionHandler

__all__ = ["Checkpoint", "PreemptionHandler", "Restored"]
