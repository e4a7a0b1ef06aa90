"""Several clusters as one."""

from __future__ import annotations

from typing import Any, final

from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec
from hpcstrat.cluster_resolver._resolver import ClusterResolver, url


@final
class UnionResolver(ClusterResolver):
    """The tasks of several resolvers together; everything else is what the first of them says.

    Args:
        *resolvers: at least one.
        rpc_layer: the protocol for `master`, instead of the first resolver's.
        task_type: the name of this process's job, instead of the first resolver's.
        task_id: this process's number in it, instead of the first resolver's. (0 counts; TensorFlow ignores it.)

    Raises:
        TypeError: one of them is no `ClusterResolver`.
        ValueError: there is none.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        if not resolvers:
            raise ValueError("UnionResolver: pass at least one ClusterResolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"UnionResolver: {resolver!r} is no ClusterResolver; pass one of hpcstrat.cluster_resolver"
                )
        self._resolvers = resolvers

    def cluster_spec(self) -> ClusterSpec:
        """All jobs. The tasks of one that several resolvers have follow each other, or keep their numbers.

        Raises:
            KeyError: one of them gives only some numbers of the job, and two give the same one.
        """
        lists: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                lists.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merged(job, parts) for job, parts in lists.items()})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task where both its arguments are given, else the first resolver's master.

        Args:
            task_type: the task's job.
            task_id: its number in the job.
            rpc_layer: the protocol; by default, for a task that is given, the one given to the union.

        Raises:
            ValueError: there is no such task.
            KeyError: as `cluster_spec`.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return url(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self._rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """What the first resolver says.

        Args:
            task_type: the task's job; by default this process's.
            task_id: its number in the job; by default this process's.
            config_proto: unused; TensorFlow has it.
        """
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """What the first resolver says."""
        return self._resolvers[0].environment

    @property
    def task_type(self) -> str | None:
        """The name of this process's job: what was set, else what the first resolver says."""
        return self._resolvers[0].task_type if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's number in its job: what was set, else what the first resolver says."""
        return self._resolvers[0].task_id if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol: what was set, else what the first resolver says."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """The parts one after the other where all are lists; else by number."""
    together = [task for part in parts if isinstance(part, list) for task in part]
    if all(isinstance(part, list) for part in parts):
        return together
    merged: dict[int, str] = {}
    for part in parts:
        numbered = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & numbered.keys())
        if twice:
            raise KeyError(f"UnionResolver: two resolvers give task {twice[0]} of job {job!r}; number them apart")
        merged.update(numbered)
    return merged
