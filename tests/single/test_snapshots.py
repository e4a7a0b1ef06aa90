"""Snapshots in memory: one stays valid if the other is damaged, which is not restored."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from internals import (
    PART,
    CheckpointFile,
    Contents,
    Entry,
    SnapshotChecksum,
    SnapshotMemory,
    State,
    host_parts,
    job_files,
)

MIB = 1 << 20


@pytest.fixture
def memory():
    return job_files.create(4, 64 * MIB)


def contents(value, size=100_000):
    array = np.arange(size, dtype=np.float64) + value
    return Contents(
        {"x": Entry("float64", 8, array.shape)},
        {"o": {"kind": "SGD"}},
        lambda _: host_parts(array),
        value,
    )


def value_of(snapshot):
    with CheckpointFile(snapshot.path, checked=snapshot.nbytes) as file:
        array = np.frombuffer(b"".join(part.tobytes() for part in file.parts("x")))
        np.testing.assert_array_equal(array, np.arange(array.size) + array[0])
        assert file.step == snapshot.step == array[0]
        assert file.metadata == {"o": {"kind": "SGD"}}
        return int(array[0])


def newest(memory, path="here"):
    return SnapshotMemory(memory, path).newest()


def generation_of_newest(memory):
    snapshot = newest(memory)
    assert snapshot is not None
    return snapshot.generation


def found(environment):
    memory = job_files.find(environment)
    assert memory is not None
    return memory


def flip(memory, generation, at):
    with open(memory.files[generation], "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


def test_the_newest_snapshot_is_read(memory):
    snapshots = SnapshotMemory(memory, "here")
    assert snapshots.newest() is None
    for value in range(1, 6):
        # all of different sizes: nothing, less than a row, rows and more, several parts
        snapshots.write(contents(value, size=[1, 7, 8192, 100_001, PART // 4][value - 1]), value)
        for one in (snapshots, SnapshotMemory(memory, "here")):
            assert value_of(one.newest()) == value


def test_snapshots_of_another_checkpoint_are_not_read(memory):
    SnapshotMemory(memory, "here").write(contents(1), 1)
    assert newest(memory, "there") is None
    assert value_of(newest(memory, os.path.join(os.getcwd(), "here"))) == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_in_the_middle_leaves_the_one_before(memory, after):
    """The writer dies after `after` parts of the third snapshot."""
    snapshots = SnapshotMemory(memory, "here")
    snapshots.write(contents(1), 1)
    snapshots.write(contents(2), 2)
    killed = contents(3, size=PART // 2)  # four parts
    views = killed.views

    def some():
        for _, view in zip(range(after), views(), strict=False):
            yield view
        raise KeyboardInterrupt

    killed.views = some
    with pytest.raises(KeyboardInterrupt):
        snapshots.write(killed, 3)
    again = SnapshotMemory(memory, "here")
    assert value_of(again.newest()) == 2
    # The next writer also leaves it alone.
    for value in (4, 5):
        again.write(contents(value), value)
        assert value_of(newest(memory)) == value


@pytest.mark.parametrize("at", [0, 5, 300, 8191, 65_536, 799_999])
def test_a_flipped_bit_is_noticed(memory, at):
    snapshots = SnapshotMemory(memory, "here")
    snapshots.write(contents(1), 1)
    snapshots.write(contents(2), 2)
    flip(memory, generation_of_newest(memory), at)
    again = SnapshotMemory(memory, "here")
    assert value_of(again.newest()) == 1
    again.write(contents(3), 3)  # overwrites the damaged snapshot
    assert value_of(newest(memory)) == 3
    flip(memory, generation_of_newest(memory), at)
    assert value_of(newest(memory)) == 1
    flip(memory, generation_of_newest(memory), at)
    assert newest(memory) is None


def test_a_flipped_bit_of_a_record_is_noticed(memory):
    snapshots = SnapshotMemory(memory, "here")
    snapshots.write(contents(1), 1)
    snapshots.write(contents(2), 2)
    generation = generation_of_newest(memory)
    record = memory.record(generation)
    for byte in range(36):  # sequence, step, bytes, checksum, path, check
        changed = bytearray(record)
        changed[byte] ^= 1
        memory.write_record(generation, bytes(changed))
        assert value_of(newest(memory)) == 1
    memory.write_record(generation, record)
    assert value_of(newest(memory)) == 2


def test_the_checksum_sees_what_is_old_or_in_another_place():
    pieces = np.arange(4 * 2048, dtype=np.uint64).reshape(4, 2, 1024) ** 2

    def value(words):
        checksum = SnapshotChecksum()
        for piece in words:
            checksum.add(piece.reshape(-1).view(np.uint8))
        return checksum.value

    others = [
        pieces[[1, 0, 2, 3]],
        pieces[..., ::-1].copy(),
        pieces.copy(),
        pieces.copy(),
        pieces * 0,
    ]
    others[2][3] = pieces[2]  # an old piece
    others[3][3, 1] = pieces[2, 1]  # and half of one
    assert len({value(words) for words in [pieces, *others]}) == 6
    assert value(pieces.copy()) == value(pieces)


def test_too_large_a_snapshot_is_a_memory_error():
    memory = job_files.create(4, MIB)
    snapshots = SnapshotMemory(memory, "here")
    snapshots.write(contents(1, size=1000), 1)
    for _ in range(3):
        with pytest.raises(MemoryError):
            snapshots.write(contents(2, size=MIB), 2)
        assert value_of(snapshots.newest()) == 1


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
    rank.note_rank(3)
    rank.note_step(41)
    rank.note_step(42)
    assert memory.steps() == (42, 2) and memory.notes(4) == {3: (os.getpid(), State.STARTED, 0, "")}
    assert memory.first_failure(4) is None
    rank.note_failure(3, "ValueError: later")
    rank.note_failure(2, "é" * 2000)
    rank.note_failure(10**6, "nobody's")
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
        rank.note_rank(1)
        rank.note_left(1)
        assert memory.note_of(1).state == State.STARTED
        rank.note_connected(1)
        if state is not None:
            rank.note_failure(1, "an error", state)
        rank.note_left(1)
        assert memory.note_of(1).state == after


def test_memory_without_snapshots():
    memory = job_files.create(2, 0)
    assert found(memory.environment).files == () and not job_files.expects_snapshots(
        memory.environment
    )


def test_the_memory_goes_with_its_process(tmp_path):
    program = """if True:
    import sys
    from hpcstrat._process import job_files
    print(job_files.create(4, 1 << 20).place, flush=True)
    sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    place = process.stdout.readline().strip()
    memory = found({"_HPCSTRAT_JOB": place})
    SnapshotMemory(memory, "here").write(contents(1), 1)
    assert value_of(newest(memory)) == 1
    # Its mapped and open files have no names that could be left behind.
    maps = pathlib.Path(f"/proc/{process.pid}/maps").read_text()
    files = [os.readlink(file) for file in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()]
    assert sum("memfd:" in file for file in files) >= 3 and not any(
        "/dev/shm" in text for text in [maps, *files]
    )
    process.kill()
    process.communicate()
    assert job_files.find({"_HPCSTRAT_JOB": place}) is None
