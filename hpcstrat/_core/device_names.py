"""Device strings, and the device that each rank computes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call, ranks_in_words

# All of TensorFlow's spellings. The only job and task is this process's own.
_FORMS = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?(?:/device:|/)?"
    r"(?P<kind>CPU|GPU):(?P<index>\d+)",
    re.IGNORECASE,
)


class Device(NamedTuple):
    """A device that a replica computes on.

    Attributes:
        kind: `"CPU"` or `"GPU"`.
        ordinal: its number on the host; there is one CPU.
        worker: the index of its host if a strategy has several workers, else `None`.
    """

    kind: str
    ordinal: int
    worker: int | None = None

    def __str__(self) -> str:
        """TensorFlow's long form, which is canonical."""
        task = (
            "localhost/replica:0/task:0"
            if self.worker is None
            else f"worker/replica:0/task:{self.worker}"
        )
        return f"/job:{task}/device:{self.kind}:{self.ordinal}"

    @property
    def short(self) -> str:
        """The kind and the number, which each host may have."""
        return f"{self.kind}:{self.ordinal}"

    @property
    def xp(self) -> ModuleType:
        """`numpy`, or `cupy` for a GPU."""
        return np if self.kind == "CPU" else gpu.load_cupy(str(self))


CPU = Device("CPU", 0)


def parse(text: Any) -> Device:
    """The device that `text` names, in any of TensorFlow's forms.

    These are `"GPU:1"`, `"/gpu:1"`, `"/device:GPU:1"` and the long form.

    Raises:
        ValueError: it names none.
    """
    match = _FORMS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(
            f"{current_call()}: {text!r} is not a device; write 'CPU:0', 'GPU:1', '/device:GPU:1' "
            "or '/job:localhost/replica:0/task:0/device:GPU:1'"
        )
    return Device(match["kind"].upper(), int(match["index"]))


def parse_all(compute_devices: Sequence[str] | None, size: int) -> list[Device] | None:
    """The devices that the user named for `size` ranks, in rank order; `None` if none.

    Raises:
        TypeError: `compute_devices` is a single string, or no sequence.
        ValueError: it does not have one entry per rank, or an entry is not a device.
    """
    if compute_devices is None:
        return None
    if not isinstance(compute_devices, Sequence):
        raise TypeError(
            f"{current_call()}: {compute_devices!r} is not a list of devices; there are as many "
            "replicas as ranks (`mpirun -n 4`), so leave it out, or name one device per rank"
        )
    # A string is a sequence of letters: each would be refused.
    if isinstance(compute_devices, str):
        raise TypeError(
            f"{current_call()}: the string {compute_devices!r} is not a list of devices; pass one "
            f"with one device per rank, such as [{compute_devices!r}]"
        )
    if len(compute_devices) != size:
        raise ValueError(
            f"{current_call()}: {len(compute_devices)} compute devices were named and {size} ranks "
            f"run; start the program with `mpirun -n {len(compute_devices)}`, or name one device "
            "per rank"
        )
    return [parse(text) for text in compute_devices]


def place(seen: Sequence[Sequence[str]], shares: bool) -> list[Device]:
    """The device of each rank of a host: GPU i for rank i, or the CPU.

    Args:
        seen: for each rank, the unique ids of the GPUs that its process sees.
        shares: whether several ranks may compute on one GPU.

    Raises:
        RuntimeError: more ranks than GPUs.
    """
    if not any(seen):
        return [CPU] * len(seen)
    # The launcher has shown each rank its own GPU, so there is nothing left to choose.
    if _each_sees_its_own(seen):
        return [Device("GPU", rank) for rank in range(len(seen))]
    placed = []
    for rank, gpus in enumerate(seen):
        if rank >= len(gpus) > 0 and not shares:
            raise RuntimeError(
                f"{current_call()}: {len(seen)} ranks run on a host with {len(gpus)} "
                f"GPU{'s' * (len(gpus) > 1)}, one for each rank; start {len(gpus)} "
                f"rank{'s' * (len(gpus) > 1)}, or let ranks share a GPU: `launch/share-gpu "
                f"mpirun -n {len(seen)} ...`"
            )
        # More ranks than GPUs, on request: they take turns.
        placed.append(Device("GPU", rank % len(gpus)) if gpus else CPU)
    return placed


def place_on_hosts(
    hosts: Sequence[int], seen: Sequence[Sequence[str]], shares: bool
) -> list[Device]:
    """`place` for ranks on several hosts, by each rank's index on its host.

    Args:
        hosts: for each rank, the index of its host.
        seen: see `place`.
        shares: see `place`.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    placed: dict[int, Device] = {}
    for host, ranks in ranks_of.items():
        devices = place([seen[rank] for rank in ranks], shares)
        placed |= {
            rank: device._replace(worker=host) for rank, device in zip(ranks, devices, strict=True)
        }
    return [placed[rank] for rank in range(len(hosts))]


def ordinal(device: Device, rank: int, seen: Sequence[Sequence[str]]) -> int | None:
    """CUDA's number of a rank's device in its process; `None` for the CPU.

    If the launcher shows each process a different GPU (`CUDA_VISIBLE_DEVICES` per rank), the
    process knows it as number 0, whatever its name here.

    Args:
        device: the rank's device.
        rank: the rank.
        seen: for each rank, the unique ids of the GPUs that its process sees.

    Raises:
        ValueError: there is no such CPU.
        RuntimeError: there is no such GPU, or no CuPy to use it with.
    """
    if device.kind == "CPU":
        if device.ordinal > 0:
            raise ValueError(
                f"{current_call()}: there is no CPU:{device.ordinal}; use 'CPU:0', which is all "
                "cores of the host"
            )
        return None
    # A requested device that cannot be used is an error: a fallback would only show as a slow
    # program.
    gpu.load_cupy(f"{current_call()}: {device}")
    if device.ordinal < len(seen[rank]):
        return device.ordinal
    if _each_sees_its_own(seen) and device.ordinal == rank:
        return 0
    count = len(seen[rank])
    raise RuntimeError(
        f"{current_call()}: there is no GPU:{device.ordinal}; this process sees {count or 'no'} "
        f"GPU{'s' * (count != 1)}. Name another: CUDA_VISIBLE_DEVICES says which it sees, and "
        "`nvidia-smi -L` says which the host has"
    )


def check_shared(gpus: Sequence[str], shares: bool) -> None:
    """Checks that ranks share a GPU only if they may.

    Args:
        gpus: the unique id of each rank's GPU, or an empty string.
        shares: whether they may.

    Raises:
        RuntimeError: they share one, and may not.
    """
    # By unique id, since two ranks may name one GPU differently. NCCL would hang, or fail late, if
    # ranks shared a GPU unprepared.
    for shared in dict.fromkeys(filter(None, gpus)):
        ranks = [rank for rank, other in enumerate(gpus) if other == shared]
        if len(ranks) > 1 and not shares:
            raise RuntimeError(
                f"{current_call()}: {ranks_in_words(ranks)} would compute on one GPU, "
                f"{len(set(filter(None, gpus)))} for {len(gpus)} ranks; name a GPU for each, start "
                f"fewer ranks, or let ranks share a GPU: `launch/share-gpu mpirun -n "
                f"{len(gpus)} ...`"
            )


def _each_sees_its_own(seen: Sequence[Sequence[str]]) -> bool:
    """Whether each process sees one GPU, and no two see the same."""
    return all(len(gpus) == 1 for gpus in seen) and len({gpus[0] for gpus in seen}) == len(seen)
