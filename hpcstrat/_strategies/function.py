"""`hs.function`: replica functions as CUDA graphs, captured once for each kind of call.

A step of small arrays takes the GPU less time than the host needs to launch its kernels. A graph
has all of them, and takes one launch. Of the calls of a kind, on all ranks,

    the first    runs as it is: it makes variables and slots, and connects NCCL
    the second   is rehearsed: it runs with the kernels of a graph, which are compiled here
    the third    is captured: it puts nothing on the GPU, but becomes a graph, which is launched
    the others   are launches, on which the ranks agree by one record

Where the ranks' calls are of different kinds, or their numbers differ, all run as they are.
Arguments are copied to the arrays with which the function was captured, and results from those that
it has made. The numbers of updates, such as learning rates, are written to the GPU's memory before
each launch: see `GraphNumbers`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, final

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import gpu, nests
from hpcstrat._core.call_name import call_named
from hpcstrat._core.graph import Graph
from hpcstrat._core.user_frames import warn
from hpcstrat._process import reports
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.parts import writer_of
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._update.graph_numbers import GraphNumbers
from hpcstrat._variable.variable import state_of

STEPS = "_hpcstrat_steps"
"""The attribute with the `StepFunction` of a function that `function_of` returned."""
MOST_KINDS = 8
"""Kinds of calls that are kept for each strategy: a graph has the memory of a whole step."""
PATIENCE = 8
"""Calls of a kind in a row whose graph other ranks do not launch, after which it is dropped."""
FOREIGN = ("jax", "numba.cuda", "tensorflow", "torch")
"""Modules with pools and streams of their own, whose arrays and work a graph would not have."""

# What a rank offers to do with a call: to launch the graph of this number; or else
_CAPTURE, _RUN = 0, -1
_OFFER = struct.Struct("<qq")

active: ContextVar[StepFunction | bool | None] = ContextVar("hpcstrat_function", default=None)
"""The function around a line; `False` in what becomes a graph, of which all calls are a part."""


def function_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that `hs.function` returns where there may be a GPU."""
    if isinstance(fn, staticmethod):  # which a class calls without its object
        return staticmethod(function_of(fn.__func__))
    steps = StepFunction(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # In a replica it is the function of `Strategy.run`, or called by that: a part of it.
        if type(contexts.current.get()) is InReplica or active.get() is False:
            return fn(*args, **kwargs)
        outer = active.set(steps)
        try:
            return fn(*args, **kwargs)
        finally:
            active.reset(outer)

    steps.call = call
    setattr(call, STEPS, steps)
    return call


@final
class StepFunction:
    """The replica functions that run in, or are, one `hs.function`.

    Args:
        fn: the function, for its name.

    Attributes:
        call: what `hs.function` returns.
    """

    def __init__(self, fn: Any) -> None:
        name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._name = name.rpartition(".<locals>.")[2]
        self.call: Any = None
        self._kinds: dict[ReplicaGroup, dict[Any, Kind]] = {}
        self._calls = 0
        self._has_warned = False

    def run(
        self, group: ReplicaGroup, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs, captures or launches a call, in its context and on its stream. Collective."""
        communicator = group.communicator
        is_on_gpus = isinstance(communicator, DeviceCommunicator)
        if communicator.checks or not is_on_gpus or group.parameter_device.kind != "GPU":
            return fn(*args, **kwargs)
        leaves, structure = nests.flatten((tuple(args), dict(kwargs)))
        kind = self._kind_of(group, fn, leaves, structure)
        if kind.graph is None:
            with call_named("Strategy.run"), communicator.raise_together():
                _check(group, leaves)
        numbers = kind.next_numbers()
        agrees = self._agree(group, kind, numbers)
        if agrees and numbers is not None:
            return kind.launch(leaves, numbers[0])
        outer = active.set(False)
        try:
            if not agrees:
                return kind.run_as_is(fn, args, kwargs)
            kind.capture(self._name, fn, leaves, structure)
        finally:
            active.reset(outer)
        return kind.launch(leaves, None)

    def _kind_of(
        self, group: ReplicaGroup, fn: Any, leaves: Sequence[Any], structure: nests.Structure
    ) -> Kind:
        key, others, array = list[Any]([structure]), list[Any](), group.xp.ndarray
        if (fn.__func__ if type(fn) is MethodType else fn) is not self.call:
            _add(fn, key, others)  # it is defined in the function, or passed to it, or around it
        elif type(fn) is MethodType:
            _add(fn.__self__, key, others)
        for leaf in leaves:
            if isinstance(leaf, array):
                key.append((leaf.shape, leaf.dtype, leaf.strides, leaf.data.device_id))
            else:
                _add(leaf, key, others)
        if group not in self._kinds:  # those of closed strategies are only memory
            self._kinds = {one: of for one, of in self._kinds.items() if not one.is_closed}
            self._kinds[group] = {}
        kinds, self._calls = self._kinds[group], self._calls + 1
        found = tuple(key)
        kind = kinds.get(found)
        if kind is None:
            if len(kinds) == MOST_KINDS:
                oldest = min(kinds, key=lambda one: kinds[one].last_call)
                self._drop(kinds.pop(oldest))
            kind = kinds[found] = Kind(group, others)
        kind.last_call = self._calls
        return kind

    def _drop(self, kind: Kind) -> None:
        if kind.graph is not None:
            kind.drop()
        elif not self._has_warned:
            self._has_warned = True
            warn(
                f"hs.function: {self._name} runs without a CUDA graph in some calls, which are of "
                f"more than {MOST_KINDS} kinds; use fewer shapes, pass numbers that change as "
                "arrays, and make other objects once",
                UserWarning,
            )

    def _agree(
        self, group: ReplicaGroup, kind: Kind, numbers: tuple[Sequence[float], int] | None
    ) -> bool:
        """Whether all ranks capture this call, or launch a graph of it with the same numbers."""
        offer, checksum = _CAPTURE if kind.is_rehearsed else _RUN, 0
        if numbers is not None:
            offer, checksum = kind.number, numbers[1]
        if group.communicator.size == 1:
            return offer != _RUN
        own = np.frombuffer(_OFFER.pack(offer, checksum), np.uint8)
        messages = group.communicator.exchange(
            signature_of("Strategy.run", self._name), _OFFER.size, writer_of(own)
        )
        offers = [_OFFER.unpack_from(message.data) for message in messages]
        agrees = offer != _RUN and all(other == (offer, checksum) for other in offers)
        if numbers is not None:
            kind.misses = 0 if agrees else kind.misses + 1
            # Another rank may have dropped its graph, or has calls of another kind for good.
            if kind.misses == PATIENCE:
                kind.drop()
        return agrees


@final
class Kind:
    """The calls of one kind: how many were made, and the graph of the later ones.

    Args:
        group: the replicas.
        others: the objects that the kind has by their identity, which is theirs as long as they
            live.

    Attributes:
        graph: of the calls; `None` before the capture.
        number: of the capture, the same on all ranks and of no other; 0 before.
        is_rehearsed: whether the function can be captured.
        last_call: the number of the last call of this kind.
        misses: how many calls in a row have not launched the graph.
    """

    def __init__(self, group: ReplicaGroup, others: Sequence[Any]) -> None:
        assert group.stream is not None
        self.graph: Graph | None = None
        self.number: int = 0
        self.is_rehearsed: bool = False
        self.last_call: int = 0
        self.misses: int = 0
        self._has_run = False
        self._group, self._stream, self._others = group, group.stream, others
        self._numbers = GraphNumbers(group.stream)
        self._structure: nests.Structure | None = None  # of the results

    def next_numbers(self) -> tuple[list[float], int] | None:
        """See `GraphNumbers.next`; `None` too if there is no graph."""
        if self.graph is None:
            return None
        numbers = self._numbers.next()
        if numbers is None:  # an option of an optimizer has changed: other kernels, another graph
            self.drop()
            self.is_rehearsed = False
        return numbers

    @contextlib.contextmanager
    def _with_numbers(self) -> Iterator[None]:
        self._group.graph_numbers = self._numbers
        try:
            yield
        finally:
            self._group.graph_numbers, self._numbers.computed = None, []

    def run_as_is(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function; in the second call it is rehearsed."""
        if not self._has_run:
            result = fn(*args, **kwargs)
            self._has_run = True
            return result
        with self._with_numbers():
            if self.is_rehearsed:
                return fn(*args, **kwargs)
            with self._numbers.recording(), self._stream.products.replace_cupys():
                result = fn(*args, **kwargs)
        self.is_rehearsed = True
        return result

    def capture(
        self, name: str, fn: Any, leaves: Sequence[Any], structure: nests.Structure
    ) -> None:
        """Runs the function, and makes a graph of what it puts on the stream. Collective.

        Raises:
            Exception: of any rank, on all; nothing was done.
        """
        communicator = self._group.communicator
        calls = communicator.calls
        graph, number = Graph(self._stream, self._group), calls.number + 1

        def call(inputs: Sequence[Any]) -> Sequence[Any]:
            args, kwargs = structure.unflatten(inputs)
            results, self._structure = nests.flatten(fn(*args, **kwargs))
            return results

        try:
            calls.is_capturing = True
            with self._with_numbers(), self._numbers.recording():
                graph.capture(call, leaves)
            communicator.exchange(signature_of("Strategy.run", name, "captured"))
        except BaseException as error:
            self._numbers.undo()
            graph.drop()
            if isinstance(error, (RuntimeError, MemoryError)):
                reports.add_note(
                    error,
                    f"hs.function: {name} was being captured as a CUDA graph, which has nothing of "
                    "the host: return arrays, and read or change what is on the host outside of "
                    "the function (docs/gpus.md)",
                )
            if isinstance(error, Exception) and not calls.all_raise:
                with call_named("Strategy.run"):
                    calls.raise_on_others(error)
            raise
        finally:
            calls.is_capturing = False
        self.graph, self.number = graph, number

    def launch(self, leaves: Sequence[Any], numbers: Sequence[float] | None) -> Any:
        """Launches the graph, right after the capture without numbers; returns its results."""
        communicator, graph, xp = self._group.communicator, self.graph, self._stream.xp
        assert graph and self._structure and isinstance(communicator, DeviceCommunicator)
        may_have_run = False
        try:  # the other ranks launch, whatever happens here
            for own, given in zip(graph.inputs, leaves, strict=True):
                if type(own) is xp.ndarray:
                    xp.copyto(own, given)
            self._numbers.write(numbers)
            may_have_run = True
            communicator.launch_graph(graph.raw)
            if numbers is not None:  # else the function itself has counted the steps
                self._numbers.count()
        except BaseException as error:  # a signal's may come between these lines
            communicator.calls.mark_interrupted(error, "Strategy.run")
            if may_have_run:
                updated = [v for update in self._numbers.updates for v in update.steps.slots]
                self._group.storage.mark_interrupted(error, [state_of(v).block for v in updated])
            raise
        arrays = xp.ndarray, np.ndarray
        results = [one.copy() if isinstance(one, arrays) else one for one in graph.results]
        return self._structure.unflatten(results)

    def drop(self) -> None:
        """Destroys the graph; a later call of this kind captures another."""
        if self.graph is not None:
            self._stream.synchronize()
            self.graph.drop()
        self.graph, self.number, self.misses = None, 0, 0


def _check(group: ReplicaGroup, leaves: Sequence[Any]) -> None:
    """Refuses a call that can never be captured."""
    stream = group.stream
    assert stream is not None
    try:
        _ = stream.products
    except Exception as error:
        raise RuntimeError(f"hs.function: cuBLAS does not start: {error}") from error
    if found := [name for name in FOREIGN if name in sys.modules]:
        raise RuntimeError(
            f"hs.function: {found[0]} is imported, and a CUDA graph has neither its arrays nor its "
            "work; leave out hs.function, or the import"
        )
    for leaf in leaves:
        is_on_gpu = gpu.is_on_gpu(leaf)
        if isinstance(leaf, np.ndarray) or (is_on_gpu and leaf.data.device_id != stream.ordinal):
            where = "another GPU" if is_on_gpu else "the host"
            raise TypeError(
                f"hs.function: an argument, {leaf.dtype}{list(leaf.shape)}, is on {where}; pass an "
                "array of this replica's GPU, as by strategy.xp.asarray(array)"
            )


def _add(thing: Any, key: list[Any], others: list[Any]) -> None:
    """Adds to a key what an object has in common with others of its kind."""
    kind = type(thing)
    if kind in (int, bool, str, bytes, type(None)):
        key.append((kind, thing))
    elif kind in (float, complex) or isinstance(thing, np.generic):
        key.append((kind, repr(thing)))  # 0.0 == -0.0, and nan != nan
    elif kind is MethodType:
        _add(thing.__func__, key, others)
        _add(thing.__self__, key, others)
    elif kind is FunctionType:
        # One that is defined in each call is the same, if it refers to the same.
        seen = [i for i, one in enumerate(others) if one is thing]
        key += seen
        if not seen:
            others.append(thing)
            key += id(thing.__code__), id(thing.__globals__)
            around = gc.get_referents(*thing.__closure__) if thing.__closure__ else ()
            given = thing.__defaults__ or (), (thing.__kwdefaults__ or {}).values()
            for part in (*around, *given[0], *given[1]):
                _add(part, key, others)
    else:
        key.append(id(thing))
        others.append(thing)
