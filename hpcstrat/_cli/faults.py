"""What is wrong with what there is, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._cli.facts import RankFacts

_SHARED_MIB = 64
"""In /dev/shm, for the ranks of a host: what a container has by default, and too little for many ranks or NCCL."""


class Fault(NamedTuple):
    """One thing that is wrong.

    Attributes:
        what: is wrong.
        remedy: what to do.
    """

    what: str
    remedy: str


def find_faults(ranks: Sequence[RankFacts], mpirun: tuple[str | None, str], error: str) -> list[Fault]:
    """All that is wrong, the worst first.

    Args:
        ranks: each rank's facts.
        mpirun: its path and whose it is.
        error: why the ranks could not be connected; empty where they could.
    """
    found = []
    if error:
        found.append(Fault(f"the ranks are not connected: {error}", "do as the message says"))
    found += _launcher_faults(ranks, mpirun)
    found += _version_faults(ranks)
    found += _host_faults(ranks)
    found += _gpu_faults(ranks)
    for name, nearest in ranks[0]["unknown"].items():
        found.append(Fault(f"unknown environment variable {name}", f"did you mean {nearest}?"))
    return found


def _launcher_faults(ranks: Sequence[RankFacts], mpirun: tuple[str | None, str]) -> list[Fault]:
    path, owner = mpirun
    library = ranks[0]["versions"]["MPI"]
    if library.startswith("not usable"):
        remedy = "`pip install '.[mpich]'` in hpcstrat's clone, or load the module of your cluster's MPI"
        return [Fault(f"MPI is {library}", remedy)]
    if path is None:
        return [Fault("there is no mpirun on the PATH", "start with srun, or put the mpirun of your MPI on the PATH")]
    if owner and not library.startswith(owner):
        return [
            Fault(
                f"{path} belongs to {owner}, and mpi4py loads {library}: each rank would think that it is alone",
                f"start with the mpirun of {library.rsplit(' ', 1)[0]}, and install one MPI only",
            )
        ]
    return []


def _version_faults(ranks: Sequence[RankFacts]) -> list[Fault]:
    names = [name for name in ranks[0]["versions"] if len({rank["versions"].get(name) for rank in ranks}) > 1]
    return [
        Fault(
            f"{name} differs: "
            + ", ".join(f"{rank['versions'].get(name, 'not installed')} on rank {rank['rank']}" for rank in ranks),
            "use one environment on all hosts",
        )
        for name in names
    ]


def _host_faults(ranks: Sequence[RankFacts]) -> list[Fault]:
    found = []
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        here = [rank for rank in ranks if rank["host"] == host]
        free = here[0]["shared_memory"]
        if free is not None and free < _SHARED_MIB:
            found.append(
                Fault(
                    f"/dev/shm of {host} has {free} MiB left",
                    "start a container with `--shm-size=1g`; else look what lies there, `ls -l /dev/shm`",
                )
            )
        cores = {core for rank in here for core in rank["cores"]}
        if len(cores) < len(here):
            is_bound = len(cores) < here[0]["host_cores"]
            found.append(
                Fault(
                    f"{len(here)} ranks of {host} run on {len(cores)} core{'s' * (len(cores) > 1)}: they take turns",
                    "start with `mpirun --bind-to none`, `srun --cpu-bind=none`, or `--cpus-per-task`"
                    if is_bound
                    else f"start {len(cores)} ranks or fewer there",
                )
            )
    return found


def _gpu_faults(ranks: Sequence[RankFacts]) -> list[Fault]:
    found = []
    hidden = [rank["rank"] for rank in ranks if rank["hidden_gpus"]]
    if hidden:
        found.append(
            Fault(
                f"the host has GPUs that ranks {', '.join(map(str, hidden))} do not see",
                "look at CUDA_VISIBLE_DEVICES, at the permissions of /dev/nvidia*, and with Slurm at --gpus-per-node",
            )
        )
    seeing = [rank for rank in ranks if rank["gpus"]]
    if seeing and seeing[0]["versions"]["CuPy"] == "not installed":
        found.append(
            Fault(
                "there are GPUs, and no CuPy to use them with",
                "`pip install '.[cuda12]'` (or cuda13) in hpcstrat's clone",
            )
        )
    elif seeing and len(ranks) > 1 and seeing[0]["versions"].get("NCCL", "").startswith("not"):
        found.append(
            Fault("CuPy finds no NCCL", "`pip install nvidia-nccl-cu12` (or -cu13), or load your cluster's module")
        )
    for error in dict.fromkeys(rank["gpu_error"] for rank in seeing if rank["gpu_error"]):
        failing = ", ".join(str(rank["rank"]) for rank in seeing if rank["gpu_error"] == error)
        found.append(
            Fault(
                f"CuPy does not compute on the GPU of the ranks {failing}: {error}",
                "`pip install '.[cuda12]'` (or cuda13, by the driver) in hpcstrat's clone, which brings CUDA's headers "
                "and libraries too, or load the module of your cluster's CUDA",
            )
        )
    for host in dict.fromkeys(rank["host"] for rank in seeing):
        here = [rank for rank in seeing if rank["host"] == host]
        if len(here[0]["gpus"]) < len(here) and len(here[0]["gpus"]) > 1:
            found.append(
                Fault(
                    f"{len(here)} ranks run on {host} with {len(here[0]['gpus'])} GPUs",
                    "start one rank a GPU, or share them: `launch/share-gpu`",
                )
            )
    return found
