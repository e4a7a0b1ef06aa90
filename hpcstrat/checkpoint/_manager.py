"""When to save, what to resume from, and a last checkpoint before the job is stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, final

from hpcstrat._agreement.collective import collective
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.timeline import CHECKPOINT, span
from hpcstrat._transports.connection import connect
from hpcstrat.checkpoint._checkpoint import Checkpoint, objects_of, restore_from
from hpcstrat.checkpoint._objects import parameter_rank, require_no_replica
from hpcstrat.checkpoint._saving import (
    check_count,
    check_keep,
    check_path,
    finish_background,
    save_to,
)


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
        self._path, self._checkpoint = path, checkpoint
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

    @collective(communicator_of=lambda _: connect())
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
        require_no_replica()
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


@final
class CheckpointManager:
    """Saves a checkpoint every N steps, and restores it: it makes a program restartable.

    Put `with CheckpointManager(checkpoint, path, every=1000) as manager:` around the training, call
    `manager.restore_or_initialize()` before the first step and `manager.step()` at the end of each.

    In the `with` block it does what `PreemptionHandler` does: after a SIGTERM or SIGUSR1 the ranks
    save at the end of the step, and exit with status 75.

    Args:
        checkpoint: what to save.
        path: as in `Checkpoint.save`. A file in memory, in `/dev/shm`, outlives the ranks, but not
            their host.
        every: steps from one save to the next; with `None`, only `save` and a preemption save.
        keep: as in `Checkpoint.save`.

    Raises:
        TypeError: `checkpoint` is not a `Checkpoint`, or `path` is not a path.
        ValueError: `every` or `keep` is not positive.
    """

    @names_call("CheckpointManager")
    def __init__(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"{current_call()}: checkpoint is {type(checkpoint).__name__}; pass a Checkpoint, "
                "such as Checkpoint(w=w)"
            )
        self._checkpoint = checkpoint
        self._path = check_path(path)
        self._every = check_count("every", every) or 0
        self._keep = check_keep(keep)
        self._steps = 0
        self._handled = 0  # the steps up to which what was due has been saved
        self._handler: PreemptionHandler | None = None

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
        """Restores the file, if there is one.

        Collective: all ranks call this.

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
        communicator, objects = connect(), objects_of(self._checkpoint)
        # Other hosts may have other files of this name.
        if not communicator.broadcast_obj(os.path.exists(self._path), parameter_rank(objects)):
            return None
        _, step = restore_from(self._path, objects)
        self._steps = self._handled = step or 0  # a file of `Checkpoint.save` has no step
        return self._path

    @span(CHECKPOINT, "step")
    @collective(communicator_of=lambda _: connect())
    def step(self) -> None:
        """Counts a step, and saves if it is time to.

        Collective: all ranks call this at the end of each step.

        Outside the `with` block, and when there is nothing to save, it does not communicate.

        Raises:
            SystemExit: a signal was received, and the checkpoint is saved; see `PreemptionHandler`.
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
        if self._handler is not None:
            self._handler.check()
        every = self._every
        if every > 0 and self._steps // every > self._handled // every:
            self._handled = self._steps
            self._save()

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
        self._save()
        return self._path

    def _save(self) -> None:
        save_to(self._path, objects_of(self._checkpoint), self._keep, step=self._steps)

    def __enter__(self) -> CheckpointManager:
        self._handler = PreemptionHandler(self._checkpoint, self._path, self._keep)
        self._handler._save = self._save  # its files hold the step
        return self

    def __exit__(self, *_: Any) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
