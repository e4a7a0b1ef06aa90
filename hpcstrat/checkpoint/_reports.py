"""A pipe on which ranks report to the root from threads, which must not use the communicator."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class PipePlace(NamedTuple):
    """Where other processes of a host, named by its boot id, find the writing end of a pipe."""

    host: str
    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> PipePlace:
        """The place of a writing end of this process."""
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


def send_report(pipe: int, write: Callable[[], int]) -> None:
    """Calls `write`, and sends its result, a checksum, or the OSError that it raises."""
    report: dict[str, Any]
    try:
        report = {"checksum": write()}
    except OSError as error:
        text = str(error.strerror or error)[:1000]
        report = {"errno": error.errno or errno.EIO, "text": text}
    with contextlib.suppress(BrokenPipeError):  # the root has failed too, and says so
        # Short enough that the system writes it in one piece.
        os.write(pipe, json.dumps(report).encode() + b"\n")


def read_reports(pipe: int, count: int) -> Iterator[int]:
    """The checksums that `count` ranks send.

    Raises:
        OSError: that of a rank; or a rank has ended without a report.
    """
    with open(pipe, encoding="utf-8", closefd=False) as reports:
        for _ in range(count):
            line = reports.readline()
            if not line:
                raise OSError(errno.EIO, "a rank ended before it had written its part")
            report = json.loads(line)
            if "errno" in report:
                raise OSError(report["errno"], report["text"])
            yield report["checksum"]


def _host() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read()
