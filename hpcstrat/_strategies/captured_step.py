"""One call of a replica function as a CUDA graph: its capture, its memory, and its launches."""

from __future__ import annotations

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat._core import gpu, nests
from hpcstrat._core.cublas import replaced
from hpcstrat._core.types import Array
from hpcstrat._core.user_frames import user_frame
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies.reachable import memory_behind
from hpcstrat._transports.device import DeviceCommunicator
from hpcstrat._update.device_update import numbers_kernel
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable.variable import Variable, state_of

MOST_NUMBERS = 256
"""Numbers of all updates in a graph: a kernel takes them as parameters."""
BY_VALUE = frozenset({bool, int, float, complex, str, type(None)})
"""Types of arguments and results that have no memory."""
TO_HOST = ("get", "item", "tolist", "__bool__", "__float__", "__int__")
"""Methods of arrays that read them on the host."""


class CapturedUpdate(NamedTuple):
    """An update in a graph.

    Attributes:
        state: what the optimizer keeps, with the number of steps done.
        iterations: this number before the update.
        next_rule: returns the rule of its next step.
        kind: the kernel of its rule, and how it clips.
    """

    state: Any
    iterations: int
    next_rule: Callable[[], UpdateRule]
    kind: tuple[Any, Any]


@final
class CapturedStep:
    """A graph, and the memory that it reads and writes.

    Args:
        group: the replicas.

    Attributes:
        group: the replicas.
        number: of the capture, the same on all ranks; 0 before.
    """

    def __init__(self, group: ReplicaGroup) -> None:
        assert group.stream is not None
        self.group, self._stream = group, group.stream
        self.number = 0
        self._graph: Any = None
        xp = self._stream.xp
        self._pool = xp.cuda.MemoryPool()  # nobody else gets memory that the graph uses
        self._memory: Array = xp.empty(MOST_NUMBERS, np.float64)
        self._written: tuple[float, ...] | None = None
        self._refused = ""  # why there can be none
        self._kept: list[Any] = []
        self._allocated: list[range] = []
        self._updates: list[CapturedUpdate] = []
        self._numbers: list[float] = []

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph."""
        return self._graph is not None

    # ---- rehearsal and capture

    def rehearse(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function as it will be captured: kernels are compiled, the pool gets memory."""
        call = tuple(args), dict(kwargs)
        leaves, structure = nests.flatten(call)
        given = [*filter(gpu.is_on_gpu, leaves)]
        try:
            products = self._stream.products
            before = [leaf.copy() for leaf in given]
        except Exception as error:
            self._refused = f"cuBLAS does not start, or there is no memory: {error}"
            return fn(*args, **kwargs)
        with self._in_pool(), products.replace_cupys(), self._watching():
            result = fn(*args, **kwargs)
        try:
            if not all(map(_are_equal, before, given)):  # the graph has copies of them
                raise TypeError("it writes to an array that is an argument; return a new one")
            self._reached(fn, leaves, structure, call, result)
        except Exception as error:
            self._refused = self._refused or str(error) or repr(error)
        return result

    @contextlib.contextmanager
    def _in_pool(self) -> Iterator[None]:
        """A block in which memory is the graph's, and optimizers read numbers from the GPU's."""
        stream, self._numbers, self._updates = self._stream, [], []
        try:
            stream.updates = self.take
            with stream.xp.cuda.using_allocator(self._allocate):
                yield
        finally:
            stream.updates = None

    def record(
        self, fn: Any, leaves: Sequence[Any], structure: nests.Structure, agree: Callable[..., Any]
    ) -> None:
        """Runs the function, and makes a graph of what it puts on the stream. Collective."""
        stream, xp, calls = self._stream, self._stream.xp, self.group.communicator.calls
        # Of all functions of these ranks no other capture has this number.
        self.number, self._kept, self._allocated = calls.number + 1, [], []
        self._escaped = calls.escaped_hash, calls.last_escaped, calls.last_escaped_call
        with self._in_pool():
            # First, so that no rank runs Python code twice for what the rehearsal has shown.
            self._raise_refused()
            agree("captures")
            self._inputs = [xp.empty_like(leaf) if gpu.is_on_gpu(leaf) else leaf for leaf in leaves]
            args, kwargs = structure.unflatten(self._inputs)
            with self._capturing(), stream.products.replace_cupys(), self._watching():
                result = fn(*args, **kwargs)
                self._raise_refused()  # the function may have caught it
        # A plan that leaves CuPy's cache takes its memory along.
        self._kept += xp.fft.config.get_plan_cache()
        self._kept += self._reached(fn, self._inputs, structure, (args, kwargs), result)
        self._inputs = [leaf if gpu.is_on_gpu(leaf) else None for leaf in self._inputs]
        self._results, self._structure = nests.flatten(result)
        stream.graphs.add(self)
        agree("captured")

    def _reached(
        self, fn: Any, leaves: Sequence[Any], structure: nests.Structure, given: Any, result: Any
    ) -> list[Any]:
        """The memory that the function can reach, after a call with these leaves.

        Raises:
            TypeError: a launch would not leave what this call has left.
        """
        xp, (after, shape) = self._stream.xp, nests.flatten(given)
        if shape != structure or any(map(operator.is_not, after, leaves)):
            raise TypeError("it changes a list or a dict that is an argument; return a new one")
        for leaf in nests.flatten(result)[0]:
            if not isinstance(leaf, (xp.ndarray, np.ndarray, np.generic, Variable, *BY_VALUE)):
                raise TypeError(f"it returns an object of type {type(leaf).__name__}")
        reached = memory_behind([fn, *[leaf for leaf in leaves if not gpu.is_on_gpu(leaf)]])
        for used in reached:
            # Each launch would have to bind it anew.
            if gpu.is_on_gpu(used) and any(used.data.ptr in one for one in self._allocated):
                raise TypeError("it keeps an array that it makes; write to an array in place")
            # Its value is read on the host, and would be the capture's.
            if isinstance(used, Variable) and not gpu.is_on_gpu(state_of(used).block.view):
                raise TypeError(f"it refers to {used.name!r}, a variable outside of every scope")
        return reached

    def refuse(self, what: str) -> None:
        """Notes what a launch would not repeat; raises it while it captures."""
        error = f"{what} cannot be part of a CUDA graph; do it outside of the function"
        self._refused = self._refused or f"{user_frame()}: RuntimeError: {error}"
        if self._stream.capture is not None:
            raise RuntimeError(error)

    def _raise_refused(self) -> None:
        if self._refused:
            raise RuntimeError(self._refused)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        stream, calls = self._stream, self.group.communicator.calls
        try:
            # Relaxed, as is CuPy's default: memory may be allocated.
            stream.raw.begin_capture()
            stream.capture, calls.is_capturing = self, True
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # of a capture that the first error has ended
                stream.raw.end_capture()
            raise
        else:
            self._graph = stream.raw.end_capture()
            self._graph.upload(stream.raw)  # here the ranks can still give up: it takes memory
        finally:
            stream.capture, calls.is_capturing = None, False

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A block in which CuPy's calls are refused that a launch would not repeat.

        CuPy refuses some itself, in a capture, but the function may catch that.
        """
        xp, cuda = self._stream.xp, self._stream.cuda

        def refuse(what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if cuda.get_current_stream().ptr == self._stream.raw.ptr:  # else in another thread
                self.refuse(what)
            return call(*arguments, **options)

        seeds = (xp.random.RandomState, "_get_seed"), (xp.random.BitGenerator, "__init__")
        watched = [
            *[("an array that is read on the host", xp.ndarray, name) for name in TO_HOST],
            *[("a random number with a seed of the host", *seed) for seed in seeds],
        ]
        if self._stream.capture is not None:  # else the library records some
            watched += [("an event", owner, "record") for owner in (cuda.Event, cuda.Stream)]
        with contextlib.ExitStack() as stack:
            for what, owner, name in watched:
                stack.enter_context(replaced(owner, name, functools.partial(refuse, what)))
            yield

    def _allocate(self, nbytes: int) -> Any:
        stream, cuda = self._stream, self._stream.cuda
        # Nearly all that works on arrays comes here.
        if stream.capture is not None and not cuda.get_current_stream().is_capturing():
            stream.require_eager("work on another stream")
        try:
            memory = self._pool.malloc(nbytes)
        except MemoryError:  # the program's pool has what the first call used
            stream.xp.get_default_memory_pool().free_all_blocks()
            memory = self._pool.malloc(nbytes)
        self._allocated.append(range(memory.ptr, memory.ptr + nbytes))
        return memory

    def keep(self, *used: Any) -> None:
        """Keeps objects alive whose memory the graph uses."""
        self._kept += used

    def take(self, rule: UpdateRule, state: Any, next_rule: Callable[[], UpdateRule]) -> UpdateRule:
        """A rule whose kernels read its numbers from the GPU's memory; see `CapturedUpdate`.

        Raises:
            ValueError: they are too many.
        """
        first = len(self._numbers)
        if first + len(rule.numbers) > MOST_NUMBERS:
            if self._stream.capture is None:
                return rule
            raise ValueError("the update takes numbers from the host")
        kind = rule.kernel, rule.clip
        self._updates.append(CapturedUpdate(state, state.iterations, next_rule, kind))
        self._numbers += rule.numbers
        if self._stream.capture is None:
            self._write(self._numbers)
        # An array without dimensions is broadcast to a kernel's other operands.
        places = [self._memory[first + i] for i in range(len(rule.numbers))]
        return rule._replace(numbers=tuple(places))

    def _write(self, numbers: Sequence[float]) -> None:
        if numbers and tuple(numbers) != self._written:
            self._written = None  # if it is interrupted
            numbers_kernel(len(numbers))(*numbers, self._memory, size=1)
            self._written = tuple(numbers)

    def undo(self) -> None:
        """Leaves optimizers and the calls' state as before the capture: nothing was done."""
        for update in reversed(self._updates):
            update.state.iterations = update.iterations
        calls = self.group.communicator.calls
        calls.escaped_hash, calls.last_escaped, calls.last_escaped_call = self._escaped
        self.drop()

    def drop(self) -> None:
        """Destroys the graph, and frees its memory."""
        self._graph, self._pool = None, self._stream.xp.cuda.MemoryPool()
        self._inputs, self._results, self._kept, self._updates = [], [], [], []

    # ---- launch

    def next_numbers(self) -> tuple[list[float], int] | None:
        """The numbers of the next launch; `None` if an update has other kernels by then.

        With a checksum of these, and of all numbers on which the ranks must agree.
        """
        values, agreed, before = list[float](), list[float](), list[tuple[Any, int]]()
        try:
            for state, _, next_rule, kind in self._updates:
                rule = next_rule()
                if (rule.kernel, rule.clip) != kind:
                    return None
                values += rule.numbers
                agreed += rule.agreed
                before.append((state, state.iterations))
                state.iterations += 1  # for the next update of this optimizer
        except Exception:  # a schedule's, for example: the function raises it, too
            return None
        finally:
            for state, iterations in reversed(before):
                state.iterations = iterations
        return values, zlib.crc32(np.array([*values, *agreed], np.float64).tobytes())

    def launch(self, leaves: Sequence[Any], numbers: Sequence[float] | None) -> Any:
        """Launches the graph, right after the capture without numbers; returns its results."""
        communicator = self.group.communicator
        assert isinstance(communicator, DeviceCommunicator)
        may_have_run = False
        try:  # the other ranks launch, whatever happens here
            for own, given in zip(self._inputs, leaves, strict=True):
                if gpu.is_on_gpu(own):
                    self._stream.xp.copyto(own, given)
            self._write(self._numbers if numbers is None else numbers)
            may_have_run = True
            communicator.launch_graph(self._graph)
            if numbers is not None:  # else the function itself has counted the steps
                for update in self._updates:
                    update.state.iterations += 1
        except BaseException as error:  # a signal's may come between these lines
            communicator.calls.mark_interrupted(error, "Strategy.run")
            for update in self._updates if may_have_run else []:
                blocks = [state_of(v).block for v in update.state.slots]
                self.group.storage.mark_interrupted(error, blocks)
            raise
        results = [
            leaf.copy() if gpu.is_on_gpu(leaf) or isinstance(leaf, np.ndarray) else leaf
            for leaf in self._results
        ]
        return self._structure.unflatten(results)


def _are_equal(one: Array, other: Array) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # or both are nan
