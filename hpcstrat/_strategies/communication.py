"""TensorFlow's choices of how replicas communicate: strategies accept them, and choose themselves.

The host's memory, MPI or NCCL carries a reduction, depending on where the arrays and the ranks are.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, final

from hpcstrat._core.types import parse_choice


class CommunicationImplementation(enum.Enum):
    """The choices of `CommunicationOptions.implementation`; none changes anything."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """TensorFlow's options of reductions, which are accepted and change nothing.

    Attributes:
        bytes_per_pack: ignored: the gradients of a step are one message.
        timeout_seconds: ignored: `HPCSTRAT_TIMEOUT_SECONDS` ends a job that hangs.
        implementation: ignored: arrays on GPUs go through NCCL, others through shared memory and
            MPI.

    Raises:
        ValueError: `bytes_per_pack` is negative, or `implementation` is not one of its choices.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        _check_count("CommunicationOptions", "bytes_per_pack", self.bytes_per_pack)
        chosen = parse_choice(
            CommunicationImplementation,
            self.implementation,
            "CommunicationOptions",
            "implementation",
        )
        object.__setattr__(self, "implementation", chosen)


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
