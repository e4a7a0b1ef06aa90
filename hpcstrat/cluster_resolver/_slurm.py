"""A cluster from what Slurm tells each task of a step."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import Any, final

from hpcstrat._launcher import expand_tasks
from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec
from hpcstrat.cluster_resolver._resolver import ClusterResolver, visible_gpus

_PIECE = re.compile(r"\[(?P<ranges>[0-9,-]+)\]|(?P<text>[^\[\],\s]+)")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")


@final
class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that `srun` sets for each task of a step. Needs no Slurm command, and starts no MPI.

    As in TensorFlow, tasks are numbered by the *names* of their nodes in the order of text (`n10` comes before `n9`),
    each node's first has the port `port_base` and the next the following ones, and the jobs take their tasks in the
    order of their names. Where the node list is not in that order, a task's address is not that of the node on which
    it runs.

    Unlike TensorFlow's it says which task this is from the start, and it never changes `CUDA_VISIBLE_DEVICES`: a
    strategy gives each rank its GPU among those that are visible, and the GPUs of the host's other ranks stay visible,
    so that they can reach each other directly. TensorFlow's also counts from 0 whatever Slurm allowed the task.

    Used variables: `SLURM_PROCID`, and where the arguments do not say it `SLURM_STEP_NUM_TASKS`, `SLURM_STEP_NODELIST`,
    `SLURM_STEP_TASKS_PER_NODE` and `CUDA_VISIBLE_DEVICES`.

    Args:
        jobs: the number of tasks of each job; by default all are workers.
        port_base: the port of the first task of each node.
        gpus_per_node: by default as many as are visible. Where that is fewer than the node has tasks, the launcher
            shows each task its own, or they share them: then all that are visible are the task's.
        gpus_per_task: by default the node's, evenly, by the node with most tasks.
        tasks_per_node: one number for all nodes, or one for each by the node's name; by default what Slurm says.
        auto_set_gpu: does nothing here; in TensorFlow it lets the resolver set `CUDA_VISIBLE_DEVICES`.
        rpc_layer: the protocol that `master` puts before addresses.

    Raises:
        RuntimeError: a variable is missing or is not what Slurm writes, the jobs have another number of tasks than the
            nodes run, or the tasks need more GPUs than there are.
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
        rank = _number("SLURM_PROCID")
        self._jobs = dict(jobs) if jobs is not None else {"worker": _number("SLURM_STEP_NUM_TASKS")}
        self._port_base = port_base
        self._tasks_per_node = _tasks_per_node(tasks_per_node)
        _check_tasks(self._jobs, self._tasks_per_node, rank)
        most_tasks = max(self._tasks_per_node.values())
        self._gpus_per_task = _gpus_per_task(gpus_per_node, gpus_per_task, most_tasks)
        super().__init__(*_place(self._jobs, rank), rpc_layer)

    def cluster_spec(self) -> ClusterSpec:
        """The jobs, with the addresses of their tasks."""
        addresses = [
            f"{node}:{self._port_base + number}"
            for node, tasks in sorted(self._tasks_per_node.items())
            for number in range(tasks)
        ]
        found = {}
        for job, tasks in sorted(self._jobs.items()):
            found[job], addresses = addresses[:tasks], addresses[tasks:]
        return ClusterSpec(found)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """The name of this task's job and its index in it."""
        return self.task_type, self.task_id

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs of each task, all alike: `{"GPU": 1}`."""
        return {"GPU": self._gpus_per_task}


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise RuntimeError(
            f"SlurmClusterResolver: {name} is not set, so this is no step of Slurm; start the program by "
            "`srun python train.py`, or take MPIClusterResolver"
        )
    return value


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise RuntimeError(
            f"SlurmClusterResolver: {name} is {value!r}; srun sets it to a number from 0 up, as it must be"
        )
    return int(value)


def _tasks_per_node(given: int | Mapping[str, int] | None) -> dict[str, int]:
    """The number of tasks by node."""
    if isinstance(given, Mapping):
        return dict(given)
    try:
        nodes = expand_nodes(_variable("SLURM_STEP_NODELIST"))
        if given is not None:
            return dict.fromkeys(nodes, int(given))
        tasks = expand_tasks(_variable("SLURM_STEP_TASKS_PER_NODE"))
    except ValueError as error:
        raise RuntimeError(f"SlurmClusterResolver: {error}; start the program by `srun`, which sets it") from error
    if len(tasks) != len(set(nodes)):
        raise RuntimeError(
            f"SlurmClusterResolver: SLURM_STEP_NODELIST names {len(set(nodes))} nodes ({', '.join(nodes)}), and "
            f"SLURM_STEP_TASKS_PER_NODE gives the tasks of {len(tasks)} ({', '.join(map(str, tasks))}); start the "
            "program by `srun`, which sets both, or pass tasks_per_node"
        )
    return dict(zip(dict.fromkeys(nodes), tasks, strict=True))


def _check_tasks(jobs: dict[str, int], tasks_per_node: dict[str, int], rank: int) -> None:
    wanted, there = sum(jobs.values()), sum(tasks_per_node.values())
    if wanted != there or not there:
        raise RuntimeError(
            f"SlurmClusterResolver: the jobs have {wanted} tasks ({jobs}), and the nodes run {there} "
            f"({tasks_per_node}); start as many as the jobs have by `srun --ntasks={wanted}`"
        )
    if rank >= there:
        raise RuntimeError(
            f"SlurmClusterResolver: SLURM_PROCID is {rank}, and there are {there} tasks, from 0 up; "
            "start the program by `srun`, which sets both"
        )


def _gpus_per_task(per_node: int | None, per_task: int | None, most_tasks: int) -> int:
    """The number of GPUs of each task, after a check that there are enough."""
    if per_node is None and per_task is None:
        there = visible_gpus()
        return there if there < most_tasks else there // most_tasks
    if per_node is None:
        per_node = visible_gpus()
    if per_task is None:
        per_task = per_node // most_tasks
        is_too_many = 0 < per_node < most_tasks
    else:
        is_too_many = most_tasks * per_task > per_node
    if is_too_many:
        raise RuntimeError(
            f"SlurmClusterResolver: a node runs {most_tasks} tasks of {max(per_task, 1)} GPUs, and has {per_node}; "
            "start fewer by `srun --ntasks-per-node`, or pass gpus_per_node and gpus_per_task"
        )
    return per_task


def _place(jobs: dict[str, int], rank: int) -> tuple[str, int]:
    """The job of the task of this rank, and its index in it."""
    for job, tasks in sorted(jobs.items()):
        if rank < tasks:
            return job, rank
        rank -= tasks
    raise AssertionError("the rank was checked")


def expand_nodes(nodes: str) -> list[str]:
    """The names of the nodes, in Slurm's order, as `scontrol show hostnames` gives them.

    A name may have several ranges and text behind them, which TensorFlow refuses. Then the last range varies fastest,
    and of the others the first.

    Args:
        nodes: for instance `"n[1-2],gpu[08-10]-ib0"`.

    Raises:
        ValueError: it is not such a list.

    >>> expand_nodes("n[1-2],p[0,07]x[3-4]y")
    ['n1', 'n2', 'p0x3y', 'p0x4y', 'p07x3y', 'p07x4y']
    """
    found: list[str] = []
    for name in re.findall(r"(?:\[[^\]]*\]|[^,])+", nodes):
        pieces = list(_PIECE.finditer(name))
        if "".join(piece[0] for piece in pieces) != name:
            raise ValueError(f"{nodes!r} is no list of Slurm's nodes: {name!r} is not like n1 or n[1-3,7]")
        choices = [_numbers(nodes, piece["ranges"]) if piece["ranges"] else [piece["text"]] for piece in pieces]
        if len(choices) > 1 and not pieces[-1]["ranges"]:
            [end] = choices.pop()
            choices[-1] = [number + end for number in choices[-1]]
        *others, last = choices
        found += ["".join([*first[::-1], end]) for *first, end in itertools.product(*others[::-1], last)]
    return found


def _numbers(nodes: str, ranges: str) -> list[str]:
    """The numbers of `1-3,07`, each as long as the first of its range."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match["first"], match["last"] or match["first"]) if match else ("1", "0")
        if int(last) < int(first):
            raise ValueError(f"{nodes!r} is no list of Slurm's nodes: {part!r} is not like 7 or 1-3")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
