"""A cluster that the program itself describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec
from hpcstrat.cluster_resolver._resolver import ClusterResolver, url


@final
class SimpleClusterResolver(ClusterResolver):
    """Gives what it was given.

    Args:
        cluster_spec: the jobs and their tasks.
        master: what `master` returns where it is not asked for a task.
        task_type: the name of this process's job.
        task_id: this process's number in it.
        environment: where the program runs.
        num_accelerators: the number of devices of each kind that each task has, such as `{"GPU": 8}`.
        rpc_layer: the protocol that `master` puts before addresses.

    Raises:
        TypeError: `cluster_spec` is no `ClusterSpec`, or `master` no string.

    Examples:
        >>> spec = ClusterSpec({"worker": ["n1:8888", "n2:8888"]})
        >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1, rpc_layer="grpc")
        >>> resolver.master("worker", 0)
        'grpc://n1:8888'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"SimpleClusterResolver: cluster_spec is {cluster_spec!r}; pass a ClusterSpec, such as "
                'ClusterSpec({"worker": ["n1:8888", "n2:8888"]})'
            )
        if not isinstance(master, str):
            raise TypeError(f"SimpleClusterResolver: master is {master!r}; it must be a string")
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """The cluster that it was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task where both its arguments are given, else the master that it was given.

        Args:
            task_type: the task's job.
            task_id: its number in the job.
            rpc_layer: the protocol; by default the resolver's.

        Raises:
            ValueError: there is no such task.
        """
        if task_type is None or task_id is None:
            return url(self._master, rpc_layer or self._rpc_layer)
        return url(self._cluster_spec.task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """What it was given, for every task; empty where that was nothing.

        Args:
            task_type: unused.
            task_id: unused.
            config_proto: unused.
        """
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Where the program runs, as it was given."""
        return self._environment
