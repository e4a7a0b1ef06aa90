"""MirroredStrategy and MultiWorkerMirroredStrategy: variables are equal on all replicas."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from hpcstrat._core import device_names
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._process import worlds
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage import make_storage
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.placement import place
from hpcstrat._transports.connection import disconnect_on_error
from hpcstrat._transports.verbs import Communicator


class MirroredStrategy(Strategy):
    """One replica per rank, on one host; variables are mirrored: equal on all replicas.

    Each GPU has its own copy of a variable. On CPUs the ranks share one, and each updates a slice.
    `ON_READ` variables are separate on each replica. Collective: all ranks construct it. The first
    strategy of a program starts MPI.

    Args:
        devices: the device of each rank, in rank order. By default rank i gets the host's GPU i; on
            a host without GPUs all ranks use the CPU.
        cross_device_ops: ignored; accepted for compatibility with TensorFlow.

    Raises:
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
        self, devices: Sequence[str] | None = None, cross_device_ops: object = None
    ) -> None:
        del cross_device_ops
        super().__init__(make_mirrored_group(*place(devices)))


class MultiWorkerMirroredStrategy(Strategy):
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
        cluster_resolver: ignored; accepted for compatibility with TensorFlow. MPI tells the hosts.
        communication_options: ignored; accepted for compatibility with TensorFlow.

    Raises:
        RuntimeError: there are more ranks than GPUs on a host, only some hosts have GPUs, there are
            GPUs and CuPy is not installed, several GPUs cannot use NCCL, or MPI cannot start.

    Examples:
        With one rank on one host; with 8 ranks on each of 2 hosts, there would be 16 replicas:

        >>> import hpcstrat as hs
        >>> strategy = hs.MultiWorkerMirroredStrategy()
        >>> strategy.num_replicas_in_sync
        1
        >>> resolver = strategy.cluster_resolver
        >>> resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")
        ('worker', 0, 1)
    """

    @names_call("MultiWorkerMirroredStrategy")
    def __init__(
        self, cluster_resolver: object = None, communication_options: object = None
    ) -> None:
        del cluster_resolver, communication_options
        devices, communicator = place(is_one_host=False)
        hosts = worlds.start().hosts
        with disconnect_on_error(communicator), communicator.raise_together():
            names = communicator.all_gather_obj(socket.gethostname())
        spec = ClusterSpec(tuple(names[hosts.index(host)] for host in sorted(set(hosts))))
        self._resolver = ClusterResolver(spec, hosts[communicator.rank])
        super().__init__(make_mirrored_group(devices, communicator, hosts))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The hosts, in the order of their first ranks: the tasks of the job `"worker"`.

        It has `task_type`, which is `"worker"`; `task_id`, the index of this rank's host; and
        `cluster_spec()`, with `as_dict()`, the names of the hosts, `num_tasks("worker")` and
        `jobs`. Nothing on it communicates.
        """
        return self._resolver


@final
@dataclass(frozen=True)
class ClusterSpec:
    """The names of the hosts, as TensorFlow's class of this name has them."""

    hosts: tuple[str, ...]

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs: only `"worker"`."""
        return ["worker"]

    def as_dict(self) -> dict[str, list[str]]:
        """The names of the hosts by job."""
        return {"worker": [*self.hosts]}

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of a job; ValueError if it is not `"worker"`."""
        if job_name != "worker":
            raise ValueError(f"ClusterSpec.num_tasks: job_name is {job_name!r}; pass 'worker'")
        return len(self.hosts)


@final
@dataclass(frozen=True)
class ClusterResolver:
    """The hosts, and which of them this rank is on."""

    spec: ClusterSpec
    task_id: int
    task_type: str = "worker"

    def cluster_spec(self) -> ClusterSpec:
        """The hosts."""
        return self.spec


def make_mirrored_group(
    devices: Sequence[device_names.Device],
    communicator: Communicator,
    hosts: Sequence[int] = (),
) -> ReplicaGroup:
    """Makes the group of placed and connected replicas that mirror variables. Collective."""
    storage = make_storage(communicator)
    name = current_call()
    return ReplicaGroup(name, communicator, devices, devices[0], storage, mirrors=True, hosts=hosts)
