"""`python -m hpcstrat info`: what is installed and visible, what is wrong, and how to fix it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import names_call
from hpcstrat._tools.info import inventory
from hpcstrat._tools.info.inventory import RankInventory

_SHARED_MIB = 64
"""The least free memory in /dev/shm of a host.

It is the default of containers, and too little for many ranks or NCCL.
"""


class Fault(NamedTuple):
    """A fault and its remedy.

    Attributes:
        what: what is wrong.
        remedy: what to do about it.
    """

    what: str
    remedy: str


@names_call("info")
def info(as_json: bool) -> int:
    """Prints the tables on the lead; returns the exit status, 1 if there are faults. Collective."""
    # This program has to work where others fail, so each rank makes its inventory before it tries
    # to connect.
    own, error, communicator = inventory.own_inventory(), "", None
    # Before the ranks are connected, the launcher says which rank this is.
    by_rank, is_lead = [own], own["rank"] == 0
    try:
        communicator = connect()
        by_rank, is_lead = communicator.all_gather_obj(own), communicator.rank == 0
    except RuntimeError as problem:
        error = str(problem)
    mpirun = inventory.find_mpirun() if is_lead else (None, "")
    faults = find_faults(by_rank, mpirun, error) if is_lead else []
    if is_lead and as_json:
        print(
            json.dumps(
                {
                    "launcher": inventory.describe_launcher(),
                    "mpirun": mpirun[0],
                    "ranks": [inventory.as_any(rank) for rank in by_rank],
                    "faults": [fault._asdict() for fault in faults],
                },
                indent=2,
            )
        )
    elif is_lead:
        _show(by_rank, mpirun, faults)
    if communicator is None:
        return 1
    return int(communicator.broadcast_obj(bool(faults)))


def find_faults(
    ranks: Sequence[RankInventory], mpirun: tuple[str | None, str], error: str
) -> list[Fault]:
    """Everything that is wrong, the worst first.

    Args:
        ranks: each rank's inventory.
        mpirun: the path of `mpirun` and the MPI that it belongs to.
        error: why the ranks could not be connected; empty if they could.
    """
    faults = []
    if error:
        faults.append(Fault(f"the ranks are not connected: {error}", "do as the message says"))
    # What keeps ranks from connecting comes first, as the rest may follow from it.
    faults += _launcher_faults(ranks, mpirun)
    faults += _version_faults(ranks)
    faults += _host_faults(ranks)
    faults += _gpu_faults(ranks)
    for name, nearest in ranks[0]["unknown"].items():
        faults.append(Fault(f"unknown environment variable {name}", f"did you mean {nearest}?"))
    return faults


def _show(
    by_rank: list[RankInventory], mpirun: tuple[str | None, str], faults: list[Fault]
) -> None:
    # No markup: names and remedies may contain brackets, as in '.[mpich]'.
    console = Console(markup=False, emoji=False)
    versions = Table(title="Versions", show_header=False)
    for name, version in by_rank[0]["versions"].items():
        versions.add_row(name, version)
    versions.add_row("Python's path", inventory.own_python())
    path, owner = mpirun
    versions.add_row("mpirun", f"{path or 'not found'}{f' ({owner})' if owner else ''}")
    versions.add_row("launcher", inventory.describe_launcher())
    versions.add_row("large updates", by_rank[0]["updates"])
    console.print(versions)
    ranks = Table("rank", "host", "device", "cores", "/dev/shm, MiB left", title="Ranks")
    for rank in by_rank:
        local = [other["rank"] for other in by_rank if other["host"] == rank["host"]].index(
            rank["rank"]
        )
        gpus = rank["gpus"]
        device = f"GPU:{local % len(gpus)} ({gpus[local % len(gpus)]})" if gpus else "CPU:0"
        ranks.add_row(
            str(rank["rank"]),
            rank["host"],
            device,
            _spans(rank["cores"]),
            str(rank["shared_memory"] or "none"),
        )
    console.print(ranks)
    for fault in faults:
        console.print(
            Text.assemble(
                ("wrong:", "bold red"),
                f" {fault.what}\n  ",
                ("remedy:", "bold"),
                f" {fault.remedy}",
            )
        )
    if not faults:
        console.print("Nothing is wrong.")


def _spans(cores: list[int]) -> str:
    """`0-3, 6` of 0, 1, 2, 3 and 6."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in spans)


def _launcher_faults(ranks: Sequence[RankInventory], mpirun: tuple[str | None, str]) -> list[Fault]:
    path, owner = mpirun
    library = ranks[0]["versions"]["MPI"]
    if library.startswith("not usable"):
        remedy = (
            "`pip install '.[mpich]'` in hpcstrat's clone, or load the module of your cluster's MPI"
        )
        return [Fault(f"MPI is {library}", remedy)]
    if path is None:
        return [
            Fault(
                "there is no mpirun on the PATH",
                "start with srun, or put the mpirun of your MPI on the PATH",
            )
        ]
    if owner and not library.startswith(owner):
        return [
            Fault(
                f"{path} belongs to {owner}, but mpi4py loads {library}: each rank would believe "
                "it is alone",
                f"start with the mpirun of {library.rsplit(' ', 1)[0]}, and install one MPI only",
            )
        ]
    return []


def _version_faults(ranks: Sequence[RankInventory]) -> list[Fault]:
    names = [
        name
        for name in ranks[0]["versions"]
        if len({rank["versions"].get(name) for rank in ranks}) > 1
    ]
    return [
        Fault(
            f"{name} differs: "
            + ", ".join(
                f"{rank['versions'].get(name, 'not installed')} on rank {rank['rank']}"
                for rank in ranks
            ),
            "use one environment on all hosts",
        )
        for name in names
    ]


def _host_faults(ranks: Sequence[RankInventory]) -> list[Fault]:
    faults = []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        here = [rank for rank in ranks if rank["host"] == host]
        free = here[0]["shared_memory"]
        if free is not None and free < _SHARED_MIB:
            faults.append(
                Fault(
                    f"/dev/shm of {host} has {free} MiB left",
                    "start a container with `--shm-size=1g`; "
                    "else see what fills it: `ls -l /dev/shm`",
                )
            )
        cores = {core for rank in here for core in rank["cores"]}
        if len(cores) < len(here):
            # Open MPI binds each rank to one core by default, and then the ranks' threads share it.
            is_bound = len(cores) < here[0]["host_cores"]
            faults.append(
                Fault(
                    f"{len(here)} ranks of {host} run on {len(cores)} "
                    f"core{'s' * (len(cores) > 1)}: they take turns",
                    "start with `mpirun --bind-to none`, `srun --cpu-bind=none`, or "
                    "`--cpus-per-task`"
                    if is_bound
                    else f"start {len(cores)} ranks or fewer there",
                )
            )
    return faults


def _gpu_faults(ranks: Sequence[RankInventory]) -> list[Fault]:
    faults = []
    hidden = [rank["rank"] for rank in ranks if rank["hidden_gpus"]]
    if hidden:
        faults.append(
            Fault(
                f"the host has GPUs that ranks {', '.join(map(str, hidden))} do not see",
                "check CUDA_VISIBLE_DEVICES, the permissions of /dev/nvidia*, "
                "and with Slurm --gpus-per-node",
            )
        )
    for error in dict.fromkeys(rank["driver_error"] for rank in ranks if rank["driver_error"]):
        failing = ", ".join(str(rank["rank"]) for rank in ranks if rank["driver_error"] == error)
        what, _, remedy = error.partition("; ")
        faults.append(Fault(f"{what}, on the ranks {failing}", remedy))
    seeing = [rank for rank in ranks if rank["gpus"]]
    if seeing and seeing[0]["versions"]["CuPy"] == "not installed":
        faults.append(
            Fault(
                "there are GPUs, but no CuPy to use them",
                "`pip install '.[cuda12]'` (or cuda13) in hpcstrat's clone",
            )
        )
    elif seeing and len(ranks) > 1 and seeing[0]["versions"].get("NCCL", "").startswith("not"):
        faults.append(
            Fault(
                "CuPy finds no NCCL",
                "`pip install nvidia-nccl-cu12` (or -cu13), or load your cluster's module",
            )
        )
    for error in dict.fromkeys(rank["gpu_error"] for rank in seeing if rank["gpu_error"]):
        failing = ", ".join(str(rank["rank"]) for rank in seeing if rank["gpu_error"] == error)
        faults.append(
            Fault(
                f"CuPy does not compute on the GPU of the ranks {failing}: {error}",
                "`pip install '.[cuda12]'` (or cuda13, by the driver) in hpcstrat's clone, "
                "which brings CUDA's headers and libraries too, "
                "or load the module of your cluster's CUDA",
            )
        )
    for host in dict.fromkeys(rank["host"] for rank in seeing):
        here = [rank for rank in seeing if rank["host"] == host]
        if len(here[0]["gpus"]) < len(here) and len(here[0]["gpus"]) > 1:
            faults.append(
                Fault(
                    f"{len(here)} ranks run on {host} with {len(here[0]['gpus'])} GPUs",
                    "start one rank per GPU, or share them: `hpcstrat run --share-gpu`",
                )
            )
    return faults
