"""Device strings, and which rank computes where."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

_FORMS = re.compile(
    r"(?:/job:localhost)?(?:/replica:0)?(?:/task:0)?(?:/device:|/)?(?P<kind>CPU|GPU):(?P<index>\d+)", re.IGNORECASE
)


class Device(NamedTuple):
    """A place to compute.

    Attributes:
        kind: `"CPU"` or `"GPU"`.
        ordinal: which of the host's; there is one CPU.
    """

    kind: str
    ordinal: int

    def __str__(self) -> str:
        """TensorFlow's long form, the canonical one."""
        return f"/job:localhost/replica:0/task:0/device:{self.kind}:{self.ordinal}"

    @property
    def array_module(self) -> ModuleType:
        """`numpy`, or `cupy` for a GPU."""
        if self.kind == "CPU":
            return np
        return _cupy(str(self))


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


def place(compute_devices: Sequence[str] | None, size: int, call: str) -> list[Device]:
    """The device of each of `size` ranks of one host, in rank order. `None` places them on the CPU.

    Raises:
        TypeError: `compute_devices` is a single string.
        ValueError: it has another length, or names something that is no device.
    """
    if compute_devices is None:
        return [CPU] * size
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


def check_present(device: Device, call: str) -> None:
    """Checks that this process can compute there.

    Raises:
        ValueError: there is no such CPU.
        RuntimeError: there is no such GPU, or no CuPy to use it with.
        NotImplementedError: there is one; this version computes on CPUs.
    """
    if device.kind == "CPU":
        if device.ordinal > 0:
            raise ValueError(f"{call}: there is no CPU:{device.ordinal}; all cores of a host are 'CPU:0'")
        return
    count = _cupy(str(device)).cuda.runtime.getDeviceCount()
    if device.ordinal >= count:
        raise RuntimeError(f"{call}: there is no GPU:{device.ordinal}; this process sees {count} GPUs")
    raise NotImplementedError(f"{call}: GPU:{device.ordinal} is there, but this version computes on CPUs; name 'CPU:0'")


def _cupy(device: str) -> Any:
    if importlib.util.find_spec("cupy") is None:
        raise RuntimeError(
            f"{device} needs CuPy, which is not installed: `pip install 'hpcstrat[cuda12]'` or `'hpcstrat[cuda13]'`"
        )
    import cupy  # pyright: ignore[reportMissingImports]

    return cupy
