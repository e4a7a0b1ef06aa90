"""NVIDIA's driver, without CUDA or CuPy: the GPUs that this process may use, or why not known."""

from __future__ import annotations

import ctypes
import functools
import os

# CUDA's stub of the library, which is not a driver, and a driver that finds no device.
_NO_GPU = {34, 100}
_MPS = (
    "look at the log of the MPS daemon, in CUDA_MPS_LOG_DIRECTORY, and restart it: "
    "`echo quit | nvidia-cuda-mps-control`, or let `hpcstrat run --share-gpu` start one"
)
_REMEDIES = {
    2: "end the processes that fill its memory: nvidia-smi shows them",
    802: "on hosts with NVSwitch, start the fabric manager: `systemctl start nvidia-fabricmanager`",
    803: "libcuda and the kernel's module have different versions: reboot after an update of the "
    "driver, and give containers the host's libcuda",
    804: "take the folder of CUDA's compatibility package (cuda/compat) out of LD_LIBRARY_PATH",
    **dict.fromkeys((805, 806, 807, 808, 809), _MPS),
}
_ANY_REMEDY = "see what nvidia-smi and the kernel's log (`dmesg`) say"


class DriverError(RuntimeError):
    """There is a driver, and it does not start."""


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """The unique id of each GPU that this process may use, in CUDA's order; none without a driver.

    It opens no context on any GPU.

    Raises:
        DriverError: there is a driver, and it does not start. It may do so later: nothing is kept.
    """
    # A user who hides all GPUs wants none, whatever state they are in.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    status = driver.cuInit(0)
    if status in _NO_GPU:
        return ()
    _check(driver, "cuInit", status)
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    # The second version gives the parts of a divided GPU (MIG) different ids.
    ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    ids = []
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        _check(driver, "cuDeviceGetUuid", ask(ctypes.byref(uuid), device))
        ids.append(bytes(uuid).hex())
    return tuple(ids)


def _check(driver: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        raise DriverError(
            f"NVIDIA's driver does not start: {call} fails with {_name(driver, status)} "
            f"({status}); {_REMEDIES.get(status, _ANY_REMEDY)}"
        )


def _name(driver: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(status, ctypes.byref(name))
    return "an error without a name" if name.value is None else name.value.decode()
