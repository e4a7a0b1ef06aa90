"""What ranks disagree on in an update, and what fails in one, is an error on all of them."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.optimizers import SGD, Adagrad, Optimizer

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
several = pytest.mark.mpi(min_size=2)  # one rank cannot differ from another


@pytest.fixture(scope="module")
def strategy(place):
    with place.make(hs.MirroredStrategy) as made:
        yield made


def dense(xp):
    return xp.full((4, 3), RANK + 1.0)


def sparse(xp):
    """The same for all rows; one of them comes in two parts."""
    values = xp.full((5, 3), RANK + 1.0)
    values[3:] /= 2
    return hs.IndexedSlices(values, xp.asarray([2, 1, 0, 3, 3]), (4, 3))


both_kinds = pytest.mark.parametrize("gradient", [dense, sparse])


def update(strategy, w, optimizer, gradient):
    strategy.run(lambda: optimizer.apply_gradients([(gradient(strategy.xp), w)]))


def check_value(strategy, w, value):
    """That `w` has it everywhere; and that the next call, of another optimizer, works."""
    assert (w.numpy() == value).all()
    update(strategy, w, SGD(0.5), dense)
    assert (w.numpy() == value - 0.25 * N * (N + 1)).all()


class Own(Optimizer):
    """Its number and two options are arguments."""

    slots = {}

    def __init__(self, factor=1.0, is_signed=False, bound=None):
        super().__init__(0.5)
        self.given = {"factor": factor, "is_signed": is_signed, "bound": bound}

    def numbers(self, rate, step):
        return self.given

    @staticmethod
    def formula(value, gradient, *, factor, is_signed, bound):
        return value - factor * gradient


def pair(other):
    """An optimizer of one option on one rank, and of another one elsewhere."""
    return lambda: SGD(0.5, **{other if RANK else "clipnorm": 0.25})  # pyright: ignore[reportArgumentType]


DIFFERENT: dict[str, tuple[Any, str]] = {
    "learning_rate": (lambda: SGD(0.25 + 0.25 * RANK), "learning_rate=0.25"),
    "momentum": (lambda: SGD(0.5, 0.25 if RANK else 0.5), "momentum="),
    "nesterov": (lambda: SGD(0.5, 0.5, nesterov=RANK > 0), "nesterov="),
    "weight_decay": (lambda: SGD(0.5, weight_decay=0.25 + RANK), "weight_decay="),
    "clipnorm": (lambda: SGD(0.5, clipnorm=0.25 + RANK), "clipnorm="),
    "clipvalue": (lambda: SGD(0.5, clipvalue=0.25 + RANK), "clipvalue="),
    "global_clipnorm": (lambda: SGD(0.5, global_clipnorm=0.25 + RANK), "global_clipnorm="),
    "global_clipnorm of one rank": (
        lambda: SGD(0.5, global_clipnorm=None if RANK else 0.25),
        "global_clipnorm=0.25",
    ),
    "clipnorm and global_clipnorm": (pair("global_clipnorm"), r"clipnorm=0\.25.*global_clip"),
    "clipnorm and weight_decay": (pair("weight_decay"), r"clipnorm=0\.25.*weight_decay=0"),
    "the start of a slot": (
        lambda: Adagrad(0.5, initial_accumulator_value=0.5 + RANK),
        "initial value=1.5",
    ),
    "a number": (lambda: Own(2.0 + RANK), "factor="),
    "an option": (lambda: Own(is_signed=RANK > 0), "is_signed="),
    "a number or none": (lambda: Own(bound=RANK or None), "bound="),
}


@several
@both_kinds
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_is_named(strategy, case, gradient):
    make, said = DIFFERENT[case]
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), make()
    call = rf"{type(optimizer).__name__}(\.apply_gradients|: accumulator of)"
    for _ in range(2):
        with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s){call}.*{said}"):
            update(strategy, w, optimizer, gradient)
    assert optimizer.iterations == 0
    check_value(strategy, w, 1)


@several
def test_learning_rates_are_compared_though_no_number_depends_on_them(strategy):
    """In the first step, and in one like the last."""
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), Own(1.5)
    for done in range(2):
        optimizer.learning_rate = 0.5 if RANK else 0.25
        said = r"(?s)Own\.apply_gradients.*learning_rate=0\.25"
        with pytest.raises(hs.ReplicaMismatchError, match=said):
            update(strategy, w, optimizer, dense)
        optimizer.learning_rate = 0.5
        update(strategy, w, optimizer, dense)
        assert (w.numpy() == 1 - 0.75 * N * (N + 1) * (1 + done)).all()


@several
def test_variables_on_one_rank_only_are_a_mismatch(strategy):
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), SGD(0.5)
    with pytest.raises(hs.ReplicaMismatchError, match=r"SGD\.apply_gradients\(no variable\)"):
        strategy.run(lambda: optimizer.apply_gradients([] if RANK else [(dense(strategy.xp), w)]))
    check_value(strategy, w, 1)


@several  # one process is all of them
def test_variables_of_no_scope_are_named_as_such(strategy):
    v = hs.Variable(np.ones(2), name="w")
    said = r"SGD.apply_gradients to 'w': .* made outside .* `with strategy.scope\(\):`"
    with pytest.raises(RuntimeError, match=said):
        strategy.run(lambda: SGD(0.5).apply_gradients([(np.ones(2), v)]))


# ---- what is wrong in an optimizer of one's own, on the last rank


def right(value, gradient, m, *, rate):
    return value - rate * gradient, m


def raising(value, gradient, m, *, rate):
    raise ZeroDivisionError("division by zero")


def numbers(rate):
    return {"rate": rate}


WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "numbers raise": (lambda rate: rate / 0, right, ZeroDivisionError, "division by zero"),
    "no number": (lambda rate: {"rate": "fast"}, right, TypeError, r"Own\.numbers.*'fast'"),
    "another name": (lambda rate: {"pace": rate}, right, TypeError, "pace"),
    "a formula raises": (numbers, raising, ZeroDivisionError, "division by zero"),
    "too few values": (
        numbers,
        lambda value, gradient, m, *, rate: value,
        TypeError,
        r"Own\.formula",
    ),
    "no formula": (
        numbers,
        lambda value, gradient, m, *, rate: (value - rate * np.exp(gradient), m),
        TypeError,
        r"test_optimizers_refused\.py:\d+",
    ),
}


@both_kinds
@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_on_one_rank_fails_on_all(strategy, case, gradient):
    """Numbers in the second step; a formula in the first."""
    wrong, wrong_formula, error, message = WRONG[case]
    steps = int(wrong is not numbers)

    class Own(Optimizer):
        slots = {"m": 0.0}
        formula = staticmethod(wrong_formula if RANK == N - 1 else right)

        def numbers(self, rate, step):
            return wrong(rate) if RANK == N - 1 and step == 2 else {"rate": rate}

    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), Own(0.5)
    for _ in range(steps):
        update(strategy, w, optimizer, gradient)
    for _ in range(2):
        with pytest.raises((error, RuntimeError), match=message):
            update(strategy, w, optimizer, gradient)
    assert optimizer.iterations == steps
    check_value(strategy, w, 1 - 0.25 * N * (N + 1) * steps)
