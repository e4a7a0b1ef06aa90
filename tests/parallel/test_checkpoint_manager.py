"""CheckpointManager on any number of ranks: it restores the newest undamaged file or snapshot."""

import errno
import os
import signal

import numpy as np
import pytest
from internals import State, job_files
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint, CheckpointManager

RANK, N = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
MEMORY = "the snapshot in memory"


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))


@pytest.fixture
def memory(monkeypatch):
    """A launcher's memory: rank 0 has it, and all ranks have its variable."""
    own = job_files.create(N, has_snapshots=True) if RANK == 0 else None
    environment = MPI.COMM_WORLD.bcast(None if own is None else own.environment)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield own
    MPI.COMM_WORLD.Barrier()
    if own is not None:
        own.close()


class Program:
    """One start of a program."""

    def __init__(self, strategy, path, accumulated=None, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = hs.Variable(np.zeros(1000))
            self.optimizer = hs.optimizers.SGD(
                1.0, momentum=0.5, gradient_accumulation_steps=accumulated
            )
            self.seen = hs.metrics.Mean()
        self.manager = CheckpointManager(
            Checkpoint(w=self.w, optimizer=self.optimizer, seen=self.seen), path, **options
        )

    def train(self, steps):
        for _ in range(steps):
            self.strategy.run(self.step)
            self.manager.step()
        return self

    def step(self):
        k = self.optimizer.iterations + 1
        self.seen.update_state(self.strategy.xp.full(k, 0.5 * RANK + k))
        self.optimizer.apply_gradients([(self.strategy.xp.arange(1000.0) * (k + RANK), self.w)])

    def state(self):
        return (
            self.w.numpy().tobytes(),
            self.optimizer.iterations,
            float(self.seen.result()),
            self.manager.steps,
        )


def states(strategy, path, steps):
    """After each step, undisturbed."""
    program = Program(strategy, path, snapshot_every=None)
    return [program.state(), *(program.train(1).state() for _ in range(steps))]


def damage(path, at=None):
    """Rank 0 flips a bit in the last byte, or in another."""
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        with open(path, "r+b") as file:
            at = os.fstat(file.fileno()).st_size - 1 if at is None else at
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 16]))
    MPI.COMM_WORLD.Barrier()


NEWEST = {  # steps between files and between snapshots, steps taken, step restored
    "a snapshot of each step": (None, 1, 7, 7),
    "a snapshot of every second step": (None, 2, 7, 6),
    "a file and a newer snapshot": (4, 2, 7, 6),
    "a file and a snapshot of the same step": (3, 2, 7, 6),
    "a snapshot and a newer file": (3, 5, 7, 6),
    "a file of the last step": (5, 3, 5, 5),
    "files only": (4, None, 7, 4),
    "too early for a snapshot": (None, 8, 7, None),
    "neither": (None, None, 7, None),
}
CORE = ("a file and a newer snapshot", "a snapshot and a newer file")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.core] * (name in CORE)) for name in NEWEST]
)
def test_the_newest_is_restored(strategy, path, memory, case):
    every, snapshot_every, steps, restored = NEWEST[case]
    expected = states(strategy, path, 12)
    options = {"every": every, "snapshot_every": snapshot_every}
    first = Program(strategy, path, **options)
    assert first.manager.restore_or_initialize() is None
    with first.manager:  # its end lets another manager take snapshots, as the end of a process does
        assert first.train(steps).state() == expected[steps]
    for _ in range(2):
        again = Program(strategy, path, **options)
        with again.manager:
            found = again.manager.restore_or_initialize()
            is_file = restored is not None and every is not None and restored % every == 0
            assert found == (None if restored is None else path if is_file else MEMORY)
            assert again.state() == expected[restored or 0]
            # The kill that comes at once in the second start costs nothing.
    again = Program(strategy, path, **options)
    with again.manager:
        again.manager.restore_or_initialize()
        assert again.train(12 - (restored or 0)).state() == expected[12]
    if memory is not None:
        assert memory.steps()[0] == 12
    assert os.path.exists(path) == (every is not None)


def test_the_damaged_one_is_passed_over(strategy, path, memory):
    expected = states(strategy, path, 8)
    program = Program(strategy, path, every=6, snapshot_every=1)
    with program.manager:
        program.train(8)  # the file of 6, snapshots of 7 and 8

    def restored():
        program = Program(strategy, path, every=6, snapshot_every=1)
        with program.manager:
            found = program.manager.restore_or_initialize()
        assert program.state() == expected[program.manager.steps]
        return found, program.manager.steps

    files = MPI.COMM_WORLD.bcast(None if memory is None else memory.files)
    assert restored() == (MEMORY, 8)
    damage(files[1], 70)
    found = {restored()}
    damage(files[0], 70)
    found.add(restored())
    assert {steps for _, steps in found} - {8} <= {7, 6}
    assert restored() == (path, 6)
    damage(path)
    with pytest.raises(ValueError, match="is damaged"):
        restored()


def test_a_damaged_file_does_not_hide_a_snapshot(strategy, path, memory):
    expected = states(strategy, path, 6)
    program = Program(strategy, path, every=6, snapshot_every=1)
    with program.manager:
        program.train(6)
    damage(path)
    program = Program(strategy, path, every=6, snapshot_every=1)
    with program.manager:
        assert program.manager.restore_or_initialize() == MEMORY
    assert program.state() == expected[5]


@pytest.mark.core
def test_without_the_launcher_there_is_the_file(strategy, path):
    expected = states(strategy, path, 7)
    program = Program(strategy, path, every=3, keep=2)
    assert program.manager.restore_or_initialize() is None
    program.train(7)
    for name, steps in ((path, 6), (f"{path}.1", 3)):
        again = Program(strategy, name)
        assert again.manager.restore_or_initialize() == name
        assert again.state() == expected[steps]
    assert program.manager.save() == path
    assert Program(strategy, path).manager.restore_or_initialize() == path
    # A file of `Checkpoint.save` has no step number; a manager's file is an ordinary checkpoint.
    other = Program(strategy, path)
    Checkpoint(w=other.w, optimizer=other.optimizer, seen=other.seen).restore(path)
    assert other.state() == (*expected[7][:3], 0)


def test_where_the_launcher_is_elsewhere_there_is_the_file(strategy, path, monkeypatch):
    expected = states(strategy, path, 3)
    monkeypatch.setenv("_HPCSTRAT_JOB", "1:2:3:4:00")
    program = Program(strategy, path, every=3)
    with program.manager:
        if RANK == 0:
            with pytest.warns(
                UserWarning, match="not on the launcher's host; a restart resumes from"
            ):
                program.manager.restore_or_initialize()
        else:
            program.manager.restore_or_initialize()
        program.train(3)
    again = Program(strategy, path, snapshot_every=None)
    assert again.manager.restore_or_initialize() == path
    assert again.state() == expected[3]


def test_a_lack_of_memory_ends_snapshots_alone(strategy, path, memory, monkeypatch):
    allocate = os.posix_fallocate

    def refuse(file, *place):
        if "hpcstrat-job" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, *place)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    program = Program(strategy, path, every=3, snapshot_every=1)
    with program.manager:
        if RANK == 0:
            with pytest.warns(UserWarning, match="no memory for snapshots"):
                program.train(1)
        else:
            program.train(1)
        program.train(3)
    again = Program(strategy, path, snapshot_every=None)
    assert again.manager.restore_or_initialize() == path
    assert again.manager.steps == 3


def test_one_manager_at_a_time_takes_snapshots(strategy, path, memory):
    one, other = (
        Program(strategy, path, snapshot_every=1),
        Program(strategy, f"{path}-other", snapshot_every=1),
    )
    with one.manager:
        one.train(1)
        for _ in range(2):
            with pytest.raises(
                ValueError, match="the CheckpointManager of .*checkpoint takes snapshots"
            ):
                other.train(1)
    with other.manager:
        other.manager.step()
    with Program(strategy, path).manager as manager:
        assert manager.restore_or_initialize() == MEMORY


@pytest.mark.core
@pytest.mark.parametrize("rank", range(N))
def test_a_signal_saves_the_step_and_ends(strategy, path, memory, rank):
    expected = states(strategy, path, 3)
    program = Program(strategy, path, every=10, snapshot_every=1)
    previous = signal.getsignal(signal.SIGTERM)
    with program.manager:
        program.train(2)
        if rank == RANK:
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            program.train(2)
        assert caught.value.code == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        MPI.COMM_WORLD.Barrier()
        if memory is not None:
            assert memory.first_failure(N).state == State.PREEMPTED
    signal.signal(signal.SIGTERM, previous)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    again = Program(strategy, path, snapshot_every=1)
    with again.manager:
        assert again.manager.restore_or_initialize() == path
    assert again.state() == expected[3]


@pytest.mark.core
def test_what_is_due_waits_until_accumulated_gradients_are_applied(strategy, path, memory):
    """Updates in every third step, a file due in every second one, and a signal in step 7."""
    files, program = [], Program(strategy, path, every=2, snapshot_every=1, accumulated=3)
    previous = signal.getsignal(signal.SIGTERM)
    with program.manager:
        for step in range(1, 9):
            if step == 7 and RANK == N - 1:
                signal.raise_signal(signal.SIGTERM)
            program.train(1)
            in_file = Program(strategy, path, snapshot_every=None, accumulated=3)
            in_file.manager.restore_or_initialize()
            files.append(in_file.manager.steps)
        with pytest.raises(SystemExit):
            program.train(1)
        MPI.COMM_WORLD.Barrier()
    signal.signal(signal.SIGTERM, previous)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert files == [0, 0, 3, 3, 3, 6, 6, 6]
    again = Program(strategy, path, snapshot_every=1, accumulated=3)
    with again.manager:
        assert again.manager.restore_or_initialize() == path
    assert again.state() == program.state()
    assert again.manager.steps == 9


def test_wrong_uses_are_refused(strategy, path):
    checkpoint = Checkpoint()
    for options, message in [
        ({"every": 0}, "CheckpointManager: every is 0; it must be a number of steps"),
        (
            {"snapshot_every": 0.5},
            "CheckpointManager: snapshot_every is 0.5; it must be a number of steps",
        ),
        ({"keep": 0}, "CheckpointManager: keep is 0; it must be the number of files"),
    ]:
        with pytest.raises(ValueError, match=message):
            CheckpointManager(checkpoint, path, **options)
    with pytest.raises(TypeError, match="CheckpointManager: path is ''"):
        CheckpointManager(checkpoint, "")
    program = Program(strategy, path)
    with pytest.raises(
        RuntimeError, match=r"CheckpointManager\.step was called inside a replica function"
    ):
        strategy.run(program.manager.step)
    assert program.manager.steps == 0
    program.train(1)
