"""Threads that prepare elements: several at once, or ahead of their use. The order is always kept.

What a function raises in a thread is raised when the turn of its element comes, and the next
element follows. Threads belong to one iterator: when it ends or is dropped, they end with the calls
that they are in.
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

from hpcstrat._process import driver
from hpcstrat.data._node import EpochPass, FailedElement, unwrapped, with_failures

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Runs a call in a thread."""

AUTOTUNED = 8
"""The threads of a call that leaves their number to the library. Ranks compare how far a source was read, and threads
read it ahead, so the number must not depend on the host."""

_END = object()


def map_in_threads(
    function: Callable[[Any], Any], items: Iterator[Any], threads: int
) -> Iterator[Any]:
    """`map(function, items)`, with that many calls at once.

    `items` are taken by the caller's thread.
    """
    return map(function, items) if threads < 2 else map(unwrapped, _map(function, items, threads))


def _map(function: Callable[[Any], Any], items: Iterator[Any], threads: int) -> Iterator[Any]:
    def attempt(item: Any) -> Any:
        try:
            return function(unwrapped(item))
        except Exception as error:
            return FailedElement(error)

    with threads_of(threads) as submit:
        waiting: deque[Future[Any]] = deque()
        for item in with_failures(items):
            waiting.append(submit(attempt, item))
            if (
                len(waiting) > threads
            ):  # one more than there are threads, so that none waits for the caller
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def prepare_ahead(elements: Iterator[Any], count: int, epoch: EpochPass) -> Iterator[Any]:
    """The elements of a pass, of which a thread takes up to `count` before they are asked for."""
    return map(unwrapped, _ahead(with_failures(elements), count, epoch))


def _ahead(elements: Iterator[Any], count: int, epoch: EpochPass) -> Iterator[Any]:
    # A round of a shuffle that only the thread has reached does not count: what the next pass
    # begins with must not depend on how fast the thread is.
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

    `count` are begun before they are asked for.

    What user code yields in a stream is added to the checksum of the pass when its block is taken,
    so that the sum does not depend on the threads.
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

    begun: deque[Iterator[Any]] = deque()
    for inner, items in streams:
        inner.checksum = epoch.checksum.fresh()
        begun.append(blocks(inner, items, submit(read, inner, items)))
        if len(begun) > count:
            yield begun.popleft()
    yield from begun


@contextlib.contextmanager
def threads_of(count: int) -> Iterator[Submit]:
    """A function that runs a call in one of `count` threads, where it sees what the caller's thread sees."""
    place = _current_place()
    executor = ThreadPoolExecutor(count, "hpcstrat-input")

    def run(context: contextvars.Context, call: Callable[..., Any], *args: Any) -> Any:
        with place():
            return context.run(call, *args)

    try:
        # Each call has a context of its own, as one cannot be entered twice at once.
        yield lambda call, *args: executor.submit(run, contextvars.copy_context(), call, *args)
    finally:
        # Not waited for: a user's function may take long, and an iterator may be dropped anywhere,
        # even in the thread.
        executor.shutdown(wait=False, cancel_futures=True)


def _current_place() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes the GPU and the stream current that are so now, in another thread."""
    cupy = sys.modules.get("cupy")
    try:
        if cupy is None or not driver.visible_gpus():
            return contextlib.nullcontext
    except driver.DriverError:  # a strategy on CPUs, which may have been named because of it
        return contextlib.nullcontext
    device, stream = cupy.cuda.Device(), cupy.cuda.get_current_stream()

    @contextlib.contextmanager
    def place() -> Iterator[None]:
        with device, stream:
            yield

    return place
