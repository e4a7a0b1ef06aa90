"""CheckpointManager on any number of ranks: what it saves, and what a start resumes from."""

import errno
import os
import pathlib
import signal
import threading

import numpy as np
import pytest
from internals import CheckpointFile
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint, CheckpointManager

SIGNALS = signal.SIGUSR1, signal.SIGUSR2
RANK, N = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture(scope="module")
def strategy(place):
    with place.make(hs.MirroredStrategy) as made:
        yield made


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))


@pytest.fixture(autouse=True)
def handlers():
    """A manager that exits ignores its signals for good; the next test must not."""
    previous = {one: signal.getsignal(one) for one in (signal.SIGTERM, *SIGNALS)}
    yield
    for one, handler in previous.items():
        signal.signal(one, handler)


class Program:
    """One start of a program."""

    def __init__(self, strategy, path, **options):
        self.strategy = strategy
        with strategy.scope():
            self.w = hs.Variable(np.zeros(1000))
            self.optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
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


def check_restored(strategy, path, state):
    """That the next start begins there."""
    again = Program(strategy, path)
    assert again.manager.restore_or_initialize() == path
    assert again.state() == state


def states(strategy, path, steps):
    """After each step, undisturbed."""
    program = Program(strategy, path)
    return [program.state(), *(program.train(1).state() for _ in range(steps))]


@pytest.mark.parametrize(
    "every, restored, blocking", [(1, 7, False), (3, 6, True), (8, None, False), (None, None, True)]
)
def test_a_start_resumes_from_the_last_save(strategy, path, every, restored, blocking):
    expected, steps = states(strategy, path, 12), 7
    first = Program(strategy, path, every=every, blocking=blocking)
    with first.manager:
        assert first.manager.restore_or_initialize() is None
        assert first.train(steps).state() == expected[steps]
    for more in (0, 12 - (restored or 0)):  # the second start ends before its first step
        again = Program(strategy, path, every=every, blocking=blocking)
        with again.manager:
            found = again.manager.restore_or_initialize()
            assert found == (None if restored is None else path)
            assert again.state() == expected[restored or 0]
            assert again.train(more).state() == expected[(restored or 0) + more]
    assert os.path.exists(path) == (every is not None)


def test_the_file_is_an_ordinary_checkpoint(strategy, path):
    expected = states(strategy, path, 7)
    program = Program(strategy, path, every=3, keep=2, blocking=False)
    program.train(7)  # the next start waits for the file
    for name, steps in ((path, 6), (f"{path}.1", 3)):
        check_restored(strategy, name, expected[steps])
    assert program.manager.save() == path
    other = Program(strategy, path)
    checkpoint = Checkpoint(w=other.w, optimizer=other.optimizer, seen=other.seen)
    checkpoint.restore(path)
    assert other.state() == (*expected[7][:3], 0)
    checkpoint.save(path)  # without the number of the step
    check_restored(strategy, path, other.state())


def test_without_a_file_the_previous_one_is_restored(strategy, path, monkeypatch):
    """What a kill may leave where there are no hard links. The parameter rank alone looks."""
    expected = states(strategy, path, 4)
    Program(strategy, path, every=2, keep=2).train(4)
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        os.unlink(path)
    again = Program(strategy, path, keep=2)
    with monkeypatch.context() as patch:
        if RANK > 0:
            patch.setattr(os.path, "exists", lambda _: False)  # as on another host
        assert again.manager.restore_or_initialize() == f"{path}.1"
    assert again.state() == expected[2]
    again.train(2).manager.save()
    MPI.COMM_WORLD.Barrier()
    for name, steps in ((path, 4), (f"{path}.1", 2)):
        check_restored(strategy, name, expected[steps])


def is_open(path):
    """Whether this process has the file open."""
    return path in [os.path.realpath(number) for number in pathlib.Path("/proc/self/fd").iterdir()]


def test_a_file_that_cannot_be_restored_is_closed_on_all_ranks(strategy, path, monkeypatch):
    program = Program(strategy, path, every=1).train(1)
    again = Program(strategy, path)
    before = again.state()

    def change(mask):
        MPI.COMM_WORLD.Barrier()
        if RANK == 0:
            whole = pathlib.Path(path).read_bytes()
            pathlib.Path(path).write_bytes(whole[:-1] + bytes([whole[-1] ^ mask]))
        MPI.COMM_WORLD.Barrier()

    change(16)
    said = r"CheckpointManager\.restore_or_initialize: .* is damaged"
    with pytest.raises(ValueError, match=said) as caught:
        again.manager.restore_or_initialize()
    assert not is_open(path) and again.state() == before
    change(16)
    other = CheckpointManager(Checkpoint(w=again.w), path)
    with pytest.raises(ValueError, match=r"left over in the file: optimizer") as caught:
        other.restore_or_initialize()
    assert not is_open(path) and again.state() == before

    def broken(*_):
        raise OSError(errno.EIO, "the disk is broken")
        yield

    monkeypatch.setattr(CheckpointFile, "parts", broken)
    with pytest.raises(OSError, match="the disk is broken; some objects are restored") as caught:
        again.manager.restore_or_initialize()
    assert not is_open(path)
    monkeypatch.undo()
    del caught  # whose traceback has kept what the calls did not close
    program.manager.save()
    assert again.manager.restore_or_initialize() == path
    assert again.state() == program.state()


@pytest.mark.parametrize(
    ("name", "rank", "options", "status"),
    [
        ("SIGTERM", 0, {"every": 10}, 75),
        ("SIGUSR1", N - 1, {"every": 1, "blocking": False}, 75),
        ("SIGUSR2", N // 2, {"signals": [signal.SIGUSR2], "exit_status": 3}, 3),
    ],
)
def test_a_signal_saves_the_step_and_ends(strategy, path, capsys, name, rank, options, status):
    expected = states(strategy, path, 3)
    program, number = Program(strategy, path, **options), signal.Signals[name]
    others = {one: signal.getsignal(one) for one in (signal.SIGTERM, *SIGNALS)}
    with pytest.raises(SystemExit) as caught, program.manager:
        for one in options.get("signals", (signal.SIGTERM, signal.SIGUSR1)):
            others.pop(one, None)
        assert all(signal.getsignal(one) is handler for one, handler in others.items())
        program.train(2)
        if rank == RANK:
            signal.raise_signal(number)
        program.train(2)
    assert caught.value.code == status
    said = (
        f"hpcstrat: received {name}; the checkpoint {path} is saved, and the job exits with "
        f"status {status}\n"
    )
    assert capsys.readouterr().err == (said if RANK == 0 else "")
    assert signal.getsignal(number) is signal.SIG_IGN  # until the end of the process
    with CheckpointFile(path) as file:  # in any case on disk by now
        assert file.step == 3
    check_restored(strategy, path, expected[3])
    with program.manager:  # a new block, in which no signal came
        program.train(1)


@pytest.mark.parametrize("restores", [False, True])
def test_the_end_of_the_block_and_a_restore_wait_for_the_file(
    strategy, path, monkeypatch, restores
):
    program = Program(strategy, path, every=1, blocking=False)
    pwrite, may_write = os.pwrite, threading.Event()

    def write_later(*arguments):
        may_write.wait()
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", write_later)
    with program.manager:
        program.train(1)
        assert RANK > 0 or not os.path.exists(path)
        threading.Timer(0.1, may_write.set).start()
        if restores:
            assert program.manager.restore_or_initialize() == path
    assert os.path.exists(path)


def test_the_end_of_the_block_restores_handlers_and_raises_the_files_error(
    strategy, path, monkeypatch
):
    before, signals = signal.getsignal(signal.SIGTERM), [signal.SIGTERM, signal.SIGTERM]
    program = Program(strategy, path, every=1, blocking=False, signals=signals)
    with program.manager:
        assert signal.getsignal(signal.SIGTERM) is not before
        program.train(1)
    assert signal.getsignal(signal.SIGTERM) is before

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space .* in the background"), program.manager:
        program.train(1)
    with pytest.raises(KeyError, match="of the program"), program.manager:
        program.train(1)
        raise KeyError("of the program")  # is what is raised, and not the file's error
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(OSError, match="No space .* in the background"):
        program.train(1)
    monkeypatch.undo()
    assert Program(strategy, path).manager.restore_or_initialize() == path


WRONG = [
    ({"checkpoint": 3}, TypeError, "checkpoint is int; pass a Checkpoint"),
    ({"path": ""}, TypeError, "path is ''; it must be the name of a file"),
    ({"path": 3}, TypeError, "path is 3; it must be the name of a file"),
    ({"every": 0}, ValueError, "every is 0; it must be a number of steps"),
    ({"every": 0.5}, ValueError, "every is 0.5; it must be a number of steps"),
    ({"keep": 0}, ValueError, "keep is 0; it must be the number of files"),
]
for one in (0, 256, -1, "x"):
    said = f"exit_status is {one!r}; it must be from 1 to"
    WRONG.append(({"exit_status": one}, ValueError, said))
for one in (0, 65, -1, "SIGUSR1", signal.SIGKILL, signal.SIGSTOP):
    said = "signals has .* no program can record"
    WRONG.append(({"signals": [signal.SIGTERM, one]}, ValueError, said))


def test_wrong_uses_are_refused_when_it_is_made(strategy, path):
    for wrong, error, message in WRONG:
        options = {"checkpoint": Checkpoint(), "path": path, **wrong}
        with pytest.raises(error, match=f"^CheckpointManager: {message}"):
            CheckpointManager(**options)
    program, said = Program(strategy, path), r"CheckpointManager\.step was called inside a replica"
    with pytest.raises(RuntimeError, match=said):
        strategy.run(program.manager.step)
    assert program.manager.steps == 0
    program.train(1)
