"""Which calls are spans: a table, and what puts a span around each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from hpcstrat._communicators import device, hierarchical, host, mpi, nccl, shared_memory, staged
from hpcstrat._communicators.base import Communicator
from hpcstrat._storage.base import Storage
from hpcstrat._storage.device import DeviceStorage
from hpcstrat._strategies.base import Strategy, group_of
from hpcstrat._timeline.recorder import Recorder
from hpcstrat._timeline.spans import CHECKPOINT, COMMUNICATION, INPUT, RUN, UPDATE, WAITING
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import _device_prefetch, _iterator


class Facts(NamedTuple):
    """What is told of a call.

    Attributes:
        name: of the span.
        nbytes: that travel; `None` where none do.
        stream: the `_gpu.Stream` on which it puts work; `None` where it does not.
    """

    name: str
    nbytes: int | None = None
    stream: Any = None


Describe = Callable[..., Facts]
"""The facts of a call, by its arguments."""


def _run(strategy: Strategy, fn: Any, *_: Any, **__: Any) -> Facts:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return Facts(f"run {name.rpartition('.<locals>.')[2]}", None, group_of(strategy).stream)


def _arrays(_: Communicator, call: str, arrays: Any, *__: Any, **___: Any) -> Facts:
    return Facts(call, sum(array.nbytes for array in arrays))


def _exchange(_: Communicator, agreed: Any, nbytes: int = 0, *__: Any, **___: Any) -> Facts:
    return Facts(agreed.call, nbytes)


def _message(_: Communicator, agreed: Any, form: Any, *__: Any, **___: Any) -> Facts:
    return Facts(agreed.call, form.nbytes)


def _update(_: Storage, call: str, plan: Any, *__: Any, **___: Any) -> Facts:
    return Facts(call, plan.form.nbytes)


def _rows(_: Storage, call: str, variable: Any, slots: Any, rows: Any, gradient: Any, *__: Any, **___: Any) -> Facts:
    return Facts(call, gradient.nbytes)


def _on_device(name: str) -> Describe:
    def describe(communicator: device.DeviceCommunicator, array: Any, *_: Any, **__: Any) -> Facts:
        return Facts(name, array.nbytes, communicator.stream)

    return describe


def _nccl_reduce(communicator: nccl.NcclCommunicator, call: str, array: Any, *_: Any, **__: Any) -> Facts:
    return Facts(call, array.nbytes, communicator.stream)


def _nccl_gather(communicator: nccl.NcclCommunicator, call: str, parts: Any, *_: Any, **__: Any) -> Facts:
    return Facts(call, sum(part.own.nbytes for part in parts), communicator.stream)


class _Copies(NamedTuple):
    """The stream on which input is copied, as a `_gpu.Stream` looks."""

    raw: Any
    ordinal: int


def _copy(loaded: Any, xp: Any, copies: Any) -> Facts:
    return Facts("copy a batch", loaded.form.nbytes, _Copies(copies, copies.device_id))


def _named(name: str) -> Describe:
    return lambda *_, **__: Facts(name)


def _storage_stream(name: str) -> Describe:
    return lambda storage, *_, **__: Facts(name, None, storage.communicator.stream)


_TRANSPORTS = (
    shared_memory.SharedMemoryCommunicator,
    mpi.MpiCommunicator,
    hierarchical.HierarchicalCommunicator,
    host.SoloCommunicator,
)

TABLE: list[tuple[Any, str, str, Describe]] = [
    (Strategy, "run", RUN, _run),
    (Communicator, "exchange", COMMUNICATION, _exchange),
    (Communicator, "all_reduce", COMMUNICATION, _arrays),
    (Communicator, "all_gather", COMMUNICATION, _arrays),
    *[(transport, "reduce_message", COMMUNICATION, _message) for transport in _TRANSPORTS],
    (mpi.MpiCommunicator, "_post", WAITING, _named("the other ranks")),
    *[
        (transport, name, COMMUNICATION, _on_device(words))
        for transport in (nccl.NcclCommunicator, staged.StagedCommunicator)
        for name, words in (("reduce_flat", "reduce"), ("broadcast_flat", "broadcast"))
    ],
    (nccl.NcclCommunicator, "_all_reduce", COMMUNICATION, _nccl_reduce),
    (nccl.NcclCommunicator, "_gather", COMMUNICATION, _nccl_gather),
    (staged.StagedCommunicator, "all_reduce_flat", COMMUNICATION, _on_device("all-reduce")),
    (Storage, "update", UPDATE, _update),
    (Storage, "update_rows", UPDATE, _rows),
    (DeviceStorage, "_packed", COMMUNICATION, _storage_stream("pack")),
    (DeviceStorage, "_apply", UPDATE, _storage_stream("update")),
    (_iterator.DistributedIterator, "__next__", INPUT, _named("next batch")),
    (_device_prefetch._Slot, "load", INPUT, _named("load a batch")),
    (_device_prefetch, "_copied", INPUT, _copy),
    (Checkpoint, "save", CHECKPOINT, _named("save")),
    (Checkpoint, "restore", CHECKPOINT, _named("restore")),
]
"""Owner, method, category and how it is described."""


def trace(recorder: Callable[[], Recorder | None]) -> None:
    """Puts a span around every call of the table, in this process, from now on.

    Args:
        recorder: gives it, or `None` as long as there is none.
    """
    for owner, name, category, describe in TABLE:
        setattr(owner, name, _traced(recorder, owner.__dict__[name], category, describe))
    make = shared_memory.barrier
    shared_memory.barrier = lambda flags, comm: _traced(  # pyright: ignore[reportPrivateImportUsage]
        recorder, make(flags, comm), WAITING, _named("the other ranks")
    )


def _traced(
    recorder: Callable[[], Recorder | None], function: Callable[..., Any], category: str, describe: Describe
) -> Callable[..., Any]:
    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        to = recorder()
        if to is None:
            return function(*args, **kwargs)
        try:
            facts = describe(*args, **kwargs)
        except (TypeError, AttributeError):  # wrong arguments, of which the function itself tells
            return function(*args, **kwargs)
        span = to.begin(category, *facts)
        if span is None:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            to.end(span)

    return traced
