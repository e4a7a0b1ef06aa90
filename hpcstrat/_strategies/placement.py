"""Places the replicas of a strategy on devices, and connects their ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import device_names, gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.ranks_in_words import join_by_rank, ranks_in_words
from hpcstrat._process import launchers, worlds
from hpcstrat._transports.connection import connect, connect_devices
from hpcstrat._transports.verbs import Communicator

_CPU_ANYWAY = (
    "To compute on the CPU anyway, name it, as in CentralStorageStrategy(compute_devices=['CPU:0', "
    "...]), or set CUDA_VISIBLE_DEVICES to nothing"
)


def place(
    compute_devices: Sequence[str] | None = None, is_one_host: bool = True
) -> tuple[list[device_names.Device], Communicator]:
    """Starts MPI, checks the devices, assigns them to the ranks, connects the ranks. Collective.

    By default rank i of a host gets the host's GPU i; on hosts without GPUs all ranks get the CPU.

    Args:
        compute_devices: the device of each rank, in rank order: all GPUs, or all CPUs.
        is_one_host: whether all ranks must be on one host.

    Returns:
        The device of each rank, in rank order, and the communicator, which is a
        `DeviceCommunicator` if the ranks compute on GPUs.

    Raises:
        TypeError: `compute_devices` is a single string.
        ValueError: a string does not name a device, or the list does not have one entry per rank,
            or has CPUs and GPUs.
        RuntimeError: the ranks are on several hosts and must not be, a device does not exist, there
            are more ranks than GPUs, only some ranks have a GPU, there are GPUs and no CuPy,
            several ranks cannot use NCCL, or MPI or the GPUs' driver does not start.
    """
    # Before `connect`, which may start MPI.
    _make_current_early(compute_devices)
    call, control = current_call(), connect()
    with control.raise_together():
        world = worlds.start()
        if is_one_host and world.local_size < world.size:
            hosts = max(world.hosts) + 1
            raise RuntimeError(
                f"{call} has one worker, but the {world.size} ranks run on {hosts} hosts; start "
                "them on one host, such as by `srun --nodes=1` or a host list of one, or use "
                "MultiWorkerMirroredStrategy"
            )
        named = device_names.parse_all(compute_devices, control.size)
        on_cpus = named is not None and all(device.kind == "CPU" for device in named)
        visible = () if on_cpus else _visible_gpus()
        # Ranks may see different GPUs, because of their host or environment; all must decide from
        # the same facts.
        by_rank = control.all_gather_differing_obj((visible, gpu.has_cupy()))
    with control.raise_together():
        seen = [gpus for gpus, _ in by_rank]
        if named is None:
            _check_cupy([has_cupy or not gpus for gpus, has_cupy in by_rank])
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if named is not None:
            devices = named
        elif is_one_host:
            devices = device_names.place(seen, shares)
        else:
            devices = device_names.place_on_hosts(world.hosts, seen, shares)
        _check_alike(devices, ValueError if named else RuntimeError)
        own_host = world.hosts[world.rank]
        on_host = [gpus for gpus, host in zip(seen, world.hosts, strict=True) if host == own_host]
        ordinal = device_names.ordinal(devices[control.rank], world.local_rank, on_host)
        # By unique id from here on, because an ordinal may mean another GPU in another process.
        own = "" if ordinal is None else seen[control.rank][ordinal]
        gpus = tuple(control.all_gather_differing_obj(own, *map(str, devices)))
    if ordinal is None:
        return devices, control
    with control.raise_together():
        device_names.check_shared(gpus, shares)
        # NCCL binds a communicator to the GPU that is current when it is made.
        gpu.load_cupy("a GPU").cuda.Device(ordinal).use()
        return devices, connect_devices(gpus, ordinal)


def agree_on_placement(
    communicator: Communicator, devices: Sequence[device_names.Device], *must_match: str
) -> None:
    """Checks that all ranks make the same strategy. Collective.

    Raises:
        ReplicaMismatchError: devices or `must_match` differ between ranks.
    """
    with communicator.raise_together():
        communicator.exchange(signature_of(current_call(), *map(str, devices), *must_match))


def _check_alike(devices: Sequence[device_names.Device], error: type[Exception]) -> None:
    # They round differently, and NCCL connects only GPUs.
    if len({device.kind for device in devices}) > 1:
        listed = join_by_rank(enumerate([device.short for device in devices]))
        raise error(
            f"{current_call()}: the replicas would compute on GPUs and on CPUs: {listed}; all must "
            "compute on GPUs, or all on CPUs. Start as many ranks as there are GPUs, on hosts that "
            "have them; or name 'CPU:0' for each rank, or set CUDA_VISIBLE_DEVICES to nothing. "
            "CentralStorageStrategy(parameter_device='CPU:0') keeps variables in host memory"
        )


def _visible_gpus() -> tuple[str, ...]:
    try:
        return gpu.visible_gpus()
    except gpu.DriverError as error:
        raise RuntimeError(f"{current_call()}: {error}. {_CPU_ANYWAY}") from None


def _check_cupy(has_cupy: Sequence[bool]) -> None:
    if missing := [rank for rank, is_there in enumerate(has_cupy) if not is_there]:
        raise RuntimeError(
            f"{current_call()}: there are GPUs, and CuPy, which computes on them, is not installed "
            f"for {ranks_in_words(missing)}: `pip install '.[cuda12]'` (or cuda13) in hpcstrat's "
            f"clone. {_CPU_ANYWAY}"
        )


def _make_current_early(compute_devices: Sequence[str] | None) -> None:
    """Makes the GPU current that this rank will probably compute on, before MPI starts.

    MPI may open a context on the GPU that is current when it starts (pmodels/mpich#5810). Without
    this every rank would open one on GPU 0. Only the launcher's variables are known at that time;
    the ranks check the placement together afterwards.
    """
    launcher = launchers.find()
    if worlds.find() is not None or launcher is None or launcher.local_rank is None:
        return
    with contextlib.suppress(Exception):
        visible = gpu.visible_gpus()
        if not visible or not gpu.has_cupy():
            return
        number = launcher.local_rank
        if compute_devices is not None:
            device = device_names.parse(compute_devices[launcher.rank])
            if device.kind == "CPU":
                return
            number = device.ordinal
        gpu.load_cupy("a GPU").cuda.Device(number % len(visible)).use()
