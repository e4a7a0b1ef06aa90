"""The values are those of TensorFlow's formulas, written out."""

import math

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.optimizers import schedules


def polynomial(step):
    return (0.1 - 0.01) * (1 - min(step, 10) / 10) ** 0.5 + 0.01


def cycling(step):
    last = 10 * max(1, math.ceil(step / 10))
    return (0.1 - 0.01) * (1 - step / last) + 0.01


def cosine(step):
    return 0.1 * ((1 - 0.2) * 0.5 * (1 + math.cos(math.pi * min(step, 10) / 10)) + 0.2)


def warmed(step):
    return 0.1 * step / 5 if step < 5 else cosine(step - 5)


def piecewise(step):  # a step that is a boundary has the rate before it
    return 1.0 if step <= 4 else 0.5 if step <= 10 else 0.1


FORMULAS = [
    (schedules.ExponentialDecay(0.1, 10, 0.5), lambda step: 0.1 * 0.5 ** (step / 10)),
    (
        schedules.ExponentialDecay(0.1, 10, 0.5, staircase=True),
        lambda step: 0.1 * 0.5 ** (step // 10),
    ),
    (schedules.InverseTimeDecay(0.1, 10, 0.5), lambda step: 0.1 / (1 + 0.5 * step / 10)),
    (schedules.PolynomialDecay(0.1, 10, 0.01, power=0.5), polynomial),
    (schedules.PolynomialDecay(0.1, 10, 0.01, cycle=True), cycling),
    (
        schedules.PolynomialDecay(0.1, 10),
        lambda step: 0.0001 + (0.1 - 0.0001) * (1 - min(step, 10) / 10),
    ),
    (schedules.CosineDecay(0.1, 10, alpha=0.2), cosine),
    (schedules.CosineDecay(0.0, 10, alpha=0.2, warmup_target=0.1, warmup_steps=5), warmed),
    (schedules.PiecewiseConstantDecay([4, 10], [1.0, 0.5, 0.1]), piecewise),
]


def test_values_of_formulas():
    for schedule, formula in FORMULAS:
        for step in range(25):
            assert schedule(step) == pytest.approx(formula(step), rel=1e-12), (schedule, step)


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


DECAYS = {
    "ExponentialDecay": lambda steps: schedules.ExponentialDecay(0.1, steps, 0.9),
    "InverseTimeDecay": lambda steps: schedules.InverseTimeDecay(0.1, steps, 0.9),
    "PolynomialDecay": lambda steps: schedules.PolynomialDecay(0.1, steps),
    "CosineDecay": lambda steps: schedules.CosineDecay(0.1, steps),
    "CosineDecayRestarts": lambda steps: schedules.CosineDecayRestarts(0.1, steps),
}


def test_arguments_that_make_no_schedule():
    for name, decay in DECAYS.items():
        for steps in (0, -1):
            with pytest.raises(ValueError, match=f"^{name}: .*steps is {steps};"):
                decay(steps)
    with pytest.raises(ValueError, match="CosineDecayRestarts: t_mul is 0.5; it must be at least"):
        schedules.CosineDecayRestarts(0.1, 10, t_mul=0.5)
    for boundaries, said in [
        ([1], "1 boundaries and 3 values"),
        ([20, 10], r"boundaries are \[20, 10\]; they must"),
        ([10, 10], r"boundaries are \[10, 10\]"),
    ]:
        with pytest.raises(ValueError, match=f"^PiecewiseConstantDecay: {said}"):
            schedules.PiecewiseConstantDecay(boundaries, [0.1] * 3)


def test_a_schedule_equals_one_of_the_same_kind_and_arguments():
    same = [schedules.ExponentialDecay(0.1, 10, 0.9) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != schedules.InverseTimeDecay(0.1, 10, 0.9)
    assert same[0] != schedules.ExponentialDecay(0.1, 10, 0.8)


class Halving(schedules.LearningRateSchedule):
    """As TensorFlow's users write one: a subclass with `__call__`."""

    def __call__(self, step):
        return 0.5 / 2**step


@pytest.mark.parametrize(
    "schedule",
    [Halving(), *(make(10) for make in DECAYS.values())],
    ids=lambda one: type(one).__name__,
)
def test_a_schedule_is_one_value_for_run_and_for_an_optimizer(schedule):
    """Not a structure of its fields, though a dataclass."""
    assert hs.MirroredStrategy().run(lambda one: [one], args=(schedule,)) == [schedule]
    v, optimizer = hs.Variable(np.zeros(1)), hs.optimizers.SGD(schedule)
    assert optimizer.learning_rate is schedule
    for _ in range(3):
        optimizer.apply_gradients([(np.ones(1), v)])
    assert v.numpy() == pytest.approx(-sum(schedule(step) for step in range(3)), rel=1e-12)
