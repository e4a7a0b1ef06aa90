"""GPUs of this process: which it may use, the stream that a strategy works on, pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, final

import numpy as np

from hpcstrat._core.cublas import GraphProducts, arrays_of

_NOT_READY = 600
# CUDA's stub of the library, which is not a driver, and a driver that finds no device.
_NO_GPU = {34, 100}
_MPS = (
    "look at the log of the MPS daemon, in CUDA_MPS_LOG_DIRECTORY, and restart it: "
    "`echo quit | nvidia-cuda-mps-control`, or let `launch/share-gpu` start one"
)
_REMEDIES = {
    2: "end the processes that fill its memory: nvidia-smi shows them",
    802: "on hosts with NVSwitch, start the fabric manager: `systemctl start nvidia-fabricmanager`",
    803: "libcuda and the kernel's module have different versions: reboot after an update of the "
    "driver, and give containers the host's libcuda",
    804: "take the folder of CUDA's compatibility package (cuda/compat) out of LD_LIBRARY_PATH",
    **dict.fromkeys((805, 806, 807, 808, 809), _MPS),
}
_ANY_REMEDY = "see what nvidia-smi and the kernel's log (`dmesg`) say"


def load_cupy(wanted_by: str) -> Any:
    """The module `cupy`.

    From now on its matrix products accept variables, as its other array functions do.

    Raises:
        RuntimeError: it is not installed. The message starts with `wanted_by`.
    """
    if not has_cupy():
        raise RuntimeError(
            f"{wanted_by} needs CuPy, which is not installed: `pip install '.[cuda12]'` (or "
            "cuda13) in hpcstrat's clone"
        )
    import cupy  # pyright: ignore[reportMissingImports]

    # Once, in the module itself: programs call `cupy.matmul`, and CuPy's own `@` looks it up there.
    if not hasattr(cupy.matmul, "__wrapped__"):
        cupy.matmul, cupy.dot = map(_accept_variables, (cupy.matmul, cupy.dot))
    return cupy


def _accept_variables(product: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function of CuPy also accept objects that export a CuPy array.

    CuPy handles `x @ w` with an array on the left: it passes on whatever it could convert to
    `matmul` of its own module, which accepts only arrays.
    """

    @functools.wraps(product)
    def multiply(*operands: Any, **options: Any) -> Any:
        return product(*arrays_of(*operands), **options)

    return multiply


def has_cupy() -> bool:
    """Whether CuPy is installed."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def is_on_gpu(value: Any) -> bool:
    """Whether `value` is a CuPy array. Does not import CuPy: before its import there is none."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def array_module(*arrays: Any) -> Any:
    """`cupy` if any of them is a CuPy array, else `numpy`."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy and any(isinstance(one, cupy.ndarray) for one in arrays) else np


@final
class Stream:
    """A strategy's own stream on a GPU of this process, which becomes the current GPU.

    It is non-blocking: not ordered with the null stream, which would forbid overlap. Events order
    it with the stream of the code that enters it, on the way in and on the way out; the host never
    waits.

    Args:
        ordinal: CUDA's number of the GPU in this process.

    Attributes:
        xp: the module `cupy`.
        ordinal: CUDA's number of the GPU.
        cuda: the module `cupy.cuda`.
        raw: the `cupy.cuda.Stream`.
        entered: the event that this stream waits for where it becomes current.
        left: the event that the program's stream waits for afterwards.
        reads: events after which this stream has read other libraries' memory, and that memory.
    """

    def __init__(self, ordinal: int) -> None:
        self.xp: Any = load_cupy("a GPU")
        self.ordinal: int = ordinal
        self.cuda: Any = self.xp.cuda
        # A stream belongs to the GPU that is current when it is made.
        self.cuda.Device(ordinal).use()
        self.raw: Any = self.cuda.Stream(non_blocking=True)
        self.entered: Any = self.cuda.Event(disable_timing=True)
        self.left: Any = self.cuda.Event(disable_timing=True)
        self.reads: deque[tuple[Any, list[Any]]] = deque()
        _computing.add(ordinal)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """A context manager in which this stream, and its GPU, are current in this thread."""
        # A step makes it current once, and then asks for it in many calls.
        if self.cuda.get_current_stream().ptr == self.raw.ptr:
            return _NOTHING
        return _Current(self)

    def here(self, array: Any) -> Any:
        """`array` on this stream's GPU, copied from the host or another GPU.

        The stream is current.
        """
        if not is_on_gpu(array):
            # A kernel with a number as its parameter: a graph has no copies from the host.
            is_number = array.size == 1 or (array.size and not any(array.strides))
            if is_number and array.dtype.isbuiltin == 1:
                return self.xp.full(array.shape, array.flat[0], array.dtype)
            return self.xp.asarray(array)
        if array.data.device_id == self.ordinal:
            return array
        self.refuse_in_graph("an array on another GPU")
        other = self.cuda.Device(array.data.device_id)
        with other:
            # CuPy copies nothing strided from another GPU.
            array = self.xp.asarray(array, order="C")
            other.synchronize()  # with whatever stream computes it
        copy = self.xp.asarray(array)
        copied = self.cuda.Event(disable_timing=True)
        copied.record(self.raw)
        with other:  # the null stream is the current GPU's
            self.cuda.get_current_stream().wait_event(copied)  # before the program writes to it
        # Its memory would return to the stream that allocated it, which may not be this one.
        self.reads.append((copied, [array.data]))
        return copy

    def let_go(self) -> None:
        """Releases the memory that `keep_alive` kept, as far as this stream has read it."""
        dead = _dead[self.ordinal]
        if dead:
            event = self.cuda.Event(disable_timing=True)
            # All reads of this memory were queued before this event.
            event.record(self.raw)
            self.reads.append((event, [dead.popleft() for _ in range(len(dead))]))
        while self.reads and self.reads[0][0].done:
            self.reads.popleft()
        for ordinal, memory in [*_dead.items()]:
            # A stream has only copied from such a GPU, and kept the memory meanwhile (`here`).
            if ordinal not in _computing:
                memory.clear()

    def synchronize(self) -> None:
        """Waits until all work on this stream is done."""
        self.raw.synchronize()

    def refuse_in_graph(self, what: str) -> None:
        """Refuses what a launch of a graph would not repeat, while this stream captures one.

        Raises:
            RuntimeError: it captures.
        """
        if self.raw.is_capturing():
            raise RuntimeError(
                f"{what} cannot be part of a CUDA graph; do it outside of the hs.function"
            )

    @functools.cached_property
    def products(self) -> GraphProducts:
        """Matrix products for graphs; this stream is current and does not capture."""
        return GraphProducts(self)


_NOTHING = contextlib.nullcontext()


class _Current(contextlib.AbstractContextManager[None]):
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
        # First what the program has queued on its own stream, such as the arrays that it passes.
        self._outer = outer = stream.cuda.get_current_stream()
        if outer.ptr != stream.raw.ptr:
            stream.entered.record(outer)
            stream.raw.wait_event(stream.entered)
            # Not use(): a `with stream:` block inside would undo it for what follows.
            stream.raw.__enter__()

    def __exit__(self, *_: Any) -> None:
        stream = self._stream
        runtime = stream.cuda.runtime
        # The following calls act on the current GPU, and the program may have changed that.
        if runtime.getDevice() != stream.ordinal:
            runtime.setDevice(stream.ordinal)
        if _dead or stream.reads:
            stream.let_go()
        outer = self._outer
        if outer.ptr != stream.raw.ptr:
            stream.left.record(stream.raw)
            outer.wait_event(stream.left)
            stream.raw.__exit__(None, None, None)
            if stream.cuda.get_current_stream().ptr != outer.ptr:
                outer.use()  # use() had made it current, which CuPy forgets here
        if self._device != stream.ordinal:
            runtime.setDevice(self._device)


def allocate_pinned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Host memory that a GPU copies from and to without the processor's help.

    Raises:
        MemoryError: not enough is left.
    """
    cupy = load_cupy("pinned memory")
    try:
        memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MemoryError(
            f"cannot allocate {nbytes:,} bytes of pinned host memory: {error}; start fewer ranks "
            "per host"
        ) from error
    return np.frombuffer(memory, np.uint8, nbytes)


def keep_alive(array: Any) -> None:
    """Keeps another library's memory, in a CuPy array, until a strategy's stream has read it.

    Its library orders the memory's next use only with its own streams. When the array itself dies,
    all reads of it are already on the stream.
    """
    # The memory, not the array: a finalizer that held the array would keep it alive for good.
    memory = array.data
    weakref.finalize(array, _dead[memory.device_id].append, memory).atexit = False


_dead: defaultdict[int, deque[Any]] = defaultdict(deque)
"""Memory of arrays that are dead, by GPU. A finalizer may add to it at any moment."""
_computing: set[int] = set()
"""The GPUs on which strategies have had streams."""


def wait_for(event: Any, pause: float = 1e-3) -> None:
    """Waits until the GPU has reached an event that was recorded, and sleeps between two looks.

    It asks the driver itself. CuPy would ask with Python's lock held, and a driver's answer may
    wait while another thread waits for room in CUDA's launch queue. CUDA's own events for sleeping
    hosts interrupt a processor at each record: two in a step cost it 100 us, on a virtual machine.

    Args:
        event: a `cupy.cuda.Event`.
        pause: seconds of sleep. The thread takes Python's lock from the program after each.

    Raises:
        cupy.cuda.runtime.CUDARuntimeError: the GPU has failed.
    """
    query, address = _event_query(), event.ptr
    while (status := query(address)) == _NOT_READY:
        time.sleep(pause)
    if status:
        event.synchronize()  # raises what is wrong


@functools.cache
def _event_query() -> Callable[[int], int]:
    # Unlike PyDLL, CDLL releases Python's lock during a call.
    query = ctypes.CDLL("libcuda.so.1").cuEventQuery
    query.argtypes = [ctypes.c_void_p]
    return query


def to_host(array: Any) -> Any:
    """A NumPy copy of a CuPy array, after the current stream's work; anything else unchanged."""
    return array.get() if is_on_gpu(array) else array


# ---- NVIDIA's driver, without CUDA or CuPy


class DriverError(RuntimeError):
    """There is a driver, and it does not start."""


@functools.cache
def visible_gpus() -> tuple[str, ...]:
    """The unique id of each GPU that this process may use, in CUDA's order; none without a driver.

    It opens no context on any GPU.

    Raises:
        DriverError: there is a driver, and it does not start. It may do so later: nothing is kept.
    """
    # A user who hides all GPUs wants none, whatever state they are in.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    status = driver.cuInit(0)
    if status in _NO_GPU:
        return ()
    _check(driver, "cuInit", status)
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    # The second version gives the parts of a divided GPU (MIG) different ids.
    ask = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)
    ids = []
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
        _check(driver, "cuDeviceGetUuid", ask(ctypes.byref(uuid), device))
        ids.append(bytes(uuid).hex())
    return tuple(ids)


def _check(driver: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        text = "an error without a name" if name.value is None else name.value.decode()
        raise DriverError(
            f"NVIDIA's driver does not start: {call} fails with {text} ({status}); "
            f"{_REMEDIES.get(status, _ANY_REMEDY)}"
        )
