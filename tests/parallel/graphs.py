"""What the tests of hs.function share: a network, its batches, and the graphs of a function."""

import functools
import gc
import warnings
from typing import Any

import numpy as np
import pytest
from adamax import Adamax
from internals import function, nests, select
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
SHAPES = [(6, 5), (5,), (5, 3), (3,)]
CALLS = 7
MARKS = [
    pytest.mark.parametrize("place", [pytest.param("GPU", marks=pytest.mark.gpu)], indirect=True),
    pytest.mark.usefixtures("no_foreign_module"),
]


def batches(strategy, sizes=(4,) * CALLS):
    """Batches of these sizes per replica, or per replica and call."""
    xp, rng = strategy.xp, np.random.default_rng(RANK)
    found = []
    for size in sizes:
        x, y = (rng.random((size, columns), np.float32) for columns in (6, 3))
        pair = xp.asarray(x), xp.asarray(y)
        found.append(
            strategy.experimental_distribute_values_from_function(lambda _, pair=pair: pair)
        )
    return found


class Model:
    """A network with its optimizer and its step."""

    def __init__(self, strategy, optimizer):
        rng = np.random.default_rng(0)
        self.strategy, self.xp = strategy, strategy.xp
        with strategy.scope():
            self.weights = [hs.Variable(rng.normal(0, 0.3, s).astype(np.float32)) for s in SHAPES]
            self.optimizer = optimizer()
            self.mean = hs.metrics.Mean()
        self.kept: list[Any] = []
        self.last: Any = None

    def step(self, batch):
        x, y = batch
        a, b, c, d = self.weights
        hidden = self.xp.maximum(x @ a + b, 0)
        error = (self.xp.dot(hidden, c) + d - y) / (4 * N)
        back = (error @ c.value().T) * (hidden > 0)
        gradients = [x.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        loss = (error * error).sum()
        self.mean.update_state(loss)
        return loss

    def state(self):
        return [
            *[v.numpy() for v in self.weights],
            *[v.numpy() for v in self.optimizer.variables],
            self.mean.result(),
            self.optimizer.iterations,
        ]


class Momentum(hs.optimizers.Optimizer):
    """A number and an option that may change between steps."""

    momentum, is_signed = 0.9, False
    slots = {"velocity": 0.0}

    def numbers(self, rate, step):
        return {"rate": rate, "momentum": self.momentum, "is_signed": self.is_signed}

    @staticmethod
    def formula(value, gradient, velocity, *, rate, momentum, is_signed):
        velocity = momentum * velocity - rate * (np.sign(gradient) if is_signed else gradient)
        return value + velocity, velocity


OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.5),
    "momentum": lambda: hs.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "Adam": lambda: hs.optimizers.Adam(0.01),
    "schedule": lambda: hs.optimizers.SGD(hs.optimizers.schedules.CosineDecay(0.5, 5)),
    "global_clipnorm": lambda: hs.optimizers.Adam(0.01, global_clipnorm=0.05),
    "clipnorm": lambda: hs.optimizers.SGD(lambda step: 1 / (1 + step), clipnorm=0.01),
    "own": lambda: Adamax(0.01),
    "decay": lambda: hs.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.01),
}


def own(value):
    return hs.asnumpy(select(value))


def captured(step):
    """The number of graphs of a function, for strategies that are open."""
    kinds = [one for of in getattr(step, function.STEPS)._kinds.values() for one in of.values()]
    return sum(kind.graph is not None and kind.graph.raw is not None for kind in kinds)


def poison(strategy):
    """Drops what is unreachable, and returns arrays of nan in the place of it."""
    gc.collect()

    def fill():
        return [strategy.xp.full(size, np.nan) for size in (1, 10, 1000, 5000) for _ in range(8)]

    return fill(), strategy.run(fill)


def check_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def check_same(trained, graphs=1):
    """Compares the values that `trained(decorate)` returns, with its function, to the bit."""
    eager, _ = trained(lambda fn: fn)
    other, step = trained(hs.function)
    check_equal(eager, other)
    assert captured(step) == graphs
    return other


def compare(strategy, optimizer, graphs=1, step=Model.step, given=batches, between=None):
    """Compares the results of all calls of `step(model, batch)`, and the state after them."""

    def trained(decorate):
        model, results = Model(strategy, optimizer), []
        decorated = decorate(functools.partial(step, model))
        for i, batch in enumerate(given(strategy)):
            if between is not None:
                between(i, model)
            results += nests.flatten(strategy.run(decorated, args=(batch,)))[0]
        return [*map(own, results), *model.state()], decorated

    return check_same(trained, graphs)


def warned(call):
    """The texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]
