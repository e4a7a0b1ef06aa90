"""Threads that prepare elements: several at once, or ahead of their use. The order is always kept.

An exception in a thread is raised when the turn of its element comes, and the next element follows.
Threads belong to one iterator: when it ends or is dropped, they finish their current calls and end.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from hpcstrat._core import gpu
from hpcstrat.data._elements import attempt, unwrap, with_failures

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Runs a call in a thread."""

AUTOTUNED = 8
"""The number of threads if a call leaves it to the library.

It must not depend on the host: threads read a source ahead, and ranks compare how far it was read.
"""


def map_in_threads(
    function: Callable[[Any], Any], items: Iterator[Any], threads: int
) -> Iterator[Any]:
    """`map(function, items)`, with up to `threads` calls at once.

    The caller's thread takes the items.
    """
    return map(function, items) if threads < 2 else map(unwrap, _map(function, items, threads))


def _map(function: Callable[[Any], Any], items: Iterator[Any], threads: int) -> Iterator[Any]:
    with threads_of(threads) as submit:
        waiting: deque[Future[Any]] = deque()
        for item in with_failures(items):
            waiting.append(submit(attempt, function, item))
            # One item more than there are threads, so that no thread waits for the caller.
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[Submit]:
    """A function that runs a call in one of `count` threads, in the context of the caller."""
    place = _current_place()
    executor = ThreadPoolExecutor(count, "hpcstrat-input")

    def run(context: contextvars.Context, call: Callable[..., Any], *args: Any) -> Any:
        with place():
            return context.run(call, *args)

    try:
        # Each call has its own context, because a context cannot be entered twice at once.
        yield lambda call, *args: executor.submit(run, contextvars.copy_context(), call, *args)
    finally:
        # Without waiting: a user's function may take long, and an iterator may be dropped anywhere,
        # even in one of the threads.
        executor.shutdown(wait=False, cancel_futures=True)


def _current_place() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context manager that makes the now current GPU and stream current in another thread."""
    cupy = sys.modules.get("cupy")
    try:
        if cupy is None or not gpu.visible_gpus():
            return contextlib.nullcontext
    except gpu.DriverError:  # CPU strategies must work without a driver
        return contextlib.nullcontext
    device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()

    @contextlib.contextmanager
    def place() -> Iterator[None]:
        with device, stream:
            yield

    return place
