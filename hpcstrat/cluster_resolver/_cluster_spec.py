"""The tasks of a job, by name and number, with their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from hpcstrat._process.launchers import MOST_TASKS

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
