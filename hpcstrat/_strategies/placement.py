"""Placing the replicas of a strategy that needs one host."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence

from hpcstrat import _devices, _gpu, _launcher, _world
from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import connect, connect_devices, disconnect_devices
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._communicators.host import HostCommunicator
from hpcstrat._edge import current_call
from hpcstrat._storage.base import Storage
from hpcstrat._storage.mirrored_host import MirroredHostStorage


def place_on_one_host(compute_devices: Sequence[str] | None) -> tuple[list[_devices.Device], Communicator]:
    """Starts MPI, gives each rank its device after all checks, and connects the ranks. Collective.

    Returns:
        The device of each rank, in rank order, and the communicator, which is a `DeviceCommunicator` where any of the
        ranks computes on a GPU.

    Raises:
        TypeError: `compute_devices` is a single string.
        ValueError: a string that names no device, or a list of another length than there are ranks.
        RuntimeError: the ranks are on several hosts, a device is not there, there are more ranks than GPUs, or MPI or
            NCCL does not start.
    """
    return _placed(compute_devices, is_one_host=True)


def place_on_hosts() -> tuple[list[_devices.Device], Communicator]:
    """`place_on_one_host` for ranks on any number of hosts: each gets the GPU of its number on its host, or the CPU."""
    return _placed(None, is_one_host=False)


def _placed(compute_devices: Sequence[str] | None, is_one_host: bool) -> tuple[list[_devices.Device], Communicator]:
    _make_current_early(compute_devices)
    call, control = current_call(), connect()
    with control.raise_together():
        world = _world.start()
        if is_one_host and world.local_size < world.size:
            hosts = max(world.hosts) + 1
            raise RuntimeError(
                f"{call} has one worker, and the {world.size} ranks run on {hosts} hosts; start them on one, such as "
                "with `srun --nodes=1` or a host list of one, or take MultiWorkerMirroredStrategy"
            )
        named = _devices.named(compute_devices, control.size, call)
        on_cpus = named is not None and all(device.kind == "CPU" for device in named)
        visible = () if on_cpus else _gpu.visible()
        everyones = control.all_gather_obj((visible, _gpu.has_cupy()))
    with control.raise_together():
        seen = [gpus for gpus, _ in everyones]
        if named is None and any(seen) and not all(has_cupy for _, has_cupy in everyones):
            if control.rank == 0:
                warnings.warn(
                    f"{call}: this host has GPUs, and CuPy to use them with is not installed, so the replicas compute "
                    "on the CPU; `pip install '.[cuda12]'` (or cuda13) in hpcstrat's clone, or name the devices: "
                    "compute_devices=['CPU:0', ...]",
                    stacklevel=4,
                )
            seen = [()] * control.size
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if is_one_host:
            devices = _devices.place(named, seen, shares, call)
            ordinal = _devices.ordinal(devices[control.rank], control.rank, seen, call)
        else:
            devices = _devices.place_on_hosts(world.hosts, seen, shares, call)
            on_host = [seen[rank] for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
            ordinal = _devices.ordinal(devices[control.rank], world.local_rank, on_host, call)
        own = "" if ordinal is None else seen[control.rank][ordinal]
        gpus = tuple(control.all_gather_obj(own, *map(str, devices)))
    if not any(gpus):
        return devices, control
    with control.raise_together():
        _devices.check_shared(gpus, shares, call)
        problem = "" if ordinal is None else _why_no_nccl(ordinal, gpus)
        problems = [problem for problem in control.all_gather_obj(problem) if problem]
    if not all(gpus):
        problems = ["some of them compute on the CPU; name a GPU for each"]
    if problems and control.rank == 0:
        message = f"{call}: what the replicas exchange goes through host memory instead of NCCL: {problems[0]}"
        with control.raise_together():  # where warnings are errors, it is one of all ranks
            warnings.warn(message, stacklevel=4)
    return devices, connect_devices(gpus, ordinal, nccl=control.size > 1 and not problems)


@contextlib.contextmanager
def given_back_on_error(communicator: Communicator) -> Iterator[None]:
    """What is raised inside, on all ranks, gives the connection back."""
    try:
        yield
    except BaseException:
        if isinstance(communicator, DeviceCommunicator):
            disconnect_devices(communicator)
        raise


def replica_storage(communicator: Communicator) -> Storage:
    """Where each replica keeps variables of its own, on its device."""
    if isinstance(communicator, DeviceCommunicator):
        from hpcstrat._storage.mirrored_device import MirroredDeviceStorage

        return MirroredDeviceStorage(communicator, root=0)
    assert isinstance(communicator, HostCommunicator)
    return MirroredHostStorage(communicator)


def _why_no_nccl(ordinal: int, gpus: Sequence[str]) -> str:
    """Why this rank, on its GPU of this number, cannot be connected by NCCL with the others; empty where it can."""
    from hpcstrat._communicators import nccl_start

    _gpu.load_cupy("a GPU").cuda.Device(ordinal).use()
    return "" if len(gpus) == 1 else nccl_start.why_not(shared=len(set(gpus)) < len(gpus))


def _make_current_early(compute_devices: Sequence[str] | None) -> None:
    """Makes the GPU current that this rank will probably compute on, before MPI starts.

    MPI may open a context on the GPU that is current when it starts (pmodels/mpich#5810): without this on GPU 0, in
    every rank. What the launcher says of the rank is all there is to go by; the ranks check it together afterwards.
    """
    launcher = _launcher.find()
    if _world.started() is not None or launcher is None or launcher.local_rank is None:
        return
    with contextlib.suppress(Exception):
        visible = _gpu.visible()
        if not visible or not _gpu.has_cupy():
            return
        number = launcher.local_rank
        if compute_devices is not None:
            device = _devices.parse(compute_devices[launcher.rank], "")
            if device.kind == "CPU":
                return
            number = device.ordinal
        _gpu.load_cupy("a GPU").cuda.Device(number % len(visible)).use()
