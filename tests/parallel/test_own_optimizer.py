"""An optimizer written outside the package has what the package's optimizers have.

Its steps: test_acceptance.py.
"""

import copy
import os
from typing import Any

import numpy as np
import pytest
from adadelta import Adadelta
from lamb import LAMB
from mpi4py import MPI

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


def model(strategy):
    with strategy.scope():
        return hs.Variable(np.ones((4, 3))), Adadelta(0.5)


def train(strategy, w, optimizer, steps):
    for step in range(steps):
        strategy.run(
            lambda step=step: optimizer.apply_gradients(
                [(strategy.xp.full((4, 3), RANK + step + 1.0), w)]
            )
        )


def test_a_checkpoint_holds_its_slots(strategy, tmp_path):
    path = MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))
    w, optimizer = model(strategy)
    train(strategy, w, optimizer, 2)
    hs.checkpoint.Checkpoint(w=w, optimizer=optimizer).save(path)
    train(strategy, w, optimizer, 2)
    restored, other = model(strategy)
    hs.checkpoint.Checkpoint(w=restored, optimizer=other).restore(path)
    assert other.iterations == 2
    train(strategy, restored, other, 2)
    np.testing.assert_array_equal(restored.numpy(), w.numpy())


def test_a_copy_goes_on_with_slots_of_its_own(strategy):
    w, optimizer = model(strategy)
    train(strategy, w, optimizer, 2)
    copied, other = copy.deepcopy((w, optimizer))
    for pair in ((w, optimizer), (copied, other)):
        train(strategy, *pair, 2)
    np.testing.assert_array_equal(copied.numpy(), w.numpy())


def test_its_repr_and_its_name(strategy):
    optimizer = model(strategy)[1]
    assert repr(optimizer) == (
        "Adadelta(learning_rate=0.5, rho=0.95, epsilon=1e-06, global_clipnorm=None, iterations=0)"
    )
    assert optimizer.name == "Adadelta"


def test_its_attributes_are_those_of_its_init_and_its_class(strategy):
    class Own(hs.optimizers.Optimizer):
        in_class = 1.0

        def __init__(self, factor):
            self.early = factor
            super().__init__(0.5)
            self.set_factor(factor)

        def set_factor(self, factor):
            self.factor = factor

        @property
        def slots(self):
            return {}

        @staticmethod
        def formula(value, gradient, *, factor, in_class, early):
            return value - factor * in_class * early * gradient

    with strategy.scope():
        w, optimizer = hs.Variable(np.zeros(3)), Own(3.0)
    changed: Any = optimizer
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.ones(3), w)]))
    for one in (changed, copy.deepcopy(changed)):
        one.factor, one.early, one.in_class, one._own = 2.0, 0.5, 4.0, 1
        with pytest.raises(
            AttributeError, match=r"Own: facter is not an attribute; did you mean factor\?"
        ):
            one.facter = 7.0
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.ones(3), w)]))
    np.testing.assert_array_equal(w.numpy(), -N * (9.0 + 4.0))


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank's constants are the only ones
def test_constants_that_differ_are_named(strategy):
    w, optimizer = model(strategy)
    optimizer.rho = 0.5 if RANK else 0.25
    with pytest.raises(hs.ReplicaMismatchError, match=r"(?s)Adadelta\.apply_gradients.*rho=0\.5"):
        train(strategy, w, optimizer, 1)
    np.testing.assert_array_equal(w.numpy(), np.ones((4, 3)))


class Nameless(hs.optimizers.Optimizer):
    """A rule of its own that names no number."""

    @property
    def slots(self):
        return {}

    def update_rule(self, learning_rate, step):
        def apply(value, gradient, slots, scratch):
            np.multiply(gradient, learning_rate, out=scratch)
            scratch += gradient
            value -= scratch

        return hs.optimizers.UpdateRule(apply)


@pytest.mark.core
def test_learning_rates_are_compared_though_a_rule_does_not_name_them(strategy):
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), Nameless(0.5)
    for done in range(2):  # the first step, and one like the last
        train(strategy, w, optimizer, 1)
        expected = 1 - 1.5 * sum(range(1, N + 1)) * (1 + done)
        np.testing.assert_array_equal(w.numpy(), np.full((4, 3), expected))
        optimizer.learning_rate = 0.5 if RANK else 0.25
        if N > 1:
            said = r"(?s)Nameless\.apply_gradients.*learning_rate=0\.25"
            with pytest.raises(hs.ReplicaMismatchError, match=said):
                train(strategy, w, optimizer, 1)
        np.testing.assert_array_equal(w.numpy(), np.full((4, 3), expected))
        optimizer.learning_rate = 0.5


@pytest.mark.core
def test_rows_of_a_table(strategy):
    """A sparse step changes its rows as a dense step does, and no other row."""
    w, optimizer = model(strategy)
    table, other = model(strategy)
    xp = strategy.xp
    rows = hs.IndexedSlices(xp.full((2, 3), RANK + 1.0), xp.asarray([1, 3]), (4, 3))
    strategy.run(lambda: other.apply_gradients([(rows, table)]))
    train(strategy, w, optimizer, 1)
    np.testing.assert_array_equal(table.numpy()[[1, 3]], w.numpy()[[1, 3]])
    np.testing.assert_array_equal(table.numpy()[[0, 2]], np.ones((2, 3)))


SHAPES = [(4, 3), (), (700,), (2, 0), (33,)]
"""Variables of both dtypes, some of them smaller than what ranks share out, one without elements."""


NUMBERS = ("beta_1", "beta_2", "epsilon", "weight_decay")


def gradients(rank, step):
    """Multiples of 1/256, whose sums are exact: LAMB enlarges what is wrong where they cancel."""
    random = np.random.default_rng([rank, step])
    return [
        (random.integers(-999, 999, shape) / 256).astype("f8" if i % 2 else "f4")
        for i, shape in enumerate(SHAPES)
    ]


def test_norms_where_variables_are_on_the_host(place):
    """Replicas may still compute on GPUs. Complex numbers have no kernel."""
    strategy = place.make(hs.CentralStorageStrategy, "CPU:0")
    for dtype in (np.float32, np.complex64):
        check_steps(strategy, dtype)


def test_norms_of_complex_numbers(strategy):
    check_steps(strategy, np.complex128)


def check_steps(strategy, dtype):
    with strategy.scope():
        w, optimizer = hs.Variable(np.full((5, 3), 0.5, dtype)), LAMB(0.5)
    value, m, v = w.numpy(), np.zeros((5, 3), dtype), np.zeros((5, 3), dtype)
    for step in range(1, 3):
        everyones = [
            np.random.default_rng([rank, step]).random((5, 3)).astype(dtype) for rank in range(N)
        ]
        strategy.run(optimizer.apply_gradients, args=([(strategy.xp.asarray(everyones[RANK]), w)],))
        value, m, v = LAMB.formula(
            value,
            sum(everyones),
            m,
            v,
            learning_rate=0.5,
            step=step,
            **{name: getattr(optimizer, name) for name in NUMBERS},
        )
    np.testing.assert_allclose(w.numpy(), value, rtol=1e-4)


@pytest.mark.core
def test_norms_are_those_of_whole_variables(strategy, tmp_path):
    """Whatever parts of them the ranks update: against the formula on whole arrays, in float64."""
    path = MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "checkpoint"))

    def model():
        with strategy.scope():
            return [hs.Variable(np.full_like(one, 0.5)) for one in gradients(0, 0)], LAMB(0.5)

    variables, optimizer = model()
    expected = [[np.full(shape, 0.5), np.zeros(shape), np.zeros(shape)] for shape in SHAPES]
    numbers = {name: getattr(optimizer, name) for name in NUMBERS}
    for step in range(1, 5):
        given = [strategy.xp.asarray(one) for one in gradients(RANK, step)]
        strategy.run(optimizer.apply_gradients, args=(list(zip(given, variables, strict=True)),))
        totals = [
            sum(ranks) for ranks in zip(*[gradients(rank, step) for rank in range(N)], strict=True)
        ]
        for i, total in enumerate(totals):
            value, m, v = expected[i]
            with np.errstate(invalid="ignore"):  # the norms of empty arrays
                expected[i] = [
                    *LAMB.formula(value, total, m, v, learning_rate=0.5, step=step, **numbers)
                ]
        if step == 2:
            hs.checkpoint.Checkpoint(variables=variables, optimizer=optimizer).save(path)
            variables, optimizer = model()
            hs.checkpoint.Checkpoint(variables=variables, optimizer=optimizer).restore(path)
    for variable, (value, *_) in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-4, atol=1e-5)


def test_an_option_chooses_how_many_norms(strategy):
    class Chooses(hs.optimizers.Optimizer):
        both = False

        @property
        def slots(self):
            return {}

        @staticmethod
        def formula(value, gradient, *, both):
            length = np.linalg.norm(gradient) + (np.linalg.norm(value) if both else 0)
            return value - length * gradient

    with strategy.scope():
        w, optimizer = hs.Variable(np.array([3.0, 4.0])), Chooses(0.5)
    gradient, expected = strategy.xp.array([3.0, 4.0]), np.array([3.0, 4.0])
    for both in (False, True):
        optimizer.both = both
        strategy.run(optimizer.apply_gradients, args=([(gradient, w)],))
        total = N * np.array([3.0, 4.0])
        expected = expected - (np.linalg.norm(total) + both * np.linalg.norm(expected)) * total
    np.testing.assert_allclose(w.numpy(), expected)
    # In the cross-replica context: plain gradients, the same everywhere.
    optimizer.apply_gradients([(gradient, w)])
    expected = expected - (5 + np.linalg.norm(expected)) * np.array([3.0, 4.0])
    np.testing.assert_allclose(w.numpy(), expected)


def test_a_norm_takes_no_rows(strategy):
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), LAMB(0.5)
    slices = hs.IndexedSlices(strategy.xp.ones((1, 3)), strategy.xp.array([2]))
    with pytest.raises(
        ValueError, match=r"LAMB\.apply_gradients: the update takes norms of whole variables"
    ):
        strategy.run(lambda: optimizer.apply_gradients([(slices, w)]))
    assert optimizer.iterations == 0 and (w.numpy() == 1).all()
