"""GPUs of this process, through CuPy: the stream that a strategy works on, pinned host memory."""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, final

import numpy as np


def load_cupy(wanted_by: str) -> Any:
    """The module `cupy`.

    From now on its matrix products accept variables, as its other array functions do.

    Raises:
        RuntimeError: it is not installed. `wanted_by` begins the message.
    """
    if not has_cupy():
        raise RuntimeError(
            f"{wanted_by} needs CuPy, which is not installed: `pip install '.[cuda12]'` (or "
            "cuda13) in hpcstrat's clone"
        )
    import cupy  # pyright: ignore[reportMissingImports]

    # Once, in the module itself: programs call `cupy.matmul`, and CuPy's own `@` looks it up there.
    if not hasattr(cupy.matmul, "__wrapped__"):
        cupy.matmul, cupy.dot = map(_taking_variables, (cupy.matmul, cupy.dot))
    return cupy


def _taking_variables(product: Callable[..., Any]) -> Callable[..., Any]:
    """A function of CuPy that also accepts objects that give it a CuPy array.

    `x @ w` with an array on the left is CuPy's: it lets pass whatever it could convert, looks for
    `matmul` in its own module, and that takes nothing but arrays.
    """

    @functools.wraps(product)
    def taking(*operands: Any, **options: Any) -> Any:
        return product(
            *[
                one.__cupy_get_ndarray__() if hasattr(one, "__cupy_get_ndarray__") else one
                for one in operands
            ],
            **options,
        )

    return taking


def has_cupy() -> bool:
    """Whether CuPy is installed."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def is_on_gpu(value: Any) -> bool:
    """Whether `value` is a CuPy array. Does not import CuPy: without it there is none."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def array_module(*arrays: Any) -> Any:
    """`cupy` where any of them is a CuPy array, else `numpy`."""
    return sys.modules["cupy"] if any(map(is_on_gpu, arrays)) else np


@final
class Stream:
    """A stream of a strategy's own on a GPU of this process, which becomes the current one.

    It is non-blocking: not ordered with the null stream, which would forbid overlap. Whoever enters
    it is ordered with
    it by events, on the way in and on the way out; the host never waits.

    Args:
        ordinal: CUDA's number of the GPU in this process.

    Attributes:
        xp: the module `cupy`.
        ordinal: CUDA's number of the GPU.
        cuda: the module `cupy.cuda`.
        raw: the `cupy.cuda.Stream`.
        reads: events after which this stream has read memory of others, and that memory.
    """

    def __init__(self, ordinal: int) -> None:
        self.xp: Any = load_cupy("a GPU")
        self.ordinal: int = ordinal
        self.cuda: Any = self.xp.cuda
        # A stream belongs to the GPU that is current when it is made.
        self.cuda.Device(ordinal).use()
        self.raw: Any = self.cuda.Stream(non_blocking=True)
        self._entered = self.cuda.Event(disable_timing=True)
        self._left = self.cuda.Event(disable_timing=True)
        self.reads: deque[tuple[Any, list[Any]]] = deque()
        _computing.add(ordinal)

    def current(self) -> _Current:
        """A context manager in which this stream, and its GPU, is the current one of this thread."""
        return _Current(self)

    def wait_for_current(self) -> Any:
        """Makes this stream wait for what is on the thread's current stream, which is returned; its GPU is current."""
        outer = self.cuda.get_current_stream()
        if outer.ptr != self.raw.ptr:
            self._entered.record(outer)
            self.raw.wait_event(self._entered)
        return outer

    def let_wait(self, outer: Any) -> None:
        """Makes the stream `outer` wait for what is on this one."""
        if outer.ptr != self.raw.ptr:
            self._left.record(self.raw)
            outer.wait_event(self._left)

    def here(self, array: Any) -> Any:
        """`array` on this stream's GPU, copied where it is on the host or on another GPU.

        The stream is current.
        """
        if not is_on_gpu(array):
            return self.xp.asarray(array)
        if array.data.device_id == self.ordinal:
            return array
        there = self.cuda.Device(array.data.device_id)
        with there:
            array = self.xp.asarray(
                array, order="C"
            )  # CuPy copies nothing strided from another GPU
            there.synchronize()  # with whatever stream it is computed on
        made = self.xp.asarray(array)
        copied = self.cuda.Event(disable_timing=True)
        copied.record(self.raw)
        with there:  # the null stream is the current GPU's
            self.cuda.get_current_stream().wait_event(copied)  # before the program writes to it
        # Its memory would return to the stream that it was allocated on, which may be another one.
        self.reads.append((copied, [array.data]))
        return made

    def let_go(self) -> None:
        """Lets go of the memory that `keep_alive` kept, as far as this stream has read it."""
        dead = _dead[self.ordinal]
        if dead:
            event = self.cuda.Event(disable_timing=True)
            # Whatever still reads this memory was queued before this event.
            event.record(self.raw)
            self.reads.append((event, [dead.popleft() for _ in range(len(dead))]))
        while self.reads and self.reads[0][0].done:
            self.reads.popleft()
        for ordinal, memory in [*_dead.items()]:
            if (
                ordinal not in _computing
            ):  # a stream has only copied from there, and kept it meanwhile
                memory.clear()

    def synchronize(self) -> None:
        """Waits until all work on this stream is done."""
        self.raw.synchronize()


class _Current:
    """See `Stream.current`."""

    __slots__ = ("_device", "_outer", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        runtime = stream.cuda.runtime
        self._device = runtime.getDevice()
        if self._device != stream.ordinal:
            runtime.setDevice(stream.ordinal)
        # What the program has queued on its own stream, such as the arrays it passes, must be there
        # first.
        self._outer = stream.wait_for_current()
        if self._outer.ptr != stream.raw.ptr:
            # not use(), which a `with stream:` block inside would undo for what follows it
            stream.raw.__enter__()

    def __exit__(self, *_: Any) -> None:
        stream = self._stream
        runtime = stream.cuda.runtime
        # What follows is done on the current GPU, and the program may have left another one
        # current.
        if runtime.getDevice() != stream.ordinal:
            runtime.setDevice(stream.ordinal)
        if _dead or stream.reads:
            stream.let_go()
        if self._outer.ptr != stream.raw.ptr:
            stream.let_wait(self._outer)
            stream.raw.__exit__(None, None, None)
            if stream.cuda.get_current_stream().ptr != self._outer.ptr:
                self._outer.use()  # that is what made it current, and CuPy forgets it here
        if self._device != stream.ordinal:
            runtime.setDevice(self._device)


def pinned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Host memory that a GPU copies from and to without the processor's help.

    Raises:
        MemoryError: there is not enough.
    """
    cupy = load_cupy("pinned memory")
    try:
        memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"{nbytes:,} bytes of pinned host memory cannot be had: {error}; start fewer ranks on "
            "a host"
        ) from error
    return np.frombuffer(memory, np.uint8, nbytes)


def keep_alive(array: Any) -> None:
    """Keeps the memory of a CuPy array, which is another library's, until a strategy's stream has read it.

    Its library orders the memory's next use with its own streams only. When the array itself dies,
    whatever reads it is on the stream.
    """
    # The memory and not the array: a finalizer that held the array would keep it alive for good.
    memory = array.data
    weakref.finalize(array, _dead[memory.device_id].append, memory).atexit = False


_dead: defaultdict[int, deque[Any]] = defaultdict(deque)
"""Memory of arrays that were held and are no more, by GPU. A finalizer may run at any moment."""
_computing: set[int] = set()
"""The GPUs on which strategies have had streams."""


def to_host(array: Any) -> Any:
    """A NumPy copy of a CuPy array, once the current stream has come so far; anything else as it is."""
    return array.get() if is_on_gpu(array) else array
