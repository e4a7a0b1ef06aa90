"""Formulas of optimizers: the operations must return what the formula returns on arrays."""

import inspect
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from package_kernels import OPTIMIZERS

from hpcstrat import optimizers

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, 3e38)


def optimizer_of(formula, slots=(), **attributes) -> Any:
    """An optimizer with this formula, made for a test."""
    names = dict.fromkeys(slots, 0.0)
    kind = type("Own", (optimizers.Optimizer,), {"slots": names, "formula": staticmethod(formula)})
    made = kind(0.5)
    vars(made).update(attributes)
    return made


def numbers(count, dtype, seed):
    found = np.random.default_rng(seed).standard_normal(count)
    found[::5] = np.resize(SPECIAL, found[::5].size)
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def check(optimizer, dtype, step=3):
    """Compares, bit for bit, with the formula on arrays of the dtype used to compute."""
    value, gradient, *slots = (
        numbers(37, dtype, seed) for seed in range(2 + len(optimizer.all_slots))
    )
    before = [array.copy() for array in (value, gradient, *slots)]
    wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    given = {"learning_rate": 0.5, "step": step}
    names = [
        each.name
        for each in inspect.signature(optimizer.formula).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    named = {name: given[name] if name in given else getattr(optimizer, name) for name in names}
    if optimizer.weight_decay is not None and "weight_decay" not in names:
        before[0] = before[0].astype(wide) * (1 - optimizer.weight_decay * 0.5)
    with np.errstate(all="ignore"):
        optimizer.update_rule(0.5, step).apply(value, gradient, slots, np.empty_like(gradient))
        results = optimizer.formula(*[array.astype(wide) for array in before], **named)
    for found, expected in zip(
        (value, *slots), results if isinstance(results, tuple) else (results,), strict=True
    ):
        assert found.tobytes() == np.asarray(expected).astype(dtype).tobytes() or np.array_equal(
            found.astype(wide), np.asarray(expected).astype(dtype).astype(wide), equal_nan=True
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_packages_own(name):
    check(OPTIMIZERS[name], np.float64)


FORMULAS = {
    "slots that change places": (
        lambda w, g, a, b, *, learning_rate: (w - learning_rate * g, b, a),
        "ab",
    ),
    "a slot that becomes the value": (
        lambda w, g, a, *, learning_rate: (w - learning_rate * g, w),
        "a",
    ),
    "slots in a circle": (lambda w, g, a, b: (a, b, w), "ab"),
    "one result for all": (lambda w, g, a: (w + g, w + g), "a"),
    "what was before stays in use": (lambda w, g, a: ((w + g) * w - a, a + g * w), "a"),
    "nothing changes": (lambda w, g, a: (w, a), "a"),
    "the gradient itself": (lambda w, g: g, ""),
    "choices": (lambda w, g, a: (np.where(w < g, w - a, w + a), np.where(a >= 0, g, -g)), "a"),
    "a condition in use twice": (lambda w, g: np.where(w > 0, g, w) + np.where(w <= 0, g, w), ""),
    "functions": (
        lambda w, g: np.sign(g) * np.sqrt(np.abs(w)) + np.maximum(w, 0.5) - np.minimum(g, w * g),
        "",
    ),
    "powers": (lambda w, g: w**2 - abs(g) ** 0.5 + np.square(g), ""),
    "reflected operators": (lambda w, g: 1 - 2 * w + 3 / (1 + g * g) - -w, ""),
    "infinities": (
        lambda w, g: np.where(g < float("inf"), w - g, -np.inf) + np.where(w > -np.inf, g, np.inf),
        "",
    ),
    "not a number": (lambda w, g: np.where(g < 0, np.nan, w) + np.maximum(g, -float("nan")), ""),
    "NumPy's scalars": (
        lambda w, g: (
            np.float32(0.5) * g + w / np.float16(3) + np.where(g > np.float64("-inf"), w, 1)
        ),
        "",
    ),
    "numbers beyond float32": (lambda w, g: np.where(g < 1e300, w, g) * 1e-300, ""),
    "numbers of infinities": (
        lambda w, g, *, learning_rate: (
            np.where(
                w > 0,
                np.maximum(learning_rate, float("nan")) * g,
                np.minimum(learning_rate, -np.inf) + g,
            )
            * np.where(learning_rate < np.inf, 1, 2)
        ),
        "",
    ),
    "a power that is not real": (
        lambda w, g, *, learning_rate: w + g * (-learning_rate) ** np.float64(1.5),
        "",
    ),
    "numbers alone": (
        lambda w, g, *, learning_rate, step: w - g * (learning_rate**step + 2.0 / step),
        "",
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", FORMULAS)
def test_any_formula(name, dtype):
    formula, slots = FORMULAS[name]
    check(optimizer_of(formula, slots), dtype)


def test_numbers_and_options_are_attributes():
    def formula(w, g, *, learning_rate, scale, upwards):
        return w + scale * learning_rate * g if upwards else w - scale * learning_rate * g

    optimizer: Any = optimizer_of(formula, scale=2.0, upwards=False)
    for optimizer.upwards, optimizer.scale in itertools.product((False, True), (2.0, 3.0)):
        check(optimizer, np.float32)
        constants = optimizer.update_rule(0.25, 1).constants
        assert constants == {
            "learning_rate": 0.25,
            "scale": optimizer.scale,
            "upwards": optimizer.upwards,
        }


def test_a_number_may_become_an_option_and_an_option_a_number():
    seen = []

    def formula(w, g, *, learning_rate, scale):
        seen.append(type(scale))
        return w - learning_rate * g * (3 if scale is True else scale)

    optimizer: Any = optimizer_of(formula, scale=1.0)
    for optimizer.scale, factor in [(1.0, 1), (True, 3), (1, 1), (True, 3), (np.float64(1), 1)]:
        value = np.zeros(2)
        optimizer.update_rule(0.5, 1).apply(value, np.ones(2), (), np.empty(2))
        assert value.tolist() == [-0.5 * factor] * 2
    assert len(seen) == 2  # each form was traced once


def test_an_attribute_that_changes_in_place():
    optimizer: Any = optimizer_of(
        lambda w, g, *, learning_rate, scale: w - learning_rate * scale * g, scale=np.array(1.0)
    )
    for factor in (1, 1, 2, 4):
        optimizer.scale[...] = factor
        value = np.zeros(2)
        optimizer.update_rule(0.5, 1).apply(value, np.ones(2), (), np.empty(2))
        assert value.tolist() == [-0.5 * factor] * 2


def put_unseen(optimizer, name, value):
    """Sets what the optimizer cannot see set, as where a property returns another value."""
    vars(optimizer)[name] = value


@pytest.mark.parametrize("wrong", [np.ones(2), [1.0, 2.0]], ids=repr)
@pytest.mark.parametrize("put", [setattr, put_unseen])
def test_an_attribute_that_becomes_an_array_is_named(wrong, put):
    optimizer: Any = optimizer_of(lambda w, g, *, scale: w - scale * g, scale=0.5)
    check(optimizer, np.float64)
    put(optimizer, "scale", wrong)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Own: scale is .*; it must be a number"):
            optimizer.update_rule(0.5, 1)
    put(optimizer, "scale", 0.25)
    check(optimizer, np.float64)


def test_numbers_of_steps():
    optimizer = optimizer_of(
        lambda w, g, *, learning_rate, step: w + learning_rate * np.sqrt(step) * g
    )
    for step in (1, 4, 9):
        value = np.zeros(2)
        optimizer.update_rule(0.5, step).apply(value, np.ones(2), (), np.empty(2))
        assert value.tolist() == [0.5 * step**0.5] * 2


def test_complex_numbers():
    optimizer = optimizers.SGD(0.5, momentum=0.5)
    value, gradient, velocity = np.zeros(2, complex), np.array([2j, 1]), np.ones(2, complex)
    optimizer.update_rule(0.5, 1).apply(value, gradient.copy(), [velocity], np.empty_like(value))
    assert velocity.tolist() == [0.5 - 1j, 0] == value.tolist()


def uses_if(w, g):
    return w - g if g > 0 else w


def uses_math(w, g):
    return w - float(g)


REFUSED = {
    "if": (uses_if, "is not known when the formula is compiled; use numpy.where"),
    "a number's value": (uses_math, "an element has no value when the formula is compiled"),
    "exp": (lambda w, g: w - np.exp(g), "numpy.exp of elements cannot be compiled"),
    "a power": (lambda w, g: w - g**3, "numpy.power of elements cannot be compiled"),
    "a sum": (lambda w, g: w - np.sum(g), "numpy.sum is not allowed in a formula"),
    "a reduction": (lambda w, g: w - np.add.reduce(g), "numpy.add with reduce is not allowed"),
    "an array": (lambda w, g: w - np.ones(3), "an operand is of type ndarray"),
    "a text": (lambda w, g: w - "1", "an operand is of type str"),
    "a condition as a number": (lambda w, g: w - (g > 0), "one operand is a condition"),
    "a number as a condition": (lambda w, g: np.where(g, w, g), "one operand is an element"),
    "a norm of a number": (
        lambda w, g: w - g * np.linalg.norm(np.linalg.norm(w)),
        "numpy.linalg.norm takes an element",
    ),
    "a norm of rows": (
        lambda w, g: w - np.linalg.norm(g, axis=0),
        "numpy.norm is not allowed in a formula",
    ),
    "parts of an element": (lambda w, g: w - sum(g), "an element is not a sequence"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_compiled_is_named_with_its_line(what):
    formula, message = REFUSED[what]
    code = formula.__code__
    line = f"{code.co_filename}:{code.co_firstlineno + (code.co_name != '<lambda>')} "
    with pytest.raises(TypeError, match=f"{re.escape(line)}.*{re.escape(message)}"):
        optimizer_of(formula).update_rule(0.5, 1)


RETURNED = {
    "None": lambda w, g, a: None,
    "too little": lambda w, g, a: w - g,
    "too much": lambda w, g, a: (w, a, g),
    "a number": lambda w, g, a: (w, 1.0),
    "a condition": lambda w, g, a: (w, w > g),
}


@pytest.mark.parametrize("what", RETURNED)
def test_what_is_returned_is_checked(what):
    with pytest.raises(TypeError, match=r"Own\.formula returned .* and 1 new slots"):
        optimizer_of(RETURNED[what], "a").update_rule(0.5, 1)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.complex128]
)
def test_norms(dtype):
    """Numbers from norms are computed in float64, from terms in the dtype used to compute."""

    def formula(w, g, a, *, learning_rate):
        update = g - a
        ratio = np.maximum(np.linalg.norm(w) / np.linalg.norm(update), 0.1)
        return w - learning_rate * ratio * update, a * np.where(ratio < 10, 2, 3)

    random = np.random.default_rng(0)
    w, g, a = (random.standard_normal(67).astype(dtype) for _ in range(3))
    wide = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    w_, g_, a_ = (array.astype(wide) for array in (w, g, a))
    norms = [np.sqrt((abs(array).astype(np.float64) ** 2).sum()) for array in (w_, g_ - a_)]
    expected = w_ - (0.5 * norms[0] / norms[1]) * (g_ - a_)
    optimizer_of(formula, "a").update_rule(0.5, 1).apply(w, g, [a], np.empty_like(w))
    eps = ml_dtypes.finfo(dtype).eps
    np.testing.assert_allclose(
        w.astype(np.complex128), expected.astype(np.complex128), rtol=4 * eps, atol=4 * eps
    )
    assert (a == (2 * a_).astype(dtype)).all()


def test_numbers_that_overflow_are_as_in_numpy():
    """An exception in the middle of an update would leave half of it."""
    formulas = [
        lambda w, g: w + np.log(np.linalg.norm(g)),
        lambda w, g: w - np.exp(1e4 + np.linalg.norm(g)),
    ]
    for formula in (*formulas, lambda w, g: w - (1e300 + np.linalg.norm(g)) ** 2):
        value = np.zeros(3)
        optimizer_of(formula).update_rule(0.5, 1).apply(value, np.zeros(3), (), np.empty(3))
        assert value.tolist() == [-np.inf] * 3


def test_a_norm_of_zeros_divides_as_numpy_does():
    rule = optimizer_of(lambda w, g: w + np.where(1 / np.linalg.norm(g) > 1e300, 1, 2)).update_rule(
        0.5, 1
    )
    value = np.zeros(3)
    rule.apply(value, np.zeros(3), (), np.empty(3))
    assert value.tolist() == [1, 1, 1]


@pytest.mark.parametrize("number", ["learning_rate", "step", "weight_decay"])
def test_a_number_taken_by_position_is_refused(number):
    formula = eval(f"lambda w, g, {number}: w - {number} * g")
    with pytest.raises(
        TypeError, match=rf"Own\.formula takes {number} by position; numbers come after `\*`: def "
    ):
        optimizer_of(formula)
    optimizer_of(eval(f"lambda w, g, *, {number}: w"))


@pytest.mark.parametrize("wrong", ["x", "0.5", b"1", [0.5], np.ones(2), 1j], ids=repr)
def test_an_attribute_that_is_no_number_is_named(wrong):
    optimizer: Any = optimizer_of(lambda w, g, *, scale: w - scale * g, scale=wrong)
    with pytest.raises(
        TypeError, match=rf"Own: scale is {re.escape(repr(wrong))}; it must be a number"
    ):
        optimizer.update_rule(0.5, 1)
    optimizer.scale = np.float32(0.5)
    check(optimizer, np.float64)


def test_what_is_missing():
    with pytest.raises(AttributeError, match="scale"):
        optimizer_of(lambda w, g, *, scale: w - scale * g).update_rule(0.5, 1)
    with pytest.raises(NotImplementedError, match="formula"):
        type("Own", (optimizers.Optimizer,), {"slots": {}})(0.5).update_rule(0.5, 1)
