"""Checkpoints: what a program has learnt, in a file that no kill damages; and a last one before a job is stopped."""

from hpcstrat.checkpoint._checkpoint import Checkpoint as Checkpoint
from hpcstrat.checkpoint._checkpoint import Restored as Restored
from hpcstrat.checkpoint._preemption import PreemptionHandler as PreemptionHandler

__all__ = ["Checkpoint", "PreemptionHandler", "Restored"]
