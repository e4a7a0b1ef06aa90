"""A large sparse reservation of memory, private or shared by a host's ranks, backed on demand."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat._core.ranks_in_words import list_by_rank
from hpcstrat._memory.intervals import round_up

# Of each version of control groups: where the hierarchy is mounted, the file with the bytes that a
# group and its subgroups may use, that with the bytes they use, and the fields of `memory.stat` for
# cached files, which count as used, but which the system drops before it refuses memory.
_V1 = (
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
_UNIFIED = ("sys/fs/cgroup/unified", *_V2[1:])


def physical_memory() -> int:
    """The host's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still get, from the host and within its control groups.

    `root` is the folder with `proc` and `sys`.
    """
    fields = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
    # Not MemFree: MemAvailable counts cached files, which the kernel drops on demand.
    return max(0, min([1024 * int(fields["MemAvailable"].split()[0]), *_read_free_in_groups(root)]))


def _read_free_in_groups(root: Path) -> Iterator[int]:
    """The bytes that are left in each of this process's groups with a limit, innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    # Limits of the outer groups apply as well: batch systems and containers set theirs at different
    # levels.
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers and leaves the field empty; version 1 may
        # have a hierarchy per controller.
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container may show the group's path on the host, but mount the group at the root.
        parts = [part for part in path.split("/") if part and part != ".."]
        for folder, limit, usage, cached in (_V1,) if controllers else (_V2, _UNIFIED):
            for length in range(len(parts), -1, -1):
                group = root.joinpath(folder, *parts[:length])
                try:
                    left = int((group / limit).read_text()) - int((group / usage).read_text())
                    fields = (group / "memory.stat").read_text().splitlines()
                    stat = dict(field.split() for field in fields)
                except (OSError, ValueError):  # no such group here, or "max"
                    continue
                yield left + sum(int(stat.get(name, 0)) for name in cached)


def reservable(nbytes: int, part: int = 2) -> tuple[int, str]:
    """How many of these bytes this process can reserve, and the `ulimit` that allows no more.

    Of the addresses that `ulimit -v` leaves it takes one `part`-th; the rest is for the program and
    its libraries.
    """
    limits = [(nbytes, "")]
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        limits.append((max(0, addresses - used) // part, f"`ulimit -v` ({addresses:,} bytes)"))
    file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file != resource.RLIM_INFINITY:
        limits.append((file, f"`ulimit -f` ({file:,} bytes)"))
    return min(limits)


LARGE = 1 << 26
"""Requests of at least this many bytes are compared with the host's free memory."""

_SMALLEST = 1 << 26


# A file and not an MPI window: a window cannot grow, a window on a full /dev/shm ends in a bus
# error, and freeing it under a NumPy view ends in a segmentation fault.
class Segment:
    """Memory that is reserved once, never moved, and backed by pages only after `commit`.

    It is a sparse file without a name, so nothing is left behind however the job ends.

    Args:
        file: its descriptor.
        size: its bytes.
        limit: the limit that allows no more; empty where there is none.

    Attributes:
        array: all its bytes. Writing where nothing was committed ends the process.
        size: its bytes.
        hint: the end of the error message when it is too small.
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
        """Backs these bytes with memory, or raises `MemoryError`; then nothing is lost."""
        nbytes = stop - start
        if nbytes <= 0:
            return
        # Pages are allocated now, when a lack of memory is an error and not yet a signal.
        check_available(nbytes)
        if stop > self.size:
            raise MemoryError(
                f"{nbytes:,} bytes were requested beyond the {self.size:,} that are reserved; make "
                f"variables smaller{self.hint}"
            )
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {nbytes:,} bytes: {error.strerror}; start fewer ranks per host"
            ) from error

    def part(self, start: int, stop: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes between two offsets, as a flat array."""
        return self.array[start:stop]

    def has(self, array: Any) -> bool:
        """Whether an array is in this memory."""
        return isinstance(array, np.ndarray) and np.may_share_memory(array, self.array)

    def release(self, start: int, stop: int) -> None:
        """Returns the whole pages within these bytes to the system."""
        # Whole pages only: the rest of a page at either end may belong to another variable.
        page = mmap.PAGESIZE
        start, stop = round_up(start, page), stop // page * page
        if start < stop:
            # MADV_REMOVE removes the pages from the file, for all ranks; MADV_DONTNEED would unmap
            # them in this process only.
            self._map.madvise(mmap.MADV_REMOVE, start, stop - start)


def check_available(nbytes: int, ranks: int = 1) -> None:
    """Refuses a large request for more than is free; the system would grant it and kill later.

    Args:
        nbytes: bytes per rank.
        ranks: how many ranks of this host request as much at the same time.
    """
    wanted = ranks * nbytes
    if wanted >= LARGE and wanted > (free := available_memory()):
        each = f" for {ranks} ranks, {nbytes:,} for each," if ranks > 1 else ","
        raise MemoryError(
            f"{wanted:,} bytes were requested{each} but this host has {free:,} free; start fewer "
            "ranks per host"
        )


def make_private_segment() -> Segment:
    """Makes a segment for this process, as large as the host's memory, or as limits allow."""
    # Reserved addresses cost nothing, but `ulimit -v` may count them.
    size, limit = _require_enough(reservable(physical_memory()))
    file, _ = _make_nameless_file(size)
    return Segment(file, size, limit)


def make_shared_segment(comm: Any, size: int, least: int = _SMALLEST) -> Segment:
    """Makes one segment for all ranks of `comm`, an MPI communicator of one host. Collective.

    All ranks use the least that a rank's limits allow, up to `size` bytes. If that is less than
    `least`, or they cannot share memory, all raise `RuntimeError` with the reasons.
    """
    size, limit = _require_enough(min(comm.allgather(reservable(size))), least)
    problems: list[str] = []
    # The other ranks open rank 0's nameless file by its path in /proc, which one container may hide
    # from another. The second choice is a file that is unlinked as soon as all have opened it.
    for create in (_make_nameless_file, _make_named_file):
        file, path, problem = -1, "", ""
        if comm.rank == 0:
            try:
                file, path = create(size)
            except OSError as error:
                problem = str(error) or repr(error)
        path = comm.bcast(path, root=0)
        if path and comm.rank > 0:
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                problem = str(error) or repr(error)
        segment = None
        if file >= 0:
            try:
                segment = Segment(file, size, limit)
            except (OSError, ValueError) as error:
                problem = str(error) or repr(error)
        # All ranks use this file, or none does: the ranks need the same memory.
        failures = list_by_rank(enumerate(comm.allgather(problem)))
        if comm.rank == 0 and path and not path.startswith("/proc/"):
            # By now each rank has opened the file or failed to. Without a name it cannot be left
            # behind, however the job ends.
            os.unlink(path)
        if not failures and segment is not None:
            return segment
        problems += failures
    raise RuntimeError(
        f"hpcstrat cannot connect the ranks: those of this host cannot share {size:,} bytes of "
        f"memory: {'; '.join(dict.fromkeys(problems))}. Start them as one user, in one container"
    )


def _require_enough(reserved: tuple[int, str], least: int = _SMALLEST) -> tuple[int, str]:
    nbytes, limit = reserved
    if nbytes < least:
        raise RuntimeError(
            f"hpcstrat cannot reserve memory: {limit} leaves {nbytes:,} bytes for variables and "
            f"messages, and the minimum is {least:,}; raise it, or ask for more memory for the "
            "job"
        )
    return nbytes // mmap.PAGESIZE * mmap.PAGESIZE, limit


def _make_nameless_file(size: int) -> tuple[int, str]:
    """Makes a file of this size; returns it and the path by which other processes open it."""
    file = os.memfd_create("hpcstrat", os.MFD_CLOEXEC)
    os.ftruncate(file, size)
    # It has no path; other processes of the same user reach it through this process's descriptor.
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _make_named_file(size: int) -> tuple[int, str]:
    """The same, where processes may not open each other's descriptors.

    The name exists for the milliseconds until all have opened the file.
    """
    import tempfile  # 10 ms, and rarely needed

    file, path = tempfile.mkstemp(prefix="hpcstrat-", dir="/dev/shm")
    try:
        os.ftruncate(file, size)
    except OSError:
        os.unlink(path)
        raise
    return file, path
