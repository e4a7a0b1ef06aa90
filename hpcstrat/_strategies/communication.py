"""TensorFlow's choices of how replicas communicate: strategies accept them, and choose themselves.

The host's memory, MPI or NCCL carries a reduction, depending on where the arrays and the ranks are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, final

from hpcstrat._core.types import parse_choice


class CommunicationImplementation(enum.Enum):
    """The choices of `CommunicationOptions.implementation`; none changes anything."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
class CommunicationOptions:
    """TensorFlow's options of reductions, which are accepted and change nothing.

    Args:
        bytes_per_pack: ignored: the gradients of a step are one message.
        timeout_seconds: ignored: `HPCSTRAT_TIMEOUT_SECONDS` ends a job that hangs.
        implementation: ignored: arrays on GPUs go through NCCL, others through shared memory and
            MPI.

    Raises:
        ValueError: `bytes_per_pack` is negative, or `implementation` is not one of its choices.
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        call = "CommunicationOptions"
        _check_count(call, "bytes_per_pack", bytes_per_pack)
        self.bytes_per_pack: int = bytes_per_pack
        self.timeout_seconds: float | None = timeout_seconds
        self.implementation: CommunicationImplementation = parse_choice(
            CommunicationImplementation, implementation, call, "implementation"
        )


class CrossDeviceOps:
    """How TensorFlow reduces values; `MirroredStrategy` accepts it, and chooses by itself.

    A sum over N replicas is in rank order on CPUs, and in NCCL's order on GPUs.
    """


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`.

    Args:
        reduce_to_device: ignored.
        accumulation_fn: must be `None`: values are added.

    Raises:
        NotImplementedError: `accumulation_fn` is given.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[..., Any] | None = None,
    ) -> None:
        del reduce_to_device
        if accumulation_fn is not None:
            raise NotImplementedError(
                f"ReductionToOneDevice: accumulation_fn is {accumulation_fn!r}, but values are "
                "added; gather them with Strategy.gather, and combine them yourself"
            )


@final
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`.

    Args:
        num_packs: ignored: the gradients of a step are one message.

    Raises:
        ValueError: `num_packs` is negative.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_count(type(self).__name__, "num_packs", num_packs)


@final
class NcclAllReduce(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`. Arrays on GPUs go through NCCL in any case.

    Args:
        num_packs: ignored: the gradients of a step are one message.

    Raises:
        ValueError: `num_packs` is negative.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_count(type(self).__name__, "num_packs", num_packs)


def _check_count(call: str, argument: str, number: int) -> None:
    if number < 0:
        raise ValueError(f"{call}: {argument} is {number}; it must be at least 0")


def check_choice(call: str, argument: str, given: object, allowed: type) -> None:
    """Refuses an argument that is neither `None` nor a choice of how to communicate.

    Raises:
        TypeError: it is something else.
    """
    if given is not None and not isinstance(given, allowed):
        raise TypeError(
            f"{call}: {argument} is {given!r}; it must be a hpcstrat.{allowed.__name__}, or None"
        )
