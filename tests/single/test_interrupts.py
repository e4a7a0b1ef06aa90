"""A signal's exception, such as Ctrl-C's, at each moment of a call that the program then repeats."""

import dis
import functools
import os
import re
import sys

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import Dataset

# Python loses an exception in a generator that it closes.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file"
)

# Python calls a signal's handler after an instruction of these.
CALLS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


@functools.cache
def names_of(code):
    return {one.offset: one.opname for one in dis.get_instructions(code)}


class Interrupt:
    """A block in which KeyboardInterrupt comes at the moment of this number, from 1 up.

    Attributes:
        has_come: whether the block had so many moments.
    """

    def __init__(self, moment):
        self._left = moment
        self._before = {}
        self.has_come = False

    def __enter__(self):
        self._trace = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it here
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self._trace)
        return kind is KeyboardInterrupt

    def _enter(self, frame, event, argument):
        if "/hpcstrat/" in frame.f_code.co_filename:
            frame.f_trace_opcodes = True
            return self._look
        return None

    def _look(self, frame, event, argument):
        if event == "opcode" and not self.has_come:
            before, now = self._before.get(frame, ""), names_of(frame.f_code)[frame.f_lasti]
            self._before[frame] = now
            # No signal comes after a call that has raised; an exception here would stay in `exc_info`.
            self._left -= before.startswith(CALLS) and now != "PUSH_EXC_INFO"
            if not self._left:
                self.has_come = True
                raise KeyboardInterrupt
        elif event == "return":
            self._before.pop(frame, None)
        return self._look


def at_each_moment(attempt, every=1):
    """Calls `attempt(interrupt)` with a block for each moment, or every so many of them."""
    for moment in range(1, 10_000, every):
        interrupt = Interrupt(moment)
        attempt(interrupt)
        assert sys.exc_info()[0] is None
        if not interrupt.has_come:
            if moment == 1:  # as that of 3.13 in some calls
                pytest.skip("this Python shows no instructions")
            return
    raise AssertionError("there is no end")


def numbers():
    return iter(range(8))


PIPELINES = {
    "range": lambda: Dataset.range(8).batch(2),
    "function": lambda: Dataset.range(8).map(lambda x: x).shuffle(3, seed=1).batch(2),
    "ahead": lambda: Dataset.range(8).map(lambda x: x, 2).batch(2).prefetch(2),
    "generated": lambda: Dataset.from_generator(numbers, np.int64).batch(2),
    "repeated": lambda: (
        Dataset.range(4).filter(lambda x: True).shuffle(4, seed=2).repeat(2).batch(2)
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("is_distributed", [False, True])
def test_no_element_is_lost(pipeline, is_distributed):
    def read(interrupt=None):
        dataset = PIPELINES[pipeline]()
        if is_distributed:
            dataset = hs.CentralStorageStrategy().experimental_distribute_dataset(dataset)
        found, iterator = [], iter(dataset)
        for at in range(4):
            if interrupt is not None and at == 2:
                with interrupt:
                    found.append(next(iterator).tolist())
            if len(found) == at:
                found.append(next(iterator).tolist())
        assert not [*iterator]
        return found, [batch.tolist() for batch in dataset]

    expected = read()

    def attempt(interrupt):
        assert read(interrupt) == expected

    at_each_moment(attempt)


@pytest.fixture
def saves(tmp_path, monkeypatch):
    """A variable, its checkpoint, and two paths."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    w = hs.Variable(np.zeros(1000))
    return w, hs.checkpoint.Checkpoint(w=w), tmp_path / "first", tmp_path / "second"


def test_a_save_is_whole_or_reported_and_the_next_one_waits_for_it(saves):
    w, checkpoint, first, second = saves

    def attempt(interrupt):
        first.unlink(missing_ok=True)
        w.assign(np.zeros(1000))
        with interrupt:
            checkpoint.save(first, blocking=False)
        w.assign(np.ones(1000))
        try:
            checkpoint.save(second, blocking=False)
        except OSError as error:
            assert re.search("of .*/first: it was interrupted .* nothing was saved", str(error))
            assert not first.exists()
            checkpoint.save(second, blocking=False)
        checkpoint.sync()
        if first.exists():
            checkpoint.restore(first)
            assert not w.numpy().any()
        checkpoint.restore(second)
        assert w.numpy().all()
        assert {path.name for path in first.parent.iterdir()} <= {"first", "second"}

    at_each_moment(attempt, every=3)


# ---- updates: no half of one is read

START = np.arange(100_000, dtype=np.float32)
STEP = np.ones_like(START)


class Model:
    def __init__(self):
        self.strategy = hs.CentralStorageStrategy()
        with self.strategy.scope():
            self.v = hs.Variable(START, name="v", aggregation="SUM")
            self.optimizer = hs.optimizers.SGD(1.0, momentum=0.5)
        self.apply(0 * STEP)
        self.checkpoint = hs.checkpoint.Checkpoint(v=self.v, optimizer=self.optimizer)

    def apply(self, gradient):
        self.strategy.run(lambda: self.optimizer.apply_gradients([(gradient, self.v)]))


def from_a_buffer(model):
    (buffer,) = model.optimizer.gradient_buffers([model.v])
    buffer[...] = STEP
    model.apply(buffer)


def rows(model):
    model.apply(hs.IndexedSlices(STEP[:10], np.arange(10), START.shape))


UPDATES = {  # a call, the values after it, the steps done then, and the distance of moments
    "apply_gradients": (lambda model: model.apply(STEP), START - 1, 2, 7),
    "from a buffer": (from_a_buffer, START - 1, 2, 7),
    "rows": (rows, START - (np.arange(len(START)) < 10), 2, 11),
    "assign": (lambda model: model.v.assign(-START), -START, 1, 3),
    "assign_add": (lambda model: model.v.assign_add(STEP), START + 1, 1, 3),
    "restore": (lambda model: model.checkpoint.restore("saved"), START - 2, 2, 17),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_is_whole_or_marked_interrupted(name, tmp_path, monkeypatch):
    call, after, steps, every = UPDATES[name]
    monkeypatch.chdir(tmp_path)
    saved, found = Model(), set()
    saved.apply(2 * STEP)
    saved.checkpoint.save("saved")

    def attempt(interrupt):
        model = Model()
        with interrupt:
            call(model)
        try:
            values, done = model.v.numpy(), model.optimizer.iterations
        except RuntimeError as error:
            assert "an exception interrupted" in str(error)
            for use in (
                lambda: model.v + 1,
                lambda: model.v[0],
                lambda: model.v.assign(START),
                lambda: model.apply(STEP),
                lambda: model.checkpoint.save("interrupted"),
            ):
                with pytest.raises(RuntimeError, match="an exception interrupted"):
                    use()
            found.add("interrupted")
            return
        is_done = done == steps and (values == after).all()
        assert is_done or (done == 1 and (values == START).all())
        found.add(is_done)

    at_each_moment(attempt, every)
    assert found == {"interrupted", False, True}
