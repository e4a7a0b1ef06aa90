"""Snapshots in memory: one stays valid if the other is damaged, which is not restored."""

import contextlib
import errno
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_files import Contents
from internals import PART, CheckpointFile, Entry, SnapshotMemory, State, host_parts, job_files


@pytest.fixture
def memory():
    return job_files.create(4, has_snapshots=True)


def write(snapshots, value, size=100_000, parts=None):
    """Writes a snapshot of step `value`."""
    array = np.arange(size, dtype=np.float64) + value
    contents = Contents(
        {"x": Entry("float64", 8, array.shape)},
        {"o": {"kind": "SGD"}},
        parts or (lambda _: host_parts(array)),
        {"step": str(value), **snapshots.notes()},
    )
    with snapshots.replacing(contents.header.nbytes) as file:
        contents.write_to(file.fileno(), snapshots)


def newest(memory, path="here"):
    """The value of the newest whole snapshot, which the next then does not overwrite."""
    return newest_of(SnapshotMemory(memory, path))


def newest_of(snapshots):
    for snapshot in snapshots.own:
        with contextlib.suppress(ValueError), CheckpointFile(snapshot.path) as file:
            array = np.frombuffer(b"".join(part.tobytes() for part in file.parts("x")))
            np.testing.assert_array_equal(array, np.arange(array.size) + array[0])
            assert file.step == snapshot.step == array[0]
            assert file.metadata == {"o": {"kind": "SGD"}}
            snapshots.kept = snapshot.path
            return int(array[0])
    return None


def flip(path, at):
    with open(path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


def found(environment):
    memory = job_files.find(environment)
    assert memory is not None
    return memory


def test_the_newest_snapshot_is_read(memory):
    snapshots = SnapshotMemory(memory, "here")
    assert snapshots.own == []
    for value in range(1, 6):
        # all of different sizes: next to nothing, one part, several parts, and again less
        write(snapshots, value, size=[1, 7, 8192, PART // 4, 100_001][value - 1])
        assert newest(memory) == value


def test_a_program_that_starts_anew_has_newer_snapshots(memory):
    """Although they are of earlier steps."""
    snapshots = SnapshotMemory(memory, "here")
    for value in (8, 9):
        write(snapshots, value)
    write(SnapshotMemory(memory, "here"), 1)
    assert newest(memory) == 1


def test_snapshots_of_another_checkpoint_are_not_read(memory):
    write(SnapshotMemory(memory, "here"), 1)
    assert newest(memory, "there") is None
    assert newest(memory, os.path.join(os.getcwd(), "here")) == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_in_the_middle_leaves_the_one_before(memory, after):
    """The writer dies after `after` parts of the third snapshot."""
    snapshots = SnapshotMemory(memory, "here")
    for value in (1, 2):
        write(snapshots, value)

    def some(_):
        yield from [np.zeros(PART, np.uint8)] * after
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(snapshots, 3, PART // 2, some)
    again = SnapshotMemory(memory, "here")
    assert newest_of(again) == 2
    # The next writer also leaves it alone.
    for value in (4, 5):
        write(again, value)
        assert newest(memory) == value


@pytest.mark.parametrize("at", [*range(0, 420, 13), 8191, 65_536, 799_999])
def test_a_flipped_bit_is_noticed(memory, at):
    snapshots = SnapshotMemory(memory, "here")
    for value in (1, 2):
        write(snapshots, value)
    flip(snapshots.kept, at)
    again = SnapshotMemory(memory, "here")
    assert newest_of(again) == 1
    write(again, 3)  # overwrites the damaged snapshot
    assert newest(memory) == 3
    flip(again.kept, at)
    last = SnapshotMemory(memory, "here")
    assert newest_of(last) == 1
    flip(last.kept, at)
    assert newest(memory) is None


@pytest.mark.parametrize("what", ["check_available", "posix_fallocate"])
def test_too_large_a_snapshot_is_a_memory_error(memory, monkeypatch, what):
    snapshots = SnapshotMemory(memory, "here")
    write(snapshots, 1, size=1000)
    if what == "posix_fallocate":
        refuse = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(os, what, lambda *_: (_ for _ in ()).throw(refuse))
    size = 1 << 20 if what == "posix_fallocate" else 1 << 50
    for _ in range(3):
        with pytest.raises(MemoryError), snapshots.replacing(size):
            raise AssertionError("there is no such memory")
        assert newest(memory) == 1


def test_only_the_launchers_memory_is_found(memory, tmp_path):
    ((name, place),) = memory.environment.items()
    assert job_files.find({}) is None and not job_files.expects_snapshots({})
    assert found(memory.environment).files == memory.files
    process, *files, token = place.split(":")
    with open(tmp_path / "file", "w+b") as file:
        wrong = [
            ["1" * 9, *files, token],
            [process, *files, "00" * 16],
            [process, *files, ""],
            [process, *files[:2], token],
            [process, str(file.fileno()), *files[1:], token],
            ["../..", *files, token],
            [""],
        ]
        for words in wrong:
            assert job_files.find({name: ":".join(words)}) is None
            assert job_files.expects_snapshots({name: ":".join(words)}) == (len(words) == 5)


def test_what_ranks_note_is_read(memory, monkeypatch):
    assert memory.steps() == (0, 0) and memory.notes(4) == {} and memory.first_failure(4) is None
    rank = found(memory.environment)
    rank.note(3, State.STARTED)
    rank.note_step(41)
    rank.note_step(42)
    assert memory.steps() == (42, 2) and memory.notes(4) == {
        3: (3, os.getpid(), State.STARTED, 0, "")
    }
    assert memory.first_failure(4) is None
    rank.note(3, State.FAILED, "ValueError: later")
    rank.note(2, State.FAILED, "é" * 2000)
    rank.note(10**6, State.FAILED, "nobody's")
    first = memory.first_failure(4)
    assert (first.rank, first.text) == (3, "ValueError: later")
    memory.forget_ranks()
    assert memory.steps() == (42, 0) and memory.notes(4) == {} and memory.first_failure(4) is None


def test_a_rank_leaves_in_order_only_from_among_the_others(memory):
    rank = found(memory.environment)
    for state, after in [
        (None, State.LEFT),
        (State.FAILED, State.FAILED),
        (State.PREEMPTED, State.PREEMPTED),
    ]:
        rank.note(1, State.STARTED)
        rank.note(1, State.LEFT)
        assert memory.note_of(1).state == State.STARTED
        rank.note(1, State.CONNECTED)
        if state is not None:
            rank.note(1, state, "an error")
        rank.note(1, State.LEFT)
        assert memory.note_of(1).state == after


def test_memory_without_snapshots():
    memory = job_files.create(2, has_snapshots=False)
    assert found(memory.environment).files == () and not job_files.expects_snapshots(
        memory.environment
    )


def test_the_memory_goes_with_its_process(tmp_path):
    program = """if True:
    import sys
    from hpcstrat._process import job_files
    print(job_files.create(4, has_snapshots=True).place, flush=True)
    sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    place = process.stdout.readline().strip()
    memory = found({"_HPCSTRAT_JOB": place})
    write(SnapshotMemory(memory, "here"), 1)
    assert newest(memory) == 1
    # Its mapped and open files have no names that could be left behind.
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    files = [os.readlink(file) for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()]
    assert sum("memfd:" in file for file in files) >= 3 and not any(
        "/dev/shm" in text for text in [maps, *files]
    )
    process.kill()
    process.communicate()
    assert job_files.find({"_HPCSTRAT_JOB": place}) is None
