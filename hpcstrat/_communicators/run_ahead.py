"""Limits how far a host is ahead of NCCL's work on its GPU, and tells the watchdog if it is."""

from __future__ import annotations

import threading
from typing import Any, final

from hpcstrat._calls.state import Waiting
from hpcstrat._core import gpu

AHEAD = 32
"""Calls of NCCL, two per update mostly, that a host may be ahead: the GPU then has enough to do."""


@final
class RunAhead:
    """Records an event after each call of NCCL, on the call's stream.

    A host that runs ahead of a hanging GPU fills CUDA's launch queue, and then waits in the driver
    with a lock held. The next call of CUDA, such as for an event's state, waits for that lock, in
    CuPy with Python's lock held: no thread of the process runs any more, and nothing ends the job.
    So the host waits here first, where it counts as waiting. The watchdog only reads numbers, which
    a thread of this class updates: it waits for the GPU in a call during which CuPy releases
    Python's lock.

    Args:
        stream: makes the events, on its GPU.
        waiting: counts this rank as waiting for others.
    """

    def __init__(self, stream: gpu.Stream, waiting: Waiting) -> None:
        with stream.current():
            # Threads sleep while they wait for them: spinning would take a core from the program.
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
            # Without asking first whether it is done: that would hold Python's lock, and this
            # returns at once if it is.
            self._waiting.depth += 1
            try:
                event.synchronize()
            finally:
                self._waiting.depth -= 1
        event.record(raw)
        self._noted += 1

    def is_behind(self) -> bool:
        """Whether the GPU has calls left, as far as is known.

        Makes no call of CUDA, and may return true for a moment too long.
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
                    # The event may belong to a newer call by now, which is done later.
                    self._events[(noted - 1) % AHEAD].synchronize()
                except Exception:  # the program gets the same error in its next call of CUDA
                    pass
                self._done = noted
