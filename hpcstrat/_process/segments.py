"""MPI's own segments in /dev/shm, which stay there when a rank is killed or aborts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hpcstrat._process import launchers

FOLDER = "/dev/shm"
# How the names of their files there start.
MPICH = ("mpich_shm_",)
OPEN_MPI = ("sm_segment.", "vader_segment.")  # of versions 5 and 4
# The last are of UCX, below both; nothing opens them by name: they have one for microseconds only.
_ALL = (*MPICH, *OPEN_MPI, "ucx_shm_posix_")


def unlink(prefixes: tuple[str, ...] = MPICH) -> None:
    """Unlinks MPI's own segments that this process has mapped: a forced end would leave them.

    Call it only when every rank of the host has mapped them, or none will.
    """
    _unlink(_mapped(os.getpid(), prefixes))


def unlink_all() -> None:
    """Unlinks those of all ranks of this host, some of which may wait in MPI's start: they end."""
    unlink()
    if (launcher := launchers.find_process()) is not None:
        for process in _processes_below(launcher):
            _unlink(_mapped(process, MPICH))


def unlink_unused(since: float) -> None:
    """Unlinks those of ranks that were killed as MPI started, whose names nobody else removes.

    They are this user's, made after `since` (as `time.time`), and no process uses them: the one
    that makes a segment has it open until it has mapped it.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.scandir(FOLDER):
            status = entry.stat(follow_symlinks=False)
            is_new = status.st_uid == os.getuid() and status.st_ctime >= since - 1
            if entry.name.startswith(_ALL) and is_new:
                found[str(status.st_ino)] = entry.path
    for process in _processes() if found else ():
        for inode in _open_in(process):  # before those that it has mapped
            found.pop(inode, None)
        for inode, *_ in _mapped(process, _ALL):
            found.pop(inode, None)
    for path in found.values():
        with contextlib.suppress(OSError):
            os.unlink(path)


def _open_in(process: int) -> Iterator[str]:
    """The inode of each file in shared memory that a process has open."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{process}/fd/{name}"
                if os.readlink(link).startswith(f"{FOLDER}/"):
                    yield str(os.stat(link).st_ino)


def _unlink(mapped: set[tuple[str, ...]]) -> None:
    for inode, path, *deleted in mapped:
        with contextlib.suppress(OSError):
            if not deleted and os.stat(path).st_ino == int(inode):
                os.unlink(path)


def is_mpi_starting(launcher: int) -> bool:
    """Whether a process below this launcher's is starting MPI, and so has segments of MPI."""
    return any(_mapped(process, _ALL) for process in _processes_below(launcher))


def _processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _processes_below(ancestor: int) -> list[int]:
    return [process for process in _processes() if _is_below(process, ancestor)]


def _mapped(process: int, prefixes: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Inode and path of each segment that a process has mapped, and whether it is unlinked."""
    try:
        with open(f"/proc/{process}/maps") as maps:
            return {
                tuple(line.split()[4:])
                for line in maps
                if any(f" {FOLDER}/{prefix}" in line for prefix in prefixes)
            }
    except OSError:  # no /proc
        return set()


def _is_below(process: int, ancestor: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        while process > 1:
            process = launchers.parent_of(process)
            if process == ancestor:
                return True
    return False
