"""Places the replicas of a strategy on devices, and connects their ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.device_names import CPU, Device, parse, parse_all
from hpcstrat._core.ranks_in_words import join_by_rank, ranks_in_words
from hpcstrat._process import launchers, worlds
from hpcstrat._transports.connection import connect, connect_devices
from hpcstrat._transports.verbs import Communicator

_CPU_ANYWAY = (
    "To compute on the CPU anyway, name it, as in CentralStorageStrategy(compute_devices=['CPU:0', "
    "...]), or set CUDA_VISIBLE_DEVICES to nothing"
)


class Facts(NamedTuple):
    """What the place of a rank depends on.

    Attributes:
        host: the index of its host.
        gpus: the unique ids of the GPUs that its process sees.
        has_cupy: whether it has CuPy.
        shares: whether it may compute on the GPU of another rank.
        named: the device that the program names for it; `None` for the default.
    """

    host: int
    gpus: tuple[str, ...]
    has_cupy: bool
    shares: bool = False
    named: Device | None = None


class Place(NamedTuple):
    """Where a rank computes.

    Attributes:
        device: its device.
        ordinal: CUDA's number of its GPU in its process; `None` on the CPU.
        gpu: the unique id of its GPU; empty on the CPU.
    """

    device: Device
    ordinal: int | None = None
    gpu: str = ""


def place(
    compute_devices: Sequence[str] | None = None, is_one_host: bool = True
) -> tuple[list[Device], Communicator]:
    """Starts MPI, places the ranks on devices, and connects them. Collective.

    Takes the devices that the program names, and returns each rank's, in rank order, with a
    communicator: a `DeviceCommunicator` if they are GPUs.
    """
    # Before `connect`, which may start MPI.
    _make_current_early(compute_devices)
    control, world = connect(), worlds.start()
    with control.raise_together():
        named = parse_all(compute_devices, control.size)
        on_cpus = named is not None and all(device.kind == "CPU" for device in named)
        shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        own = () if on_cpus else _visible_gpus(), gpu.has_cupy(), shares
        # Ranks may see different GPUs, because of their host or environment; all must decide from
        # the same facts.
        by_rank = control.all_gather_differing_obj(own, *map(str, named or ()))
    with control.raise_together():
        devices = named or [None] * control.size
        facts = [*map(Facts, world.hosts, *zip(*by_rank, strict=True), devices)]
        places = decide(facts, is_one_host)
        devices, ordinal = [place.device for place in places], places[control.rank].ordinal
        if ordinal is None:
            return devices, control
        # NCCL binds a communicator to the GPU that is current when it is made.
        gpu.load_cupy("a GPU").cuda.Device(ordinal).use()
        return devices, connect_devices(tuple(place.gpu for place in places), ordinal)


def decide(facts: Sequence[Facts], is_one_host: bool = True) -> list[Place]:
    """The place of each rank, by the ranks' facts, in rank order; it depends on nothing else.

    Raises:
        ValueError: CPUs and GPUs are named.
        RuntimeError: the ranks are on several hosts and must not be, a GPU does not exist, there
            are more ranks than GPUs, only some ranks have a GPU, or CuPy is missing.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, one in enumerate(facts):
        ranks_of.setdefault(one.host, []).append(rank)
    if is_one_host and len(ranks_of) > 1:
        raise RuntimeError(
            f"{current_call()} has one worker, but the {len(facts)} ranks run on {len(ranks_of)} "
            "hosts; start them on one host, such as by `srun --nodes=1` or a host list of one, or "
            "use MultiWorkerMirroredStrategy"
        )
    _check_cupy(facts)
    placed: dict[int, Place] = {}
    for host, ranks in ranks_of.items():
        seen = [facts[rank].gpus for rank in ranks]
        # The launcher has shown each rank its own GPU, so there is nothing left to choose. The
        # process knows it as number 0, whatever its name here.
        own = all(len(gpus) == 1 for gpus in seen) and len(set(seen)) == len(seen)
        for index, rank in enumerate(ranks):
            device = facts[rank].named or _choose(seen, index, own, facts[rank].shares)
            ordinal = 0 if own and device.ordinal == index else device.ordinal
            device = device._replace(worker=None if is_one_host else host)
            placed[rank] = _find(rank, device, ordinal, seen[index])
    places = [placed[rank] for rank in range(len(facts))]
    _check_alike(places, ValueError if facts[0].named else RuntimeError)
    if not all(one.shares for one in facts):
        _check_shared([place.gpu for place in places])
    return places


def _check_cupy(facts: Sequence[Facts]) -> None:
    missing = [
        rank
        for rank, one in enumerate(facts)
        if not one.has_cupy and (one.named.kind == "GPU" if one.named else one.gpus)
    ]
    if missing:
        who = "there are GPUs, and CuPy, which computes on them,"
        if named := facts[missing[0]].named:
            who = f"{named} needs CuPy, which"
        raise RuntimeError(
            f"{current_call()}: {who} is not installed for {ranks_in_words(missing)}: `pip install "
            f"'.[cuda12]'` (or cuda13) in hpcstrat's clone. {_CPU_ANYWAY}"
        )


def _choose(seen: Sequence[Sequence[str]], index: int, own: bool, shares: bool) -> Device:
    """The device of a host's rank of this index, if the program names none."""
    count, ranks = len(seen[index]), len(seen)
    if not count:
        return CPU
    if index >= count and not own and not shares:
        raise RuntimeError(
            f"{current_call()}: {ranks} ranks run on a host with {count} GPU{'s' * (count > 1)}, "
            f"one for each rank; start {count} rank{'s' * (count > 1)}, or let ranks share a GPU: "
            f"`launch/share-gpu mpirun -n {ranks} ...`"
        )
    # More ranks than GPUs, on request: they take turns.
    return Device("GPU", index if own else index % count)


def _find(rank: int, device: Device, ordinal: int, gpus: Sequence[str]) -> Place:
    """The place of a rank on a device, which its process knows by the number `ordinal`."""
    if device.kind == "CPU":
        return Place(device)
    # A requested device that cannot be used is an error: a fallback would only show as a slow
    # program.
    if ordinal >= len(gpus):
        raise RuntimeError(
            f"{current_call()}: there is no GPU:{ordinal}; the process of rank {rank} sees "
            f"{len(gpus) or 'no'} GPU{'s' * (len(gpus) != 1)}. Name another: CUDA_VISIBLE_DEVICES "
            "says which it sees, and `nvidia-smi -L` says which the host has"
        )
    return Place(device, ordinal, gpus[ordinal])


def _check_alike(places: Sequence[Place], error: type[Exception]) -> None:
    # They round differently, and NCCL connects only GPUs.
    if len({place.device.kind for place in places}) > 1:
        listed = join_by_rank(enumerate(place.device.short for place in places))
        raise error(
            f"{current_call()}: the replicas would compute on GPUs and on CPUs: {listed}; all must "
            "compute on GPUs, or all on CPUs. Start as many ranks as there are GPUs, on hosts that "
            "have them; or name 'CPU:0' for each rank, or set CUDA_VISIBLE_DEVICES to nothing. "
            "CentralStorageStrategy(parameter_device='CPU:0') keeps variables in host memory"
        )


def _check_shared(gpus: Sequence[str]) -> None:
    # By unique id, since two ranks may name one GPU differently. NCCL would hang, or fail late, if
    # ranks shared a GPU unprepared.
    shared = next((one for one in gpus if one and gpus.count(one) > 1), None)
    if shared:
        ranks = [rank for rank, other in enumerate(gpus) if other == shared]
        raise RuntimeError(
            f"{current_call()}: {ranks_in_words(ranks)} would compute on one GPU, {len(set(gpus))} "
            f"for {len(gpus)} ranks; name a GPU for each, start fewer ranks, or let ranks share a "
            f"GPU: `launch/share-gpu mpirun -n {len(gpus)} ...`"
        )


def _visible_gpus() -> tuple[str, ...]:
    try:
        return gpu.visible_gpus()
    except gpu.DriverError as error:
        raise RuntimeError(f"{current_call()}: {error}. {_CPU_ANYWAY}") from None


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
        visible, number = gpu.visible_gpus(), launcher.local_rank
        if compute_devices is not None:
            device = parse(compute_devices[launcher.rank])
            number = device.ordinal if device.kind == "GPU" else None
        if visible and gpu.has_cupy() and number is not None:
            gpu.load_cupy("a GPU").cuda.Device(number % len(visible)).use()
