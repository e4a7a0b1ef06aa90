"""CUDA graphs: what a function puts on a stream, captured with the memory that it uses."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from hpcstrat._core import gpu
from hpcstrat._core.cublas import replaced


@final
class Graph:
    """The work of a function as a CUDA graph, with all memory that it may use.

    Args:
        stream: where it is captured and launched; the current stream.
        owner: whose graph it is; see `drop_graphs`.

    Attributes:
        stream: as above.
        owner: as above.
        raw: the `cupy.cuda.Graph`.
        inputs: the function's arguments; the graph reads those that are arrays.
        results: what the function has returned; the graph writes those that are arrays.
    """

    def __init__(self, stream: gpu.Stream, owner: object) -> None:
        self.stream: gpu.Stream = stream
        self.owner: object = owner
        self.raw: Any = None
        self.inputs: Sequence[Any] = ()
        self.results: Sequence[Any] = ()
        # Of its own: what the function frees is free for others, but each launch writes to it.
        self._pool: Any = stream.xp.cuda.MemoryPool()
        self._made: set[int] = set()
        self._kept: list[Any] = []
        _all.add(self)

    def capture(
        self, function: Callable[[Sequence[Any]], Sequence[Any]], given: Sequence[Any]
    ) -> None:
        """Calls a function, but makes a graph of what it puts on the stream.

        Args:
            function: takes `inputs`, and returns `results`.
            given: arguments like those of the launches.

        Raises:
            RuntimeError: an array that the function makes is kept elsewhere than in the results.
            Exception: what the function raises, such as CuPy's refusal of a copy to the host.
        """
        stream, xp = self.stream, self.stream.xp
        with xp.cuda.using_allocator(self._allocate):
            self.inputs = [xp.empty_like(one) if gpu.is_on_gpu(one) else one for one in given]
        self._made.clear()  # the inputs stay
        # Before and after: the function may drop arrays that it reads, and make others.
        self._kept = _memory_of_arrays(xp.cuda)
        stream.raw.begin_capture()  # relaxed, which is CuPy's default: memory may be allocated
        try:
            with (
                xp.cuda.using_allocator(self._allocate),
                stream.products.replace_cupys(),
                self._watching(),
            ):
                self.results = function(self.inputs)
            self.raw = stream.raw.end_capture()
        except BaseException:
            with contextlib.suppress(Exception):  # of a capture that the first error has ended
                stream.raw.end_capture()
            raise
        self.results = [_Memory(one) if gpu.is_on_gpu(one) else one for one in self.results]
        self.raw.upload(stream.raw)  # here it can still fail: it takes memory
        self._kept += [*self._memory_that_stays(), *xp.fft.config.get_plan_cache()]
        self.results = [one.array(xp) if type(one) is _Memory else one for one in self.results]

    def _allocate(self, nbytes: int) -> Any:
        try:
            memory = self._pool.malloc(nbytes)
        except MemoryError:  # the program's pool has what the calls before have used
            self.stream.xp.get_default_memory_pool().free_all_blocks()
            memory = self._pool.malloc(nbytes)
        if nbytes:
            self._made.add(memory.mem.ptr)
        return memory

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """A block in which calls of CuPy are refused that launches would not repeat."""
        stream, cuda, random = self.stream, self.stream.cuda, self.stream.xp.random

        def refuse(what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            if cuda.get_current_stream().ptr == stream.raw.ptr:  # else in another thread
                stream.refuse_in_graph(what)
            return call(*arguments, **options)

        watched = {
            "work on another stream": [(cuda.Stream, "__enter__"), (cuda.Stream, "use")],
            "a random number with a seed of the host": [
                (random.RandomState, "_get_seed"),
                (random.BitGenerator, "__init__"),
            ],
        }
        with contextlib.ExitStack() as stack:
            for what, calls in watched.items():
                for owner, name in calls:
                    stack.enter_context(replaced(owner, name, functools.partial(refuse, what)))
            yield

    def _memory_that_stays(self) -> list[Any]:
        """`_memory_of_arrays`, of which none was made: not even a result is kept elsewhere."""
        for _ in range(5):
            stays = _memory_of_arrays(self.stream.cuda)
            if all(memory.ptr not in self._made for memory in stays):
                return stays
            del stays  # which a traceback would keep
            gc.collect()  # those in circles
            time.sleep(0.01)  # a thread, such as the watchdog, may look at the function's frame
        raise RuntimeError(
            "an array that the function makes outlives it, and each launch would write to that one "
            "and make no other; only return it, as it is or in a tuple, list or dict, or write to "
            "an array in place"
        )

    def drop(self) -> None:
        """Destroys the graph and frees its memory. The stream has done its work."""
        self.raw = self._pool = None
        self.inputs = self.results = self._kept = []


_all: weakref.WeakSet[Graph] = weakref.WeakSet()


def drop_graphs(stream: gpu.Stream, owner: object = None) -> None:
    """Destroys the graphs on a stream, all or an owner's, once the stream has done its work."""
    mine = [one for one in _all if one.stream is stream and owner in (None, one.owner)]
    if mine:
        stream.synchronize()
        for graph in mine:
            graph.drop()
        gc.collect()  # what else holds one, such as the traceback of an error


def _memory_of_arrays(cuda: Any) -> list[Any]:
    """The memory of all arrays that are there now: the function may read any, and it be dropped.

    Not the arrays themselves, which the next capture would find here, and keep as well.
    """
    pointer = cuda.MemoryPointer
    return [one.mem for one in gc.get_objects() if type(one) is pointer]


@final
class _Memory:
    """The memory of an array, and where the array is in it."""

    def __init__(self, array: Any) -> None:
        data = array.data
        self._memory, self._offset = data.mem, data.ptr - data.mem.ptr
        self._layout = {"shape": array.shape, "dtype": array.dtype, "strides": array.strides}

    def array(self, xp: Any) -> Any:
        """The array, made anew."""
        pointer = xp.cuda.MemoryPointer(self._memory, self._offset)
        return xp.ndarray(**self._layout, memptr=pointer)
