"""Snapshots: checkpoints in memory of the job's launcher, which survive the death of the ranks.

Each is an ordinary checkpoint in a file without a name. There are two such files: while one is
written, the other is whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._memory.segment import check_available
from hpcstrat._process.job_files import JobMemory
from hpcstrat.checkpoint._checkpoint_file import notes_in, step_of
from hpcstrat.checkpoint._new_file import Write


class Snapshot(NamedTuple):
    """A snapshot, whose contents may be damaged.

    Attributes:
        number: the snapshots are numbered as they are made, from 1 up.
        path: the file's path.
        step: the step after which it was made.
        of: the path of the checkpoint that it belongs to.
    """

    number: int
    path: str
    step: int
    of: str


class SnapshotMemory:
    """The snapshots of a checkpoint, and the room for the next.

    Args:
        memory: the launcher's memory.
        path: the checkpoint's path.
    """

    def __init__(self, memory: JobMemory, path: str) -> None:
        self._files = memory.files
        self._of = os.path.abspath(path)
        snapshots = _find(memory.files)
        self.own: list[Snapshot] = [one for one in snapshots if one.of == self._of]
        """Those of this checkpoint when this was made, newest first."""
        self.kept: str = snapshots[0].path if snapshots else ""
        """The path of the snapshot that the next does not overwrite."""
        self._number = snapshots[0].number if snapshots else 0
        # Kept, because mapping a file anew takes longer than the copy into it.
        self._mapped: dict[int, Bytes] = {}

    def notes(self) -> dict[str, str]:
        """What the next snapshot says about itself."""
        return {"snapshot": str(self._number + 1), "of": self._of}

    def writer(self, file: int) -> Write:
        """See `Target`. The file has its memory, and its length."""
        status = os.fstat(file)
        memory = self._mapped.get(status.st_ino)
        if memory is None or memory.size != status.st_size:
            # Writing to it takes half as long as `os.pwrite`, which looks up each page.
            memory = np.frombuffer(mmap.mmap(file, status.st_size), np.uint8)
            self._mapped[status.st_ino] = memory

        def write(data: bytes | memoryview, start: int) -> None:
            memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

        return write

    @contextlib.contextmanager
    def replacing(self, nbytes: int) -> Iterator[BinaryIO]:
        """The file to write the next snapshot to.

        Raises:
            MemoryError: there is no memory for this many bytes. The kept snapshot is whole.
        """
        path = next(file for file in self._files if file != self.kept)
        with open(path, "r+b", buffering=0) as file:
            file.write(bytes(1 << 10))  # over the header: it is not a checkpoint until it is whole
            _reserve(file.fileno(), nbytes)
            yield file
        self.kept = path
        self._number += 1


def newest_step(memory: JobMemory) -> int | None:
    """The step of the newest snapshot, which is not checked; `None` if there is none."""
    snapshots = _find(memory.files)
    return snapshots[0].step if snapshots else None


def _find(files: Sequence[str]) -> list[Snapshot]:
    """The snapshots, newest first."""
    snapshots: list[Snapshot] = []
    for path in files:
        notes = notes_in(path)
        with contextlib.suppress(LookupError, ValueError, TypeError):
            number, step = int(notes["snapshot"]), step_of(notes)
            snapshots.append(Snapshot(number, path, step or 0, notes["of"]))
    return sorted(snapshots, reverse=True)


def _reserve(file: int, nbytes: int) -> None:
    """Gives a file its memory now, when a lack of it is an error and not yet a signal."""
    committed = os.fstat(file).st_blocks * 512  # from its start on
    if committed < nbytes:
        check_available(nbytes - committed)
        try:
            os.posix_fallocate(file, committed, nbytes - committed)
        except OSError as error:
            raise MemoryError(f"cannot allocate {nbytes:,} bytes: {error.strerror}") from error
