"""Loads NCCL, checks its version, and connects the ranks with a time-out, which NCCL lacks."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import threading
import time
import warnings
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.ranks_in_words import join_by_rank, list_by_rank
from hpcstrat._transports.host import HostCommunicator

MIN_NCCL_VERSION = 21000
"""NCCL 2.10, the first with bfloat16.

Since 2.9 NCCL writes a version as major, minor and patch, the last two with two digits each.
"""
MIN_NCCL_VERSION_FOR_SHARING = 23000
"""NCCL 2.30, the first that allows several ranks on one GPU."""
START_SECONDS = 300.0
"""How long NCCL, which has no time-out, may take to connect the ranks and make its first calls."""


def describe(cupy: Any) -> str:
    """The versions that matter when NCCL fails."""
    runtime = cupy.cuda.runtime
    return (
        f"NCCL {version_text(load_nccl().get_version())}, CuPy {cupy.__version__}, "
        f"CUDA {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"
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


@names_call("starting NCCL")
def start(control: HostCommunicator, stream: gpu.Stream) -> Any:
    """NCCL's communicator, after one call of each kind.

    Collective; if one rank fails or hangs, all raise.

    NCCL's own call waits for all ranks forever. So it runs in a thread, and the ranks exchange its
    state through the control communicator.
    """
    nccl = load_nccl()
    with control.raise_together():
        # The id is opaque, a tuple in older versions of CuPy and bytes in newer ones, so it travels
        # as an object.
        own = (nccl.get_version(), nccl.get_unique_id() if control.rank == 0 else None)
    by_rank = control.all_gather_obj(own)
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
    # call of each kind, and waits there without a time limit.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    outcome: list[Any] = []

    def connect() -> None:
        try:
            stream.xp.cuda.Device(stream.ordinal).use()
            comm = nccl.NcclCommunicator(control.size, by_rank[0][1], control.rank)
            with stream.raw:
                _try_calls(nccl, comm, control.rank, control.size, stream)
            outcome.append(comm)
        except Exception as error:
            outcome.append(error)

    # A daemon, because NCCL may never return, and the program must still be able to end.
    thread = threading.Thread(target=connect, name="hpcstrat-nccl-start", daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    # The first looks follow each other quickly, later ones ten times per second, because each is an
    # exchange of all ranks.
    pause = 0.001
    while True:
        thread.join(pause)
        pause = min(2 * pause, 0.1)
        if outcome:
            own = outcome[0]
        else:
            own = "waits" if time.monotonic() < deadline else "waits too long"
        if isinstance(own, Exception):
            state = f"{type(own).__name__}: {own}"
        else:
            state = own if isinstance(own, str) else ""
        states = control.all_gather_obj(state)
        if not any(states):
            return own
        if any(state not in ("", "waits") for state in states):
            said = enumerate(state or "connected" for state in states)
            listed = "".join(f"\n  {line}" for line in list_by_rank(said))
            if not isinstance(own, (str, Exception)):
                # Not `destroy`, which would wait for ranks that are not connected.
                own.abort()
            elif thread.is_alive():
                _skip_exit_handlers()
                # Also those that CUDA's libraries register until then.
                atexit.register(_skip_exit_handlers)
            raise RuntimeError(
                f"{current_call()}: NCCL does not connect the {control.size} ranks "
                f"({describe(stream.xp)}):{listed}\n"
                "If it never returns, the GPUs often cannot reach each other's memory (PCIe access "
                "control: try NCCL_P2P_DISABLE=1), or /dev/shm is too small in a container "
                "(--shm-size=1g, or NCCL_SHM_DISABLE=1). NCCL_DEBUG=INFO shows what it does"
            )


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
    comm.reduceScatter(source, target, 1, kind, nccl.NCCL_SUM, raw)
    comm.allGather(source, target, 1, kind, raw)
    nccl.groupStart()
    comm.send(source, 1, kind, (rank + 1) % size, raw)
    comm.recv(target, 1, kind, (rank - 1) % size, raw)
    nccl.groupEnd()
    stream.synchronize()


def _skip_exit_handlers() -> None:
    """Makes the process end without the exit handlers that C libraries have registered so far.

    They would shut down CUDA and NCCL while a thread is inside them. What Python does at exit comes
    before, and the exit status stays: C's `exit` calls the last handler, this `_exit`, first.
    """
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    if hasattr(libc, "on_exit"):  # glibc's, which all of NCCL's own builds use
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
