"""When to save, what to resume from, and a last checkpoint before the job is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn, final

from hpcstrat._agreement.collective import collective
from hpcstrat._core.atomic_file import follow_link
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.timeline import CHECKPOINT, span
from hpcstrat._transports.connection import connect
from hpcstrat.checkpoint._checkpoint import Checkpoint, objects_of
from hpcstrat.checkpoint._objects import parameter_rank, require_no_replica
from hpcstrat.checkpoint._restoring import restore_from
from hpcstrat.checkpoint._saving import (
    check_count,
    check_keep,
    check_path,
    finish_background,
    save_to,
)


@final
class CheckpointManager:
    """Makes a program restartable: it restores, saves every N steps, and saves before the end.

    Put `with CheckpointManager(checkpoint, path, every=1000) as manager:` around the training, call
    `manager.restore_or_initialize()` before the first step and `manager.step()` at the end of each.

    In the `with` block signals that announce the job's end are recorded. A signal to any rank is
    enough: at the end of the step all ranks save and exit, and further signals have no effect. The
    end of the block restores the previous handlers.

    Args:
        checkpoint: what to save.
        path: as in `Checkpoint.save`. A file in memory, in `/dev/shm`, outlives the ranks, but not
            their host.
        every: steps from one save to the next; with `None`, only `save` and a signal save.
        keep: as in `Checkpoint.save`.
        blocking: as in `Checkpoint.save`. Without an exception the end of the `with` block waits
            for the file; the save after a signal waits in any case.
        signals: the signals to record; by default those that Slurm sends before a job's time is up
            (`--signal=USR1@120`) and at its end.
        exit_status: the status of all ranks after a signal, and so of `mpirun`; by default
            `EX_TEMPFAIL`, 75.

    Raises:
        TypeError: `checkpoint` is not a `Checkpoint`, or `path` is not a path.
        ValueError: `every` or `keep` is not positive, a signal cannot be recorded, or `exit_status`
            is not from 1 to 255.
        RuntimeError: the `with` block begins outside the main thread.
    """

    @names_call("CheckpointManager")
    def __init__(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
        blocking: bool = True,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        exit_status: int = os.EX_TEMPFAIL,
    ) -> None:
        # All of it now: after a signal an error would cost the steps since the last save.
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"{current_call()}: checkpoint is {type(checkpoint).__name__}; pass a Checkpoint, "
                "such as Checkpoint(w=w)"
            )
        recordable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if wrong := [number for number in signals if number not in recordable]:
            raise ValueError(
                f"{current_call()}: signals has {wrong[0]!r}, which no program can record; pass "
                "signals such as signal.SIGTERM"
            )
        if not isinstance(exit_status, int) or not 1 <= exit_status <= 255:
            raise ValueError(
                f"{current_call()}: exit_status is {exit_status!r}; it must be from 1 to 255, so "
                "that it does not look like success"
            )
        self._checkpoint = checkpoint
        self._path = check_path(path)
        self._every = check_count("every", every)
        self._keep = check_keep(keep)
        self._blocking = bool(blocking)
        self._signals = tuple(dict.fromkeys(signals))  # two numbers may be one, as SIGCLD is
        self._exit_status = exit_status
        self._steps = 0
        self._noted = 0  # the number of the received signal, or 0
        self._previous: dict[int, Any] = {}  # the handlers, in the `with` block

    @property
    def steps(self) -> int:
        """The number of steps that the program has done, including those before it was restored.

        Examples:
            >>> manager = hs.checkpoint.CheckpointManager(hs.checkpoint.Checkpoint(), "model")
            >>> manager.step()
            >>> manager.steps
            1
        """
        return self._steps

    @collective(communicator_of=lambda _: connect())
    def restore_or_initialize(self) -> str | None:
        """Restores the newest file, if there is one.

        Collective: all ranks call this.

        It is `path`; or `path.1`, which a kill on a file system without hard links may leave alone.

        Returns:
            The file's path; `None` if there is no file, and then nothing has changed.

        Raises:
            Exception: what `Checkpoint.restore` raises.

        Examples:
            The same lines start a program and start it again:

            >>> import tempfile
            >>> w = hs.Variable(0.0)
            >>> def train(path):
            ...     manager = hs.checkpoint.CheckpointManager(hs.checkpoint.Checkpoint(w=w), path)
            ...     found = manager.restore_or_initialize() is not None
            ...     w.assign_add(1.0)
            ...     path = manager.save()
            ...     return found
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     print(train(f"{folder}/model"), train(f"{folder}/model"), w.numpy())
            False True 2.0
        """
        finish_background()  # it may write this very file
        objects = objects_of(self._checkpoint)
        newest = next(
            (path for path in (self._path, f"{follow_link(self._path)}.1") if os.path.exists(path)),
            None,
        )
        # Other hosts may have other files of this name.
        newest = connect().broadcast_obj(newest, parameter_rank(objects))
        if newest is not None:
            _, step = restore_from(newest, objects)
            self._steps = step or 0  # a file of `Checkpoint.save` has no step
        return newest

    @span(CHECKPOINT, "step")
    @collective(communicator_of=lambda _: connect())
    def step(self) -> None:
        """Counts a step, and saves if it is time to; after a signal it saves and exits.

        Collective: all ranks call this at the end of each step.

        Outside the `with` block, and when there is nothing to save, it does not communicate.

        Raises:
            SystemExit: a signal was received, and the checkpoint is saved; the status is
                `exit_status`.
            RuntimeError: called inside a replica function.
            Exception: what `Checkpoint.save` raises.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = hs.checkpoint.Checkpoint(w=hs.Variable(0.0))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = f"{folder}/model"
            ...     manager = hs.checkpoint.CheckpointManager(checkpoint, path, every=2)
            ...     for _ in range(3):
            ...         manager.step()
            ...         print(manager.steps, os.listdir(folder))
            1 []
            2 ['model']
            3 ['model']
        """
        require_no_replica()
        self._steps += 1
        # One rank's signal is enough: Slurm may signal the ranks at different moments, and all must
        # save the same step. Signal numbers are at most 64.
        if self._previous and (number := connect().highest(self._noted)):
            self._save_and_exit(number)
        if self._every is not None and self._steps % self._every == 0:
            self._save(self._blocking)

    @span(CHECKPOINT, "save")
    @collective(communicator_of=lambda _: connect())
    def save(self) -> str:
        """Writes the file now. Collective: all ranks call this.

        Returns:
            The file's path.

        Raises:
            Exception: what `Checkpoint.save` raises.

        Examples:
            >>> import os, tempfile
            >>> checkpoint = hs.checkpoint.Checkpoint(w=hs.Variable(0.0))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     manager = hs.checkpoint.CheckpointManager(checkpoint, f"{folder}/model")
            ...     print(os.path.basename(manager.save()))
            model
        """
        self._save(self._blocking)
        return self._path

    def _save(self, blocking: bool) -> None:
        save_to(self._path, objects_of(self._checkpoint), self._keep, blocking, self._steps)

    def _save_and_exit(self, number: int) -> NoReturn:
        # What a save in the background has met does not matter if this one succeeds.
        with contextlib.suppress(OSError):
            self._checkpoint.sync()
        self._save(blocking=True)
        if connect().rank == 0:
            names = {known.value: known.name for known in signal.Signals}
            print(
                f"hpcstrat: received {names.get(number, f'signal {number}')}; the checkpoint "
                f"{self._path} is saved, and the job exits with status {self._exit_status}",
                file=sys.stderr,
                flush=True,
            )
        # For good: Python removes its handlers before the process ends, and a signal after that
        # would kill the process and change the status.
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)
        self._previous = {}
        raise SystemExit(self._exit_status)

    @names_call("CheckpointManager")
    def __enter__(self) -> CheckpointManager:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"{current_call()}: its `with` block begins in the thread "
                f"{threading.current_thread().name!r}; put it into the main thread, which alone "
                "handles signals"
            )
        self._noted = 0
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}
        if kind is None and not self._blocking:
            self._checkpoint.sync()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only a note: this may run in the middle of a collective call, where nothing can be saved.
        self._noted = number
