"""An optimizer written outside the package has what the package's optimizers have.

Its steps: test_acceptance.py.
"""

from typing import Any

import numpy as np
import pytest
from adamax import Adamax
from internals import select
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
several = pytest.mark.mpi(min_size=2)  # one rank cannot differ from another


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def model(strategy, make: Any = Adamax):
    with strategy.scope():
        return hs.Variable(np.ones((4, 3)), name="w"), make(0.5)


def dense(xp, step):
    return xp.full((4, 3), RANK + step + 1.0)


def sparse(xp, step):
    return hs.IndexedSlices(xp.full((2, 3), RANK + step + 1.0), xp.asarray([1, 3]), (4, 3))


both_kinds = pytest.mark.parametrize("gradient", [dense, sparse])


def train(strategy, w, optimizer, steps, gradient=dense):
    for step in range(steps):
        pairs = [(gradient(strategy.xp, step), w)]
        strategy.run(optimizer.apply_gradients, args=(pairs,))


def check_nothing_changed(strategy, w, optimizer):
    """And the next call of another optimizer works."""
    assert (w.numpy() == 1).all() and optimizer.iterations == 0
    train(strategy, w, hs.optimizers.SGD(0.5), 1)
    assert (w.numpy() == 1 - 0.25 * N * (N + 1)).all()


@pytest.mark.core
def test_a_checkpoint_holds_its_slots(strategy, mpi_tmp_path):
    w, optimizer = model(strategy)
    train(strategy, w, optimizer, 2)
    Checkpoint(w=w, optimizer=optimizer).save(mpi_tmp_path / "file")
    train(strategy, w, optimizer, 2)
    restored, other = model(strategy)
    Checkpoint(w=restored, optimizer=other).restore(mpi_tmp_path / "file")
    assert other.iterations == 2
    train(strategy, restored, other, 2)
    np.testing.assert_array_equal(restored.numpy(), w.numpy())


@pytest.mark.parametrize("make", [Adamax, hs.optimizers.Adam])
def test_it_is_one_object(strategy, make):
    """Though its class is a dataclass, whose members `run` passes one by one."""
    with strategy.scope():
        optimizer = make(0.5)
    found = strategy.run(lambda pair: {"of the replica": pair[0]}, args=((optimizer, 1),))
    assert select(found)["of the replica"] is optimizer


def test_its_repr_and_its_name():
    optimizer = Adamax(0.5)
    assert repr(optimizer) == (
        "Adamax(learning_rate=0.5, beta_1=0.9, beta_2=0.999, epsilon=1e-07, iterations=0)"
    )
    assert optimizer.name == "Adamax"


@pytest.mark.core
def test_rows_of_a_table(strategy):
    """A sparse step changes its rows as a dense step does, and no other row."""
    w, optimizer = model(strategy)
    table, other = model(strategy)
    train(strategy, w, optimizer, 1)
    train(strategy, table, other, 1, sparse)
    np.testing.assert_array_equal(table.numpy()[[1, 3]], w.numpy()[[1, 3]])
    np.testing.assert_array_equal(table.numpy()[[0, 2]], np.ones((2, 3)))


class Plain(hs.optimizers.Optimizer):
    """Not a dataclass: it has its own `__init__`, attributes of its own, and two options."""

    in_class = 1.0

    def __init__(self, learning_rate, factor=3.0, is_signed=False):
        self.early = factor
        super().__init__(learning_rate)
        self.factor = factor
        self.is_signed, self.bound = is_signed, None

    @property
    def slots(self):
        return {"steps": 1.0}

    def numbers(self, rate, step):
        return {
            "rate": rate * self.factor * self.early * self.in_class,
            "step": step,
            "is_signed": self.is_signed,
            "bound": self.bound,
        }

    @staticmethod
    def formula(value, gradient, steps, *, rate, step, is_signed, bound):
        if is_signed:
            gradient = np.sign(gradient)
        if bound is not None:
            gradient = np.minimum(gradient, bound)
        return value - rate * gradient, steps + step


def test_attributes_and_options_of_its_own(strategy):
    """They may change between steps; a `bool` or `None` chooses another formula."""
    w, optimizer = model(strategy, Plain)
    total, value, steps = sum(range(1, N + 1)), 1.0, 1
    changes = [
        {},
        {"factor": 2.0, "in_class": 4.0},
        {"is_signed": True},
        {"bound": 0.5},
        {"bound": 0.25},
    ]
    for step, change in enumerate(changes, 1):
        for name, new in change.items():
            setattr(optimizer, name, new)
        train(strategy, w, optimizer, 1)
        gradient = min(1 if optimizer.is_signed else total, optimizer.bound or total)
        value -= 0.5 * optimizer.factor * 3 * optimizer.in_class * gradient
        steps += step
    assert (w.numpy() == value).all()
    assert (optimizer.variables[-1].numpy() == steps).all()


@pytest.mark.core
@several
@both_kinds
@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("factor", 2.0 + RANK, "rate="),
        ("is_signed", RANK > 0, "is_signed="),
        ("bound", RANK or None, "bound="),
    ],
    ids=["a number", "an option", "a number or none"],
)
def test_numbers_that_differ_are_named(strategy, name, value, said, gradient):
    w, optimizer = model(strategy, Plain)
    setattr(optimizer, name, value)
    with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s)Plain\.apply_gradients.*{said}"):
        train(strategy, w, optimizer, 1, gradient)
    check_nothing_changed(strategy, w, optimizer)


class Nameless(hs.optimizers.Optimizer):
    """No number of its formula depends on the learning rate."""

    slots = {}

    def numbers(self, rate, step):
        return {}

    @staticmethod
    def formula(value, gradient):
        return value - 1.5 * gradient


@pytest.mark.core
def test_learning_rates_are_compared_though_no_number_depends_on_them(strategy):
    w, optimizer = model(strategy, Nameless)
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


def right(value, gradient, m, *, rate):
    return value - rate * gradient, m


def raising(value, gradient, m, *, rate):
    raise ZeroDivisionError("division by zero")


on_ranks = pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])

NUMBERS = {
    "it raises": (lambda rate: {"rate": rate / 0}, ZeroDivisionError, "division by zero"),
    "no number": (lambda rate: {"rate": "fast"}, TypeError, r"Own\.numbers.*'fast'"),
    "another name": (lambda rate: {"pace": rate}, TypeError, "pace"),
}


@pytest.mark.core
@on_ranks
@both_kinds
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_are_wrong_fail_on_all_ranks(strategy, case, everywhere, gradient):
    wrong, error, message = NUMBERS[case]
    is_wrong = everywhere or RANK == N - 1

    class Own(hs.optimizers.Optimizer):
        slots = {"m": 0.0}
        formula = staticmethod(right)

        def numbers(self, rate, step):
            return wrong(rate) if is_wrong and step == 2 else {"rate": rate}

    w, optimizer = model(strategy, Own)
    train(strategy, w, optimizer, 1, gradient)
    before = w.numpy()
    with pytest.raises((error, RuntimeError), match=message):
        train(strategy, w, optimizer, 1, gradient)
    assert np.array_equal(w.numpy(), before) and optimizer.iterations == 1
    train(strategy, w, hs.optimizers.SGD(0.5), 1)  # the next call works
    np.testing.assert_array_equal(w.numpy(), before - 0.25 * N * (N + 1))


FORMULAS = {
    "it raises": (raising, ZeroDivisionError, "division by zero"),
    "too few values": (lambda value, gradient, m, *, rate: value, TypeError, r"Own\.formula"),
    "no formula": (
        lambda value, gradient, m, *, rate: (value - rate * np.exp(gradient), m),
        TypeError,
        r"test_own_optimizer\.py:\d+",
    ),
}


@pytest.mark.core
@on_ranks
@both_kinds
@pytest.mark.parametrize("case", FORMULAS)
def test_a_formula_that_is_wrong_fails_on_all_ranks(strategy, case, everywhere, gradient):
    wrong, error, message = FORMULAS[case]
    is_wrong = everywhere or RANK == N - 1

    class Own(hs.optimizers.Optimizer):
        slots = {"m": 0.0}
        formula = staticmethod(wrong if is_wrong else right)

    w, optimizer = model(strategy, Own)
    for _ in range(2):
        with pytest.raises((error, RuntimeError), match=message):
            train(strategy, w, optimizer, 1, gradient)
    check_nothing_changed(strategy, w, optimizer)
