"""MultiWorkerMirroredStrategy: ranks on any number of hosts, a copy of every variable on each replica."""

from __future__ import annotations

from typing import Any

from hpcstrat import _world
from hpcstrat._edge import current_call, names_call
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.mirrored import MirroredStrategy, mirrored_group
from hpcstrat._strategies.placement import place_on_hosts
from hpcstrat.cluster_resolver import ClusterResolver, MPIClusterResolver


class MultiWorkerMirroredStrategy(MirroredStrategy):
    """One replica a rank, on any number of hosts; each holds a copy of every variable, and all copies change alike.

    A worker is a host. Reductions run within each host first, then across hosts, one message per host. The script is
    still one program, as if one worker ran it: every rank runs all its lines. Workers differ only in their own data:
    `experimental_local_results` gives the components of this host's replicas, and `distribute_datasets_from_function`
    one pipeline a host. `experimental_distribute_dataset` takes the same dataset on all hosts, and each replica reads
    its own elements only.

    Collective: all ranks make it. The first strategy of a program starts MPI.

    Args:
        cluster_resolver: says which worker this process belongs to; by default MPI does. It must agree with MPI on the
            number of hosts.
        communication_options: taken for TensorFlow's sake.

    Raises:
        TypeError: `cluster_resolver` is neither None nor a `ClusterResolver`.
        RuntimeError: the resolver knows of another number of workers than there are hosts, there are more ranks than
            GPUs on a host, or MPI or NCCL cannot start.
    """

    @names_call("MultiWorkerMirroredStrategy")
    def __init__(self, cluster_resolver: ClusterResolver | None = None, communication_options: Any = None) -> None:
        del communication_options
        call = current_call()
        devices, communicator = place_on_hosts()
        world = _world.start()
        group = mirrored_group(devices, communicator, world.hosts)
        Strategy.__init__(self, group)  # not MirroredStrategy's, which places the ranks on one host
        with communicator.raise_together():
            if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
                raise TypeError(
                    f"{call}: cluster_resolver is {cluster_resolver!r}; pass one of hpcstrat.cluster_resolver, or None"
                )
            self._resolver = MPIClusterResolver() if cluster_resolver is None else cluster_resolver
            if cluster_resolver is not None:
                spec = cluster_resolver.cluster_spec().as_dict()
                tasks = sum(len(tasks) for tasks in spec.values())
                if tasks not in (group.workers.count, world.size):
                    raise RuntimeError(
                        f"{call}: the cluster_resolver knows {tasks} tasks ({spec}), and the {world.size} ranks run on "
                        f"{group.workers.count} hosts; omit it, or make it name every host once"
                    )
            communicator.barrier()
        if cluster_resolver is None:
            # The first call is collective. It is made here, so that later one rank may ask alone.
            self._resolver.cluster_spec()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that was passed, or one of MPI's."""
        return self._resolver
