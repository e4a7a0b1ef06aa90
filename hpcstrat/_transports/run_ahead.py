"""How far a host may run ahead of its GPU, and whether its GPU still has calls of NCCL to do."""

from __future__ import annotations

import threading
from typing import Any, final

from hpcstrat._agreement.collective import Waiting
from hpcstrat._core import gpu

AHEAD = 32
"""Calls of NCCL, two per update mostly, that a host may be ahead: the GPU then has enough to do."""
_TOGETHER = 8
"""The host waits once for as many of them: to ask for each would cost each update a microsecond."""


@final
class RunAhead:
    """Records an event after each call of NCCL, on its stream.

    A host that runs ahead of a hanging GPU fills CUDA's launch queue, and then waits in the driver
    with a lock held. Other calls of CUDA may wait for that lock; if CuPy makes one of them with
    Python's lock held, no thread of the process runs any more, and nothing ends the job. So the
    host waits here first, where it counts as waiting. The watchdog only reads numbers, which
    a thread of this class updates. Both wait by `gpu.wait_for`, without Python's lock.

    Args:
        stream: the stream.
        waiting: counts this rank as waiting for others.
    """

    def __init__(self, stream: gpu.Stream, waiting: Waiting) -> None:
        with stream.current():
            self._events: list[Any] = [stream.cuda.Event(disable_timing=True) for _ in range(AHEAD)]
        self._raw: Any = stream.raw
        self._device: Any = stream.cuda.Device(stream.ordinal)
        self._waiting = waiting
        self._noted = 0  # calls
        self._done = 0  # the number of the last call that the GPU is known to have done
        self._look = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._wait, name="hpcstrat-nccl", daemon=True)
        self._thread.start()

    def note(self) -> None:
        """Notes the call that was just put on the stream.

        Waits while the host is too far ahead.
        """
        noted = self._noted
        if noted % _TOGETHER == 0 and noted >= AHEAD:  # the next calls record these events again
            with self._waiting:
                gpu.wait_for(self._events[(noted + _TOGETHER - 1) % AHEAD], pause=1e-4)
        self._events[noted % AHEAD].record(self._raw)
        self._noted = noted + 1

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
        # CUDA may open a context on the GPU that is current in a thread: in a new one, GPU 0.
        self._device.use()
        while True:
            self._look.wait()
            self._look.clear()
            if self._is_closed:
                return
            noted = self._noted
            if self._done < noted:
                try:
                    # The event may belong to a newer call by now, which is done later.
                    gpu.wait_for(self._events[(noted - 1) % AHEAD], pause=1e-2)
                except Exception:  # the program gets the same error in its next call of CUDA
                    pass
                self._done = noted
