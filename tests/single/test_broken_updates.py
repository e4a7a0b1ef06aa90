"""An exception at any moment of an update, as from a signal handler: no half update is read."""

import sys

import numpy as np
import pytest

import hpcstrat as hs

START = np.arange(100_000, dtype=np.float32)
STEP = np.ones_like(START)


class Stop(BaseException):
    pass


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


def rows(model):
    model.apply(hs.IndexedSlices(STEP[:10], np.arange(10), START.shape))


def restore(model):
    model.checkpoint.restore("saved")


CALLS = {
    "apply_gradients": (lambda model: model.apply(STEP), START - 1, 2),
    "rows": (rows, START - (np.arange(len(START)) < 10), 2),
    "assign": (lambda model: model.v.assign(-START), -START, 1),
    "assign_add": (lambda model: model.v.assign_add(STEP), START + 1, 1),
    "restore": (restore, START - 2, 2),
}


def interrupted(moment, call):
    """Whether `call` was still running at its `moment`-th event, where `Stop` is raised.

    If the garbage collector happens to run a finalizer there, it swallows the exception.
    """
    left = moment

    def look(frame, event, argument):
        nonlocal left
        # Python checks for signals when a function starts and after a call.
        left -= event != "c_call"
        if left == 0:
            raise Stop

    try:
        sys.setprofile(look)
        call()
    except Stop:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


# From what an exception stops midway.
midway = pytest.mark.filterwarnings("ignore:Exception ignored", "ignore:unclosed file")


@midway
@pytest.mark.parametrize(("name", "stride"), [("assign", 9), ("apply_gradients", 3)])
def test_an_update_is_whole_or_marked_interrupted(name, stride, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(name, stride)


@midway
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_an_update_is_whole_or_marked_interrupted_at_every_moment(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(name, stride=1)


def check(name, stride):
    """Interrupts a call at its first moment, and so many further ones on each time."""
    call, after, steps = CALLS[name]
    model = Model()
    model.apply(2 * STEP)
    model.checkpoint.save("saved")
    found, outcome, moment, is_interrupted = set(), "", 1, True
    while is_interrupted:
        outcome, is_interrupted = outcome_of(moment, Model(), call, after, steps)
        found.add(outcome)
        moment += stride
    assert outcome == "after" and found == {"interrupted", "before", "after"}


def outcome_of(moment, model, call, after, steps):
    """What an interruption at this moment leaves, and whether there was one."""
    is_interrupted = interrupted(moment, lambda: call(model))
    try:
        values, done = model.v.numpy(), model.optimizer.iterations
    except RuntimeError as error:
        assert "an exception interrupted" in str(error)
        reads = (
            model.v.value,
            lambda: model.v + 1,
            lambda: model.v[0],
            lambda: model.v.assign(START),
        )
        for use in (
            *reads,
            lambda: model.apply(STEP),
            lambda: model.checkpoint.save("interrupted"),
        ):
            with pytest.raises(RuntimeError, match="an exception interrupted"):
                use()
        return "interrupted", is_interrupted
    if (values == START).all() and done == 1:
        return "before", is_interrupted
    assert (values == after).all() and done == steps
    return "after", is_interrupted
