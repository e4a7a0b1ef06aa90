"""A signal's exception, such as Ctrl-C's, at each moment of a call that the program then repeats."""

import dis
import functools
import os
import re
import sys
import threading

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import Dataset

# Python loses an exception in a generator that it closes.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

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


def test_the_end_of_an_iteration_stays_one():
    def attempt(interrupt):
        iterator = iter(PIPELINES["function"]())
        assert len([*iterator]) == 4
        with interrupt:
            next(iterator, None)
        assert next(iterator, None) is None

    at_each_moment(attempt)


def test_an_update_by_buffers_is_whole_or_its_variables_are_gone():
    strategy = hs.CentralStorageStrategy()

    def attempt(interrupt):
        with strategy.scope():
            variables = [hs.Variable(np.zeros(3)), hs.Variable(np.zeros(2))]
            optimizer = hs.optimizers.SGD(1.0)
        buffers = optimizer.gradient_buffers(variables)

        def step():
            for buffer in buffers:
                buffer[...] = -1.0
            optimizer.apply_gradients(zip(buffers, variables, strict=True))

        def steps_done():
            (value,) = {*np.concatenate([v.numpy() for v in variables])}
            return value

        with interrupt:
            strategy.run(step)
        try:
            done = steps_done()
        except RuntimeError as error:
            assert "an exception interrupted SGD.apply_gradients" in str(error)
            return
        assert done in (0, 1)
        strategy.run(step)
        assert steps_done() == done + 1

    at_each_moment(attempt, every=3)


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


def test_a_save_waits_for_one_that_was_interrupted_in_its_start(saves, monkeypatch):
    w, checkpoint, first, second = saves
    start, may_write = threading.Thread.start, threading.Event()

    def start_and_raise(thread):
        start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        raise KeyboardInterrupt

    def write_late(*arguments, pwrite=os.pwrite):
        may_write.wait(30)
        return pwrite(*arguments)

    monkeypatch.setattr("os.pwrite", write_late)
    monkeypatch.setattr(threading.Thread, "start", start_and_raise)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(first, blocking=False)
    threading.Timer(0.2, may_write.set).start()
    w.assign(np.ones(1000))
    checkpoint.save(second, blocking=False)
    assert first.exists()
    checkpoint.restore(first)
    assert not w.numpy().any()
