"""Memory that the ranks of a host share: files without a name, so that nothing is left behind."""

from __future__ import annotations

import mmap
import os
from typing import Any, final

import numpy as np

from hpcstrat._core.ranks_in_words import list_by_rank
from hpcstrat._core.types import Bytes
from hpcstrat._memory.host_limits import check_available
from hpcstrat._memory.slabs import Slab


# A file and not an MPI window: a window on a full /dev/shm ends in a bus error, and freeing it
# under a NumPy view ends in a segmentation fault.
@final
class SharedFile:
    """A sparse file in memory, which is backed by pages only after `commit`.

    It is unmapped with the last array over it, and freed when no rank has it any more.

    Args:
        file: its descriptor, which this object closes.
        nbytes: its size.

    Attributes:
        array: all its bytes. Writing where nothing was committed may end the process.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self.array: Bytes = np.frombuffer(mmap.mmap(file, nbytes), np.uint8)

    def __del__(self) -> None:
        os.close(self._file)

    def commit(self, start: int, stop: int) -> None:
        """Backs these bytes with memory, or raises `MemoryError`; then nothing is lost."""
        nbytes = stop - start
        if nbytes <= 0:
            return
        # Pages are allocated now, when a lack of memory is an error and not yet a signal.
        check_available(nbytes)
        try:
            os.posix_fallocate(self._file, start, nbytes)
        except OSError as error:
            raise MemoryError(
                f"cannot allocate {nbytes:,} bytes: {error.strerror}; start fewer ranks per host"
            ) from error


def share_file(comm: Any, nbytes: int) -> SharedFile:
    """Makes one file for all ranks of `comm`, an MPI communicator of one host. Collective.

    Raises:
        MemoryError: they cannot share so many bytes, for the reasons that it lists; on all ranks.
    """
    problems: list[str] = []
    # The other ranks open rank 0's nameless file by its path in /proc, which one container may hide
    # from another. The second choice is a file that is unlinked as soon as all have opened it.
    for create in (_make_nameless_file, _make_named_file):
        shared, path, problem = None, "", ""
        try:
            if comm.rank == 0:
                file, path = create(nbytes)
                shared = SharedFile(file, nbytes)
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        shown = comm.bcast(path if shared is not None else "", root=0)
        try:
            if comm.rank > 0 and shown:
                shared = SharedFile(os.open(shown, os.O_RDWR | os.O_CLOEXEC), nbytes)
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        # All ranks use this file, or none does: the ranks need the same memory.
        failures = list_by_rank(enumerate(comm.allgather(problem)))
        if comm.rank == 0 and path and not path.startswith("/proc/"):
            # By now each rank has opened the file or failed to. Without a name it cannot be left
            # behind, however the job ends.
            os.unlink(path)
        if not failures and shared is not None:
            return shared
        problems += failures
    raise MemoryError(
        f"the ranks of this host cannot share {nbytes:,} bytes of memory: "
        f"{'; '.join(dict.fromkeys(problems))}. Start them as one user, in one container; `ulimit "
        "-v`, `ulimit -f` and `ulimit -n` limit what they can share"
    )


def share_slab(comm: Any, least: int, wanted: int) -> Slab:
    """A slab for all ranks of a host, which rank 0 backs with pages. Collective.

    The size is what rank 0 wants: others may not have collected the same garbage.
    """
    wanted = comm.bcast(wanted, root=0)
    try:
        shared = share_file(comm, wanted)
    except MemoryError:
        if wanted == least:
            raise
        shared = share_file(comm, least)
    # Pages belong to the file, and so to all ranks.
    return Slab(shared.array, shared.commit if comm.rank == 0 else None)


def _make_nameless_file(size: int) -> tuple[int, str]:
    """Makes a file of this size; returns it and the path by which other processes open it."""
    file = os.memfd_create("hpcstrat", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        raise
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
        os.close(file)
        os.unlink(path)
        raise
    return file, path
