"""Clusters, the interface of their resolvers, those that the program fills itself, and MPI's."""

from __future__ import annotations

import abc
import functools
import operator
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

from hpcstrat._core import gpu
from hpcstrat._core.call_name import names_call
from hpcstrat._process import worlds
from hpcstrat._process.launchers import MOST_TASKS
from hpcstrat._transports.connection import connect

Tasks: TypeAlias = "Sequence[str] | Mapping[int, str] | Mapping[str, str]"
"""The addresses of tasks 0, 1, ..., or a mapping from task numbers, or their text, to addresses."""


@final
class ClusterSpec:
    """The tasks of a cluster in named jobs: `tf.train.ClusterSpec` without protocol buffers.

    Args:
        cluster: for each job its tasks' addresses, usually `"host:port"`: a list, or a dict from
            their numbers if some are unknown; or another `ClusterSpec`.

    Raises:
        TypeError: `cluster` is something else.
        ValueError: a task's number is negative, or not a number.

    Examples:
        >>> spec = ClusterSpec({"worker": ["n1:8888", "n2:8888"], "ps": {3: "n9:8888"}})
        >>> spec.task_address("worker", 1)
        'n2:8888'
        >>> spec.as_dict()
        {'worker': ['n1:8888', 'n2:8888'], 'ps': {3: 'n9:8888'}}
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = dict(sorted(cluster.as_dict().items()))
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"ClusterSpec: the cluster is {cluster!r}; pass a dict from names of jobs to lists "
                "of addresses"
            )
        self._jobs = {job: _number_tasks(job, tasks) for job, tasks in cluster.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """For each job its tasks' addresses: a list, or a dict by number if some are missing.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"worker": {0: "n1:1", 1: "n2:1"}}).as_dict()
            {'worker': ['n1:1', 'n2:1']}
        """
        return {
            job: [*tasks.values()] if [*tasks] == [*range(len(tasks))] and tasks else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"worker": ["n1:1"], "ps": ["n2:1"]}).jobs
            ['worker', 'ps']
        """
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """The number of the job's known tasks.

        Raises:
            ValueError: there is no such job.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"ps": {3: "n9:1"}}).num_tasks("ps")
            1
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The numbers of the job's known tasks, ascending.

        Raises:
            ValueError: there is no such job.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"ps": {3: "n9:1", 1: "n7:1"}}).task_indices("ps")
            [1, 3]
        """
        return [*self._job(job_name)]

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of a task.

        Raises:
            ValueError: there is no such job, or no such task in it.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"ps": {3: "n9:1"}}).task_address("ps", 3)
            'n9:1'
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(
                f"ClusterSpec.task_address: No task with index {task_index!r} in job {job_name!r}; "
                f"there are {', '.join(map(str, tasks))}; pass one of these"
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of the job's tasks by number; `None` if unknown.

        Raises:
            ValueError: there is no such job.

        Examples:
            >>> hs.cluster_resolver.ClusterSpec({"ps": {1: "n7:1"}}).job_tasks("ps")
            [None, 'n7:1']
        """
        tasks = self._job(job_name)
        return [tasks.get(number) for number in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            there = ", ".join(map(repr, self._jobs)) or "none"
            raise ValueError(
                f"ClusterSpec: No such job in cluster: {name!r}; there are {there}; pass one of "
                "these"
            )
        return self._jobs[name]


def _number_tasks(job: str, tasks: Tasks) -> dict[int, str]:
    """Returns the tasks of a job by ascending number, after checks."""
    if not isinstance(job, str):
        raise TypeError(f"ClusterSpec: the name of a job is {job!r}; it must be a string")
    if not isinstance(tasks, list | tuple | Mapping):
        raise TypeError(
            f"ClusterSpec: the tasks of job {job!r} are {tasks!r}; pass a list of addresses, or a "
            "dict from numbers"
        )
    numbered: dict[int, str] = {}
    for number, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
        try:
            index = int(number)  # JSON has text for keys, so numbers in `TF_CONFIG` may be text
        except (OverflowError, TypeError, ValueError):
            index = -1
        if not 0 <= index < MOST_TASKS:
            raise ValueError(
                f"ClusterSpec: a task of job {job!r} has the number {number!r:.50}; it must be 0, "
                f"1, ... below {MOST_TASKS}"
            )
        if not isinstance(address, str):
            raise TypeError(
                f"ClusterSpec: an address in job {job!r} is {address!r}; it must be a string"
            )
        numbered[index] = address
    return dict(sorted(numbered.items()))


def _given_or_found(name: str, doc: str) -> Any:
    """A property: what the program has passed or set, else what `_find` finds now."""

    def get(resolver: ClusterResolver) -> Any:
        given = resolver._given[name]
        return resolver._find[name]() if given is None and name in resolver._find else given

    def put(resolver: ClusterResolver, value: Any) -> None:
        resolver._given[name] = value

    return property(get, put, doc=doc)


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

    _find: Mapping[str, Callable[[], Any]] = {}
    """How to find the attributes that depend on the environment, by name."""
    _environment: str | None = ""
    _accelerators: Mapping[str, int] | None = None
    """The devices of each task, if they are known."""

    task_type: str | None = _given_or_found("task_type", "The name of this process's job.")
    task_id: int | None = _given_or_found("task_id", "This process's index in its job.")
    rpc_layer: str | None = _given_or_found("rpc_layer", "The protocol of addresses.")

    def __init__(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> None:
        self._given = {"task_type": task_type, "task_id": task_id, "rpc_layer": rpc_layer}

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The jobs and the addresses of their tasks, as they are now.

        Examples:
            >>> spec = hs.cluster_resolver.ClusterSpec({"worker": ["n1:1", "n2:1"]})
            >>> hs.cluster_resolver.SimpleClusterResolver(spec).cluster_spec()
            ClusterSpec({'worker': ['n1:1', 'n2:1']})
        """

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

        Examples:
            >>> class TwoHosts(hs.cluster_resolver.ClusterResolver):
            ...     def cluster_spec(self):
            ...         return hs.cluster_resolver.ClusterSpec({"worker": ["n1:1", "n2:1"]})
            >>> resolver = TwoHosts("worker", 1, rpc_layer="grpc")
            >>> resolver.master(), resolver.master(task_id=0, rpc_layer="http")
            ('grpc://n2:1', 'http://n1:1')
        """
        task_type, task_id = self._task(task_type, task_id)
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs of a task: `{"GPU": 4}`; empty if there are none or they are unknown.

        Only this process's GPUs are known, unless the resolver was made with each task's devices. A
        missing kind counts as 0.

        Args:
            task_type: the task's job; by default this process's.
            task_id: its index in the job; by default this process's.
            config_proto: unused; TensorFlow has it.

        Examples:
            >>> class OneHost(hs.cluster_resolver.ClusterResolver):
            ...     def cluster_spec(self):
            ...         return hs.cluster_resolver.ClusterSpec({"worker": ["n1:1", "n2:1"]})
            >>> OneHost("worker", 0).num_accelerators("worker", 1)["GPU"]  # another task's: unknown
            0
        """
        if self._accelerators is not None:
            return dict(self._accelerators)
        # Another task's GPUs are on a host that this process cannot ask.
        is_own = self._task(task_type, task_id) == (self.task_type, self.task_id)
        gpus = visible_gpus() if is_own else 0
        # As in TensorFlow: "GPU" is 0 without GPUs.
        return defaultdict(int, {"GPU": gpus} if gpus else {})

    def _task(self, task_type: str | None, task_id: int | None) -> tuple[str | None, int | None]:
        """The task that a caller names; by default this process's."""
        return (
            self.task_type if task_type is None else task_type,
            self.task_id if task_id is None else task_id,
        )

    @property
    def environment(self) -> str | None:
        """Where the program runs, such as `"google"` in TensorFlow; empty unless passed.

        Examples:
            >>> spec = hs.cluster_resolver.ClusterSpec({"worker": ["n1:1"]})
            >>> hs.cluster_resolver.SimpleClusterResolver(spec, environment="google").environment
            'google'
        """
        return self._environment


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
        self._cluster_spec, self._master, self._environment = cluster_spec, master, environment
        self._accelerators = dict(num_accelerators or {})

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
        self._resolvers, first = resolvers, resolvers[0]
        self._environment = first.environment
        self._find = {
            name: functools.partial(operator.attrgetter(name), first) for name in self._given
        }

    def cluster_spec(self) -> ClusterSpec:
        """All jobs. Tasks of a job in several resolvers are concatenated.

        Numbered tasks keep their numbers.

        Raises:
            KeyError: a resolver has only some indices of a job, and two resolvers have the same
                index.
        """
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                parts[job].append(tasks)
        return ClusterSpec({job: _merge(job, tasks) for job, tasks in parts.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The address of a task if its job and index are given, else the first resolver's master.

        A task's address has the protocol passed here or to the constructor, not the first
        resolver's.
        """
        if task_type is None or task_id is None:
            return self._resolvers[0].master(rpc_layer=rpc_layer)
        address = self.cluster_spec().task_address(task_type, task_id)
        return url(address, rpc_layer or self._given["rpc_layer"])

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The first resolver's value."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merge(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Concatenates the tasks if all are lists; else merges them by index."""
    lists = [tasks for tasks in parts if isinstance(tasks, list)]
    if len(lists) == len(parts):
        return [task for tasks in lists for task in tasks]
    merged: dict[int, str] = {}
    for tasks in parts:
        numbered = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        if twice := merged.keys() & numbered.keys():
            raise KeyError(
                f"UnionResolver: two resolvers give task {min(twice)} of job {job!r}; give them "
                "different numbers"
            )
        merged |= numbered
    return merged


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
        self._find = {"task_id": _own_host}

    def cluster_spec(self) -> ClusterSpec:
        """The job `"worker"`, with the name of each host. Collective on first use.

        Raises:
            RuntimeError: MPI cannot start.
        """
        return ClusterSpec({"worker": [name for name, _ in _hosts()]})

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs that the ranks of a host see together: `{"GPU": 4}`.

        Collective on first use.

        Raises:
            ValueError: there is no such task.
            RuntimeError: MPI cannot start.
        """
        task_type, task_id = self._task(task_type, task_id)
        host = task_id or 0
        self.cluster_spec().task_address(str(task_type), host)
        return {"GPU": _hosts()[host][1]}


@functools.cache
@names_call("MPIClusterResolver")
def _hosts() -> list[tuple[str, int]]:
    """The name and GPUs of each host, in the order of their first ranks. Collective, once."""
    communicator = connect()
    with communicator.raise_together():
        by_rank = communicator.all_gather_obj((socket.gethostname(), gpu.visible_gpus()))
    # By unique id: ranks may see the same GPUs, or each only its own if the launcher hides others.
    hosts: dict[int, tuple[str, set[str]]] = {}
    for host, (name, visible) in zip(worlds.start().hosts, by_rank, strict=True):
        hosts.setdefault(host, (name, set()))[1].update(visible)
    return [(hosts[host][0], len(hosts[host][1])) for host in sorted(hosts)]


def _own_host() -> int:
    _hosts()  # connects the ranks, so that each learns its host
    world = worlds.start()
    return world.hosts[world.rank]


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
    return len(gpu.visible_gpus())
