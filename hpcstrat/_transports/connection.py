"""Connects the ranks and their GPUs, and disconnects them at the end of the program."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping

import numpy as np

from hpcstrat._core import gpu, timeline
from hpcstrat._core.call_name import call_named
from hpcstrat._core.ranks_in_words import join_by_rank
from hpcstrat._core.user_frames import warn
from hpcstrat._process import failure, launchers, pmi, reports, settings, worlds
from hpcstrat._transports import nccl_start
from hpcstrat._transports.device import DeviceCommunicator, SoloDevice
from hpcstrat._transports.host import HostCommunicator, SoloCommunicator
from hpcstrat._transports.hosts import HostsCommunicator
from hpcstrat._transports.nccl import NcclCommunicator
from hpcstrat._transports.shared_memory import SharedMemoryCommunicator
from hpcstrat._transports.verbs import Communicator
from hpcstrat._watchdog import channels
from hpcstrat._watchdog.watchdog import Watchdog, end_with_launcher, waiting_for_all

_connected: dict[tuple[str, ...], DeviceCommunicator] = {}


_communicator: HostCommunicator | None = None
# Threads may make their first strategies at the same time, but the ranks connect only once.
_connect_lock = threading.Lock()


def connect() -> HostCommunicator:
    """The communicator of all ranks of the program, the same for every strategy. Starts MPI.

    Collective, once.

    Raises:
        RuntimeError: MPI cannot be started, or the ranks cannot share memory, or their versions
            differ.
        OSError: the requested timeline cannot be written.
    """
    global _communicator
    if _communicator is None:
        with _connect_lock:
            if _communicator is None:
                communicator = _connect()
                timeline.start(communicator)
                _communicator = communicator
    return _communicator


def count_ranks() -> int:
    """The number of ranks. Starts MPI, and is collective, only if the launcher does not tell."""
    told = worlds.size()
    return connect().size if told is None else told


def find_connected() -> HostCommunicator | None:
    """The communicator that `connect` returned; `None` if it was not called yet. Starts nothing."""
    return _communicator


def _connect() -> HostCommunicator:
    launcher = launchers.find()
    alone = launcher is None or launcher.alone
    end_with_launcher()
    # MPI's start waits for every rank, and cannot be interrupted from Python.
    with contextlib.nullcontext() if alone else waiting_for_all("the others to connect"):
        world = worlds.start()
        if world.comm is None or world.size == 1:
            return SoloCommunicator()
        failure.install_when_connected(world.rank)
        is_one_host = world.local_size == world.size
        communicator = (
            SharedMemoryCommunicator(world.comm)
            if is_one_host
            else HostsCommunicator(world.comm, world.host_comm)
        )
        channel = channels.connect(world.comm, is_one_host)
    held: Mapping[int, int] = {}
    if channel is not None:
        communicator.watchdog = Watchdog(communicator.rank, communicator.calls, channel)
        held = pmi.share(world.host_comm)
    else:
        remedy = (
            "start the ranks of the host in one network namespace"
            if is_one_host
            else "open the hosts' TCP ports to each other"
        )
        warn(
            "hpcstrat: not all ranks can reach rank 0, so a rank that never comes is not noticed; "
            f"{remedy}, or give the job a time limit",
            UserWarning,
        )
    # After mpi4py's own hook, so it runs before MPI is finalized.
    atexit.register(_leave, communicator, held, os.getpid())
    _check_versions(communicator)
    return communicator


def _check_versions(communicator: HostCommunicator) -> None:
    """Refuses ranks that run different versions: they might pack or compute differently.

    Raises:
        RuntimeError: on all ranks.
    """
    own = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "NumPy": np.__version__,
        "hpcstrat": sys.modules["hpcstrat"].__version__,
        # These two decide which collective calls are made, so they must be equal too.
        "HPCSTRAT_CHECK": str(int(communicator.checks)),
        "HPCSTRAT_TIMELINE": settings.timeline() or "not set",
    }
    with call_named("connecting the ranks"):
        by_rank = communicator.all_gather_differing_obj(own)
    problems = [
        f"{name} is {join_by_rank(enumerate(other[name] for other in by_rank))}"
        for name in own
        if len({other[name] for other in by_rank}) > 1
    ]
    if problems:
        raise RuntimeError(
            "hpcstrat cannot connect the ranks: they must run the same versions, but "
            f"{'; '.join(problems)}; use one environment"
        )


def connect_devices(gpus: tuple[str, ...], ordinal: int) -> DeviceCommunicator:
    """The communicator of all ranks and their GPUs. Collective.

    Strategies on the same GPUs share it, and its stream: several communicators, used in an order
    that differs between ranks, can deadlock, and each costs memory on the GPU. Each user releases
    it with `disconnect_devices`.

    Args:
        gpus: the unique id of each rank's GPU.
        ordinal: CUDA's number of this rank's GPU, which is current.

    Raises:
        RuntimeError: there are several ranks, and NCCL cannot be used; on all ranks.
    """
    # By the GPUs of all ranks: each rank finds the same entry, or none.
    communicator = _connected.get(gpus)
    if communicator is None:
        control = connect()
        if control.size > 1:
            nccl_start.require_nccl(control, shared=len(set(gpus)) < len(gpus))
        with call_named("connecting the GPUs"), control.raise_together():
            # A rank may lack the memory for a context on its GPU: others would wait for it in NCCL.
            stream = gpu.Stream(ordinal)
            control.barrier()
        made = NcclCommunicator if control.size > 1 else SoloDevice
        communicator = _connected[gpus] = made(control, stream)
    communicator.users += 1
    return communicator


def disconnect_devices(communicator: DeviceCommunicator) -> None:
    """Releases a communicator of `connect_devices`; the last user closes it.

    All ranks call this, after a barrier.
    """
    communicator.users -= 1
    if not communicator.users:
        for gpus in [gpus for gpus, other in _connected.items() if other is communicator]:
            del _connected[gpus]
        communicator.close()


@contextlib.contextmanager
def disconnect_on_error(communicator: Communicator) -> Iterator[None]:
    """A block that releases a communicator of `connect_devices` if all ranks raise in it."""
    try:
        yield
    except BaseException:
        if isinstance(communicator, DeviceCommunicator):
            disconnect_devices(communicator)
        raise


def _leave(communicator: HostCommunicator, held: Mapping[int, int], process: int) -> None:
    from mpi4py import MPI

    if os.getpid() != process:  # a forked child does not leave in its parent's place
        return
    is_started = not MPI.Is_finalized()  # by the program itself
    if is_started:
        # First all ranks agree that they leave here, so that all have made the same calls: only
        # then do the calls of NCCL end.
        try:
            communicator.leave()
        except BaseException:  # Python would print it, and this rank would leave alone
            failure.end_job(
                f"{traceback.format_exc()}hpcstrat: the job ends: rank {communicator.rank} cannot "
                "leave the program together with the others"
            )
        timeline.write(communicator)
    elif settings.timeline() and communicator.rank == 0:
        reports.say(
            f"hpcstrat: the timeline {settings.timeline()} is lost: the program has called "
            "MPI.Finalize(), which Python does at its end"
        )
    if communicator.watchdog is not None:
        communicator.watchdog.leave()
    pmi.release(held)
    if is_started:
        try:
            for device in _connected.values():
                device.close()
        except Exception:  # of the GPU's last work: Python would print it, and exit with status 0
            lines = traceback.format_exc()
            failure.end_job(
                f"{lines}hpcstrat: the job ends: what the program had put on the GPU of rank "
                f"{communicator.rank} failed, which was only noticed at its end; start with "
                "CUDA_LAUNCH_BLOCKING=1 to see where"
            )
