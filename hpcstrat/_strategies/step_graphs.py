"""Replica functions as CUDA graphs: what `hs.function` makes of calls of `Strategy.run` on GPUs.

A step of small arrays takes the GPU less time than the host needs to launch its kernels. A graph
has all of them, and takes one launch. For each kind of arguments, such as arrays of these shapes
and dtypes, the calls on all ranks are

    the first    run as it is: it makes variables and slots, and connects NCCL
    the second   rehearsed: it runs with the kernels and the memory of a graph, which are made here,
                 and shows most of what a graph cannot have
    the third    captured: it runs, but its kernels become a graph, which is launched at the end
    the others   launches of the graph, on which the ranks agree by one record

The arguments are copied to the arrays with which the graph was captured, and results from those
that it writes. There is one set of arguments, and not two in turn: the copy and the graphs are on
one stream, where a copy within the GPU's memory takes less time than a launch.

The numbers of an update, such as the learning rate, change from step to step, so its kernels take
them from the GPU's memory here. The host computes them as in any step, and writes what has changed
before the launch.

All ranks capture, launch, or run the function as it is. What one rank cannot capture, all run as it
is from then on.
"""

from __future__ import annotations

import functools
import gc
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._agreement.records import signature_of
from hpcstrat._core import nests
from hpcstrat._core.call_name import call_named
from hpcstrat._core.user_frames import user_frame_of_error, warn
from hpcstrat._process import settings
from hpcstrat._replicas import contexts
from hpcstrat._replicas.contexts import InReplica
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._storage.parts import writer_of
from hpcstrat._strategies.captured_step import BY_VALUE, CapturedStep
from hpcstrat._strategies.reachable import globals_in
from hpcstrat._transports.device import DeviceCommunicator

STEPS = "_hpcstrat_steps"
"""The attribute with the `StepFunction` of a function that `function_of` returned."""
MOST_KINDS = 8
"""Kinds of calls that are captured: each graph keeps the memory of a whole step."""
FOREIGN = ("jax", "numba.cuda", "tensorflow", "torch")
"""Modules with pools or streams of their own, whose arrays and work a graph would not have."""

# What a rank offers to do with a call: to launch the graph of this number; else
_CAPTURE, _RUN, _FOREIGN, _ON_HOST, _MANY = 0, -1, -2, -3, -4
_REASONS = {
    _FOREIGN: f"a rank has imported one of {', '.join(FOREIGN)}, whose arrays a graph cannot hold",
    _ON_HOST: "an argument is an array on the host, or on another GPU",
    _MANY: f"its arguments, or objects that it refers to, are of more than {MOST_KINDS} kinds; use "
    "fewer shapes, pass numbers that change as arrays, and make other objects once",
}
_OFFER = struct.Struct("<qq")
_References: TypeAlias = Sequence[Callable[[], Any]]

active: ContextVar[StepFunction | None] = ContextVar("hpcstrat_function", default=None)
"""The `hs.function` around this line, outside of replicas."""


def function_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that `hs.function` returns where there may be a GPU."""
    if isinstance(fn, staticmethod):  # which a class calls without its object
        return staticmethod(function_of(fn.__func__))
    steps = StepFunction(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # In a replica it is the function of `Strategy.run`, or called by that: a part of it.
        if type(contexts.current.get()) is InReplica:
            return fn(*args, **kwargs)
        outer = active.set(steps)
        try:
            return fn(*args, **kwargs)
        finally:
            active.reset(outer)

    setattr(call, STEPS, steps)
    return call


@final
class StepFunction:
    """What has become of the replica functions that run in, or are, one `hs.function`.

    Args:
        fn: the function, for its name.
    """

    def __init__(self, fn: Any) -> None:
        self._name: str = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._by_group: dict[ReplicaGroup, GroupSteps] = {}

    def run(
        self, group: ReplicaGroup, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Runs a replica function, in its context and on its stream. Collective."""
        steps = self._by_group.get(group)
        if steps is None:
            # Those of closed strategies are only memory.
            self._by_group = {one: of for one, of in self._by_group.items() if not one.is_closed}
            steps = self._by_group[group] = GroupSteps(self._name, group)
        if steps.is_eager:
            return fn(*args, **kwargs)
        return steps.run(fn, args, kwargs)


@final
class GroupSteps:
    """The graphs of one `hs.function` on the replicas of a strategy.

    Args:
        name: the function's.
        group: the replicas.

    Attributes:
        is_eager: whether all calls run as they are.
    """

    def __init__(self, name: str, group: ReplicaGroup) -> None:
        communicator = group.communicator
        # The same on all ranks.
        self.is_eager: bool = (
            not isinstance(communicator, DeviceCommunicator)
            or communicator.checks
            or group.parameter_device.kind != "GPU"
            or settings.timeline() != ""
        )
        self._name = name.rpartition(".<locals>.")[2]
        self._group = group
        # Of each kind; `None` between the first call and the second. With references to the objects
        # that the kind has by their identity.
        self._steps: dict[tuple[Any, ...], tuple[CapturedStep | None, _References]] = {}
        self._has_warned = False
        self._died = 0  # kinds, since the last capture, of objects that were gone before theirs

    def run(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs, rehearses, captures or launches a call."""
        leaves, structure = nests.flatten((tuple(args), dict(kwargs)))
        kind, kept = self._kind_of(fn, leaves, structure)
        if kind not in self._steps or _is_dead(self._steps[kind][1]):
            for one in [one for one, (_, kept) in self._steps.items() if _is_dead(kept)]:
                dead, _ = self._steps.pop(one)
                self._died += dead is None or not dead.is_captured
        step, _ = self._steps.get(kind, (None, ()))
        numbers = None if step is None or not step.is_captured else step.next_numbers()
        own = self._offer(kind, step, numbers is not None)
        offers = self._exchange(own, 0 if numbers is None else numbers[1])
        if own >= 0 and all(offer == offers[0] for offer in offers):
            assert step is not None
            if numbers is not None:
                return step.launch(leaves, numbers[0])
            if self._capture(step, fn, leaves, structure):
                return step.launch(leaves, None)
            return fn(*args, **kwargs)
        self._tell({offer for offer, _ in offers})
        if self.is_eager or own != _RUN:
            return fn(*args, **kwargs)
        if kind in self._steps and step is None:
            step = CapturedStep(self._group)
            result = step.rehearse(fn, args, kwargs)
        else:  # or an option of an optimizer has changed: what follows from it is made once more
            step, result = None, fn(*args, **kwargs)
        self._steps[kind] = step, [*map(_reference, kept)]
        return result

    def _offer(self, kind: tuple[Any, ...], step: CapturedStep | None, fits: bool) -> int:
        if any(name in sys.modules for name in FOREIGN):
            return _FOREIGN
        if not kind:
            return _ON_HOST
        if kind not in self._steps and len(self._steps) + self._died >= MOST_KINDS:
            self._died = 0  # so that later objects have graphs
            return _MANY
        if step is None:
            return _RUN
        if not step.is_captured:
            return _CAPTURE
        return step.number if fits else _RUN

    def _exchange(self, offer: int, numbers: int) -> list[tuple[int, int]]:
        """The ranks' offers, each with a checksum of numbers on which they must agree."""
        communicator = self._group.communicator
        if communicator.size == 1:
            return [(offer, numbers)]
        own = writer_of(np.frombuffer(_OFFER.pack(offer, numbers), np.uint8))
        signature = signature_of("Strategy.run", self._name)
        messages = communicator.exchange(signature, _OFFER.size, own)
        return [_OFFER.unpack_from(message.data) for message in messages]

    def _kind_of(
        self, fn: Any, leaves: Sequence[Any], structure: nests.Structure
    ) -> tuple[tuple[Any, ...], Sequence[Any]]:
        """What a call has in common with launches of its graph, and objects that this refers to.

        Empty if an array is not in the memory of this GPU.
        """
        stream, key, kept = self._group.stream, list[Any]([structure]), list[Any]()
        assert stream is not None
        for leaf in leaves:
            if type(leaf) is stream.xp.ndarray:
                if leaf.data.device_id != stream.ordinal:
                    return (), ()
                key.append((leaf.shape, leaf.dtype, leaf.strides))
            elif isinstance(leaf, np.ndarray):
                return (), ()
            else:
                _add(leaf, key, kept)
        # A function that is defined again in each step is the same if it refers to the same.
        for part in _parts_of(fn):
            _add(part, key, kept)
        return tuple(key), kept

    def _capture(
        self, step: CapturedStep, fn: Any, leaves: Sequence[Any], structure: nests.Structure
    ) -> bool:
        """Captures a call on all ranks, or on none; returns whether it has. Collective."""
        communicator = self._group.communicator
        calls = communicator.calls

        def agree(what: str) -> None:
            communicator.exchange(signature_of("Strategy.run", self._name, what))

        try:
            step.record(fn, leaves, structure, agree)
            self._died = 0
        except BaseException as error:
            step.undo()
            if not isinstance(error, Exception):
                raise
            # Ranks that wait in an exchange, of the function or the one above, raise there.
            where, reason = user_frame_of_error(error), str(error)
            if where:
                reason = f"{where}: {type(error).__name__}: {reason}"
            if not calls.all_raise:
                with call_named("Strategy.run"):
                    calls.raise_on_others(RuntimeError(reason))
            self._give_up(reason)
            return False
        return True

    def _tell(self, offers: set[int]) -> None:
        """Warns once of each reason for which a rank cannot make graphs."""
        reasons = offers & _REASONS.keys()
        if lasting := reasons - {_MANY}:  # each further exchange would cost time
            self._give_up(_REASONS[min(lasting)])
        elif reasons and not self._has_warned:
            self._has_warned = True
            self._warn(f": {_REASONS[_MANY]}")

    def _give_up(self, reason: str) -> None:
        self.is_eager = True
        self._steps.clear()
        self._warn(f" from now on: {reason}")

    def _warn(self, why: str) -> None:
        warn(f"hs.function: {self._name} runs without a CUDA graph{why}", UserWarning)


def _parts_of(fn: Any) -> list[Any]:
    """What a function refers to: its code, closure, defaults, object, and the globals it names.

    Also what the function refers to that it wraps, or that a partial or another object calls.
    """
    parts, left = list[Any](), [fn]
    while left:
        one = left.pop()
        if type(one) is FunctionType:
            if (inner := vars(one).get("__wrapped__")) is not None:
                left.append(inner)
            if STEPS in vars(one):
                continue
            parts += gc.get_referents(*(one.__closure__ or ()))  # what is in the cells
            parts += (one.__code__, *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values())
            parts += map(one.__globals__.get, globals_in(one.__code__))
        elif type(one) is MethodType:
            parts.append(one.__self__)
            left.append(one.__func__)
        elif isinstance(one, functools.partial):
            parts += [*one.args, *one.keywords, *one.keywords.values()]
            left.append(one.func)
        else:
            parts.append(one)
            left += [call for call in (type(one).__call__,) if type(call) is FunctionType]
    return parts


def _add(thing: Any, key: list[Any], kept: list[Any]) -> None:
    if isinstance(thing, np.generic):
        key.append((type(thing), thing.dtype, thing.tobytes()))
    elif type(thing) in (float, complex):
        key.append((type(thing), repr(thing)))  # 0.0 == -0.0, and nan != nan
    elif type(thing) in BY_VALUE:
        key.append((type(thing), thing))
    else:
        key.append(id(thing))
        kept.append(thing)


def _reference(thing: Any) -> Callable[[], Any]:
    """Weak, so that an object whose method is decorated does not live as long as its class."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _is_dead(references: _References) -> bool:
    """Whether an object is gone, whose identity another may have."""
    return any(reference() is None for reference in references)
