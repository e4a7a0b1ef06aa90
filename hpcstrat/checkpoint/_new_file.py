"""The file of a save while it is written: all ranks have it open, and the root renames it."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import operator
import os
import stat
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

from hpcstrat._communicators.base import Communicator
from hpcstrat.checkpoint import _safetensors
from hpcstrat.checkpoint._atomic_file import explaining, replacing
from hpcstrat.checkpoint._pieces import Piece, write_pieces

NOT_SAVED = "nothing was saved, and the previous file is whole. Correct this, and save again"
"""The end of an error's message."""


class _Place(NamedTuple):
    """Where the other ranks find the root's file.

    Attributes:
        path: the file's name, with random digits that no other file has.
        inode: its inode number.
        header: bytes before the arrays.
        nbytes: bytes of the whole file.
        pipe: on which the other ranks report to the root, without the communicator; `None` for a
            blocking save.
    """

    path: str
    inode: int
    header: int
    nbytes: int
    pipe: _PipePlace | None


class NewFile:
    """The file of a save.

    Collective: all ranks make it, with the same arguments except `contents`. It is a context: an
    exception inside leaves only the previous file.

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
        contents: _safetensors.Contents | None,
        blocking: bool,
    ) -> None:
        self._path = path
        self._size = communicator.size
        self._contents = contents
        self._replacing = contextlib.ExitStack()  # on the root
        self._descriptors = contextlib.ExitStack()
        self._file = self._pipe = -1
        try:
            # The root closes its writing end of the pipe: then the pipe ends with the other ranks.
            with contextlib.ExitStack() as opening:
                with communicator.raise_together():
                    own = (
                        None
                        if contents is None
                        else self._make(path, keep, contents, blocking, opening)
                    )
                    place: _Place = communicator.broadcast_obj(own, root)
                self.header: int = place.header
                self._nbytes = place.nbytes
                self.is_shared: bool = all(
                    communicator.all_gather_obj(contents is not None or self._open(place))
                )
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _make(
        self,
        path: str,
        keep: int | None,
        contents: _safetensors.Contents,
        blocking: bool,
        opening: contextlib.ExitStack,
    ) -> _Place:
        with explaining(path, NOT_SAVED):
            file = self._replacing.enter_context(replacing(path, keep))
            self._file = file.fileno()
            os.ftruncate(self._file, contents.nbytes)
        pipe = None
        if not blocking and self._size > 1:
            self._pipe, writing = os.pipe()
            self._descriptors.callback(os.close, self._pipe)
            opening.callback(os.close, writing)
            pipe = _PipePlace.of(writing)
        return _Place(
            file.name, os.fstat(self._file).st_ino, len(contents.header), contents.nbytes, pipe
        )

    def _open(self, place: _Place) -> bool:
        """Opens the root's file, if this rank can see it."""
        try:
            self._file = os.open(place.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._descriptors.callback(os.close, self._file)
            status = os.fstat(self._file)
            if (status.st_ino, status.st_size) != (place.inode, place.nbytes):
                return False
            if place.pipe is not None:
                self._pipe = place.pipe.open()
                self._descriptors.callback(os.close, self._pipe)
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
        self._descriptors.close()
        self._replacing.__exit__(kind, error, traceback)

    def detach(self) -> NewFile:
        """The same file, for a thread that continues after this context has ended."""
        other = object.__new__(NewFile)
        other.__dict__.update(self.__dict__)
        other._replacing = self._replacing.pop_all()
        other._descriptors = self._descriptors.pop_all()
        return other

    def write(self, pieces: Iterable[Piece]) -> int:
        """Writes this rank's pieces, and returns their part of the checksum.

        Raises:
            OSError: the file system's error.
        """
        with explaining(self._path, NOT_SAVED):
            return self._write(pieces)

    def finish(self, checksums: Iterable[int]) -> None:
        """On the root, seals and renames the file, once all ranks have written.

        Raises:
            OSError: the file system's error.
        """
        with explaining(self._path, NOT_SAVED):
            self._finish(checksums)

    def _write(self, pieces: Iterable[Piece]) -> int:
        checksum = write_pieces(self._file, pieces, self._nbytes)
        if self._size > 1:
            # On each rank: a host syncs only what it has written itself. The root syncs again, once
            # the header has the checksum.
            os.fsync(self._file)
        return checksum

    def _finish(self, checksums: Iterable[int]) -> None:
        if self._contents is not None:
            self._contents.seal(self._file, functools.reduce(operator.xor, checksums))
            self._replacing.close()

    # ---- without the communicator, and without names of calls

    def write_alone(self, pieces: Iterable[Piece]) -> None:
        """`write` and `finish` in a thread on each rank; the pipe tells the root how it ended.

        Raises:
            OSError: the file system's error, on the root also that of another rank.
        """
        if self._contents is not None:
            own = self._write(pieces)
            others = self._others() if self.is_shared and self._size > 1 else ()
            self._finish([own, *others])
        elif self.is_shared:
            report: dict[str, Any]
            try:
                report = {"checksum": self._write(pieces)}
            except OSError as error:
                report = {
                    "errno": error.errno or errno.EIO,
                    "text": str(error.strerror or error)[:1000],
                }
            with contextlib.suppress(BrokenPipeError):  # the root has failed too, and says so
                # Short enough that the system writes it in one piece.
                os.write(self._pipe, json.dumps(report).encode() + b"\n")

    def _others(self) -> Iterator[int]:
        with open(self._pipe, encoding="utf-8", closefd=False) as reports:
            for _ in range(self._size - 1):
                line = reports.readline()
                if not line:
                    raise OSError(errno.EIO, "a rank ended before it had written its part")
                report = json.loads(line)
                if "errno" in report:
                    raise OSError(report["errno"], report["text"])
                yield report["checksum"]


class _PipePlace(NamedTuple):
    """Where other processes of a host find the writing end of a pipe."""

    host: str
    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> _PipePlace:
        status = os.fstat(descriptor)
        return cls(_host(), f"/proc/{os.getpid()}/fd/{descriptor}", status.st_dev, status.st_ino)

    def open(self) -> int:
        """The writing end.

        Raises:
            OSError: this process is on another host, or in another container.
        """
        # Checked before it is opened, and not waited for: elsewhere this name may be anything.
        status = os.stat(self.path)
        here = _host(), status.st_dev, status.st_ino
        if here != (self.host, self.device, self.inode) or not stat.S_ISFIFO(status.st_mode):
            raise OSError(errno.ENXIO, "it is another pipe", self.path)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        return descriptor


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read()
