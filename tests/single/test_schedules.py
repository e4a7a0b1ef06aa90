"""The values are those of TensorFlow's formulas, written out."""

import math

import pytest
from internals import nests

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
}


@pytest.mark.parametrize("steps", [0, -1])
@pytest.mark.parametrize("decay", DECAYS)
def test_decay_steps_must_be_positive(decay, steps):
    with pytest.raises(
        ValueError, match=rf"^{decay}: decay_steps is {steps}; it must be a positive number"
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


SCHEDULES = [
    schedules.ExponentialDecay(0.1, 10, 0.9),
    schedules.InverseTimeDecay(0.1, 10, 0.9),
    schedules.PolynomialDecay(0.1, 10),
    schedules.CosineDecay(0.1, 10),
    schedules.PiecewiseConstantDecay([1], [2.0, 3.0]),
]


def test_schedules_of_different_kinds_differ():
    assert schedules.ExponentialDecay(0.1, 10, 0.9) == SCHEDULES[0]
    assert SCHEDULES[0] != SCHEDULES[1]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_is_one_leaf(schedule):
    assert nests.flatten({"rate": schedule})[0] == [schedule]
    assert nests.flatten(schedule)[0] == [schedule]
