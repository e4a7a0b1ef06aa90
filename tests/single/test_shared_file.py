"""Shared files, as one rank alone makes them: what is backed by memory, and what is left behind."""

import errno
import os
import pathlib

import numpy as np
import pytest
from internals import host_limits, share_file

MIB = 1 << 20


class Alone:
    """A communicator of one rank."""

    rank = 0

    def allgather(self, one):
        return [one]

    def bcast(self, one, root):
        return one


def mapped():
    """How many files of the library this process has mapped, and how many descriptors of them."""
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    is_open = [name for name in os.listdir("/proc/self/fd") if is_library_file(name)]
    return len([line for line in maps if "memfd:hpcstrat" in line]), len(is_open)


def is_library_file(name):
    try:
        return "memfd:hpcstrat" in os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # of the folder itself
        return False


def backed(made):
    return os.fstat(made._file).st_blocks * 512


def test_only_what_is_committed_has_memory():
    made = share_file(Alone(), 1 << 34)
    assert made.array.size == 1 << 34 and made.array.dtype == np.uint8
    assert backed(made) == 0
    made.commit(MIB, 5 * MIB)
    assert backed(made) == 4 * MIB
    made.array[MIB : 5 * MIB] = 7
    made.commit(4 * MIB, 6 * MIB)  # what is there stays
    assert backed(made) == 5 * MIB
    assert (made.array[MIB : 5 * MIB] == 7).all() and not made.array[5 * MIB : 6 * MIB].any()
    made.commit(9, 9)
    assert backed(made) == 5 * MIB


def test_more_than_there_is(monkeypatch):
    made = share_file(Alone(), 1 << 34)
    with monkeypatch.context() as patch:
        patch.setattr(host_limits, "available_memory", lambda: 1000)
        with pytest.raises(MemoryError, match="67,108,864 bytes were requested, but this host has"):
            made.commit(0, 64 * MIB)

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(MemoryError, match="cannot allocate 4,096 bytes: No space left on device"):
        made.commit(0, 4096)
    assert backed(made) == 0


def test_it_goes_with_the_last_array():
    maps, files = mapped()
    made = share_file(Alone(), MIB)
    assert mapped() == (maps + 1, files + 2)  # one descriptor is the mapping's
    assert os.fstat(made._file).st_nlink == 0  # it has no name
    made.commit(0, MIB)
    view = made.array[10:20].reshape(2, 5)
    del made
    view[:] = 3
    assert mapped() == (maps + 1, files + 1) and view.sum() == 30
    del view
    assert mapped() == (maps, files)


def test_a_file_with_a_name_where_none_without_can_be_opened(monkeypatch):
    names, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name: (names.append(name), unlink(name)))

    def refuse(*_):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    made = share_file(Alone(), MIB)
    made.commit(0, MIB)
    made.array[:] = 1
    (name,) = names
    assert name.startswith("/dev/shm/hpcstrat-") and not os.path.exists(name)


def test_nothing_is_left_behind_where_the_file_cannot_grow(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    names, unlink, before = [], os.unlink, mapped()
    monkeypatch.setattr(os, "unlink", lambda name: (names.append(name), unlink(name)))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(
        MemoryError,
        match=r"cannot share 67,108,864 bytes of memory: rank 0: \[Errno 27\] File too large",
    ):
        share_file(Alone(), 64 * MIB)
    (name,) = names
    assert name.startswith("/dev/shm/hpcstrat-") and not os.path.exists(name)
    assert mapped() == before
