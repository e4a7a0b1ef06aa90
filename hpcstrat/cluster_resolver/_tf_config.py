"""A cluster from the environment variable `TF_CONFIG`."""

from __future__ import annotations

import json
import os
import re
from typing import Any, final

from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec
from hpcstrat.cluster_resolver._resolver import ClusterResolver, url


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

    def cluster_spec(self) -> ClusterSpec:
        """The jobs and their tasks; empty if the variable names no job.

        Raises:
            ValueError: it is not an object of jobs, each a list of addresses or an object.
        """
        cluster = _config().get("cluster", {})
        try:
            return ClusterSpec(cluster)
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
        session_master = _text("session_master")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        # As in TensorFlow: a single task needs no master.
        if not spec or (len(spec.jobs) == 1 and len(spec.job_tasks(spec.jobs[0])) == 1):
            return ""
        task_type, task_id = self._or_own(task_type, task_id)
        if task_type is None or task_id is None:
            raise ValueError(
                "TFConfigClusterResolver.master: TF_CONFIG does not say which task this is; add "
                '"task": {"type": "worker", "index": 0} to it, or pass task_type and task_id'
            )
        return url(
            spec.task_address(task_type, task_id),
            self.rpc_layer if rpc_layer is None else rpc_layer,
        )

    @property
    def environment(self) -> str | None:
        """Where the program runs, as passed to the constructor."""
        return self._environment

    def _find_task_type(self) -> str | None:
        job = _task().get("type")
        return None if job is None else str(job)

    def _find_task_id(self) -> int | None:
        index = _task().get("index")
        if index is None:
            return None
        if not re.fullmatch("[0-9]{1,9}", str(index)):  # refuses `True` and 1.5 too
            raise ValueError(
                f'TF_CONFIG: the "index" of its "task" is {index!r:.50}; it must be a number, '
                "from 0 up"
            )
        return int(index)

    def _find_rpc_layer(self) -> str | None:
        return _text("rpc_layer")


def _config() -> dict[str, Any]:
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
    return config


def _text(name: str) -> str | None:
    text = _config().get(name)
    if text is not None and not isinstance(text, str):
        raise ValueError(f'TF_CONFIG: its "{name}" is {text!r:.50}; it must be a string')
    return text


def _task() -> dict[str, Any]:
    task = _config().get("task", {})
    if not isinstance(task, dict):
        raise ValueError(
            f'TF_CONFIG: its "task" is {task!r:.50}; it must be like '
            '{"type": "worker", "index": 0}'
        )
    return task
