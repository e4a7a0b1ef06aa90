import errno
import os
import resource

import numpy as np
import pytest
from internals import (
    RangeAllocator,
    available_memory,
    make_private_segment,
    physical_memory,
    segment,
)

MIB = 1 << 20


def backed(made):
    return os.fstat(made._file).st_blocks * 512


def test_memory_appears_and_goes():
    made = make_private_segment()
    assert made.size >= 1 << 30 and made.array.size == made.size and made.array.dtype == np.uint8
    assert backed(made) == 0
    made.commit(MIB, 5 * MIB)
    assert backed(made) == 4 * MIB
    made.array[MIB : 5 * MIB] = 7
    made.release(2 * MIB, 4 * MIB)
    assert backed(made) == 2 * MIB
    assert (made.array[MIB : 2 * MIB] == 7).all() and (made.array[4 * MIB : 5 * MIB] == 7).all()
    made.commit(2 * MIB, 3 * MIB)
    assert not made.array[2 * MIB : 3 * MIB].any()


def test_pages_that_others_share_stay():
    made = make_private_segment()
    made.commit(0, 3 * 4096)
    made.array[: 3 * 4096] = 5
    made.release(100, 2 * 4096 + 100)  # only the second page is wholly inside
    assert (made.array[:4096] == 5).all() and (made.array[2 * 4096 : 3 * 4096] == 5).all()
    made.release(10, 20)
    assert (made.array[:4096] == 5).all()


def test_nothing():
    made = make_private_segment()
    made.commit(5, 5)
    made.release(5, 5)
    assert backed(made) == 0


def test_more_than_there_is():
    made = make_private_segment()
    with pytest.raises(
        MemoryError, match="bytes were requested beyond the|bytes were requested, but this host has"
    ):
        made.commit(made.size, made.size + 4096)
    with pytest.raises(MemoryError, match="were requested, but this host has"):
        made.commit(0, 1 << 50)
    assert backed(made) == 0


def test_what_the_host_has_left_is_asked_for_large_ones(monkeypatch):
    made = make_private_segment()
    monkeypatch.setattr(segment, "available_memory", lambda: 1000)
    made.commit(0, MIB)
    with pytest.raises(
        MemoryError, match="67,108,864 bytes were requested, but this host has 1,000 free"
    ):
        made.commit(0, 64 * MIB)


def test_facts_of_the_host():
    assert 0 < available_memory() <= physical_memory()


def test_nothing_is_left_behind():
    made = make_private_segment()
    made.commit(0, MIB)
    assert os.fstat(made._file).st_nlink == 0  # it has no name


class Alone:
    """A communicator of one rank."""

    rank = 0

    def allgather(self, one):
        return [one]

    def bcast(self, one, root):
        return one


def test_nothing_is_left_behind_where_the_file_cannot_grow(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    names = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda name: (names.append(name), unlink(name)))
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(
        RuntimeError,
        match=r"cannot share 67,108,864 bytes of memory: rank 0: \[Errno 27\] File too large",
    ):
        segment.make_shared_segment(Alone(), 64 * MIB)
    (name,) = names
    assert name.startswith("/dev/shm/hpcstrat-") and not os.path.exists(name)


@pytest.fixture
def limits(monkeypatch):
    """`limits(AS=number, FSIZE=number)` replaces the limits set by `ulimit`."""

    def set_limits(**given):
        found = {getattr(resource, f"RLIMIT_{name}"): value for name, value in given.items()}
        monkeypatch.setattr(
            resource, "getrlimit", lambda one: (found.get(one, resource.RLIM_INFINITY), 0)
        )

    return set_limits


@pytest.mark.parametrize("part", [2, 4])
def test_a_part_of_the_addresses_that_are_left(limits, part):
    limits()
    assert segment.reservable(1 << 50, part) == (1 << 50, "")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits(AS=used + 8192 * MIB)
    found, limit = segment.reservable(1 << 50, part)
    # Other threads may have allocated memory in the meantime.
    assert abs(found - 8192 * MIB // part) < 64 * MIB
    assert limit == f"`ulimit -v` ({used + 8192 * MIB:,} bytes)"
    assert segment.reservable(MIB, part) == (MIB, "")
    limits(AS=used // 2)
    assert segment.reservable(MIB, part)[0] == 0


def test_limits_make_it_smaller(limits):
    limits(FSIZE=100 * MIB + 1)
    made = make_private_segment()
    assert made.size == 100 * MIB
    with pytest.raises(
        MemoryError,
        match=r"make variables smaller; `ulimit -f` \(104,857,601 bytes\) leaves no more: ",
    ):
        made.commit(0, made.size + 1)
    heap = RangeAllocator(0, made.size, made.hint)
    with pytest.raises(
        MemoryError,
        match=r"fewer ranks per host; `ulimit -f` \(104,857,601 bytes\) leaves no more: ",
    ):
        heap.allocate(101 * MIB, 8)
    limits(AS=1000)
    with pytest.raises(
        RuntimeError, match=r"`ulimit -v` \(1,000 bytes\) leaves 0 bytes .* raise it"
    ):
        make_private_segment()
    limits()
    assert make_private_segment().hint == ""


@pytest.fixture
def system(tmp_path):
    """A stand-in for /: `system(path=text, ...)` writes files to it; 1,000 MiB are free."""

    def write(**files):
        for path, text in (
            {"proc/meminfo": f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\n"} | files
        ).items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


def group(folder, limit, used, cached, v1=False):
    """The files of a control group, in MiB."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    total = "total_" * v1
    stat = f"anon 1\n{total}inactive_file {cached * MIB}\n{total}active_file {MIB}\n"
    limit = limit if isinstance(limit, str) else str(limit * MIB)
    return {
        f"{folder}/{names[0]}": limit,
        f"{folder}/{names[1]}": str(used * MIB),
        f"{folder}/memory.stat": stat,
    }


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
JOB_V1, JOB_V2 = (
    {"proc/self/cgroup": "5:cpu:/x\n4:memory:/job/step\n"},
    {"proc/self/cgroup": "0::/job/step\n"},
)


@pytest.mark.parametrize(
    "files, left",
    [
        ({}, 1000),
        (JOB_V2, 1000),
        (JOB_V2 | group(f"{V2}/job/step", 500, 200, 9), 310),
        # The limit of the parent group.
        (JOB_V2 | group(f"{V2}/job/step", "max", 200, 9) | group(f"{V2}/job", 400, 300, 0), 101),
        (JOB_V2 | group(V2, 100, 90, 0), 11),  # in a container, but with the host's path
        ({"proc/self/cgroup": "0::/../../job\n"} | group(V2, 100, 90, 0), 11),
        (JOB_V2 | group(f"{V2}/job/step", 5000, 200, 0), 1000),
        (JOB_V2 | group(f"{V2}/job/step", 500, 600, 0), 0),
        (JOB_V2 | group(f"{V2}/unified/job", 500, 400, 0), 101),
        (JOB_V1 | group(f"{V1}/job/step", 500, 200, 9, v1=True), 310),
        (
            JOB_V1
            | group(f"{V1}/job/step", 1 << 43, 200, 9, v1=True)
            | group(V1, 300, 200, 0, v1=True),
            101,
        ),
        (JOB_V1 | {f"{V1}/job/step/memory.limit_in_bytes": "nonsense"}, 1000),
    ],
    ids=[
        *(
            "no groups",
            "no files",
            "the job's",
            "one further out",
            "a container's",
            "a container's, by dots",
        ),
        *(
            "more than the host's",
            "more used than allowed",
            "both versions",
            "version 1",
            "version 1, further out",
        ),
        "nonsense",
    ],
)
def test_what_control_groups_leave(system, files, left):
    assert available_memory(system(**files)) == left * MIB
