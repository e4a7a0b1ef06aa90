"""Memory of a host: what is free, files that ranks share, slabs of blocks, layouts of messages."""

import errno
import os
import pathlib

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from internals import host_limits, layout, shared_file, slabs

MIB = 1 << 20
FLOAT, BYTE = np.dtype(np.float32), np.dtype(np.uint8)


# ---- what is free


def test_only_large_requests_are_compared_with_what_is_free(monkeypatch):
    monkeypatch.setattr(host_limits, "available_memory", lambda: 1000)
    host_limits.check_available(32 * MIB - 1, 2)
    facts = "67,108,864 bytes were requested for 2 ranks, 33,554,432 for each, but this host"
    with pytest.raises(MemoryError, match=facts):
        host_limits.check_available(32 * MIB, 2)
    monkeypatch.setattr(host_limits, "available_memory", lambda: 64 * MIB)
    host_limits.check_available(32 * MIB, 2)


def group(folder, limit, used, cached):
    """The files of a control group, in MiB."""
    stat = f"anon 1\ninactive_file {cached * MIB}\nactive_file {MIB}\n"
    limit = limit if isinstance(limit, str) else str(limit * MIB)
    texts = {"memory.max": limit, "memory.current": str(used * MIB), "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in texts.items()}


IN = "proc/self/cgroup"
JOB = {IN: "0::/job/step\n"}
UNLIMITED = group("job/step/", "max", 200, 9)
# Files of this process's groups on a host with 1,000 MiB free, and the MiB that it can still get.
GROUPS = {
    "no files": (JOB, 1000),
    "the job's": (JOB | group("job/step/", 500, 200, 9), 310),
    "one further out": (JOB | UNLIMITED | group("job/", 400, 300, 0), 101),
    # It shows the path on the host, but its group is at the root.
    "a container's, by dots": ({IN: "0::/../../job\n"} | group("", 100, 90, 0), 11),
    "more than the host's": (JOB | group("job/step/", 5000, 200, 0), 1000),
    "more used than allowed": (JOB | group("job/step/", 500, 600, 0), 0),
    "beside version 1": (
        {IN: "4:memory:/job\n0::/job\n"} | group("unified/job/", 500, 400, 0),
        101,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_control_groups_leave(tmp_path, name):
    files, left = GROUPS[name]
    meminfo = {"proc/meminfo": f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\n"}
    for path, text in (meminfo | files).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert host_limits.available_memory(tmp_path) == left * MIB


# ---- files that ranks share, as one rank alone makes them


class Alone:
    """A communicator of one rank."""

    rank = 0

    def allgather(self, one):
        return [one]

    def bcast(self, one, root):
        return one


def share(nbytes):
    return shared_file.share_file(Alone(), nbytes)


def mapped():
    """How many files of the library this process has mapped, and how many descriptors of them."""
    maps = pathlib.Path("/proc/self/maps").read_text().count("memfd:hpcstrat")
    links = [path for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return maps, sum("memfd:hpcstrat" in os.readlink(path) for path in links)


def backed(made):
    return os.fstat(made._file).st_blocks * 512


def refuse(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture
def unlinked(monkeypatch):
    """The names of files that were removed."""
    names, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda name: (names.append(name), unlink(name)))
    return names


def test_only_what_is_committed_has_memory(monkeypatch):
    made = share(1 << 34)
    assert made.array.size == 1 << 34 and made.array.dtype == np.uint8
    assert backed(made) == 0
    made.commit(MIB, 5 * MIB)
    assert backed(made) == 4 * MIB
    made.array[MIB : 5 * MIB] = 7
    made.commit(4 * MIB, 6 * MIB)  # what is there stays
    made.commit(9, 9)
    assert (made.array[MIB : 5 * MIB] == 7).all() and not made.array[5 * MIB : 6 * MIB].any()
    with monkeypatch.context() as patch:
        patch.setattr(host_limits, "available_memory", lambda: 1000)
        with pytest.raises(MemoryError, match="67,108,864 bytes were requested, but this host has"):
            made.commit(0, 64 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(MemoryError, match="cannot allocate 4,096 bytes: No space left on device"):
        made.commit(0, 4096)
    assert backed(made) == 5 * MIB


def test_a_file_goes_with_the_last_array():
    maps, files = mapped()
    made = share(MIB)
    assert mapped() == (maps + 1, files + 2)  # one descriptor is the mapping's
    assert os.fstat(made._file).st_nlink == 0  # it has no name
    made.commit(0, MIB)
    view = made.array[10:20].reshape(2, 5)
    del made
    view[:] = 3
    assert mapped() == (maps + 1, files + 1) and view.sum() == 30
    del view
    assert mapped() == (maps, files)


def test_a_file_with_a_name_where_none_without_can_be_opened(monkeypatch, unlinked):
    monkeypatch.setattr(os, "memfd_create", refuse(errno.EPERM))
    made = share(MIB)
    made.commit(0, MIB)
    made.array[:] = 1
    (name,) = unlinked
    assert name.startswith("/dev/shm/hpcstrat-") and not os.path.exists(name)


def test_nothing_is_left_behind_where_the_file_cannot_grow(monkeypatch, unlinked):
    before = mapped()
    monkeypatch.setattr(os, "ftruncate", refuse(errno.EFBIG))
    with pytest.raises(MemoryError, match=r"share 67,108,864 bytes .* rank 0: .*File too large"):
        share(64 * MIB)
    (name,) = unlinked
    assert name.startswith("/dev/shm/hpcstrat-") and not os.path.exists(name)
    assert mapped() == before


# ---- slabs


def place(block):
    """Where a block starts in its slab, and where it stops."""
    return [end - block.owner.address for end in block.memory]


def allocating(sizes):
    """A function that allocates slabs, whose sizes it notes, and that costs nothing."""

    def allocate(least, wanted):
        sizes.append(wanted)
        return slabs.Slab(np.empty(wanted, np.uint8))

    return allocate


@pytest.mark.parametrize("alignment", [1, slabs.GPU_ALIGNMENT])
def test_blocks_lie_one_after_another(alignment):
    memory = slabs.Slabs(allocating([]), alignment=alignment)
    forms = [((3,), np.int8), ((2, 2), FLOAT), ((), np.complex128), ((0, 5), FLOAT), ((1,), FLOAT)]
    blocks = [memory.new_block(shape, np.dtype(dtype)) for shape, dtype in forms]
    closely = [[0, 3], [4, 20], [32, 48], [48, 48], [48, 52]]
    of_gpu = [[0, 3], [256, 272], [512, 528], [768, 768], [768, 772]]
    assert [place(block) for block in blocks] == (closely if alignment == 1 else of_gpu)
    for i, block in enumerate(blocks):
        block.array[...] = i
    for i, (block, (shape, dtype)) in enumerate(zip(blocks, forms, strict=True)):
        assert block.array.shape == shape and block.array.dtype == dtype
        assert (block.view == i).all() and not block.view.flags.writeable
        assert slabs.part(*block.memory).tobytes() == block.array.tobytes()


def test_slabs_double_up_to_the_limit():
    """And large blocks have slabs of their own, between which the others go on as before."""
    sizes = []
    memory = slabs.Slabs(allocating(sizes), smallest=1 << 17, largest=1 << 20)
    before = memory.new_block((5,), FLOAT)
    kept = [memory.new_block(((1 << 19) + 1,), BYTE)]
    after = memory.new_block((5,), FLOAT)
    assert (place(before), place(kept[0]), place(after)) == ([0, 20], [0, (1 << 19) + 1], [20, 40])
    kept += [memory.new_block((1 << 16,), BYTE) for _ in range(63)]
    alone = (1 << 19) + (1 << 16)
    # The first has room for one beside the two small blocks.
    assert sizes == [1 << 17, alone, 1 << 17, 1 << 18, 1 << 19, *[1 << 20] * 3]


# ---- layouts of messages

SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0, 5), (5,), (2, 1, 3)])
DTYPES = st.sampled_from(
    [np.dtype(one) for one in ("int8", "float64", "float32", "complex64", ml_dtypes.bfloat16)]
)


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=7), st.sampled_from([0, 40]))
def test_arrays_of_one_dtype_lie_back_to_back(forms, room):
    shapes, dtypes = tuple(shape for shape, _ in forms), tuple(dtype for _, dtype in forms)
    form = layout.layout_of(shapes, dtypes)
    assert layout.layout_of(shapes, dtypes) is form
    arrays = [
        (np.arange(np.prod(shape)).reshape(shape) + i).astype(dtype).T.copy().T
        for i, (shape, dtype) in enumerate(forms)
    ]
    message = np.full(form.nbytes + room, 255, np.uint8)
    form.write(message, arrays)
    assert (message[form.nbytes :] == 255).all()
    views = form.views(message)
    for view, array, start in zip(views, arrays, form.starts, strict=True):
        assert view.dtype == array.dtype and view.shape == array.shape
        assert np.array_equal(view, array) and view.flags.c_contiguous
        assert view.size == 0 or np.shares_memory(view, message[start:])
    # One group for each dtype, in the order of the first of them.
    assert [group.dtype for group in form.groups] == [*dict.fromkeys(dtypes)]
    for group in form.groups:
        of_it = [array.ravel() for array in arrays if array.dtype == group.dtype]
        assert group.elements == sum(map(len, of_it))
        assert group.of(message).tolist() == np.concatenate(of_it).tolist()
    sizes = sum(array.nbytes for array in arrays)
    assert sizes <= form.nbytes < sizes + 8 * len(form.groups) + 8
