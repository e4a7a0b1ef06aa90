"""A cluster from MPI: the hosts that the ranks run on."""

from __future__ import annotations

import functools
import socket
from typing import Any, NamedTuple, final

from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import names_call
from hpcstrat._process import driver, worlds
from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec
from hpcstrat.cluster_resolver._resolver import ClusterResolver


@final
class MPIClusterResolver(ClusterResolver):
    """The hosts that `mpirun` or `srun` started the ranks on: each host is a task, a worker.

    It needs no variables and no arguments. An address is the host's name, without a port, because
    nothing listens there. With a single rank, with or without MPI, the cluster is this host.

    Constructing a resolver starts nothing. The first use of `cluster_spec`, `task_id`, `master` or
    `num_accelerators` is collective: all ranks take part, and MPI starts unless it runs already; if
    it cannot start, that raises a RuntimeError. Later uses do not communicate.

    Attributes:
        task_type: always `"worker"`, unless set.
        task_id: the index of this rank's host, in the order of the hosts' first ranks, unless set.
    """

    def __init__(self) -> None:
        super().__init__(task_type="worker")

    def cluster_spec(self) -> ClusterSpec:
        """The job `"worker"`, with the name of each host. Collective on first use.

        Raises:
            RuntimeError: MPI cannot start.
        """
        return ClusterSpec({"worker": [host.name for host in _hosts()]})

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs that the ranks of a host see together: `{"GPU": 4}`.

        Collective on first use.

        Raises:
            ValueError: there is no such task.
            RuntimeError: MPI cannot start.
        """
        task_type, task_id = self._or_own(task_type, task_id)
        self.cluster_spec().task_address(str(task_type), task_id or 0)
        return {"GPU": _hosts()[task_id or 0].gpus}

    def _find_task_id(self) -> int:
        _hosts()  # connects the ranks, so that each learns its host
        world = worlds.start()
        return world.hosts[world.rank]


class _Host(NamedTuple):
    name: str
    gpus: int


@functools.cache
@names_call("MPIClusterResolver")
def _hosts() -> list[_Host]:
    """The hosts, in the order of their first ranks. Collective, once."""
    communicator = connect()
    with communicator.raise_together():
        by_rank = communicator.all_gather_obj((socket.gethostname(), driver.visible_gpus()))
    hosts = worlds.start().hosts
    # By unique id: ranks may see the same GPUs, or each only its own if the launcher hides others.
    names: dict[int, str] = {}
    gpus: dict[int, set[str]] = {}
    for host, (name, visible) in zip(hosts, by_rank, strict=True):
        names.setdefault(host, name)
        gpus.setdefault(host, set()).update(visible)
    return [_Host(names[host], len(gpus[host])) for host in sorted(names)]
