"""Device strings, and which rank computes where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hpcstrat import _gpu

_FORMS = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?(?:/device:|/)?(?P<kind>CPU|GPU):(?P<index>\d+)", re.IGNORECASE
)


class Device(NamedTuple):
    """A place to compute.

    Attributes:
        kind: `"CPU"` or `"GPU"`.
        ordinal: which of the host's; there is one CPU.
        worker: the index of its host, where a strategy has several workers; else `None`.
    """

    kind: str
    ordinal: int
    worker: int | None = None

    def __str__(self) -> str:
        """TensorFlow's long form, the canonical one."""
        task = "localhost/replica:0/task:0" if self.worker is None else f"worker/replica:0/task:{self.worker}"
        return f"/job:{task}/device:{self.kind}:{self.ordinal}"

    @property
    def short(self) -> str:
        """The kind and the number, of which there may be one on each host."""
        return f"{self.kind}:{self.ordinal}"

    @property
    def xp(self) -> ModuleType:
        """`numpy`, or `cupy` for a GPU."""
        return np if self.kind == "CPU" else _gpu.load_cupy(str(self))


CPU = Device("CPU", 0)


def parse(text: Any, call: str) -> Device:
    """The device that `text` names, in any of TensorFlow's forms: `"GPU:1"`, `"/gpu:1"`, `"/device:GPU:1"`, the long.

    Raises:
        ValueError: it names none. `call` names the method in the message.
    """
    match = _FORMS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{call}: {text!r} is not a device; write 'CPU:0', 'GPU:1', '/device:GPU:1' or "
            "'/job:localhost/replica:0/task:0/device:GPU:1'"
        )
    return Device(match["kind"].upper(), int(match["index"]))


def named(compute_devices: Sequence[str] | None, size: int, call: str) -> list[Device] | None:
    """The devices that the user named for `size` ranks, in rank order; `None` for none.

    Raises:
        TypeError: `compute_devices` is a single string.
        ValueError: it has another length, or names something that is no device.
    """
    if compute_devices is None:
        return None
    if isinstance(compute_devices, str):
        raise TypeError(
            f"{call}: compute_devices is the string {compute_devices!r}; pass a list with one device a rank, "
            f"such as [{compute_devices!r}]"
        )
    if len(compute_devices) != size:
        raise ValueError(
            f"{call}: {len(compute_devices)} compute devices were named and {size} ranks run; start the program with "
            f"`mpirun -n {len(compute_devices)}`, or name one device a rank"
        )
    return [parse(text, call) for text in compute_devices]


def place(devices: list[Device] | None, seen: Sequence[Sequence[str]], shares: bool, call: str) -> list[Device]:
    """The device of each rank of one host, in rank order: what was named, or GPU i for rank i, or the CPU.

    Args:
        devices: those that the user named.
        seen: for each rank the unique ids of the GPUs that its process sees.
        shares: whether several ranks may compute on one GPU.
        call: the user's name of the method.

    Raises:
        RuntimeError: more ranks than GPUs.
    """
    if devices is not None:
        return devices
    if not any(seen):
        return [CPU] * len(seen)
    if _one_each(seen):
        return [Device("GPU", rank) for rank in range(len(seen))]
    placed = []
    for rank, gpus in enumerate(seen):
        if rank >= len(gpus) > 0 and not shares:
            raise RuntimeError(
                f"{call}: {len(seen)} ranks run on a host with {len(gpus)} GPU{'s' * (len(gpus) > 1)}, one for each "
                f"rank; start {len(gpus)} rank{'s' * (len(gpus) > 1)}, or let ranks share a GPU: "
                f"`launch/share-gpu mpirun -n {len(seen)} ...`"
            )
        placed.append(Device("GPU", rank % len(gpus)) if gpus else CPU)
    return placed


def place_on_hosts(hosts: Sequence[int], seen: Sequence[Sequence[str]], shares: bool, call: str) -> list[Device]:
    """`place` for ranks on several hosts, each by its number on its own.

    Args:
        hosts: for each rank the index of its host.
        seen: see `place`.
        shares: see `place`.
        call: the user's name of the method.
    """
    placed: dict[int, Device] = {}
    for host in range(max(hosts) + 1):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        devices = place(None, [seen[rank] for rank in ranks], shares, call)
        placed |= {rank: device._replace(worker=host) for rank, device in zip(ranks, devices, strict=True)}
    return [placed[rank] for rank in range(len(hosts))]


def ordinal(device: Device, rank: int, seen: Sequence[Sequence[str]], call: str) -> int | None:
    """CUDA's number of a rank's device in its process; `None` for the CPU.

    A process to which its launcher shows another GPU than the other ranks (`CUDA_VISIBLE_DEVICES` a rank) knows it as
    number 0, whatever its name here.

    Args:
        device: the rank's.
        rank: which rank.
        seen: for each rank the unique ids of the GPUs that its process sees.
        call: the user's name of the method.

    Raises:
        ValueError: there is no such CPU.
        RuntimeError: there is no such GPU, or no CuPy to use it with.
    """
    if device.kind == "CPU":
        if device.ordinal > 0:
            raise ValueError(f"{call}: there is no CPU:{device.ordinal}; use 'CPU:0', which is all cores of a host")
        return None
    _gpu.load_cupy(f"{call}: {device}")
    if device.ordinal < len(seen[rank]):
        return device.ordinal
    if _one_each(seen) and device.ordinal == rank:
        return 0
    count = len(seen[rank])
    raise RuntimeError(
        f"{call}: there is no GPU:{device.ordinal}; this process sees {count or 'no'} GPU{'s' * (count != 1)}. "
        "Name another: CUDA_VISIBLE_DEVICES says which it sees, and `nvidia-smi -L` which the host has"
    )


def check_shared(gpus: Sequence[str], shares: bool, call: str) -> None:
    """Checks that ranks share a GPU only where they may. `gpus`: the unique id of each rank's, or nothing.

    Raises:
        RuntimeError: they do, and may not.
    """
    for gpu in dict.fromkeys(filter(None, gpus)):
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1 and not shares:
            raise RuntimeError(
                f"{call}: ranks {', '.join(map(str, ranks))} would compute on one GPU, {len(set(filter(None, gpus)))} "
                f"for {len(gpus)} ranks; name a GPU for each or start fewer ranks, or let ranks share a GPU: "
                f"`launch/share-gpu mpirun -n {len(gpus)} ...`"
            )


def _one_each(seen: Sequence[Sequence[str]]) -> bool:
    """Whether each process sees one GPU, and each another one."""
    return all(len(gpus) == 1 for gpus in seen) and len({gpus[0] for gpus in seen}) == len(seen)
