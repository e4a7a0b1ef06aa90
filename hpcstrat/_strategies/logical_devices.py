"""The methods of a strategy for replicas of several devices. Here a replica has one, and tensors stay as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_DEVICES = 1  # logical devices of a replica


class LogicalDeviceMethods:
    """A part of `Strategy`."""

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """`tensor`, which is on the replica's one logical device, number 0, already.

        Raises:
            ValueError: another number.
        """
        if not 0 <= logical_device_id < _DEVICES:
            raise ValueError(
                f"Strategy.experimental_assign_to_logical_device: there is no logical device {logical_device_id}; "
                "a replica has one, so pass 0"
            )
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """`tensor`, in one part for the replica's one logical device.

        Args:
            tensor: an array.
            partition_dimensions: for each dimension the number of parts along it; all of them are 1.

        Raises:
            ValueError: another number of entries than the tensor has dimensions, a product that is not the number of
                logical devices, or one that does not divide the shape.
        """
        call = "Strategy.experimental_split_to_logical_devices"
        shape = np.shape(tensor)
        parts = list(partition_dimensions)
        if len(parts) != len(shape):
            raise ValueError(
                f"{call}: partition_dimensions is {parts}; it must have {len(shape)} entries, as the shape {shape} has"
            )
        if math.prod(parts) != _DEVICES:
            raise ValueError(
                f"{call}: partition_dimensions is {parts}, which makes {math.prod(parts)} parts; for the replica's one "
                "logical device all must be 1"
            )
        if any(part < 1 or size % part for size, part in zip(shape, parts, strict=True)):
            raise ValueError(f"{call}: partition_dimensions is {parts}; it must divide the shape {shape}")
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """`tensor`, which is on every logical device of the replica already."""
        return tensor
