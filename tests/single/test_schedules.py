"""The values are those of TensorFlow's formulas, written out."""

import math
import re

import numpy as np
import pytest
from internals import nests

import hpcstrat as hs
from hpcstrat.optimizers import schedules

STEPS = range(0, 25)


def close(schedule, expected):
    for step in STEPS:
        assert schedule(step) == pytest.approx(expected(step), rel=1e-12), step


DECAYS = {
    "ExponentialDecay": lambda steps: schedules.ExponentialDecay(0.1, steps, 0.9),
    "InverseTimeDecay": lambda steps: schedules.InverseTimeDecay(0.1, steps, 0.9),
    "PolynomialDecay": lambda steps: schedules.PolynomialDecay(0.1, steps),
    "CosineDecay": lambda steps: schedules.CosineDecay(0.1, steps),
    "CosineDecayRestarts": lambda steps: schedules.CosineDecayRestarts(0.1, steps),
}


@pytest.mark.parametrize("steps", [0, -1])
@pytest.mark.parametrize("decay", DECAYS)
def test_decay_steps_must_be_positive(decay, steps):
    with pytest.raises(
        ValueError, match=rf"^{decay}: \w*decay_steps is {steps}; it must be a positive"
    ):
        DECAYS[decay](steps)


def test_exponential_decay():
    close(schedules.ExponentialDecay(0.1, 10, 0.5), lambda step: 0.1 * 0.5 ** (step / 10))
    close(
        schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True),
        lambda step: 0.1 * 0.5 ** (step // 10),
    )


def test_piecewise_constant_decay():
    """TensorFlow's example: 1.0 for the first 100001 steps, 0.5 for the next 10000, then 0.1."""
    schedule = schedules.PiecewiseConstantDecay([100000, 110000], [1.0, 0.5, 0.1])
    found = [schedule(step) for step in (0, 100000, 100001, 110000, 110001, 10**6)]
    assert found == [1.0, 1.0, 0.5, 0.5, 0.1, 0.1]


def test_polynomial_decay():
    close(
        schedules.PolynomialDecay(0.1, 10, 0.01, power=0.5),
        lambda step: (0.1 - 0.01) * (1 - min(step, 10) / 10) ** 0.5 + 0.01,
    )
    assert schedules.PolynomialDecay(0.1, 10)(99) == pytest.approx(0.0001)

    def cycling(step):
        last = 10 * max(1, math.ceil(step / 10))
        return (0.1 - 0.01) * (1 - step / last) + 0.01

    close(schedules.PolynomialDecay(0.1, 10, 0.01, cycle=True), cycling)


def test_inverse_time_decay():
    close(schedules.InverseTimeDecay(0.1, 10, 0.5), lambda step: 0.1 / (1 + 0.5 * step / 10))
    close(
        schedules.InverseTimeDecay(0.1, 10, 0.5, staircase=True),
        lambda step: 0.1 / (1 + 0.5 * (step // 10)),
    )


def test_cosine_decay():
    def cosine(step):
        return 0.1 * ((1 - 0.2) * 0.5 * (1 + math.cos(math.pi * min(step, 10) / 10)) + 0.2)

    close(schedules.CosineDecay(0.1, 10, alpha=0.2), cosine)

    def warmed(step):
        if step < 5:
            return 0.0 + (0.1 - 0.0) * step / 5
        return cosine(step - 5)

    close(schedules.CosineDecay(0.0, 10, alpha=0.2, warmup_target=0.1, warmup_steps=5), warmed)


OF_TENSORFLOW = {
    schedules.CosineDecay(0.01, 20, 0.1, None, 0.2, 10): [
        *(0.01, 0.029, 0.105, 0.181, 0.2, 0.198892, 0.11, 0.021108, 0.02, 0.02, 0.02),
    ],
    schedules.CosineDecayRestarts(0.1, 10): [
        *(0.1, 0.0975528, 0.05, 0.00244718, 0.1, 0.0993844, 0.05, 0.000615582, 0.1),
        *(0.0998459, 0.0777785),
    ],
    schedules.CosineDecayRestarts(0.1, 10, t_mul=1.0, m_mul=0.5, alpha=0.1): [
        *(0.1, 0.0977975, 0.055, 0.0122025, 0.055, 0.0538988, 0.0325, 0.0105506, 0.02125),
        *(0.0209747, 0.0100001),
    ],
    schedules.CosineDecayRestarts(0.1, 7, 1.5, 0.9, 0.05): [
        *(0.1, 0.095296, 0.0228842, 0.0830717, 0.0744042, 0.0633683, 0.0772646, 0.0180166),
        *(0.0128053, 0.00881023, 0.0164565),
    ],
}
"""The rates of `tf.keras.optimizers.schedules` (2.15.1, float32) after some steps."""


@pytest.mark.parametrize("schedule", OF_TENSORFLOW, ids=str)
def test_values_of_tensorflow(schedule):
    found = [schedule(step) for step in (0, 1, 5, 9, 10, 11, 20, 29, 30, 31, 200)]
    assert found == pytest.approx(OF_TENSORFLOW[schedule], rel=1e-5)


def test_arguments_that_make_no_schedule():
    with pytest.raises(
        ValueError, match=r"^CosineDecayRestarts: t_mul is 0\.5; it must be at leas"
    ):
        schedules.CosineDecayRestarts(0.1, 10, t_mul=0.5)
    with pytest.raises(ValueError, match=r"^PiecewiseConstantDecay: 2 boundaries and 2 values"):
        schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.2])
    for boundaries in [20, 10], [10, 10]:
        said = re.escape(f"PiecewiseConstantDecay: boundaries are {boundaries}; they must increase")
        with pytest.raises(ValueError, match=f"^{said}"):
            schedules.PiecewiseConstantDecay(boundaries, [0.1, 0.2, 0.3])


SCHEDULES = [
    schedules.ExponentialDecay(0.1, 10, 0.9),
    schedules.InverseTimeDecay(0.1, 10, 0.9),
    schedules.PolynomialDecay(0.1, 10),
    schedules.CosineDecay(0.1, 10),
    schedules.CosineDecayRestarts(0.1, 10),
    schedules.PiecewiseConstantDecay([1], [2.0, 3.0]),
]


def test_schedules_of_different_kinds_differ():
    assert schedules.ExponentialDecay(0.1, 10, 0.9) == SCHEDULES[0]
    assert SCHEDULES[0] != SCHEDULES[1]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_is_one_leaf(schedule):
    assert nests.flatten({"rate": schedule})[0] == [schedule]
    assert nests.flatten(schedule)[0] == [schedule]


def test_a_schedule_of_the_program():
    """As TensorFlow's users write one: a subclass with `__call__`."""

    class Halving(schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 / 2**step

    v, optimizer = hs.Variable(np.zeros(1)), hs.optimizers.SGD(Halving())
    assert nests.flatten([optimizer.learning_rate])[0] == [optimizer.learning_rate]
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(1), v)])
    assert v.numpy().tolist() == [-0.5 - 0.25 - 0.125]
