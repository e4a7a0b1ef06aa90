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
from hpcstrat.checkpoint import Checkpoint

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
    assert {name for name in dir(hs.optimizers) if name[0].isupper()} == {*SIGNATURES}


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


@pytest.mark.parametrize("kind", WRONG)
def test_each_field_is_checked_when_it_is_set(kind):
    make: Any = getattr(hs.optimizers, kind)
    for field, numbers in {**OF_ALL, **WRONG[kind]}.items():
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
    optimizer.clipnorm, optimizer.clipvalue = None, 1.0  # before the first step all may change


def used(name=None):
    optimizer, v = hs.optimizers.SGD(0.5, momentum=0.5, name=name), variable()
    optimizer.apply_gradients([(np.ones(2), v)], "a name")  # which changes nothing
    assert v.numpy().tolist() == [-0.5] * 2
    return optimizer, v


def variable():
    return hs.Variable(np.zeros(2), name="v")


@pytest.mark.parametrize("where", ["stepped", "restored"])
def test_after_the_first_step_the_learning_rate_alone_may_change(where, tmp_path):
    optimizer, v = used()
    if where == "restored":
        Checkpoint(v=v, optimizer=optimizer).save(tmp_path / "file")
        v, optimizer = variable(), hs.optimizers.SGD(0.5, momentum=0.5)
        Checkpoint(v=v, optimizer=optimizer).restore(tmp_path / "file")
    before = repr(optimizer)
    for field, value in dict(momentum=0.25, nesterov=True, weight_decay=0.1, name="x").items():
        with pytest.raises(
            AttributeError, match=rf"^SGD: {field} is .*cannot change.* pass {field}=.* to a new"
        ):
            setattr(optimizer, field, value)
    assert repr(optimizer) == before
    optimizer.mine = 3  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.learning_rate = 0.25
    optimizer.apply_gradients([(np.ones(2), v)])  # by 0.25 and half of the last
    assert v.numpy().tolist() == [-0.5 - 0.5] * 2
    assert repr(optimizer) == "SGD(learning_rate=0.25, momentum=0.5, nesterov=False, iterations=2)"


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


@pytest.mark.parametrize("make", [hs.optimizers.Adam, Adamax])
def test_an_optimizer_is_a_single_value_for_strategies_and_checkpoints(make, tmp_path):
    """And not a structure of its fields, though a dataclass."""
    v, optimizer = variable(), make(0.5, beta_1=0.5)
    assert hs.MirroredStrategy().run(lambda one: [one], args=(optimizer,))[0] is optimizer
    checkpoint = Checkpoint(v=v, of=[optimizer])
    checkpoint.save(tmp_path / "file")
    optimizer.apply_gradients([(np.ones(2), v)])
    checkpoint.restore(tmp_path / "file")
    assert optimizer.iterations == 0


class Plain(hs.optimizers.Optimizer):
    """Its numbers are the rate alone, as by default."""

    slots = {}

    @staticmethod
    def formula(value, gradient, *, rate):
        return value - rate * gradient


RATES = {
    "a function": lambda: 0.5,
    "a parameter with a default": lambda factor=0.5: factor,
    "any parameters": lambda *rest, **more: 0.5,
    "the step": lambda step: 0.5 + step,
    "a schedule": hs.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9),
    "a variable": hs.Variable(0.5),
}


@pytest.mark.parametrize(
    "gradient", [np.ones(2), hs.IndexedSlices(np.ones(2), np.arange(2))], ids=["dense", "sparse"]
)
@pytest.mark.parametrize("make", [Plain, hs.optimizers.SGD])
def test_only_a_parameter_without_a_default_is_the_step(make, gradient):
    for name, rate in RATES.items():
        optimizer, v = make(rate), variable()
        optimizer.apply_gradients([(gradient, v)])
        assert v.numpy().tolist() == [-0.5] * 2, name


def test_slices_of_a_scalar_are_refused():
    v, optimizer = hs.Variable(1.0), hs.optimizers.SGD(1.0)
    with pytest.raises(ValueError, match=r"SGD\.apply_gradients: .* the variable is a scalar"):
        optimizer.apply_gradients([(hs.IndexedSlices(np.ones(1), np.array([0])), v)])
    assert v.numpy() == 1 and optimizer.iterations == 0


def test_the_repr_has_the_arguments_and_the_steps_done():
    optimizer = Adamax(0.5)
    assert repr(optimizer) == (
        "Adamax(learning_rate=0.5, beta_1=0.9, beta_2=0.999, epsilon=1e-07, iterations=0)"
    )
    assert optimizer.name == "Adamax"
    schedule = hs.optimizers.schedules.CosineDecay(0.1, 10)
    assert repr(hs.optimizers.AdamW(schedule)).startswith(f"AdamW(learning_rate={schedule!r}, ")
