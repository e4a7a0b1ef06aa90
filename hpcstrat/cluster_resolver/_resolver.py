"""The interface of cluster resolvers, and two that the program fills itself."""

from __future__ import annotations

import abc
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, final

from hpcstrat._process import driver
from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Tells the tasks of the job, their addresses, and which task this process is.

    A subclass implements `cluster_spec` and passes what it knows about this process to the
    constructor.

    Attributes:
        task_type: the name of this process's job in the cluster, such as `"worker"`; `None` if
            unknown.
        task_id: this process's index in that job; `None` if unknown.
        rpc_layer: the protocol that `master` puts before addresses, such as `"grpc"`; `None` or
            empty for no protocol.
    """

    def __init__(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The jobs and the addresses of their tasks, as they are now."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of a task, with its protocol; empty if no task is named.

        Args:
            task_type: the task's job; by default this process's, if known.
            task_id: its index in the job; by default this process's, if known.
            rpc_layer: the protocol; by default the resolver's.

        Raises:
            ValueError: there is no such task.
        """
        task_type, task_id = self._or_own(task_type, task_id)
        if task_type is None or task_id is None:
            return ""
        return url(
            self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs of a task: `{"GPU": 4}`; empty if there are none or they are unknown.

        Only this process's GPUs are known. A missing kind counts as 0.

        Args:
            task_type: the task's job; by default this process's.
            task_id: its index in the job; by default this process's.
            config_proto: unused; TensorFlow has it.
        """
        # Another task's GPUs are on a host that this process cannot ask.
        is_other = task_type not in (None, self.task_type) or task_id not in (None, self.task_id)
        devices: dict[str, int] = defaultdict(int)  # as in TensorFlow: "GPU" is 0 without GPUs
        gpus = 0 if is_other else visible_gpus()
        if gpus:
            devices["GPU"] = gpus
        return devices

    @property
    def environment(self) -> str | None:
        """Where the program runs, such as `"google"` in TensorFlow; empty here."""
        return ""

    # A subclass whose answers depend on its environment overrides `_find_...`, not the properties:
    # values that the user passed or set take precedence everywhere.

    @property
    def task_type(self) -> str | None:
        """The name of this process's job in the cluster; `None` if unknown."""
        return self._find_task_type() if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's index in its job; `None` if unknown."""
        return self._find_task_id() if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` puts before addresses; `None` or empty for no protocol."""
        return self._find_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _find_task_type(self) -> str | None:
        return None

    def _find_task_id(self) -> int | None:
        return None

    def _find_rpc_layer(self) -> str | None:
        return None

    def _or_own(self, task_type: str | None, task_id: int | None) -> tuple[str | None, int | None]:
        """The task; what is missing is taken from this process's task."""
        return (
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
        )


@final
class SimpleClusterResolver(ClusterResolver):
    """Returns the cluster that the program passes.

    Args:
        cluster_spec: the jobs and their tasks.
        master: the result of `master` without a task.
        task_type: the name of this process's job.
        task_id: this process's index in it.
        environment: the value of `environment`.
        num_accelerators: the number of devices of each kind that each task has, such as
            `{"GPU": 8}`.
        rpc_layer: the protocol that `master` puts before addresses.

    Raises:
        TypeError: `cluster_spec` is not a `ClusterSpec`, or `master` is not a string.

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
                f"SimpleClusterResolver: cluster_spec is {cluster_spec!r}; pass a ClusterSpec, "
                'such as ClusterSpec({"worker": ["n1:8888", "n2:8888"]})'
            )
        if not isinstance(master, str):
            raise TypeError(f"SimpleClusterResolver: master is {master!r}; it must be a string")
        self._cluster_spec = cluster_spec
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """The cluster passed to the constructor."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of a task if its job and index are given, else `master` as constructed."""
        if task_type is None or task_id is None:
            return url(self._master, rpc_layer or self.rpc_layer)
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The devices passed to the constructor, the same for every task; empty by default."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """Where the program runs, as passed to the constructor."""
        return self._environment


@final
class UnionResolver(ClusterResolver):
    """The tasks of several resolvers together; everything else comes from the first resolver.

    Args:
        *resolvers: at least one resolver.
        rpc_layer: the protocol for `master`, instead of the first resolver's.
        task_type: the name of this process's job, instead of the first resolver's.
        task_id: this process's index in it, instead of the first resolver's. (0 counts; TensorFlow
            ignores it.)

    Raises:
        TypeError: an argument is not a `ClusterResolver`.
        ValueError: no resolver was passed.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer or None)
        if not resolvers:
            raise ValueError("UnionResolver: pass at least one ClusterResolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"UnionResolver: {resolver!r} is not a ClusterResolver; pass one of "
                    "hpcstrat.cluster_resolver"
                )
        self._resolvers = resolvers

    def cluster_spec(self) -> ClusterSpec:
        """All jobs. Tasks of a job in several resolvers are concatenated.

        Numbered tasks keep their numbers.

        Raises:
            KeyError: a resolver has only some indices of a job, and two resolvers have the same
                index.
        """
        lists: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                lists.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merge(job, tasks) for job, tasks in lists.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of a task if its job and index are given, else the first resolver's master.

        A task's address has the protocol passed here or to the constructor, not the first
        resolver's.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        return url(
            self.cluster_spec().task_address(task_type, task_id), rpc_layer or self._rpc_layer
        )

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The first resolver's value."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The first resolver's value."""
        return self._resolvers[0].environment

    def _find_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _find_task_id(self) -> int | None:
        return self._resolvers[0].task_id

    def _find_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer


def url(address: str, rpc_layer: str | None) -> str:
    """Puts the protocol, if any, before the address."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def visible_gpus() -> int:
    """The number of GPUs that this process may use.

    Opens no GPU, and starts neither MPI nor CuPy.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len(driver.visible_gpus())


def _merge(job: str, lists: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Concatenates the tasks if all are lists; else merges them by index."""
    dense = [tasks for tasks in lists if isinstance(tasks, list)]
    if len(dense) == len(lists):
        return [task for tasks in dense for task in tasks]
    merged: dict[int, str] = {}
    for tasks in lists:
        numbered = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        twice = sorted(merged.keys() & numbered.keys())
        if twice:
            raise KeyError(
                f"UnionResolver: two resolvers give task {twice[0]} of job {job!r}; give them "
                "different numbers"
            )
        merged.update(numbered)
    return merged
