"""A large sparse reservation of memory, private or shared by the ranks of one host, of which pages appear on demand."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class _Controller(NamedTuple):
    """The files of one version of control groups.

    Attributes:
        folder: of the hierarchy, where it is mounted.
        limit: bytes that a group and those in it may have.
        usage: bytes that they have, with cached files, which the system gives up first.
        cached: the fields of `memory.stat` with those.
    """

    folder: str
    limit: str
    usage: str
    cached: tuple[str, str]


_V2_FILES = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = _Controller(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = (_Controller("sys/fs/cgroup", *_V2_FILES), _Controller("sys/fs/cgroup/unified", *_V2_FILES))


def physical_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still get: what the host has left, or one of its control groups if that is less.

    Args:
        root: the folder that `proc` and `sys` are in.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    # MemAvailable and not MemFree: it counts cached files, which the kernel gives up on demand.
    return max(0, min([1024 * int(fields["MemAvailable"].split()[0]), *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What is left in each group that this process is in, from the innermost out, where it has a limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    # A limit of any group further out applies as well: batch systems and containers set theirs at
    # different levels.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers and leaves the field empty; version 1 may
        # have one for each.
        if controllers and "memory" not in controllers.split(","):
            continue
        for controller in (_V1,) if controllers else _V2:
            # A container may show the group's path on the host, and mount the group itself at the
            # root.
            parts = [part for part in path.split("/") if part and part != ".."]
            for length in range(len(parts), -1, -1):
                yield from _left(root.joinpath(controller.folder, *parts[:length]), controller)


def _left(group: Path, controller: _Controller) -> Iterator[int]:
    try:
        limit = int((group / controller.limit).read_text())
        usage = int((group / controller.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group here, or "max"
        return
    # Cached files count as used, but the kernel drops them before it refuses memory.
    yield limit - usage + sum(int(stat.get(name, 0)) for name in controller.cached)


def reservable(nbytes: int, part: int = 2) -> tuple[int, str]:
    """How much of a reservation this process can have, and the limit of `ulimit` that keeps it below `nbytes`, if any.

    Args:
        nbytes: what is wanted.
        part: one in so many of the bytes that `ulimit -v` leaves; the others are for the program,
            and for libraries.
    """
    found = [(nbytes, "")]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        found.append((max(0, addresses - used) // part, f"`ulimit -v` ({addresses:,} bytes)"))
    file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file != resource.RLIM_INFINITY:
        found.append((file, f"`ulimit -f` ({file:,} bytes)"))
    return min(found)


LARGE = 1 << 26
"""Bytes from which on a request is compared with what the host has left."""

_SMALLEST = 1 << 26


# A file of our own, and not an MPI window: a window cannot grow, one on a full /dev/shm ends in a
# bus error, and freeing it under a NumPy view is a segmentation fault.
class Segment:
    """Memory that is reserved once, never moved, and backed by pages only where `commit` was called.

    It is a sparse file that has no name, so nothing is left behind however the job ends.

    Args:
        file: it.
        size: how many of its bytes.
        limit: what keeps it so small; empty where nothing does.

    Attributes:
        array: all of its bytes. Writing where nothing was committed ends the process.
        size: how many they are.
        hint: the end of a message that it is too small.
    """

    def __init__(self, file: int, size: int, limit: str = "") -> None:
        self._file = file
        self._map = mmap.mmap(file, size)
        self.size = size
        self.hint: str = (
            f"; {limit} leaves no more: raise it, or ask for more memory for the job"
            if limit
            else ""
        )
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(self._map, np.uint8)

    def commit(self, start: int, stop: int) -> None:
        """Backs these bytes with memory.

        Raises:
            MemoryError: there is not enough of it. Nothing is lost.
        """
        nbytes = stop - start
        if nbytes <= 0:
            return
        # Every request has its pages made now, where their lack is an error.
        check_available(nbytes)
        if stop > self.size:
            raise MemoryError(
                f"{nbytes:,} bytes are wanted beyond the {self.size:,} that are reserved; make "
                f"variables smaller{self.hint}"
            )
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            raise MemoryError(
                f"{nbytes:,} bytes cannot be had: {error.strerror}; start fewer ranks on a host"
            ) from error

    def part(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes between two offsets, a flat array."""
        return self.array[start:stop]

    def release(self, start: int, stop: int) -> None:
        """Gives the whole pages within these bytes back to the system."""
        # Whole pages only: the rest of a page at either end may be another variable's.
        page = mmap.PAGESIZE
        start, stop = -(-start // page) * page, stop // page * page
        if start < stop:
            # MADV_REMOVE takes the pages out of the file, and so from all ranks; MADV_DONTNEED
            # would unmap them here only.
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)


def check_available(nbytes: int, ranks: int = 1) -> None:
    """Compares a large request with what is left: the system promises more, and ends who takes it at its word.

    Args:
        nbytes: of each rank.
        ranks: how many of this host request as much at the same time.

    Raises:
        MemoryError: there is less.
    """
    wanted = ranks * nbytes
    if wanted >= LARGE and wanted > (free := available_memory()):
        each = f" for {ranks} ranks, {nbytes:,} for each," if ranks > 1 else ""
        raise MemoryError(
            f"{wanted:,} bytes are wanted{each} and this host has {free:,} left; start fewer ranks "
            "on a host"
        )


def private_segment() -> Segment:
    """A segment of this process alone, as large as the host's memory, or as limits allow.

    Raises:
        RuntimeError: they allow next to nothing.
    """
    # Reserved addresses cost nothing, but `ulimit -v` may count them.
    size, limit = _checked(reservable(physical_memory()))
    file, _ = _nameless_file(size)
    return Segment(file, size, limit)


def shared_segment(comm: Any, size: int) -> Segment:
    """One segment for all ranks of `comm`, an MPI communicator of one host. Collective.

    Args:
        comm: the ranks.
        size: its bytes; where limits allow a rank less, all ranks have that.

    Raises:
        RuntimeError: the ranks cannot share memory; on every rank, with the reasons.
    """
    size, limit = _checked(min(comm.allgather(reservable(size))))
    problems: list[str] = []
    # The other ranks open rank 0's nameless file by its path in /proc, which one container may hide
    # from another. A file whose name is taken away as soon as all have opened it is the second
    # choice.
    for create in (_nameless_file, _named_file):
        file, path, problem = -1, "", ""
        if comm.rank == 0:
            try:
                file, path = create(size)
            except OSError as error:
                problem = f"rank 0: {error}"
        path = comm.bcast(path, root=0)
        if path and comm.rank > 0:
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = f"rank {comm.rank}: {error}"
        segment = None
        if file >= 0:
            try:
                segment = Segment(file, size, limit)
            except (OSError, ValueError) as error:
                problem = f"rank {comm.rank}: {error}"
        # All ranks take the same way, or none: memory that one of them lacks is of no use to the
        # others.
        found = [one for one in comm.allgather(problem) if one]
        if comm.rank == 0 and path and not path.startswith("/proc/"):
            # By now each rank has opened the file or failed to. Without a name it cannot be left
            # behind, however the job ends.
            os.unlink(path)
        if not found and segment is not None:
            return segment
        problems += found
    raise RuntimeError(
        f"hpcstrat cannot connect the ranks: those of this host cannot share {size:,} bytes of "
        f"memory: {'; '.join(dict.fromkeys(problems))}. Start them as one user, in one container"
    )


def _checked(found: tuple[int, str]) -> tuple[int, str]:
    nbytes, limit = found
    if nbytes < _SMALLEST:
        raise RuntimeError(
            f"hpcstrat cannot reserve memory: {limit} leaves {nbytes:,} bytes for variables and "
            f"messages, and {_SMALLEST:,} are the least; raise it, or ask for more memory for the "
            "job"
        )
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE, limit


def _nameless_file(size: int) -> tuple[int, str]:
    """A new file of this size, and the path by which other processes open it."""
    file = os.memfd_create("hpcstrat", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    # It has no path of its own; processes of the same user reach it through this one's descriptor.
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _named_file(size: int) -> tuple[int, str]:
    """Where processes may not open each other's files.

    The name lives for the milliseconds until all have opened it.
    """
    import tempfile  # 10 ms, and hardly ever needed

    file, path = tempfile.mkstemp(prefix="hpcstrat-", dir="/dev/shm")
    try:
        os.ftruncate(file, size)
    except OSError:
        os.unlink(path)
        raise
    return file, path
