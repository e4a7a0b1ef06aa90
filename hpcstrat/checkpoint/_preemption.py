"""Before a job is stopped: a last checkpoint, and an exit status that asks for a restart."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

from hpcstrat._calls.collective import collective
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._process import job_files
from hpcstrat._replicas import contexts
from hpcstrat.checkpoint._checkpoint import Checkpoint


@final
class PreemptionHandler:
    """Records signals that announce the job's end; after the step all ranks save and exit.

    Put `with PreemptionHandler(checkpoint, path) as handler:` around the training, and call
    `handler.check()` after each step. A signal to any rank is enough. While the ranks save and
    exit, further signals have no effect. The end of the `with` block, or `close`, restores the
    previous handlers.

    Args:
        checkpoint: what to save.
        path: as in `Checkpoint.save`.
        keep: as in `Checkpoint.save`.
        signals: the signals to record; by default those that Slurm sends before a job's time is up
            (`--signal=USR1@120`) and at its end.
        exit_status: the status of all ranks, and so of `mpirun`; by default `EX_TEMPFAIL`, 75.

    Raises:
        RuntimeError: made in a thread other than the main thread, which alone handles signals.
        ValueError: `exit_status` is not from 1 to 255.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        keep: int | None = None,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        exit_status: int = os.EX_TEMPFAIL,
    ) -> None:
        call = "PreemptionHandler"
        if not 1 <= exit_status <= 255:
            raise ValueError(
                f"{call}: exit_status is {exit_status}; it must be from 1 to 255, "
                "so that it does not look like success"
            )
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{call} was made in the thread {threading.current_thread().name!r}; "
                "make it in the main thread"
            )
        self._path = path
        self._save: Callable[[], object] = lambda: checkpoint.save(path, keep)
        self._exit_status = exit_status
        # The handler only takes a note: it may run in the middle of a collective call, where
        # nothing can be saved.
        self._noted = 0  # the number of the received signal, or 0
        self._leaves = False
        self._previous: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in signals
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number

    @property
    def is_preempted(self) -> bool:
        """Whether this rank has received a signal, or `check` learnt of a signal on another rank.

        May differ between ranks.

        Examples:
            >>> import signal
            >>> checkpoint = hs.checkpoint.Checkpoint()
            >>> with hs.checkpoint.PreemptionHandler(checkpoint, "model") as handler:
            ...     signal.raise_signal(signal.SIGUSR1)  # as Slurm sends it
            ...     print(handler.is_preempted)
            True
        """
        return bool(self._noted)

    @collective("PreemptionHandler.check", communicator_of=lambda _: connect())
    def check(self) -> None:
        """Saves and exits on all ranks if any has received a signal.

        Collective: all ranks call this after each step.

        Raises:
            SystemExit: a signal was received, and the checkpoint is saved; the status is
                `exit_status`.
            RuntimeError: called inside a replica function.
            Exception: what `Checkpoint.save` raises.

        Examples:
            >>> checkpoint = hs.checkpoint.Checkpoint()
            >>> with hs.checkpoint.PreemptionHandler(checkpoint, "model") as handler:
            ...     for step in range(2):
            ...         handler.check()  # no signal: returns
            >>> print(step)
            1
        """
        communicator = connect()
        if isinstance(contexts.context(), (contexts.InReplica, contexts.InUpdate)):
            raise RuntimeError(
                f"{current_call()} was called inside a replica function; call it outside "
                "Strategy.run"
            )
        # One rank's signal is enough: Slurm may signal the ranks at different moments, and all must
        # save the same step. Signal numbers are at most 64.
        number = communicator.highest(self._noted)
        if not number:
            return
        self._noted = number
        self._save()
        if communicator.rank == 0:
            name = {known.value: known.name for known in signal.Signals}.get(
                self._noted, f"signal {self._noted}"
            )
            print(
                f"hpcstrat: received {name}; the checkpoint {os.fspath(self._path)} is saved, and "
                f"the job exits with status {self._exit_status}",
                file=sys.stderr,
                flush=True,
            )
        self._leaves = True
        # Python removes its handlers before the process ends; a signal after that would kill the
        # process, and change the status.
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        if (memory := job_files.find()) is not None:
            memory.note(communicator.rank, job_files.State.PREEMPTED)
        raise SystemExit(self._exit_status)

    def close(self) -> None:
        """Restores the previous handlers, unless the ranks exit: then signals stay ignored.

        Examples:
            >>> import signal
            >>> before = signal.getsignal(signal.SIGTERM)
            >>> handler = hs.checkpoint.PreemptionHandler(hs.checkpoint.Checkpoint(), "model")
            >>> handler.close()
            >>> signal.getsignal(signal.SIGTERM) == before
            True
        """
        if not self._leaves:
            for number, previous in self._previous.items():
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
            self._previous = {}

    def __enter__(self) -> PreemptionHandler:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
