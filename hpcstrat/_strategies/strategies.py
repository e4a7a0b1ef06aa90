"""The strategies: where each puts its replicas and its variables."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._agreement.collective import collective
from hpcstrat._core import device_names
from hpcstrat._core.arrays import as_number
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import parse_choice
from hpcstrat._process import worlds
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage import make_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import agree_on_placement, place
from hpcstrat._transports.connection import connect, disconnect_on_error
from hpcstrat._transports.verbs import Communicator
from hpcstrat.cluster_resolver import ClusterResolver, MPIClusterResolver


class CentralStorageStrategy(Strategy):
    """One replica per rank, on one host; each variable is stored once, on the parameter device.

    In host memory all ranks share it, and each updates a slice. Collective: all ranks construct it.
    The first strategy of a program starts MPI.

    Args:
        compute_devices: the device of each rank, in rank order. By default rank i gets the host's
            GPU i; on a host without GPUs all ranks use the CPU.
        parameter_device: the device that stores variables: the compute device of a rank, or
            `"CPU:0"`, the memory of the host. By default rank 0's compute device.

    Raises:
        ValueError: a string does not name a device, the list does not have one entry per rank, or
            has CPUs and GPUs, or no rank computes on the parameter device.
        RuntimeError: a device does not exist, there are more ranks than GPUs, only some ranks have
            a GPU, there are GPUs and CuPy is not installed, several GPUs cannot use NCCL, the ranks
            are on several hosts, or MPI cannot start.

    Examples:
        Computes and stores variables on the CPU, on a host with GPUs too:

        >>> import hpcstrat as hs
        >>> strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size(), parameter_device="CPU:0")
        >>> strategy
        CentralStorageStrategy(1 replica on CPU:0)
        >>> strategy.extended.parameter_devices
        ('/job:localhost/replica:0/task:0/device:CPU:0',)
    """

    @names_call("CentralStorageStrategy")
    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
    ) -> None:
        call = current_call()
        devices, communicator = place(compute_devices)
        # A wrong argument must not leave a connected GPU behind, on any rank.
        with disconnect_on_error(communicator), communicator.raise_together():
            parameter = (
                devices[0] if parameter_device is None else device_names.parse(parameter_device)
            )
            if parameter not in (*devices, device_names.CPU):
                names = ", ".join(map(str, dict.fromkeys([*devices, device_names.CPU])))
                raise ValueError(
                    f"{call}: parameter_device is {parameter}, and no rank computes there; pass "
                    f"one of {names}"
                )
            agree_on_placement(communicator, devices, str(parameter))
        # The host's memory belongs to no rank: there rank 0's initial values count.
        root = devices.index(parameter) if parameter in devices else 0
        storage = make_storage(communicator, root, on_host=parameter != devices[root])
        super().__init__(ReplicaGroup(call, communicator, devices, parameter, storage, root=root))


class MirroredStrategy(Strategy):
    """One replica per rank, on one host; variables are mirrored: equal on all replicas.

    Each GPU has its own copy of a variable. On CPUs the ranks share one, and each updates a slice.
    `ON_READ` variables are separate on each replica. Collective: all ranks construct it. The first
    strategy of a program starts MPI.

    Args:
        devices: the device of each rank, in rank order. By default rank i gets the host's GPU i; on
            a host without GPUs all ranks use the CPU.
        cross_device_ops: `None` or a `CrossDeviceOps`, which changes nothing.

    Raises:
        TypeError: `cross_device_ops` has another type.
        ValueError: a string does not name a device, or the list does not have one entry per rank,
            or has CPUs and GPUs.
        RuntimeError: a device does not exist, there are more ranks than GPUs, only some ranks have
            a GPU, there are GPUs and CuPy is not installed, several GPUs cannot use NCCL, the ranks
            are on several hosts, or MPI cannot start.

    Examples:
        On a host without GPUs, or with GPUs that should not be used, each rank names its CPU:

        >>> import hpcstrat as hs
        >>> hs.MirroredStrategy(["CPU:0"] * hs.size())
        MirroredStrategy(1 replica on CPU:0)
    """

    @names_call("MirroredStrategy")
    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        check_choice(current_call(), "cross_device_ops", cross_device_ops, CrossDeviceOps)
        super().__init__(make_mirrored_group(*place(devices)))


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """One replica per rank, on any number of hosts; variables are mirrored: equal on all replicas.

    Each GPU has its own copy of a variable; on CPUs each host has one, as in `MirroredStrategy`. A
    worker is a host. Reductions run within each host first, then across hosts. The script is still
    one program: every rank runs all its lines. Only the data is per worker:
    `experimental_local_results` returns the components of this host's replicas, and
    `distribute_datasets_from_function` makes one pipeline per host.
    `experimental_distribute_dataset` takes the same dataset on all hosts, and each replica reads
    its own elements only.

    Collective: all ranks construct it. The first strategy of a program starts MPI.

    Args:
        cluster_resolver: tells which worker this process belongs to; by default MPI does. It must
            agree with MPI on the number of hosts.
        communication_options: `None` or a `CommunicationOptions`, which changes nothing.

    Raises:
        TypeError: `cluster_resolver` is neither None nor a `ClusterResolver`, or
            `communication_options` has another type.
        RuntimeError: the resolver's number of workers is not the number of hosts, there are more
            ranks than GPUs on a host, only some hosts have GPUs, there are GPUs and CuPy is not
            installed, several GPUs cannot use NCCL, or MPI cannot start.

    Examples:
        With one rank on one host; with 8 ranks on each of 2 hosts, there would be 16 replicas:

        >>> import hpcstrat as hs
        >>> strategy = hs.MultiWorkerMirroredStrategy()
        >>> strategy.num_replicas_in_sync
        1
        >>> strategy.cluster_resolver.task_id
        0
    """

    @names_call("MultiWorkerMirroredStrategy")
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        call = current_call()
        check_choice(call, "communication_options", communication_options, CommunicationOptions)
        devices, communicator = place(is_one_host=False)
        hosts = worlds.start().hosts
        with disconnect_on_error(communicator), communicator.raise_together():
            if cluster_resolver is not None:
                _check_resolver(cluster_resolver, hosts)
            communicator.barrier()
        self._resolver = MPIClusterResolver() if cluster_resolver is None else cluster_resolver
        # MirroredStrategy's would place the ranks on one host.
        Strategy.__init__(self, make_mirrored_group(devices, communicator, hosts))
        if cluster_resolver is None:
            # The first call is collective, and made here, so that a single rank may ask later.
            self._resolver.cluster_spec()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that was passed, or an `MPIClusterResolver`.

        Examples:
            The first and only worker of a job on one host:

            >>> resolver = hs.MultiWorkerMirroredStrategy().cluster_resolver
            >>> resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")
            ('worker', 0, 1)
        """
        return self._resolver


def _check_resolver(resolver: object, hosts: Sequence[int]) -> None:
    """Refuses what does not tell as many workers as there are hosts; `hosts` has each rank's."""
    call = current_call()
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            f"{call}: cluster_resolver is {resolver!r}; pass one of hpcstrat.cluster_resolver, or "
            "None"
        )
    spec = resolver.cluster_spec().as_dict()
    tasks, count = sum(len(tasks) for tasks in spec.values()), len(set(hosts))
    # Some resolvers list hosts and some list ranks: Slurm's lists one task per rank.
    if tasks not in (count, len(hosts)):
        raise RuntimeError(
            f"{call}: the cluster_resolver knows {tasks} tasks ({spec}), but the {len(hosts)} "
            f"ranks run on {count} hosts; omit it, or make it name every host once"
        )


def make_mirrored_group(
    devices: Sequence[device_names.Device],
    communicator: Communicator,
    hosts: Sequence[int] = (),
) -> ReplicaGroup:
    """Makes the group of placed and connected replicas that mirror variables. Collective."""
    call = current_call()
    with disconnect_on_error(communicator):
        # Otherwise ranks that place replicas differently would differ only in speed and rounding.
        agree_on_placement(communicator, devices)
    storage = make_storage(communicator)
    return ReplicaGroup(call, communicator, devices, devices[0], storage, mirrors=True, hosts=hosts)


class OneDeviceStrategy(Strategy):
    """One replica on one device, to try out a program without changing its code.

    Args:
        device: the string of the device, such as `"CPU:0"` or `"GPU:0"`.

    Raises:
        ValueError: `device` does not name a device.
        RuntimeError: there are several ranks, or the device does not exist.

    Examples:
        >>> import hpcstrat as hs
        >>> strategy = hs.OneDeviceStrategy("CPU:0")
        >>> result = 0
        >>> for i in range(10):
        ...     result += strategy.run(lambda x: 2 * x, args=(i,))
        >>> result
        90
    """

    @collective("OneDeviceStrategy", communicator_of=lambda _: connect())
    def __init__(self, device: str) -> None:
        call, control = current_call(), connect()
        # Checked before the replica is placed, so that with several ranks all of them raise.
        device_names.parse(device)
        if control.size > 1:
            raise RuntimeError(
                f"{call} has one replica, but {control.size} ranks run; start the program without "
                "mpirun"
            )
        placed, communicator = place([device])
        storage = make_storage(communicator)
        super().__init__(
            ReplicaGroup(call, communicator, placed, placed[0], storage, requires_aggregation=False)
        )


# ---- TensorFlow's choices of how replicas communicate
#
# Strategies accept them, and choose themselves: the host's memory, MPI or NCCL carries a reduction,
# depending on where the arrays and the ranks are.


class CommunicationImplementation(enum.Enum):
    """The choices of `CommunicationOptions.implementation`; none changes anything."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@final
class CommunicationOptions:
    """TensorFlow's options of reductions, which are accepted and change nothing.

    Args:
        bytes_per_pack: ignored: the gradients of a step are one message.
        timeout_seconds: ignored: `HPCSTRAT_TIMEOUT_SECONDS` ends a job that hangs.
        implementation: ignored: arrays on GPUs go through NCCL, others through shared memory and
            MPI.

    Raises:
        ValueError: `bytes_per_pack` is negative, or `implementation` is not one of its choices.
        TypeError: `bytes_per_pack` is not a number.
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        call = "CommunicationOptions"
        _check_count(call, "bytes_per_pack", bytes_per_pack)
        self.bytes_per_pack: int = bytes_per_pack
        self.timeout_seconds: float | None = timeout_seconds
        self.implementation: CommunicationImplementation = parse_choice(
            CommunicationImplementation, implementation, call, "implementation"
        )


class CrossDeviceOps:
    """How TensorFlow reduces values; `MirroredStrategy` accepts it, and chooses by itself.

    A sum over N replicas is in rank order on CPUs, and in NCCL's order on GPUs.
    """


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`.

    Args:
        reduce_to_device: ignored.
        accumulation_fn: must be `None`: values are added.

    Raises:
        NotImplementedError: `accumulation_fn` is given.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[..., Any] | None = None,
    ) -> None:
        del reduce_to_device
        if accumulation_fn is not None:
            raise NotImplementedError(
                f"ReductionToOneDevice: accumulation_fn is {accumulation_fn!r}, but values are "
                "added; gather them with Strategy.gather, and combine them yourself"
            )


@final
class HierarchicalCopyAllReduce(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`.

    Args:
        num_packs: ignored: the gradients of a step are one message.

    Raises:
        ValueError: `num_packs` is negative.
        TypeError: it is not a number.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_count(type(self).__name__, "num_packs", num_packs)


@final
class NcclAllReduce(CrossDeviceOps):
    """Accepted and ignored: see `CrossDeviceOps`. Arrays on GPUs go through NCCL in any case.

    Args:
        num_packs: ignored: the gradients of a step are one message.

    Raises:
        ValueError: `num_packs` is negative.
        TypeError: it is not a number.
    """

    def __init__(self, num_packs: int = 1) -> None:
        _check_count(type(self).__name__, "num_packs", num_packs)


def _check_count(call: str, argument: str, number: int) -> None:
    if as_number(call, argument, number, "a number of at least 0") < 0:
        raise ValueError(f"{call}: {argument} is {number}; it must be at least 0")


def check_choice(call: str, argument: str, given: object, allowed: type) -> None:
    """Refuses an argument that is neither `None` nor a choice of how to communicate.

    Raises:
        TypeError: it is something else.
    """
    if given is not None and not isinstance(given, allowed):
        raise TypeError(
            f"{call}: {argument} is {given!r}; it must be a hpcstrat.{allowed.__name__}, or None"
        )
