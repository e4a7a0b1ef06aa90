"""`python -m hpcstrat info`: what the ranks find on their hosts, what is wrong, and what to do."""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcstrat import _run
from hpcstrat._core import gpu
from hpcstrat._core.call_name import names_call
from hpcstrat._core.ranks_in_words import list_by_rank, ranges_in_words
from hpcstrat._process import launchers, mpi_library, settings
from hpcstrat._transports import nccl_start
from hpcstrat._transports.connection import connect
from hpcstrat._update.compiled import compiler

_SECONDS_FOR_RANK_0 = 5.0


class Inventory(NamedTuple):
    """What a rank finds on its host."""

    facts: dict[str, str]  # by their names; equal ones are printed once
    faults: list[str]  # what is wrong, and what to do
    cores: set[int]  # that the rank may run on
    gpus: tuple[str, ...]  # the unique ids of those that the rank sees


@names_call("info")
def info() -> int:
    """Prints what the ranks find, on rank 0; returns 1 if something is wrong. Collective."""
    # This has to work where other programs fail: each rank looks before it tries to connect.
    own = take_inventory()
    launcher = launchers.find()
    by_rank, rank, fault = [own], launcher.rank if launcher else 0, ""
    try:
        communicator = connect()
        by_rank, rank = communicator.all_gather_obj(own), communicator.rank
    except RuntimeError as error:
        fault = f"the ranks are not connected: {error}"
    faults = [fault, *own.faults] if fault else list(find_faults(by_rank))
    if rank == 0:
        for name in dict.fromkeys(name for one in by_rank for name in one.facts):
            values = [one.facts.get(name, "not found") for one in by_rank]
            by_value = list_by_rank(enumerate(values), "{text} ({ranks})")
            lines = values[:1] if len(set(values)) == 1 else by_value
            print(f"{name:<11}", f"\n{'':12}".join(lines))
        print("\n".join(f"wrong: {fault}" for fault in faults) or "Nothing is wrong.")
    elif fault:
        # Most launchers end all ranks when one fails, and would cut off what rank 0 prints; ranks
        # that are not connected can only give it time.
        time.sleep(_SECONDS_FOR_RANK_0)
        print(f"wrong on rank {rank}: {'; '.join(faults)}", file=sys.__stderr__)
    return int(bool(faults))


def find_faults(by_rank: Sequence[Inventory]) -> Iterator[str]:
    """What is wrong with ranks, and with hosts that they share."""
    found = [(rank, fault) for rank, one in enumerate(by_rank) for fault in one.faults]
    yield from list_by_rank(found, "{text} ({ranks})" if len(by_rank) > 1 else "{text}")
    for host in dict.fromkeys(rank.facts["host"] for rank in by_rank):
        ranks = [rank for rank in by_rank if rank.facts["host"] == host]
        cores = len(set().union(*(rank.cores for rank in ranks)))
        gpus = len(set().union(*(rank.gpus for rank in ranks)))
        if cores < len(ranks):
            yield (
                f"{len(ranks)} ranks of {host} take turns on {cores} cores; start fewer, or do not "
                "bind them: `mpirun --bind-to none`, `srun --cpu-bind=none`"
            )
        if 0 < gpus < len(ranks) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            yield (
                f"{len(ranks)} ranks of {host} have {gpus} GPUs; start one for each GPU, or share "
                "them: `launch/share-gpu mpirun ...`"
            )


# ---- what a rank finds


def take_inventory() -> Inventory:
    """This process's inventory. Loads MPI to ask for its version, but does not start it."""
    launcher, cores = launchers.find(), os.sched_getaffinity(0)
    facts, faults = {"host": socket.gethostname()}, []
    for name in ("hpcstrat", "NumPy", "mpi4py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    facts["Python"] = f"{platform.python_version()}, {sys.executable}"
    facts["launcher"] = launcher.describe() if launcher else "none: started by hand"
    try:
        if launcher is None:
            facts["mpiexec"] = _find_mpiexec(faults)
        vendor, version = mpi_library.load().get_vendor()
        facts["MPI"] = f"{vendor} {'.'.join(map(str, version))}"
    except (ImportError, RuntimeError) as error:
        faults.append(" ".join(str(error).split()))
    facts["cores"] = f"{ranges_in_words(cores)} of {os.cpu_count()}"
    facts["C compiler"] = compiler() or "none, so that NumPy makes large updates"
    gpus = _look_at_gpus((launcher and launcher.local_rank) or 0, facts, faults)
    for name, nearest in settings.unknown().items():
        faults.append(f"unknown environment variable {name}; did you mean {nearest}?")
    return Inventory(facts, faults, cores, gpus)


def _find_mpiexec(faults: list[str]) -> str:
    (path, *_), vendor = _run.find_mpiexec()
    mpirun = shutil.which("mpirun") or path
    owner = _run.vendor_of([mpirun])
    if (owner == "Open MPI") != (vendor == "Open MPI"):
        faults.append(
            f"{mpirun} is that of {owner or 'an unknown MPI'}, and each rank would believe that it "
            f"is alone; start with {path}, as `hpcstrat run -n 4 train.py` does"
        )
    return path


def _look_at_gpus(local_rank: int, facts: dict[str, str], faults: list[str]) -> tuple[str, ...]:
    """The unique ids of the visible GPUs; computes on that of this rank."""
    facts["device"] = "CPU"
    try:
        ids = gpu.visible_gpus()
    except gpu.DriverError as error:
        faults.append(str(error))
        return ()
    if not ids:
        if glob.glob("/dev/nvidia[0-9]*"):
            where = "CUDA_VISIBLE_DEVICES, permissions of /dev/nvidia*, Slurm's --gpus-per-node"
            faults.append(f"the host has GPUs that are not visible; see {where}")
        return ids
    number = local_rank % len(ids)
    facts["device"] = f"GPU {number} of {len(ids)}"
    remedy = "`pip install '.[cuda12]'` (or cuda13, by the driver) in hpcstrat's clone"
    if not gpu.has_cupy():
        faults.append(f"there are GPUs, but no CuPy to use them: {remedy}")
        return ids
    try:
        cupy = gpu.load_cupy("info")
        facts["CuPy"], runtime = str(cupy.__version__), cupy.cuda.runtime
        facts["device"] += f", {runtime.getDeviceProperties(number)['name'].decode()}"
        facts["CUDA"] = f"{runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"
        if why_not := nccl_start.why_not(shared=False):
            faults.append(why_not)
        else:
            facts["NCCL"] = nccl_start.version_text(nccl_start.load_nccl().get_version())
        cupy.cuda.Device(number).use()
        square = cupy.arange(4.0).reshape(2, 2)  # a kernel, which CuPy compiles for this GPU
        float((square @ square).sum())  # by cuBLAS
    except Exception as error:
        faults.append(f"CuPy does not compute: {' '.join(str(error).split())}; {remedy}")
    return ids
