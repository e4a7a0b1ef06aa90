"""Threads that prepare elements: several at once, or ahead of their use. The order is always kept.

An exception in a thread is raised when the turn of its element comes, and the next element follows.
Threads belong to one iterator: when it ends or is dropped, they finish their current calls and end.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from hpcstrat._core import gpu
from hpcstrat.data._node import EpochPass, FailedElement, unwrap, with_failures

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Runs a call in a thread."""

AUTOTUNED = 8
"""The number of threads if a call leaves it to the library.

It must not depend on the host: threads read a source ahead, and ranks compare how far it was read.
"""

_END = object()


def map_in_threads(
    function: Callable[[Any], Any], items: Iterator[Any], threads: int
) -> Iterator[Any]:
    """`map(function, items)`, with up to `threads` calls at once.

    The caller's thread takes the items.
    """
    return map(function, items) if threads < 2 else map(unwrap, _map(function, items, threads))


def _map(function: Callable[[Any], Any], items: Iterator[Any], threads: int) -> Iterator[Any]:
    def attempt(item: Any) -> Any:
        try:
            return function(unwrap(item))
        except Exception as error:
            return FailedElement(error)

    with threads_of(threads) as submit:
        waiting: deque[Future[Any]] = deque()
        for item in with_failures(items):
            waiting.append(submit(attempt, item))
            # One item more than there are threads, so that no thread waits for the caller.
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def prepare_ahead(elements: Iterator[Any], count: int, epoch: EpochPass) -> Iterator[Any]:
    """The elements of a pass; a thread takes up to `count` before they are asked for."""
    return map(unwrap, _ahead(with_failures(elements), count, epoch))


def _ahead(elements: Iterator[Any], count: int, epoch: EpochPass) -> Iterator[Any]:
    # A round of a shuffle that only the thread has reached does not count: the next pass must not
    # depend on how fast the thread is.
    epoch.runs_ahead = True

    def take() -> tuple[Any, Any]:
        return next(elements, _END), epoch.reached

    with threads_of(1) as submit:
        waiting = deque([submit(take) for _ in range(count)])
        while True:
            waiting.append(submit(take))
            element, reached = waiting.popleft().result()
            epoch.commit(reached)
            if element is _END:
                return
            yield element


def blocks_ahead(
    streams: Iterator[tuple[EpochPass, Iterator[Any]]],
    size: int,
    count: int,
    submit: Submit,
    epoch: EpochPass,
) -> Iterator[Iterator[Any]]:
    """The streams, each read in blocks of `size` items, one block ahead.

    `count` streams are started before they are asked for. The elements that user code yields in a
    stream are added to the checksum of the pass when their block is taken, so that the checksum
    does not depend on the threads.
    """

    def read(inner: EpochPass, items: Iterator[Any]) -> tuple[list[Any], int]:
        return list(itertools.islice(items, size)), inner.checksum.value

    def blocks(inner: EpochPass, items: Iterator[Any], reading: Future[Any]) -> Iterator[Any]:
        while True:
            block, checksum = reading.result()
            if not block:
                return
            reading = submit(read, inner, items)
            epoch.checksum.add_text(f"{checksum}")
            yield from block

    started: deque[Iterator[Any]] = deque()
    for inner, items in streams:
        inner.checksum = epoch.checksum.fresh()
        started.append(blocks(inner, items, submit(read, inner, items)))
        if len(started) > count:
            yield started.popleft()
    yield from started


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
