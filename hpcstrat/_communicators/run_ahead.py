"""How far a host is ahead of what NCCL does on its GPU: it is bounded, and the watchdog hears whether it is at all."""

from __future__ import annotations

import threading
from typing import Any, final

from hpcstrat._calls.state import Waiting
from hpcstrat._core import gpu

AHEAD = 32
"""Calls of NCCL, two for most updates, that a host may be ahead: enough to keep the GPU busy when the host is late."""


@final
class RunAhead:
    """Notes each call of NCCL by an event on its stream.

    A host that runs ahead of a GPU that hangs fills CUDA's queue of launches, and then waits inside
    the driver, where it holds a lock. Whatever asks CUDA next, such as for the state of an event,
    waits for that lock, in CuPy with Python's: no thread of the process runs any more, and nobody
    ends the job. So the host waits here first, where it counts as waiting; and the watchdog reads
    numbers, which a thread of this class brings: that one waits for the GPU, by a call for which
    CuPy lets go of Python's lock.

    Args:
        stream: makes the events, on its GPU.
        waiting: counts this rank as one that waits for others.
    """

    def __init__(self, stream: gpu.Stream, waiting: Waiting) -> None:
        with stream.current():
            # Whoever waits for them sleeps: a spinning thread would take a core from the program.
            self._events: list[Any] = [
                stream.cuda.Event(block=True, disable_timing=True) for _ in range(AHEAD)
            ]
        self._waiting = waiting
        self._noted = 0  # calls
        self._done = 0  # the number of the last call that the GPU is known to have done
        self._look = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="hpcstrat-nccl", daemon=True)
        self._thread.start()

    def note(self, raw: Any) -> None:
        """Notes the call that was just put on this `cupy.cuda.Stream`.

        Waits while the host is too far ahead.
        """
        event = self._events[self._noted % AHEAD]
        if self._noted >= AHEAD:
            # Not asked first whether it is done: that would hold Python's lock, and this returns at
            # once if it is.
            self._waiting.depth += 1
            try:
                event.synchronize()
            finally:
                self._waiting.depth -= 1
        event.record(raw)
        self._noted += 1

    def is_behind(self) -> bool:
        """Whether the GPU has not done all calls, as far as is known.

        Asks nothing of CUDA, and may say so too late.
        """
        self._look.set()
        return self._done < self._noted

    def close(self) -> None:
        """Ends the thread. The GPU has done all calls."""
        self._is_closed = True
        self._look.set()
        self._thread.join()

    def _wait(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            if self._is_closed:
                return
            noted = self._noted
            if self._done < noted:
                try:
                    # Of a call that may be newer by now, which is done later than the one that
                    # counts here.
                    self._events[(noted - 1) % AHEAD].synchronize()
                except Exception:  # the program meets the same, in its own next call of CUDA
                    pass
                self._done = noted
