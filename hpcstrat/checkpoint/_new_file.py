"""The file of a save, from its creation until it replaces the previous file.

    state          its name               what happens
    -------------  ---------------------  ----------------------------------------------------------
    being written  path.partial-0123abcd  The root makes it and holds its lock. The other ranks open
                                          it by this name. Each rank writes its pieces, syncs them,
                                          and tells the root its part of the checksum.
    complete       the same               The root has the parts of all ranks; it writes the
                                          checksum and syncs.
    published      path                   The root has renamed it. The previous file is gone, or
                                          kept as path.1.
    abandoned      none                   After an error on any rank the root removes the name. A
                                          kill of the root drops the lock, and the next save to
                                          this path removes the file (`_atomic_file`).

Until the rename `path` is the previous file, as it was. The ranks tell the root their parts through
the communicator, or in the background through a pipe (`_reports`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from hpcstrat._communicators.base import Communicator
from hpcstrat.checkpoint._atomic_file import explaining, replacing
from hpcstrat.checkpoint._pieces import Piece, write_pieces
from hpcstrat.checkpoint._reports import PipePlace, read_reports, send_report
from hpcstrat.checkpoint._safetensors import Contents

NOT_SAVED = "nothing was saved, and the previous file is whole. Correct this, and save again"
"""The end of an error's message."""


class _Place(NamedTuple):
    """Where the other ranks find the root's file.

    Attributes:
        path: the file's name, with random digits that no other file has.
        inode: its inode number.
        header: bytes before the arrays.
        nbytes: bytes of the whole file.
        pipe: for their reports in the background; `None` for a blocking save.
    """

    path: str
    inode: int
    header: int
    nbytes: int
    pipe: PipePlace | None


class NewFile:
    """The file of a save, open on this rank.

    Collective: all ranks make it, with the same arguments except `contents`. It is a context: an
    exception inside abandons the file.

    Args:
        communicator: all ranks.
        root: the rank that has `contents`.
        path: as in `replacing`.
        keep: as in `replacing`.
        contents: what to write; `None` on the other ranks.
        blocking: whether the communicator can be used until the end; otherwise a thread may
            continue without it.

    Attributes:
        header: bytes before the arrays.
        is_shared: whether every rank has it open. A rank on another host may see other files; then
            the root writes alone.

    Raises:
        OSError: the file system refuses the root; all ranks raise.
    """

    def __init__(
        self,
        communicator: Communicator,
        root: int,
        path: str,
        keep: int | None,
        contents: Contents | None,
        blocking: bool,
    ) -> None:
        self._size = communicator.size
        self._contents = contents
        self._file = self._pipe = -1
        with contextlib.ExitStack() as ending, contextlib.ExitStack() as opening:
            self._ending = ending
            with communicator.raise_together():
                own = None
                if contents is not None:
                    pipe = None if blocking or self._size == 1 else self._make_pipe(opening)
                    own = self._make(path, keep, contents, pipe)
                place: _Place = communicator.broadcast_obj(own, root)
            self.header: int = place.header
            self._nbytes = place.nbytes
            self.is_shared: bool = all(
                communicator.all_gather_obj(contents is not None or self._open(place))
            )
            self._ending = ending.pop_all()  # nothing has failed: now it is for `__exit__`

    def _make_pipe(self, opening: contextlib.ExitStack) -> PipePlace:
        self._pipe, writing = os.pipe()
        self._ending.callback(os.close, self._pipe)
        # The root closes its writing end once the others have theirs: the pipe ends with them.
        opening.callback(os.close, writing)
        return PipePlace.of(writing)

    def _make(
        self, path: str, keep: int | None, contents: Contents, pipe: PipePlace | None
    ) -> _Place:
        """Makes the file, on the root."""
        with explaining(path, NOT_SAVED):
            file = self._ending.enter_context(replacing(path, keep))
            self._file = file.fileno()
            os.ftruncate(self._file, contents.nbytes)
        inode = os.fstat(self._file).st_ino
        return _Place(file.name, inode, len(contents.header), contents.nbytes, pipe)

    def _open(self, place: _Place) -> bool:
        """Opens the root's file and its pipe, if this rank can see them."""
        try:
            self._file = os.open(place.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._ending.callback(os.close, self._file)
            status = os.fstat(self._file)
            if (status.st_ino, status.st_size) != (place.inode, place.nbytes):
                return False
            if place.pipe is not None:
                self._pipe = place.pipe.open()
                self._ending.callback(os.close, self._pipe)
        except OSError:
            return False
        return True

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.__exit__(kind, error, traceback)

    def write(self, pieces: Iterable[Piece]) -> int:
        """Writes this rank's pieces, and returns their part of the checksum.

        Raises:
            OSError: the file system's error.
        """
        checksum = write_pieces(self._file, pieces, self._nbytes)
        if self._size > 1:
            # On each rank: a host syncs only what it has written itself. The root syncs again, once
            # the file has the checksum.
            os.fsync(self._file)
        return checksum

    def publish(self, checksums: Iterable[int]) -> None:
        """On the root, completes and renames the file, once all ranks have written.

        Raises:
            OSError: the file system's error.
        """
        if self._contents is not None:
            self._contents.seal(self._file, functools.reduce(operator.xor, checksums))
            self._ending.close()

    def write_and_publish(self, pieces: Iterable[Piece]) -> None:
        """`write` and `publish` in a thread on each rank, without the communicator.

        Raises:
            OSError: the file system's error, on the root also that of another rank.
        """
        if self._contents is not None:
            checksums = [self.write(pieces)]
            if self.is_shared and self._size > 1:
                checksums += read_reports(self._pipe, self._size - 1)
            self.publish(checksums)
        elif self.is_shared:
            send_report(self._pipe, lambda: self.write(pieces))
