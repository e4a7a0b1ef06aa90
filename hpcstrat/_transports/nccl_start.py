"""Loads NCCL, checks its version, and connects the ranks."""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.ranks_in_words import join_by_rank, list_by_rank
from hpcstrat._process import failure
from hpcstrat._transports.host import HostCommunicator

MIN_NCCL_VERSION = 21000
"""NCCL 2.10, the first with bfloat16.

Since 2.9 NCCL writes a version as major, minor and patch, the last two with two digits each.
"""
MIN_NCCL_VERSION_FOR_SHARING = 23000
"""NCCL 2.30, the first that allows several ranks on one GPU."""
_REMEDIES = (
    "if GPUs cannot reach each other's memory (PCIe access control): NCCL_P2P_DISABLE=1; if "
    "/dev/shm is too small in a container: --shm-size=1g, or NCCL_SHM_DISABLE=1"
)


def version_text(version: int) -> str:
    """NCCL's version number as text: 22803 is 2.28.3."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def load_nccl() -> Any:
    """The module `cupy.cuda.nccl`, whose `available` says whether CuPy found NCCL."""
    gpu.load_cupy("NCCL")
    with warnings.catch_warnings():
        # CuPy warns if there is no NCCL; our own message says what follows from it.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy.cuda.nccl")


def why_not(shared: bool) -> str:
    """Why this process cannot use NCCL; empty if it can.

    Args:
        shared: several ranks compute on one GPU.
    """
    nccl = load_nccl()
    if not nccl.available:
        return (
            "CuPy finds no NCCL: `pip install nvidia-nccl-cu12` (or -cu13), or load the module of "
            "your cluster"
        )
    version = nccl.get_version()
    if version < MIN_NCCL_VERSION:
        return (
            f"NCCL is {version_text(version)}, and hpcstrat needs {version_text(MIN_NCCL_VERSION)} "
            "or later; install a newer one"
        )
    if shared and version < MIN_NCCL_VERSION_FOR_SHARING:
        return (
            "several ranks share a GPU, which takes NCCL "
            f"{version_text(MIN_NCCL_VERSION_FOR_SHARING)} or later, but this is "
            f"{version_text(version)}; `launch/share-gpu --nccl libnccl.so.2` loads a newer one"
        )
    if shared and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
        return (
            "several ranks share a GPU, which NCCL allows only with NCCL_MULTI_RANK_GPU_ENABLE=1; "
            "start with `launch/share-gpu mpirun ...`, which sets it"
        )
    return ""


def require_nccl(control: HostCommunicator, shared: bool) -> None:
    """Checks that all ranks can use NCCL. Collective.

    Args:
        control: connects the ranks.
        shared: several ranks compute on one GPU.

    Raises:
        RuntimeError: a rank cannot; on all ranks.
    """
    problems = control.all_gather_differing_obj(why_not(shared))
    if any(problems):
        listed = "".join(f"\n  {line}" for line in list_by_rank(enumerate(problems)))
        raise RuntimeError(
            f"{current_call()}: the GPUs of several ranks exchange data through NCCL, which cannot "
            f"be used:{listed}\nOr start one rank, or name 'CPU:0' for each rank"
        )


@names_call("starting NCCL")
def start(control: HostCommunicator, stream: gpu.Stream) -> Any:
    """NCCL's communicator, after one call of each kind. Collective.

    NCCL has no time-out. If it never returns, the watchdog ends the job, with a report.

    Raises:
        RuntimeError: the ranks load different versions of NCCL; on all ranks.
    """
    nccl = load_nccl()
    with control.raise_together():
        # The id is opaque, a tuple in older versions of CuPy and bytes in newer ones, so it travels
        # as an object.
        own = (nccl.get_version(), nccl.get_unique_id() if control.rank == 0 else None)
    # With the remedies, which a report of the watchdog shows: NCCL follows this call.
    by_rank = control.all_gather_obj(own, f"NCCL_DEBUG=INFO shows what it does; {_REMEDIES}")
    versions = [version for version, _ in by_rank]
    # A process uses the first libnccl that is loaded, and another library may bring its own: ranks
    # can differ.
    if len(set(versions)) > 1:
        listed = join_by_rank(enumerate(map(version_text, versions)))
        raise RuntimeError(
            f"{current_call()}: the ranks load different versions of NCCL: {listed}; install the "
            "same everywhere"
        )
    # With 0 NCCL connects the ranks at its start. By default, since 2.22, it does so in their first
    # call of each kind.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    try:
        with stream.current(), control.calls.waiting:
            comm = nccl.NcclCommunicator(control.size, by_rank[0][1], control.rank)
            _try_calls(nccl, comm, control.rank, control.size, stream)
    except Exception as error:  # the others may be in NCCL forever
        failure.end_job(
            f"{traceback.format_exc()}{describe_failure(error, control, stream)}; {_REMEDIES}"
        )
    except BaseException as error:
        control.calls.mark_interrupted(error)
        raise
    return comm


def _try_calls(nccl: Any, comm: Any, rank: int, size: int, stream: gpu.Stream) -> None:
    """Makes one small call of each kind, and waits for them. The stream is current.

    So connections that NCCL makes in the first call that needs them are made here, and not in a
    training step. Except those of `send` and `recv` to ranks that are not neighbors, which would
    cost each rank memory for every other rank.
    """
    sent, received = stream.xp.zeros((2, size), np.uint8)
    source, target, kind, raw = sent.data.ptr, received.data.ptr, nccl.NCCL_UINT8, stream.raw.ptr
    comm.allReduce(source, target, 1, kind, nccl.NCCL_SUM, raw)
    comm.reduce(source, target, 1, kind, nccl.NCCL_SUM, 0, raw)
    comm.broadcast(target, target, 1, kind, 0, raw)
    comm.allGather(source, target, 1, kind, raw)
    nccl.groupStart()
    comm.send(source, 1, kind, (rank + 1) % size, raw)
    comm.recv(target, 1, kind, (rank - 1) % size, raw)
    nccl.groupEnd()
    stream.synchronize()


def describe_failure(error: Exception, control: HostCommunicator, stream: gpu.Stream) -> str:
    """The text with which the job ends when NCCL raises this error on this rank."""
    cupy, runtime = stream.xp, stream.cuda.runtime
    return (
        f"hpcstrat: the job ends: NCCL failed on rank {control.rank} of {control.size}: {error!r} "
        f"(NCCL {version_text(load_nccl().get_version())}, CuPy {cupy.__version__}, "
        f"CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}). Start with "
        "NCCL_DEBUG=INFO to see why"
    )
