"""What a rank finds on its host: versions, launcher, cores, GPUs, memory."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from typing import Any, TypedDict

import numpy as np

import hpcstrat
from hpcstrat._core import gpu
from hpcstrat._process import driver, launchers, mpi, settings
from hpcstrat._tools.launch import mpiexec
from hpcstrat._update import compiled
from hpcstrat.optimizers import SGD


class RankInventory(TypedDict):
    """One rank's inventory.

    Attributes:
        rank: its index, according to the launcher.
        host: the name of its host.
        versions: the installed versions by name; `"not installed"` for what is missing.
        cores: the cores that it may run on.
        host_cores: the number of its host's cores.
        gpus: the names of the GPUs that it sees, in CUDA's order.
        hidden_gpus: whether the host has GPUs and this process sees none.
        driver_error: why NVIDIA's driver does not start; empty if it does, or without a driver.
        gpu_error: why CuPy does not compute on this rank's GPU; empty if it does, or if there is no
            GPU or no CuPy.
        shared_memory: free MiB in /dev/shm; `None` without it.
        unknown: environment variables that look like the library's but are not.
        updates: how it updates large variables in host memory.
    """

    rank: int
    host: str
    versions: dict[str, str]
    cores: list[int]
    host_cores: int
    gpus: list[str]
    hidden_gpus: bool
    driver_error: str
    gpu_error: str
    shared_memory: int | None
    unknown: dict[str, str]
    updates: str


def own_inventory() -> RankInventory:
    """This process's inventory. Loads MPI to ask for its version, but starts no communication."""
    launcher = launchers.find()
    gpus, driver_error = _gpu_names()
    return {
        "rank": 0 if launcher is None else launcher.rank,
        "host": socket.gethostname(),
        "versions": _versions(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count() or 1,
        "gpus": gpus,
        "hidden_gpus": not gpus and not driver_error and bool(glob.glob("/dev/nvidia[0-9]*")),
        "driver_error": driver_error,
        "gpu_error": _gpu_error(0 if launcher is None else launcher.local_rank or 0)
        if gpus
        else "",
        "shared_memory": _measure_shared_memory(),
        "unknown": settings.unknown(),
        "updates": _updates(),
    }


def find_mpirun() -> tuple[str | None, str]:
    """The path of the `mpirun` that the shell would start, and its MPI; empty if unknown."""
    path = shutil.which("mpirun")
    if path is None:
        return None, ""
    vendor = mpiexec.vendor_of([path])
    return path, "" if vendor is None else vendor.name


def _versions() -> dict[str, str]:
    versions = {
        "Python": platform.python_version(),
        "hpcstrat": hpcstrat.__version__,
        **{
            name: _find_version(name.lower())
            for name in ("NumPy", "mpi4py", "optree", "threadpoolctl", "tqdm")
        },
        "MPI": _mpi_version(),
        "CuPy": "not installed",
    }
    if gpu.has_cupy():
        versions |= _gpu_versions()
    return versions


def _updates() -> str:
    try:
        if not settings.compiles():
            return "by NumPy: HPCSTRAT_COMPILE is 0"
        rule = SGD(1.0).update_rule(1.0, 1)
        assert rule.kernel is not None
        compiled.load(rule.kernel, rule, np.dtype(np.float32))
    except (OSError, ValueError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        return f"by NumPy: {error}"
    return f"compiled by {compiled.compiler()}"


def _find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _mpi_version() -> str:
    try:
        vendor, version = mpi.load().get_vendor()
    except (ImportError, RuntimeError) as error:
        return f"not usable: {str(error).splitlines()[0]}"
    return f"{vendor} {'.'.join(map(str, version))}"


def _gpu_versions() -> dict[str, str]:
    from hpcstrat._communicators.nccl_start import load_nccl, version_text

    cupy = gpu.load_cupy("info")
    versions = {"CuPy": str(cupy.__version__)}
    with contextlib.suppress(Exception):  # no driver
        runtime = cupy.cuda.runtime
        versions["CUDA"] = _cuda_version(runtime.runtimeGetVersion())
        versions["driver, up to CUDA"] = _cuda_version(runtime.driverGetVersion())
    nccl = load_nccl()
    versions["NCCL"] = version_text(nccl.get_version()) if nccl.available else "not found by CuPy"
    if paths := [line.split()[-1] for line in _maps() if "libnccl" in line]:
        versions["NCCL's path"] = paths[0]
    return versions


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _maps() -> list[str]:
    try:
        with open("/proc/self/maps") as maps:
            return list(maps)
    except OSError:
        return []


def _gpu_names() -> tuple[list[str], str]:
    try:
        visible = driver.visible_gpus()
    except driver.DriverError as error:
        return [], str(error)
    names = ["GPU"] * len(visible)
    if visible and gpu.has_cupy():
        # A driver that is too old for this CuPy is reported separately.
        with contextlib.suppress(Exception):
            runtime = gpu.load_cupy("info").cuda.runtime
            names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(len(visible))]
    return names, ""


def _gpu_error(local_rank: int) -> str:
    if not gpu.has_cupy():
        return ""
    try:
        cupy = gpu.load_cupy("info")
        cupy.cuda.Device(local_rank % len(driver.visible_gpus())).use()
        square = cupy.arange(4.0).reshape(2, 2)  # a kernel, which CuPy compiles for this GPU
        float((square @ square).sum())  # by cuBLAS
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _measure_shared_memory() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize // 2**20


def own_python() -> str:
    """The path of this Python."""
    return sys.executable


def describe_launcher() -> str:
    """What started this process."""
    launcher = launchers.find()
    if launcher is None:
        return "none: started by hand"
    return launcher.name + ("" if launcher.size is None else f", {launcher.size} ranks")


def as_any(inventory: RankInventory) -> dict[str, Any]:
    """The inventory as a plain dict, for JSON."""
    return dict(inventory)
