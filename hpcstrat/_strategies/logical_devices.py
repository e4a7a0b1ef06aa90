"""Checks of the methods for replicas of several devices. Here a replica has one, so a tensor comes back as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_DEVICES = 1  # logical devices of a replica


def assign(tensor: Any, logical_device_id: int) -> Any:
    """See `Strategy.experimental_assign_to_logical_device`."""
    if not 0 <= logical_device_id < _DEVICES:
        raise ValueError(
            f"Strategy.experimental_assign_to_logical_device: there is no logical device {logical_device_id}; "
            "a replica has one, number 0"
        )
    return tensor


def split(tensor: Any, partition_dimensions: Sequence[int]) -> Any:
    """See `Strategy.experimental_split_to_logical_devices`."""
    call = "Strategy.experimental_split_to_logical_devices"
    shape = np.shape(tensor)
    parts = list(partition_dimensions)
    if len(parts) != len(shape):
        raise ValueError(f"{call}: {parts} has {len(parts)} entries, and a tensor of shape {shape} needs {len(shape)}")
    if math.prod(parts) != _DEVICES:
        raise ValueError(f"{call}: {parts} makes {math.prod(parts)} parts, and a replica has {_DEVICES} logical device")
    if any(part < 1 or size % part for size, part in zip(shape, parts, strict=True)):
        raise ValueError(f"{call}: {parts} does not divide the shape {shape}")
    return tensor
