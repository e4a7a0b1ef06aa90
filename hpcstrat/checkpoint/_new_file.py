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

import functools
import operator
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

from hpcstrat._communicators.connection import connect
from hpcstrat.checkpoint._atomic_file import explaining, follow_link, partial_file, put_in_place
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

    Collective: all ranks make it, with the same arguments except `contents`.

    Args:
        root: the rank that has `contents`.
        path: as in `replacing`.
        keep: as in `replacing`.
        contents: what to write; `None` on the other ranks.
        blocking: whether the communicator can be used until the end; otherwise a thread may
            continue without it.
        ending: closes the file at its end, and abandons it if it is not published.

    Attributes:
        header: bytes before the arrays.
        is_shared: whether every rank has it open. A rank on another host may see other files; then
            the root writes alone.

    Raises:
        OSError: the file system refuses the root; all ranks raise.
    """

    def __init__(
        self,
        root: int,
        path: str,
        keep: int | None,
        contents: Contents | None,
        blocking: bool,
        ending: ExitStack,
    ) -> None:
        communicator = connect()
        self._size = communicator.size
        self._path = follow_link(path)
        self._keep = keep
        self._contents = contents
        self._file = self._pipe = -1
        with ExitStack() as opening:
            with communicator.raise_together():
                own = pipe = None
                if contents is not None:
                    if self._size > 1 and not blocking:
                        pipe = self._make_pipe(ending, opening)
                    with explaining(path, NOT_SAVED):
                        own = self._make(ending, contents, pipe)
                self._place: _Place = communicator.broadcast_obj(own, root)
            self.header: int = self._place.header
            is_open = contents is not None or self._open(ending, self._place)
            self.is_shared: bool = all(communicator.all_gather_obj(is_open))

    def _make_pipe(self, ending: ExitStack, opening: ExitStack) -> PipePlace:
        self._pipe, writing = os.pipe()
        ending.callback(os.close, self._pipe)
        # The root closes its writing end once the others have theirs: the pipe ends with them.
        opening.callback(os.close, writing)
        return PipePlace.of(writing)

    def _make(self, ending: ExitStack, contents: Contents, pipe: PipePlace | None) -> _Place:
        """Makes the file, on the root."""
        file = ending.enter_context(partial_file(self._path, self._keep))
        self._file = file.fileno()
        os.ftruncate(self._file, contents.nbytes)
        inode = os.fstat(self._file).st_ino
        return _Place(file.name, inode, len(contents.header), contents.nbytes, pipe)

    def _open(self, ending: ExitStack, place: _Place) -> bool:
        """Opens the root's file and its pipe, if this rank can see them."""
        try:
            self._file = os.open(place.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            ending.callback(os.close, self._file)
            status = os.fstat(self._file)
            if (status.st_ino, status.st_size) != (place.inode, place.nbytes):
                return False
            if place.pipe is not None:
                self._pipe = place.pipe.open()
                ending.callback(os.close, self._pipe)
        except OSError:
            return False
        return True

    def write(self, pieces: Iterable[Piece]) -> int:
        """Writes this rank's pieces, and returns their part of the checksum.

        Raises:
            OSError: the file system's error.
        """
        checksum = write_pieces(self._file, pieces, self._place.nbytes)
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
            put_in_place(self._place.path, self._file, self._path, self._keep)

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
