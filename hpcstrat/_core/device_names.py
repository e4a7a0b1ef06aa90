"""Device strings, and the device that each rank computes on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call

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
    """The device that `text` names, such as `"GPU:1"`; ValueError if it names none."""
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
        TypeError: `compute_devices` is no list.
        ValueError: it does not have one entry per rank, or an entry is no device, or a second CPU.
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
    devices = [*map(parse, compute_devices)]
    if other := [device for device in devices if device.kind == "CPU" and device != CPU]:
        raise ValueError(
            f"{current_call()}: there is no {other[0].short}; use 'CPU:0', which is all cores of "
            "the host"
        )
    return devices
