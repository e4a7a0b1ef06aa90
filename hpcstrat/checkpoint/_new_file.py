"""The file of a save, which all ranks write.

    state          its name               what happens
    -------------  ---------------------  ----------------------------------------------------------
    being written  path.partial-0123abcd  The root makes it and holds its lock. The other ranks open
                                          it by this name. Each rank writes its extents, syncs them,
                                          and tells the root their checksums.
    complete       the same               The root has the checksums of all ranks; it writes the
                                          header and syncs.
    published      path                   The root has renamed it. The previous file is gone, or
                                          kept as path.1.
    abandoned      none                   After an error on any rank the root removes the name. A
                                          kill of the root drops the lock, and the next save to
                                          this path removes the file (`_atomic_file`).

Until the rename `path` is the previous file, as it was. The ranks tell the root their checksums
through the communicator. Threads in the background must not use it: there each rank makes a mark,
the file `path.partial-0123abcd.rank1`, whose lock it holds until it has written what it reports.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, BinaryIO, TypeAlias

from hpcstrat._transports.connection import connect
from hpcstrat.checkpoint._atomic_file import explaining, replacing
from hpcstrat.checkpoint._format import Header, checksum

NOT_SAVED = "nothing was saved, and the previous file is whole. Correct this, and save again"
"""The end of an error's message."""

Write: TypeAlias = Callable[[bytes | memoryview, int], None]
"""Writes bytes to their place in a file."""

Piece: TypeAlias = tuple[int, memoryview]
"""Bytes of a file, after their place in it."""

_LOOK_SECONDS = 0.05
_REPORT_BYTES = 4096


class NewFile:
    """The file of a save, open on this rank.

    Collective: all ranks make it, with the same arguments except `header`.

    Args:
        root: the rank that has `header`.
        path: the file that it replaces.
        keep: as in `replacing`.
        header: the header; `None` on the other ranks.
        ending: on the root it puts the file in its place; it closes it on every rank.
        is_marked: whether ranks report by marks.

    Attributes:
        first: where the arrays start.
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
        header: Header | None,
        ending: ExitStack,
        is_marked: bool = False,
    ) -> None:
        communicator = connect()
        self._size, self._header = communicator.size, header
        self._file = -1
        self._mark: BinaryIO | None = None
        self._marks: list[int] = []
        with communicator.raise_together():
            own = None
            if header is not None:
                with explaining(path, NOT_SAVED):
                    file = ending.enter_context(replacing(path, keep))
                    self._file = file.fileno()
                    os.ftruncate(self._file, header.nbytes)
                    own = file.name, _identity(os.fstat(self._file)), header.size
            # The name has random digits that no other file has.
            name, identity, self.first = communicator.broadcast_obj(own, root)
        marks = [f"{name}.rank{rank}" for rank in range(self._size)]
        mark = marks.pop(communicator.rank) if is_marked else ""
        is_open = header is not None or self._open(name, identity, mark, ending)
        self.is_shared: bool = all(communicator.all_gather_obj(is_open))
        self._others = marks

    def _open(self, name: str, identity: tuple[int, int], mark: str, ending: ExitStack) -> bool:
        """Opens the root's file and makes this rank's mark, if this rank can see the file."""
        try:
            # Before it is opened, which may wait: elsewhere this name may be anything.
            if _identity(os.stat(name)) != identity:
                return False
            self._file = os.open(name, os.O_RDWR | os.O_CLOEXEC)
            ending.callback(os.close, self._file)
            if mark:
                self._mark = ending.enter_context(open(mark, "xb", buffering=0))
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(self._mark, fcntl.LOCK_EX)
                # So that a full disk can be reported.
                self._mark.write(b" " * _REPORT_BYTES)
        except OSError:
            return False
        return True

    def open_marks(self, ending: ExitStack) -> None:
        """On the root, opens the marks of the other ranks, whose names `ending` removes.

        Raises:
            OSError: the file system refuses.
        """
        for name in self._others if self._header is not None else []:
            ending.callback(_remove, name)
            if self.is_shared:
                self._marks.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC))
                ending.callback(os.close, self._marks[-1])

    def write(self, pieces: Iterable[Piece], stops: Sequence[int]) -> dict[int, int]:
        """Writes this rank's pieces; returns checksums, as `write_pieces`.

        Raises:
            OSError: the file system's error.
        """
        checksums = write_pieces(writer_to(self._file), pieces, self.first, stops)
        if self._size > 1:
            # On each rank: a host syncs only what it has written itself. The root syncs again, once
            # the file has its header.
            os.fsync(self._file)
        return checksums

    def complete(self, checksums: Iterable[Mapping[int, int]]) -> None:
        """On the root, writes the header, once all ranks have written.

        Raises:
            OSError: the file system's error.
        """
        if self._header is not None:
            by_index = {index: value for own in checksums for index, value in own.items()}
            writer_to(self._file)(self._header.sealed(by_index), 0)

    def write_and_complete(self, pieces: Iterable[Piece], stops: Sequence[int]) -> None:
        """`write` and `complete` in a thread on each rank, without the communicator.

        Raises:
            OSError: the file system's error, on the root also that of another rank.
        """
        if self._header is not None:
            own = self.write(pieces, stops)
            self.complete([own, *map(_read_mark, self._marks)])
        elif self.is_shared:
            try:
                self._report(checksums=list(self.write(pieces, stops).items()))
            except OSError as error:
                text = str(error.strerror or error)[
                    : _REPORT_BYTES // 8
                ]  # in JSON, up to 6 bytes each
                self._report(errno=error.errno or errno.EIO, text=text)

    def _report(self, **report: Any) -> None:
        """Writes this rank's mark."""
        assert self._mark is not None
        self._mark.seek(0)
        text = json.dumps(report).encode() + b"\n"
        while text:
            text = text[self._mark.write(text) :]
        with contextlib.suppress(OSError):
            # By hand: a process that the program has forked would hold it on.
            fcntl.flock(self._mark, fcntl.LOCK_UN)


def writer_to(file: int) -> Write:
    """A function that writes to an open file, and returns before the bytes are on disk."""

    def write(data: bytes | memoryview, start: int) -> None:
        end = start
        while data:  # a write may take less than it was given
            written = os.pwrite(file, data, end)
            data, end = data[written:], end + written
        # The disk starts now, during the work on the next piece, not when everything is written.
        # (These pages are not read soon; Linux starts to write them, whatever the name says.)
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)

    return write


def write_pieces(
    write: Write, pieces: Iterable[Piece], first: int, stops: Sequence[int]
) -> dict[int, int]:
    """Writes pieces of a file; returns the checksums of their extents, by the extents' indices.

    Args:
        write: writes to the file.
        pieces: each is read once, before the next. Those of an extent start with its first byte,
            and all but the last are as long as `checksum` asks.
        first: where the arrays start.
        stops: where each extent ends, from there on.

    Raises:
        OSError: the file system's error.
    """
    checksums: dict[int, int] = {}
    for start, data in pieces:
        index = bisect.bisect_right(stops, start - first)
        checksums[index] = checksum(data, checksums.get(index, 0))
        write(data, start)
    return checksums


def _read_mark(mark: int) -> dict[int, int]:
    """The checksums that a rank reports.

    Raises:
        OSError: that of the rank; or it has ended without a report.
    """
    has_locks = True
    try:
        fcntl.flock(mark, fcntl.LOCK_SH)
    except OSError:
        has_locks = False
    while b"\n" not in (text := os.pread(mark, os.fstat(mark).st_size, 0)):
        if has_locks:
            raise OSError(errno.EIO, "a rank ended before it had written its part")
        time.sleep(_LOOK_SECONDS)
    report = json.loads(text.partition(b"\n")[0])
    if "errno" in report:
        raise OSError(report["errno"], report["text"])
    return dict(report["checksums"])


def _identity(status: os.stat_result) -> tuple[int, int]:
    # Not the device: hosts may number a common file system in different ways.
    return status.st_ino, status.st_size


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
