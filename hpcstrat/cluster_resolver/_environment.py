"""Clusters from environment variables: TensorFlow's `TF_CONFIG`, and those of a Slurm step."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, final

from hpcstrat._process.launchers import MOST_NODES, MOST_TASKS, expand_tasks
from hpcstrat.cluster_resolver._resolver import ClusterResolver, ClusterSpec, url, visible_gpus

_PIECE = re.compile(r"\[(?P<ranges>[0-9,-]+)\]|(?P<text>[^\[\],\s]+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,18})(?:-(?P<last>[0-9]{1,18}))?")

_Item = TypeVar("_Item")


@final
class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable `TF_CONFIG`, in JSON, on every use.

    A value is, for instance,
    `{"cluster": {"worker": ["n1:8888", "n2:8888"]}, "task": {"type": "worker", "index": 0}}`;
    `"rpc_layer"` and `"session_master"` are read too. Without the variable the cluster is empty.

    Args:
        task_type: the name of this process's job, instead of the variable's.
        task_id: this process's index in it, instead of the variable's.
        rpc_layer: the protocol that `master` puts before addresses, instead of the variable's.
        environment: the value of `environment`.

    Every method that reads the variable raises `ValueError` if it is not a JSON object, or a member
    has a wrong type.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer)
        self._environment = environment
        self._find = {
            "task_type": _task_type,
            "task_id": _task_id,
            "rpc_layer": functools.partial(_member, "rpc_layer", None, str, "a string"),
        }

    def cluster_spec(self) -> ClusterSpec:
        """The jobs and their tasks; empty if the variable names no job.

        Raises:
            ValueError: it is not an object of jobs, each a list of addresses or an object.
        """
        try:
            return ClusterSpec(_member("cluster", {}, object, "an object"))
        except (TypeError, ValueError) as error:
            raise ValueError(
                'TFConfigClusterResolver: TF_CONFIG: its "cluster" is not like '
                f'{{"worker": ["n1:8888"]}}. {error}'
            ) from error

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """The variable's `"session_master"`, else the address of the task.

        Empty if the cluster has a single task.

        Raises:
            ValueError: there is no such task, or neither the caller nor the variable names a task.
        """
        session_master = _member("session_master", None, str, "a string")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        # As in TensorFlow: a single task needs no master.
        if not spec or (len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1):
            return ""
        task_type, task_id = self._task(task_type, task_id)
        if task_type is None or task_id is None:
            raise ValueError(
                "TFConfigClusterResolver.master: TF_CONFIG does not say which task this is; add "
                '"task": {"type": "worker", "index": 0} to it, or pass task_type and task_id'
            )
        address = spec.task_address(task_type, task_id)
        return url(address, self.rpc_layer if rpc_layer is None else rpc_layer)


def _member(name: str, default: Any, kind: type, like: str) -> Any:
    """A member of the object in `TF_CONFIG`, or the default if it is missing."""
    text = os.environ.get("TF_CONFIG", "{}")
    try:
        config = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(
            f"TF_CONFIG is not JSON ({error}): {text!r:.200}. Correct it, or unset it"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            'TF_CONFIG must be an object in JSON, such as {"cluster": ..., "task": ...}; '
            f"it is {text!r:.200}"
        )
    value = config.get(name, default)
    if value is not default and not isinstance(value, kind):
        raise ValueError(f'TF_CONFIG: its "{name}" is {value!r:.50}; it must be {like}')
    return value


def _task(name: str) -> Any:
    return _member("task", {}, dict, 'like {"type": "worker", "index": 0}').get(name)


def _task_type() -> str | None:
    job = _task("type")
    return None if job is None else str(job)


def _task_id() -> int | None:
    index = _task("index")
    if index is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", str(index)):  # refuses `True` and 1.5 too
        raise ValueError(
            f'TF_CONFIG: the "index" of its "task" is {index!r:.50}; it must be a number, from 0 up'
        )
    return int(index)


@final
class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that `srun` sets for each task of a step.

    Needs no Slurm command, and starts no MPI.

    As in TensorFlow, tasks are numbered by the *names* of their nodes in alphabetical order (`n10`
    before `n9`); a node's tasks have the ports `port_base`, `port_base + 1` and so on; and jobs
    take their tasks in the order of the jobs' names. If the node list has another order, a task's
    address is not that of the node on which it runs.

    Unlike TensorFlow's resolver, it knows from the start which task this is, and it never changes
    `CUDA_VISIBLE_DEVICES`: a strategy assigns each rank a visible GPU, and the GPUs of the host's
    other ranks must stay visible for direct transfers between GPUs. TensorFlow's also counts GPUs
    from 0, whatever GPUs Slurm allowed the task.

    It reads `SLURM_PROCID` and, unless arguments replace them, `SLURM_STEP_NUM_TASKS`,
    `SLURM_STEP_NODELIST`, `SLURM_STEP_TASKS_PER_NODE` and `CUDA_VISIBLE_DEVICES`.

    Args:
        jobs: the number of tasks of each job; by default all are workers.
        port_base: the port of the first task of each node.
        gpus_per_node: by default the number of visible GPUs. If the node has more tasks than that,
            the launcher shows each task its own GPUs, or tasks share them: then all visible GPUs
            count as the task's.
        gpus_per_task: by default the node's GPUs, divided by the tasks of the node with most tasks.
        tasks_per_node: a number for all nodes, or a dict from node names; by default Slurm's
            numbers.
        auto_set_gpu: ignored; in TensorFlow the resolver then sets `CUDA_VISIBLE_DEVICES`.
        rpc_layer: the protocol that `master` puts before addresses.

    Raises:
        RuntimeError: a variable is missing or malformed, the jobs and the nodes have different
            numbers of tasks, or the tasks need more GPUs than a node has.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        # Variables of the step, not of the job: a job may run several steps with fewer tasks.
        rank = _number("SLURM_PROCID")
        jobs = {"worker": _number("SLURM_STEP_NUM_TASKS")} if jobs is None else dict(jobs)
        nodes = _tasks_per_node(tasks_per_node)
        _check_tasks(jobs, nodes, rank)
        gpus = _gpus_per_task(gpus_per_node, gpus_per_task, max(nodes.values()))
        self._accelerators = {"GPU": gpus}
        addresses = (
            f"{node}:{port_base + number}"
            for node, tasks in sorted(nodes.items())
            for number in range(tasks)
        )
        self._cluster = {
            job: [*itertools.islice(addresses, tasks)] for job, tasks in sorted(jobs.items())
        }
        numbered = ((job, i) for job, tasks in sorted(jobs.items()) for i in range(tasks))
        super().__init__(*next(itertools.islice(numbered, rank, None)), rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """The jobs, with the addresses of their tasks."""
        return ClusterSpec(self._cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The name of this task's job and its index in it."""
        return self.task_type, self.task_id


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise RuntimeError(
            f"SlurmClusterResolver: {name} is not set, so this is not a Slurm step; start the "
            "program with `srun python train.py`, or use MPIClusterResolver"
        )
    return value


def _number(name: str) -> int:
    value = _variable(name)
    if not re.fullmatch("[0-9]{1,18}", value) or int(value) > MOST_TASKS:
        raise RuntimeError(
            f"SlurmClusterResolver: {name} is {value!r:.50}; it must be a number from 0 up, as "
            "srun sets it"
        )
    return int(value)


def _tasks_per_node(given: int | Mapping[str, int] | None) -> dict[str, int]:
    """The number of tasks by node."""
    if isinstance(given, Mapping):
        return dict(given)
    nodes = _expand("SLURM_STEP_NODELIST", expand_nodes)
    if given is not None:
        return dict.fromkeys(nodes, int(given))
    tasks = _expand("SLURM_STEP_TASKS_PER_NODE", expand_tasks)
    # A node that is named twice has one entry in the list of tasks.
    if len(tasks) != len(set(nodes)):
        raise RuntimeError(
            f"SlurmClusterResolver: SLURM_STEP_NODELIST names {len(set(nodes))} nodes "
            f"({', '.join(nodes):.200}), and SLURM_STEP_TASKS_PER_NODE gives the tasks of "
            f"{len(tasks)} ({', '.join(map(str, tasks)):.200}); start the program with `srun`, "
            "which sets both, or pass tasks_per_node"
        )
    return dict(zip(dict.fromkeys(nodes), tasks, strict=True))


def _expand(name: str, expand: Callable[[str], list[_Item]]) -> list[_Item]:
    try:
        return expand(_variable(name))
    except ValueError as error:
        raise RuntimeError(
            f"SlurmClusterResolver: {name}: {error}; start the program with `srun`, which sets it"
        ) from error


def _check_tasks(jobs: dict[str, int], tasks_per_node: dict[str, int], rank: int) -> None:
    wanted, there = sum(jobs.values()), sum(tasks_per_node.values())
    if wanted != there or not there:
        raise RuntimeError(
            f"SlurmClusterResolver: the jobs have {wanted} tasks ({jobs}), and the nodes run "
            f"{there} ({tasks_per_node!s:.200}); start as many as the jobs have with "
            f"`srun --ntasks={wanted}`"
        )
    if rank >= there:
        raise RuntimeError(
            f"SlurmClusterResolver: SLURM_PROCID is {rank}, and there are {there} tasks, from 0 "
            "up; start the program with `srun`, which sets both"
        )


def _gpus_per_task(per_node: int | None, per_task: int | None, most_tasks: int) -> int:
    """Returns the number of GPUs of each task, after a check that there are enough."""
    gpus = visible_gpus() if per_node is None else per_node
    if per_node is None and per_task is None and gpus < most_tasks:
        return gpus  # this task's own, or shared
    needed = min(gpus, 1) if per_task is None else per_task
    if most_tasks * needed > gpus:
        raise RuntimeError(
            f"SlurmClusterResolver: a node runs {most_tasks} tasks of {needed} GPUs, but has "
            f"{gpus}; start fewer with `srun --ntasks-per-node`, or pass gpus_per_node and "
            "gpus_per_task"
        )
    return gpus // most_tasks if per_task is None else per_task


def expand_nodes(nodes: str) -> list[str]:
    """The names of the nodes, in Slurm's order, as `scontrol show hostnames` prints them.

    A name may have several ranges, and text after them, which TensorFlow refuses. The last range
    varies fastest, then the first, the second and so on.

    Args:
        nodes: a list such as `"n[1-2],gpu[08-10]-ib0"`.

    Raises:
        ValueError: `nodes` is not such a list.

    >>> expand_nodes("n[1-2],p[0,07]x[3-4]y")
    ['n1', 'n2', 'p0x3y', 'p0x4y', 'p07x3y', 'p07x4y']
    """
    names: list[str] = []
    for name in re.findall(r"(?:\[[^\[\]]*\]|[^,])+", nodes):
        pieces = list(_PIECE.finditer(name))
        if "".join(piece[0] for piece in pieces) != name:
            raise ValueError(
                f"{nodes!r:.200} is not a Slurm node list: {name!r:.50} is not like n1 or n[1-3,7]"
            )
        choices = [
            _numbers(nodes, piece["ranges"]) if piece["ranges"] else [piece["text"]]
            for piece in pieces
        ]
        if len(choices) > 1 and not pieces[-1]["ranges"]:
            [end] = choices.pop()
            choices[-1] = [number + end for number in choices[-1]]
        if len(names) + math.prod(map(len, choices)) > MOST_NODES:
            raise ValueError(
                f"{nodes!r:.200} is not a Slurm node list: it has more than {MOST_NODES} nodes"
            )
        *others, last = choices
        names += [
            "".join([*first[::-1], end]) for *first, end in itertools.product(*others[::-1], last)
        ]
    return names


def _numbers(nodes: str, ranges: str) -> list[str]:
    """The numbers of `1-3,07`, padded with zeros to the width of their range's first number."""
    numbers: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        first, last = (match["first"], match["last"] or match["first"]) if match else ("1", "0")
        if not 0 <= int(last) - int(first) < MOST_NODES - len(numbers):
            raise ValueError(
                f"{nodes!r:.200} is not a Slurm node list: {text!r:.50} is not like 7 or 1-3, of "
                f"{MOST_NODES} nodes at most"
            )
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
