"""The one interface of cluster resolvers."""

from __future__ import annotations

import abc
import os
from collections import defaultdict
from typing import Any

from hpcstrat import _gpu
from hpcstrat.cluster_resolver._cluster_spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Says which tasks make up the job, where they are, and which of them this process is.

    A kind of resolver gives `cluster_spec` and `master`, and sets the attributes.

    Attributes:
        task_type: the name of this process's job in the cluster, such as `"worker"`; `None` where it is not known.
        task_id: this process's number in that job; `None` where it is not known.
        rpc_layer: what `master` puts before addresses, as in `"grpc://"`; `None` or empty for nothing.
    """

    def __init__(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The jobs and the addresses of their tasks, as they are now."""

    @abc.abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of a task, with the protocol before it; empty where there is no such task to name.

        Args:
            task_type: the task's job; by default this process's.
            task_id: its number in the job; by default this process's.
            rpc_layer: the protocol; by default the resolver's.

        Raises:
            ValueError: there is no such task.
        """

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """The number of GPUs of a task: `{"GPU": 4}`, or empty where it has none or they are not known.

        Known are those that this process sees; other tasks' are not. A kind that missing gives is 0.

        Args:
            task_type: the task's job; by default this process's.
            task_id: its number in the job; by default this process's.
            config_proto: unused; TensorFlow has it.
        """
        others = (task_type not in (None, self.task_type), task_id not in (None, self.task_id))
        return _counted(0 if any(others) else visible_gpus())

    @property
    def environment(self) -> str | None:
        """Where the program runs; empty for nowhere special."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The name of this process's job in the cluster; `None` where it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """This process's number in its job; `None` where it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """What `master` puts before addresses; `None` or empty for nothing."""
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def url(address: str, rpc_layer: str | None) -> str:
    """The address with the protocol before it, if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def visible_gpus() -> int:
    """The number of GPUs that this process may use. Opens none, and starts neither MPI nor CuPy."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return len(_gpu.visible())


def _counted(gpus: int) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)  # as in TensorFlow, so that found["GPU"] is 0 where there are none
    if gpus:
        found["GPU"] = gpus
    return found
