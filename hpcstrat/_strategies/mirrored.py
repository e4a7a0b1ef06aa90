"""The strategies with mirrored variables: one copy per replica, on one host or several."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat._communicators.base import Communicator
from hpcstrat._communicators.connection import disconnect_on_error
from hpcstrat._communicators.device import DeviceCommunicator
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.device_names import Device
from hpcstrat._process import worlds
from hpcstrat._replicas.group import ReplicaGroup, UpdatesOn
from hpcstrat._storage import (
    make_central_storage,
    make_replica_storage,
)
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.communication import CommunicationOptions, CrossDeviceOps, check_choice
from hpcstrat._strategies.placement import agree_on_placement, place_on_hosts, place_on_one_host
from hpcstrat.cluster_resolver import ClusterResolver, MPIClusterResolver


class MirroredStrategy(Strategy):
    """One replica per rank, on one host; variables are mirrored, with a copy on each replica.

    All copies of a variable stay equal. Collective: all ranks construct it. The first strategy of a
    program starts MPI.

    Args:
        devices: the device of each rank, in rank order. By default rank i gets the host's GPU i; on
            a host without GPUs all ranks use the CPU.
        cross_device_ops: `None` or a `CrossDeviceOps`, which changes nothing.
        shard_updates: whether each replica keeps the optimizers' slots for its part of all elements
            only, and updates that part, as PyTorch's `ZeroRedundancyOptimizer` and DeepSpeed's ZeRO
            stage 1 do. On the CPU the result is the same, bit for bit.

    Raises:
        TypeError: `shard_updates` is not a bool, or `cross_device_ops` has another type.
        ValueError: a string does not name a device, or the list does not have one entry per rank.
        RuntimeError: a device does not exist, there are more ranks than GPUs, the ranks are on
            several hosts, or MPI or NCCL cannot start.

    Examples:
        On a host without GPUs, or with GPUs that should not be used, each rank names its CPU:

        >>> import hpcstrat as hs
        >>> hs.MirroredStrategy(["CPU:0"] * hs.size())
        MirroredStrategy(1 replica on CPU:0)
    """

    _takes_pipeline_per_replica = True

    @names_call("MirroredStrategy")
    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_updates: bool = False,
    ) -> None:
        check_choice(current_call(), "cross_device_ops", cross_device_ops, CrossDeviceOps)
        super().__init__(
            make_mirrored_group(*place_on_one_host(devices), shard_updates=shard_updates)
        )


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """One replica per rank, on any number of hosts; variables are mirrored on each replica.

    A worker is a host. Reductions run within each host first, then across hosts, with one message
    per host. The script is still one program: every rank runs all its lines. Only the data is per
    worker: `experimental_local_results` returns the components of this host's replicas, and
    `distribute_datasets_from_function` makes one pipeline per host.
    `experimental_distribute_dataset` takes the same dataset on all hosts, and each replica reads
    its own elements only.

    Collective: all ranks construct it. The first strategy of a program starts MPI.

    Args:
        cluster_resolver: tells which worker this process belongs to; by default MPI does. It must
            agree with MPI on the number of hosts.
        communication_options: `None` or a `CommunicationOptions`, which changes nothing.
        shard_updates: as in `MirroredStrategy`.

    Raises:
        TypeError: `cluster_resolver` is neither None nor a `ClusterResolver`, `shard_updates` is
            not a bool, or `communication_options` has another type.
        RuntimeError: the resolver's number of workers is not the number of hosts, there are more
            ranks than GPUs on a host, or MPI or NCCL cannot start.

    Examples:
        With one rank on one host; with 8 ranks on each of 2 hosts, there would be 16 replicas:

        >>> import hpcstrat as hs
        >>> strategy = hs.MultiWorkerMirroredStrategy()
        >>> strategy.num_replicas_in_sync
        1
        >>> strategy.cluster_resolver.task_id
        0
    """

    _takes_pipeline_per_replica = False

    @names_call("MultiWorkerMirroredStrategy")
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        shard_updates: bool = False,
    ) -> None:
        call = current_call()
        check_choice(call, "communication_options", communication_options, CommunicationOptions)
        devices, communicator = place_on_hosts()
        world = worlds.start()
        group = make_mirrored_group(devices, communicator, world.hosts, shard_updates)
        Strategy.__init__(self, group)  # MirroredStrategy's would place the ranks on one host
        with communicator.raise_together():
            if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
                raise TypeError(
                    f"{call}: cluster_resolver is {cluster_resolver!r}; pass one of "
                    "hpcstrat.cluster_resolver, or None"
                )
            self._resolver = MPIClusterResolver() if cluster_resolver is None else cluster_resolver
            if cluster_resolver is not None:
                spec = cluster_resolver.cluster_spec().as_dict()
                tasks = sum(len(tasks) for tasks in spec.values())
                # Some resolvers list hosts and some list ranks: Slurm's lists one task per rank.
                if tasks not in (group.workers.count, world.size):
                    raise RuntimeError(
                        f"{call}: the cluster_resolver knows {tasks} tasks ({spec}), but the "
                        f"{world.size} ranks run on {group.workers.count} hosts; omit it, or make "
                        "it name every host once"
                    )
            communicator.barrier()
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


def make_mirrored_group(
    devices: Sequence[Device],
    communicator: Communicator,
    hosts: Sequence[int] = (),
    shard_updates: bool = False,
) -> ReplicaGroup:
    """Makes the group of placed and connected replicas that mirror variables. Collective."""
    call = current_call()
    with disconnect_on_error(communicator):
        # Otherwise ranks that place replicas differently would differ only in speed and rounding.
        agree_on_placement(communicator, devices, shard_updates)
    local = storage = make_replica_storage(communicator)
    updates_on = UpdatesOn.ALL_RANKS
    # With sharded updates one rank updates each element, so CPUs and GPUs have equal copies.
    if shard_updates:
        storage = make_replica_storage(communicator, shard_updates=True)
    elif (
        isinstance(communicator, DeviceCommunicator)
        and len({device.kind for device in devices}) > 1
    ):
        # A CPU and a GPU round differently: copies that each updates itself would not stay equal.
        storage, updates_on = make_central_storage(communicator, root=0), UpdatesOn.ROOT
    return ReplicaGroup(
        call,
        communicator,
        devices,
        devices[0],
        storage,
        local,
        updates_on=updates_on,
        mirrors=True,
        hosts=hosts,
    )
