"""`python -m hpcstrat info`: what is installed and visible, what is wrong, and how to fix it."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hpcstrat
from hpcstrat._communicators.connection import connect
from hpcstrat._core import gpu
from hpcstrat._core.call_name import names_call
from hpcstrat._core.ranks_in_words import join_by_rank, ranges_in_words, ranks_in_words
from hpcstrat._process import launchers, settings
from hpcstrat._tools.launch import mpiexec
from hpcstrat._update import compiled
from hpcstrat.optimizers import SGD

_SHARED_MIB = 64
"""The least free memory in /dev/shm of a host.

It is the default of containers, and too little for many ranks or NCCL.
"""
_MOST = 16
"""Up to this many faults are shown, and hosts have a row each; of more, equal ones share it."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class RankInventory(TypedDict):
    """What a rank finds on its host."""

    rank: int  # according to the launcher
    host: str
    versions: dict[str, str]  # by name; "not installed" for what is missing
    cores: list[int]  # that it may run on
    host_cores: int  # how many its host has
    gpus: list[str]  # names of the GPUs that it sees, in CUDA's order
    hidden_gpus: bool  # the host has GPUs, and this process sees none
    driver_error: str  # why NVIDIA's driver does not start; empty if it does, or without a driver
    gpu_error: str  # why CuPy does not compute on this rank's GPU; empty if it does, or without one
    shared_memory: int | None  # free MiB in /dev/shm
    unknown: dict[str, str]  # variables that look like the library's but are not; what was meant
    updates: str  # how it updates large variables in host memory


class Fault(NamedTuple):
    """What is wrong, and what to do about it."""

    what: str
    remedy: str


@names_call("info")
def info(as_json: bool) -> int:
    """Prints the tables on the lead; returns the exit status, 1 if there are faults. Collective."""
    # This program has to work where others fail, so each rank makes its inventory before it tries
    # to connect.
    own, error, communicator = own_inventory(), "", None
    # Before the ranks are connected, the launcher says which rank this is.
    by_rank, is_lead = [own], own["rank"] == 0
    try:
        communicator = connect()
        by_rank, is_lead = communicator.all_gather_obj(own), communicator.rank == 0
    except RuntimeError as problem:
        error = str(problem)
    faults = []
    if is_lead:
        path = shutil.which("mpirun")
        vendor = None if path is None else mpiexec.vendor_of([path])
        mpirun = path, "" if vendor is None else vendor.name
        faults = find_faults(by_rank, mpirun, error)
        if as_json:
            found = [fault._asdict() for fault in faults]
            facts = {"launcher": _launcher(), "mpirun": path, "ranks": by_rank, "faults": found}
            print(json.dumps(facts, indent=2))
        else:
            _show(by_rank, mpirun, faults)
    if communicator is None:
        return 1
    return int(communicator.broadcast_obj(bool(faults)))


def _show(
    by_rank: list[RankInventory], mpirun: tuple[str | None, str], faults: list[Fault]
) -> None:
    # No markup: names and remedies may contain brackets, as in '.[mpich]'.
    console = Console(markup=False, emoji=False)
    path, owner = mpirun
    versions = Table(title="Versions", show_header=False)
    for name, version in {
        **by_rank[0]["versions"],
        "Python's path": sys.executable,
        "mpirun": f"{path or 'not found'}{f' ({owner})' if owner else ''}",
        "launcher": _launcher(),
        "large updates": by_rank[0]["updates"],
    }.items():
        versions.add_row(name, version)
    console.print(versions)
    columns = "ranks", "host", "devices", "cores", "of each", "/dev/shm, MiB left"
    ranks = Table(*columns, title="Ranks")
    for row in _rows(by_rank):
        ranks.add_row(*row)
    console.print(ranks)
    for what, remedy in faults[:_MOST]:
        wrong, how = ("wrong:", "bold red"), ("remedy:", "bold")
        console.print(Text.assemble(wrong, f" {what}\n  ", how, f" {remedy}"))
    if len(faults) > _MOST:
        console.print(f"{len(faults) - _MOST} more: `info --json` shows all.")
    if not faults:
        console.print("Nothing is wrong.")


def _rows(by_rank: Sequence[RankInventory]) -> list[list[str]]:
    """A row of the table for each host; of very many hosts, for those that are equal."""
    hosts = _by_host(by_rank)

    def facts_of(host: str) -> tuple[str, ...]:
        ranks = hosts[host]
        cores = {core for rank in ranks for core in rank["cores"]}
        of_each = ranges_in_words({len(rank["cores"]) for rank in ranks})
        key = str(len(ranks)) if len(hosts) > _MOST else host
        return _devices(ranks), ranges_in_words(cores), of_each, key

    rows = []
    for (*facts, _), names in _grouped((facts_of(host), host) for host in hosts).items():
        ranks = [rank for name in names for rank in hosts[name]]
        free = min(rank["shared_memory"] or 0 for rank in ranks)
        numbers = ranges_in_words(rank["rank"] for rank in ranks)
        rows.append([numbers, _names(names), *facts, str(free or "none")])
    return rows


def _devices(ranks: Sequence[RankInventory]) -> str:
    """What the ranks of a host compute on: `CPU:0`, or `GPU:0-3 (NVIDIA H100)`."""
    names_of = [rank["gpus"] or [""] for rank in ranks]
    # More ranks than GPUs take turns.
    used = _grouped((gpus[i % len(gpus)], i % len(gpus)) for i, gpus in enumerate(names_of))
    return ", ".join(
        f"GPU:{ranges_in_words(set(numbers))} ({name})" if name else "CPU:0"
        for name, numbers in used.items()
    )


def _by_host(by_rank: Sequence[RankInventory]) -> dict[str, list[RankInventory]]:
    return _grouped((rank["host"], rank) for rank in by_rank)


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, in their order."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _names(hosts: Sequence[str]) -> str:
    """`n1`, `n1, n2`, or `n1, n2, n3 and 61 more hosts`."""
    left_out = len(hosts) - 3
    return ", ".join(hosts[:3]) + (f" and {left_out} more hosts" if left_out > 0 else "")


def _launcher() -> str:
    launcher = launchers.find()
    if launcher is None:
        return "none: started by hand"
    return launcher.name + ("" if launcher.size is None else f", {launcher.size} ranks")


# ---- what is wrong


def find_faults(
    ranks: Sequence[RankInventory], mpirun: tuple[str | None, str], error: str
) -> list[Fault]:
    """Everything that is wrong, the worst first.

    Args:
        ranks: each rank's inventory.
        mpirun: the path of `mpirun` and the MPI that it belongs to.
        error: why the ranks could not be connected; empty if they could.
    """
    # What keeps ranks from connecting comes first, as the rest may follow from it.
    faults = []
    if error:
        faults.append(Fault(f"the ranks are not connected: {error}", "do as the message says"))
    faults += _launcher_faults(ranks[0]["versions"]["MPI"], *mpirun)
    faults += _version_faults(ranks)
    # Hosts with the same fault share it. A slot for their names is in its text.
    found = (
        (fault, host) for host, ranks in _by_host(ranks).items() for fault in _host_faults(ranks)
    )
    for (what, remedy), names in _grouped(found).items():
        where = f"{'each of ' if len(names) > 1 else ''}{_names(names)}"
        faults.append(Fault(what.format(host=where), remedy))
    faults += _gpu_faults(ranks)
    for name, nearest in ranks[0]["unknown"].items():
        faults.append(Fault(f"unknown environment variable {name}", f"did you mean {nearest}?"))
    return faults


def _launcher_faults(library: str, path: str | None, owner: str) -> Iterator[Fault]:
    if library.startswith("not usable"):
        yield Fault(
            f"MPI is {library}",
            "`pip install '.[mpich]'` in hpcstrat's clone, "
            "or load the module of your cluster's MPI",
        )
    elif path is None:
        yield Fault(
            "there is no mpirun on the PATH",
            "start with srun, or put the mpirun of your MPI on the PATH",
        )
    elif not library.startswith(owner):
        yield Fault(
            f"{path} belongs to {owner}, but mpi4py loads {library}: each rank would believe "
            "it is alone",
            f"start with the mpirun of {library.rsplit(' ', 1)[0]}, and install one MPI only",
        )


def _version_faults(ranks: Sequence[RankInventory]) -> Iterator[Fault]:
    for name in ranks[0]["versions"]:
        each = [rank["versions"].get(name, "not installed") for rank in ranks]
        if len(set(each)) > 1:
            where = join_by_rank(zip([rank["rank"] for rank in ranks], each, strict=True))
            yield Fault(f"{name} differs: {where}", "use one environment on all hosts")


def _host_faults(ranks: Sequence[RankInventory]) -> Iterator[Fault]:
    free = ranks[0]["shared_memory"]
    if free is not None and free < _SHARED_MIB:
        yield Fault(
            f"/dev/shm of {{host}} has {free} MiB left",
            "start a container with `--shm-size=1g`; else see what fills it: `ls -l /dev/shm`",
        )
    cores = {core for rank in ranks for core in rank["cores"]}
    if len(cores) < len(ranks):
        # Open MPI binds each rank to one core by default, and then the ranks' threads share it.
        is_bound = len(cores) < ranks[0]["host_cores"]
        yield Fault(
            f"{len(ranks)} ranks of {{host}} run on {len(cores)} core{'s' * (len(cores) > 1)}: "
            "they take turns",
            "start with `mpirun --bind-to none`, `srun --cpu-bind=none`, or `--cpus-per-task`"
            if is_bound
            else f"start {len(cores)} ranks or fewer there",
        )
    gpus = len(ranks[0]["gpus"])
    if 1 < gpus < len(ranks):
        yield Fault(
            f"{len(ranks)} ranks run on {{host}} with {gpus} GPUs",
            "start one rank per GPU, or share them: `hpcstrat run --share-gpu`",
        )


def _gpu_faults(ranks: Sequence[RankInventory]) -> Iterator[Fault]:
    if hidden := [rank["rank"] for rank in ranks if rank["hidden_gpus"]]:
        yield Fault(
            f"the host has GPUs that its ranks do not see: {ranks_in_words(hidden)}",
            "check CUDA_VISIBLE_DEVICES, the permissions of /dev/nvidia*, "
            "and with Slurm --gpus-per-node",
        )
    errors = _grouped((rank["driver_error"], rank["rank"]) for rank in ranks)
    for error in filter(None, errors):
        what, _, remedy = error.partition("; ")
        yield Fault(f"{what}, on {ranks_in_words(errors[error])}", remedy)
    seeing = [rank for rank in ranks if rank["gpus"]]
    if seeing and seeing[0]["versions"]["CuPy"] == "not installed":
        yield Fault(
            "there are GPUs, but no CuPy to use them",
            "`pip install '.[cuda12]'` (or cuda13) in hpcstrat's clone",
        )
    elif seeing and len(ranks) > 1 and seeing[0]["versions"].get("NCCL", "").startswith("not"):
        yield Fault(
            "CuPy finds no NCCL",
            "`pip install nvidia-nccl-cu12` (or -cu13), or load your cluster's module",
        )
    errors = _grouped((rank["gpu_error"], rank["rank"]) for rank in seeing)
    for error in filter(None, errors):
        yield Fault(
            f"CuPy does not compute on the GPU of {ranks_in_words(errors[error])}: {error}",
            "`pip install '.[cuda12]'` (or cuda13, by the driver) in hpcstrat's clone, "
            "which brings CUDA's headers and libraries too, "
            "or load the module of your cluster's CUDA",
        )


# ---- what a rank finds


def own_inventory() -> RankInventory:
    """This process's inventory. Loads MPI to ask for its version, but starts no communication."""
    launcher = launchers.find()
    gpus, driver_error = _gpu_names()
    local_rank = 0 if launcher is None else launcher.local_rank or 0
    return {
        "rank": 0 if launcher is None else launcher.rank,
        "host": socket.gethostname(),
        "versions": _versions(),
        "cores": sorted(os.sched_getaffinity(0)),
        "host_cores": os.cpu_count() or 1,
        "gpus": gpus,
        "hidden_gpus": not gpus and not driver_error and bool(glob.glob("/dev/nvidia[0-9]*")),
        "driver_error": driver_error,
        "gpu_error": _gpu_error(local_rank) if gpus else "",
        "shared_memory": _shared_memory(),
        "unknown": settings.unknown(),
        "updates": _updates(),
    }


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version(), "hpcstrat": hpcstrat.__version__}
    for name in ("NumPy", "mpi4py", "optree", "threadpoolctl", "tqdm"):
        versions[name] = "not installed"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name.lower())
    try:
        vendor, version = mpi_library.load().get_vendor()
        versions["MPI"] = f"{vendor} {'.'.join(map(str, version))}"
    except (ImportError, RuntimeError) as error:
        versions["MPI"] = f"not usable: {str(error).splitlines()[0]}"
    return versions | (_gpu_versions() if gpu.has_cupy() else {"CuPy": "not installed"})


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
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        if paths := [line.split()[-1] for line in maps if "libnccl" in line]:
            versions["NCCL's path"] = paths[0]
    return versions


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _gpu_names() -> tuple[list[str], str]:
    """The names of the visible GPUs, and why there are none."""
    try:
        visible = gpu.visible_gpus()
    except gpu.DriverError as error:
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
        cupy.cuda.Device(local_rank % len(gpu.visible_gpus())).use()
        square = cupy.arange(4.0).reshape(2, 2)  # a kernel, which CuPy compiles for this GPU
        float((square @ square).sum())  # by cuBLAS
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def _shared_memory() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize // 2**20


def _updates() -> str:
    try:
        if not settings.is_on("HPCSTRAT_COMPILE"):
            return "by NumPy: HPCSTRAT_COMPILE is 0"
        rule = SGD(1.0).update_rule(1.0, 1)
        compiled.load(rule, np.dtype(np.float32))
    except (OSError, ValueError, AttributeError, RuntimeError, subprocess.SubprocessError) as error:
        return f"by NumPy: {error}"
    return f"compiled by {compiled.compiler()}"
