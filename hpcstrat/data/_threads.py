"""Threads that prepare elements: several at once, or ahead of their use. The order is always kept.

An error in a thread is raised when the turn of its element comes. Threads belong to one iterator:
when it ends or is dropped, they finish their current calls and end.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from hpcstrat._core import gpu

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Runs a call in a thread."""

_END = object()


def map_in_threads(
    function: Callable[[Any], Any], items: Iterator[Any], calls: int
) -> Iterator[Any]:
    """`map(function, items)`, with up to `calls` calls at once, and so many elements ahead.

    The caller's thread takes the items, always equally many ahead, because ranks compare how far a
    source was read. It also makes the calls that no thread has begun when their turn comes: those
    that are over sooner than a thread wakes up then cost hardly more than without threads.
    """
    return map(function, items) if calls < 2 else _map(function, items, calls)


class _Call:
    """A call, which the first thread to claim it makes."""

    __slots__ = ("_claim", "_error", "_function", "_item", "_made", "_result")

    def __init__(self, function: Callable[[Any], Any], item: Any) -> None:
        self._function, self._item = function, item
        self._claim, self._made = threading.Lock(), threading.Lock()
        self._made.acquire()
        self._error: BaseException | None = None

    def make(self) -> bool:
        """Makes the call and returns true, unless another thread has claimed it."""
        if not self._claim.acquire(blocking=False):
            return False
        item, self._item = self._item, None  # this call may be kept longer than the item
        try:
            self._result = self._function(item)
        except BaseException as error:
            self._error = error
        finally:
            self._made.release()
        return True

    def result(self) -> Any:
        """The result; waits for the thread that makes the call."""
        self._made.acquire()
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # its traceback keeps this frame alive


def _map(function: Callable[[Any], Any], items: Iterator[Any], calls: int) -> Iterator[Any]:
    waiting: deque[_Call] = deque()  # in order
    with threads_of(calls) as submit:
        helpers = _Helpers(calls, submit)
        try:
            for call in _calls(function, items):
                waiting.append(call)
                helpers.add(call)
                if len(waiting) > calls:
                    yield helpers.result(waiting.popleft())
            while waiting:
                yield helpers.result(waiting.popleft())
        finally:
            helpers.dismiss()


class _Helpers:
    """Threads that make calls in order, next to the one whose calls they are."""

    def __init__(self, count: int, submit: Submit) -> None:
        self._submit = submit
        self._unclaimed: deque[_Call] = deque()
        self._idle = deque(range(count))  # the threads that have nothing to do
        self._permits = deque(range(count))  # one for each call that is being made

    def add(self, call: _Call) -> None:
        """Lets a thread make a call."""
        self._unclaimed.append(call)
        self._wake()

    def result(self, call: _Call) -> Any:
        """The result of the next call, which is made here if no thread has begun it."""
        try:
            permit = self._permits.popleft()
        except IndexError:  # the threads that have them take this call first
            return call.result()
        is_made = call.make()
        self._permits.append(permit)
        if not is_made:
            self._wake()  # a thread may have missed this permit
        return call.result()

    def dismiss(self) -> None:
        """Lets the threads end after their current calls."""
        self._unclaimed.clear()

    def _wake(self) -> None:
        """Lets a thread look for a call, if one has nothing to do."""
        if self._idle and self._unclaimed and self._permits:
            # Another was faster, or the end has come.
            with contextlib.suppress(IndexError, RuntimeError):
                self._submit(self._help, self._idle.popleft())

    def _help(self, thread: int) -> None:
        try:
            while True:
                permit = self._permits.popleft()
                try:
                    self._unclaimed.popleft().make()
                finally:
                    self._permits.append(permit)
        except IndexError:  # no call is left, or none may be made now
            self._idle.append(thread)
            self._wake()  # a call, or a permit, may have come since


def _calls(function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[_Call]:
    try:
        for item in items:
            yield _Call(function, item)
    except Exception as error:  # its turn comes after the elements before it
        yield _Call(_raise, error)


def _raise(error: Exception) -> None:
    raise error


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


def take_ahead(elements: Iterator[Any], count: int) -> Iterator[Any]:
    """The elements; a thread takes up to `count` before they are asked for."""
    with threads_of(1) as submit:
        waiting = deque([submit(next, elements, _END) for _ in range(count)])
        while True:
            waiting.append(submit(next, elements, _END))
            if (element := waiting.popleft().result()) is _END:
                return
            yield element


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
