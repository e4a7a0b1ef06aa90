"""Optimizers are dataclasses: their arguments, the checks of their fields, and what may change."""

import copy
import dataclasses
import inspect
import pickle
import re
from typing import Any

import numpy as np
import pytest
from adamax import Adamax

import hpcstrat as hs

OPTIONS = "weight_decay=None, clipnorm=None, clipvalue=None, global_clipnorm=None, name=None"
SIGNATURES = {
    "SGD": f"learning_rate=0.01, momentum=0.0, nesterov=False, *, {OPTIONS}",
    "Adam": f"learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-07, *, {OPTIONS}",
    "AdamW": "learning_rate=0.001, weight_decay=0.004, beta_1=0.9, beta_2=0.999, epsilon=1e-07, *, "
    + OPTIONS.partition(", ")[2],
    "Adagrad": f"learning_rate=0.001, initial_accumulator_value=0.1, epsilon=1e-07, *, {OPTIONS}",
    "RMSprop": "learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-07, centered=False, *, "
    + OPTIONS,
    "Lion": f"learning_rate=0.0001, beta_1=0.9, beta_2=0.99, *, {OPTIONS}",
    "Optimizer": f"learning_rate, *, {OPTIONS}",
}
"""Those of Keras."""


@pytest.mark.parametrize("kind", SIGNATURES)
def test_the_arguments(kind):
    parameters = inspect.signature(getattr(hs.optimizers, kind)).parameters.values()
    plain = [one.replace(annotation=one.empty) for one in parameters]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[kind]})"


def test_these_are_all():
    kinds = {name for name in dir(hs.optimizers) if name[0].isupper()}
    assert kinds == {*SIGNATURES}


NOT_NEGATIVE = (-1, np.inf, np.nan)
BELOW_1 = (-0.1, 1, np.nan)
OF_ALL = {
    "learning_rate": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    **dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), (0, -1, np.nan)),
}
WRONG: dict[str, dict[str, tuple[float, ...]]] = {
    "SGD": {"momentum": (-0.1, 2, np.nan)},
    "Adam": {"beta_1": BELOW_1, "beta_2": BELOW_1, "epsilon": NOT_NEGATIVE},
    "AdamW": {"beta_1": BELOW_1, "beta_2": BELOW_1, "epsilon": NOT_NEGATIVE},
    "Adagrad": {"initial_accumulator_value": NOT_NEGATIVE, "epsilon": NOT_NEGATIVE},
    "RMSprop": {"rho": (-0.1, 2), "momentum": (-0.1, 2), "epsilon": NOT_NEGATIVE},
    "Lion": {"beta_1": (-0.1, 0, 2), "beta_2": (-0.1, 2)},
}


@pytest.mark.parametrize(
    "kind, field", [(kind, field) for kind, own in WRONG.items() for field in (*OF_ALL, *own)]
)
def test_each_field_is_checked_when_it_is_set(kind, field):
    make: Any = getattr(hs.optimizers, kind)
    numbers = {**OF_ALL, **WRONG[kind]}[field]
    for value, error in [*[(one, ValueError) for one in numbers], ("0.5", TypeError)]:
        said = rf"^{kind}: {field} is {re.escape(repr(value))}; it must be "
        with pytest.raises(error, match=said):
            make(**{field: value})
        optimizer = make()
        before = repr(optimizer)
        with pytest.raises(error, match=said):
            setattr(optimizer, field, value)
        assert repr(optimizer) == before
    optimizer = make()
    setattr(optimizer, field, np.float32(0.5))
    assert getattr(optimizer, field) == 0.5


def test_what_is_no_field_at_all():
    make: Any = hs.optimizers.Adam
    with pytest.raises(TypeError, match="beta1"):
        make(beta1=0.5)
    with pytest.raises(TypeError, match="learning_rate is None"):
        make(None)
    with pytest.raises(TypeError, match="what learning_rate returns is '0.1'; it must be a number"):
        make(lambda: "0.1").variables  # noqa: B018
    with pytest.raises(AttributeError, match="momentm"):
        make().momentm  # noqa: B018


def test_clips_exclude_one_another():
    said = r"^SGD: clipnorm and clipvalue exclude each other"
    with pytest.raises(ValueError, match=said):
        hs.optimizers.SGD(clipnorm=1.0, clipvalue=1.0)
    optimizer = hs.optimizers.SGD(clipnorm=1.0)
    with pytest.raises(ValueError, match=said):
        optimizer.clipvalue = 1.0
    with pytest.raises(ValueError, match="^Adam: .*global_clipnorm.* exclude each other"):
        hs.optimizers.Adam(global_clipnorm=1.0, clipnorm=1.0)
    assert optimizer.clipvalue is None
    optimizer.clipnorm = None
    optimizer.clipvalue = 1.0


def used(name=None):
    optimizer, v = hs.optimizers.SGD(0.5, momentum=0.5, name=name), variable()
    optimizer.apply_gradients([(np.ones(2), v)], "a name")  # which changes nothing
    assert v.numpy().tolist() == [-0.5] * 2
    return optimizer, v


def variable():
    return hs.Variable(np.zeros(2), name="v")


def test_after_the_first_step_the_learning_rate_alone_may_change():
    optimizer, v = used()
    for field, value in dict(momentum=0.25, nesterov=True, weight_decay=0.1, name="x").items():
        with pytest.raises(AttributeError, match=rf"^SGD: {field} is .*cannot change"):
            setattr(optimizer, field, value)
    optimizer.mine = 3  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.learning_rate = 0.25
    optimizer.apply_gradients([(np.ones(2), v)])  # by 0.25 and half of the last
    assert v.numpy().tolist() == [-0.5 - 0.5] * 2
    assert repr(optimizer).startswith("SGD(learning_rate=0.25, momentum=0.5")


def test_before_the_first_step_all_may_change():
    optimizer, v = hs.optimizers.SGD(1.0), variable()
    optimizer.momentum, optimizer.learning_rate = 0.5, hs.Variable(0.5)
    for _ in range(2):
        optimizer.apply_gradients([(np.ones(2), v)])
    assert v.numpy().tolist() == [-0.5 - 0.75] * 2


def test_replace_makes_a_fresh_optimizer():
    optimizer, v = used(name="first")
    other = dataclasses.replace(optimizer, learning_rate=1.0)
    assert (other.iterations, other.name, other.momentum) == (0, "first", 0.5)
    assert len(other.variables) == 2
    other.apply_gradients([(np.ones(2), v)])
    assert v.numpy().tolist() == [-0.5 - 1.0] * 2  # without the first one's velocity
    assert (optimizer.iterations, optimizer.learning_rate) == (1, 0.5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(copied):
    optimizer, _ = used()
    with pytest.raises(TypeError, match=r"^SGD: .*dataclasses\.replace"):
        copied({"model": [optimizer]} if copied is not copy.copy else optimizer)


def test_optimizers_are_equal_to_themselves_alone():
    one, other = hs.optimizers.SGD(), hs.optimizers.SGD()
    assert one == one and one != other and len({one, other}) == 2


def test_an_optimizer_of_the_program():
    optimizer, v = Adamax(0.5, beta_1=0.5, epsilon=0.0, weight_decay=0.5), variable()
    v.assign([4.0, 8.0])
    optimizer.apply_gradients([(np.array([2.0, -4.0]), v)])
    # Three quarters by the decay; then 0.5 / 0.5 times m / u, which is 1 / 2 and -2 / 4.
    assert v.numpy().tolist() == [3.0 - 0.5, 6.0 + 0.5]
    names = ["iterations", "learning_rate", "m/v", "u/v"]
    assert [one.name for one in optimizer.variables] == [f"Adamax/{name}" for name in names]
    assert [one.numpy().tolist() for one in optimizer.variables[2:]] == [[1.0, -2.0], [2.0, 4.0]]


@pytest.mark.parametrize("make", [hs.optimizers.Adam, Adamax])
def test_an_optimizer_is_a_single_value_for_strategies_and_checkpoints(make, tmp_path, monkeypatch):
    """And not a structure of its fields, though a dataclass."""
    monkeypatch.chdir(tmp_path)
    strategy, ended = hs.MirroredStrategy(), []

    def update(step):
        optimizer.apply_gradients([(np.full(2, step - 2.5), v)])

    for begins in (True, False):
        with strategy.scope():
            v, optimizer = variable(), make(0.5, beta_1=0.5)
        assert strategy.run(lambda one: [one], args=(optimizer,))[0] is optimizer
        checkpoint = hs.checkpoint.Checkpoint(v=v, of=[optimizer])
        for step in range(4):
            if step == 2:
                checkpoint.save("saved") if begins else checkpoint.restore("saved")
            if begins or step >= 2:
                strategy.run(update, args=(step,))
        assert optimizer.iterations == 4
        ended.append(v.numpy().tolist())
    assert ended[0] == ended[1] != [0.0, 0.0]


def test_a_subclass_with_its_own_init():
    class Scaled(hs.optimizers.Optimizer):
        def __init__(self, rate, factor, **options):
            super().__init__(rate, **options)
            self.factor = factor

        @property
        def slots(self):
            return {"last": self.factor}

        def numbers(self, rate, step):
            return {"rate": rate * self.factor * step}

        @staticmethod
        def formula(value, gradient, last, *, rate):
            return value - rate * last * gradient, gradient

    optimizer, v = Scaled(0.5, factor=4.0, clipvalue=2.0), variable()
    for _ in range(2):
        optimizer.apply_gradients([(np.array([1.0, 3.0]), v)])
    assert v.numpy().tolist() == [-2 * 4 - 4 * 1, -2 * 4 * 2 - 4 * 2 * 2]


def test_numbers_are_the_rate_by_default():
    class Plain(hs.optimizers.Optimizer):
        slots = {}

        @staticmethod
        def formula(value, gradient, *, rate):
            return value - rate * gradient

    v = variable()
    Plain(lambda step: 0.5 + step).apply_gradients([(np.ones(2), v)])
    assert v.numpy().tolist() == [-0.5] * 2


def test_a_broken_subclass_says_what_is_wrong():
    class Broken(hs.optimizers.Optimizer):
        @property
        def slots(self):
            return {"m": self.initial}  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(AttributeError, match="^'Broken' object has no attribute 'initial'$"):
        Broken(0.1).slots  # noqa: B018
