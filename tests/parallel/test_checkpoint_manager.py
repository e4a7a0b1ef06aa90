"""CheckpointManager on any number of ranks: what it saves, and what a start resumes from."""

import os
import signal

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint, CheckpointManager

RANK, N = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))


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


def states(strategy, path, steps):
    """After each step, undisturbed."""
    program = Program(strategy, path)
    return [program.state(), *(program.train(1).state() for _ in range(steps))]


@pytest.mark.core
@pytest.mark.parametrize(
    "every, steps, restored",
    [(1, 7, 7), (3, 7, 6), (5, 5, 5), (8, 7, None), (None, 7, None)],
    ids=lambda value: str(value),
)
def test_a_start_resumes_from_the_last_save(strategy, path, every, steps, restored):
    expected = states(strategy, path, 12)
    first = Program(strategy, path, every=every)
    with first.manager:
        assert first.manager.restore_or_initialize() is None
        assert first.train(steps).state() == expected[steps]
    for more in (0, 12 - (restored or 0)):  # the second start ends before its first step
        again = Program(strategy, path, every=every)
        with again.manager:
            found = again.manager.restore_or_initialize()
            assert found == (None if restored is None else path)
            assert again.state() == expected[restored or 0]
            assert again.train(more).state() == expected[(restored or 0) + more]
    assert os.path.exists(path) == (every is not None)


@pytest.mark.core
def test_the_file_is_an_ordinary_checkpoint(strategy, path):
    expected = states(strategy, path, 7)
    program = Program(strategy, path, every=3, keep=2)
    program.train(7)
    for name, steps in ((path, 6), (f"{path}.1", 3)):
        again = Program(strategy, name)
        assert again.manager.restore_or_initialize() == name
        assert again.state() == expected[steps]
    assert program.manager.save() == path
    other = Program(strategy, path)
    checkpoint = Checkpoint(w=other.w, optimizer=other.optimizer, seen=other.seen)
    checkpoint.restore(path)
    assert other.state() == (*expected[7][:3], 0)
    checkpoint.save(path)  # without the number of the step
    again = Program(strategy, path)
    assert again.manager.restore_or_initialize() == path
    assert again.state() == other.state()


def test_a_damaged_file_is_refused_on_all_ranks(strategy, path):
    program = Program(strategy, path, every=1).train(1)
    MPI.COMM_WORLD.Barrier()
    if RANK == 0:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([byte ^ 16]))
    MPI.COMM_WORLD.Barrier()
    again = Program(strategy, path)
    before = again.state()
    with pytest.raises(
        ValueError, match=r"CheckpointManager\.restore_or_initialize: .* is damaged"
    ):
        again.manager.restore_or_initialize()
    assert again.state() == before
    program.manager.save()
    assert again.manager.restore_or_initialize() == path
    assert again.state() == program.state()


@pytest.mark.core
@pytest.mark.parametrize("rank", range(N))
def test_a_signal_saves_the_step_and_ends(strategy, path, rank):
    expected = states(strategy, path, 3)
    program = Program(strategy, path, every=10)
    previous = signal.getsignal(signal.SIGTERM)
    with program.manager:
        program.train(2)
        if rank == RANK:
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            program.train(2)
        assert caught.value.code == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, previous)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    again = Program(strategy, path)
    assert again.manager.restore_or_initialize() == path
    assert again.state() == expected[3]


def test_wrong_uses_are_refused(strategy, path):
    checkpoint = Checkpoint()
    for options, message in [
        ({"every": 0}, "CheckpointManager: every is 0; it must be a number of steps"),
        ({"every": 0.5}, "CheckpointManager: every is 0.5; it must be a number of steps"),
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
