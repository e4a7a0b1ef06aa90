"""Formulas of optimizers: what the interpreter does, and what may not be written in one."""

import inspect
import re
import shutil
from typing import Any

import numpy as np
import pytest
from internals import compiled
from package_kernels import DTYPES, Choosing, numbers_of, optimizers_of

import hpcstrat as hs

SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-41, -1e-310, 3e38, 6e4)
"""Special in some dtype: zeros, infinities, subnormal and huge numbers."""


def optimizer_of(formula, slots=(), options=(), rate=0.5) -> Any:
    """An optimizer with this formula; it takes what the formula takes of the rate and the step."""
    taken = inspect.signature(formula).parameters

    def numbers(self, rate, step):
        given = {"rate": rate, "step": step, **dict(options)}
        return {name: given[name] for name in taken if name in given}

    own = {"slots": dict.fromkeys(slots, 0.0), "numbers": numbers, "formula": staticmethod(formula)}
    return type("Own", (hs.optimizers.Optimizer,), own)(rate)


def numbers(dtype, seed):
    """Numbers with special ones among them."""
    random = np.random.default_rng(seed)
    found = random.standard_normal(67)
    found[::3] = np.resize(random.permutation(SPECIAL), found[::3].size)
    with np.errstate(all="ignore"):
        if dtype.kind == "c":
            return (found + 1j * random.permutation(found)).astype(dtype)
        return found.astype(dtype)


def by_the_optimizer(optimizer, value, gradients):
    """The variable and the slots after some steps."""
    v = hs.Variable(value)
    with np.errstate(all="ignore"):
        for gradient in gradients:
            optimizer.apply_gradients([(gradient, v)])
    return [v.numpy(), *[one.numpy() for one in optimizer.variables[2:]]]


def by_arrays(optimizer, value, gradients):
    """The same by the formula on whole arrays; 16 bits are rounded once a step."""
    dtype = value.dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    arrays = [value, *[np.full_like(value, initial) for initial in optimizer.slots.values()]]
    with np.errstate(all="ignore"):
        for step, gradient in enumerate(gradients, 1):
            given = numbers_of(optimizer, step, wide)
            old, *slots = [array.astype(wide) for array in arrays]
            new = optimizer.formula(old, gradient.astype(wide), *slots, **given)
            new = new if isinstance(new, tuple) else (new,)
            arrays = [np.asarray(one).astype(dtype) for one in new]
    return arrays


def check(make, dtype):
    value, *gradients = (numbers(dtype, seed) for seed in range(3))
    found = by_the_optimizer(make(), value, gradients)
    for one, other in zip(found, by_arrays(make(), value, gradients), strict=True):
        same_bits(one, other)


def same_bits(one, other):
    """But for those of NaN."""
    assert one.dtype == other.dtype
    real = one.real.dtype
    one, other = (np.ascontiguousarray(each).view(real) for each in (one, other))
    nan = np.isnan(other)
    assert (np.isnan(one) == nan).all()
    assert one[~nan].tobytes() == other[~nan].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_librarys_own(dtype):
    for make in optimizers_of(dtype, with_options=False).values():
        check(make, dtype)


FORMULAS = {
    "slots that change places": (lambda w, g, a, b, *, rate: (w - rate * g, b + 1, a), "ab"),
    "a slot that becomes the value": (lambda w, g, a, *, rate: (w - rate * g, w), "a"),
    "what was before stays in use": (lambda w, g, a: ((w + g) * w - a, a + g * w), "a"),
    "nothing changes": (lambda w, g, a: (w, a), "a"),
    "the gradient itself": (lambda w, g: g, ""),
    "choices": (lambda w, g, a: (np.where(w < g, w - a, w + a), np.where(a >= 0, g, -g)), "a"),
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
    "minus zero": (lambda w, g: np.where(g < 0, -0.0, g), ""),
    "NumPy's scalars": (lambda w, g: np.float32(0.5) * g + w / np.float16(3), ""),
    "the number of the step": (lambda w, g, *, rate, step: w - rate * g / step, ""),
}


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.kind != "c"], ids=str)
def test_any_formula(dtype):
    for formula, slots in FORMULAS.values():
        check(lambda formula=formula, slots=slots: optimizer_of(formula, slots), dtype)
    check(lambda: Choosing(0.5), dtype)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float64", "choices"),
        ("float32", "RMSprop, centered, with momentum"),
        ("float64", "clipped norms"),
        ("float32", "clipped values, and decay"),
    ],
)
def test_a_loop_gives_the_same_bits(monkeypatch, dtype, name):
    make = optimizers_of(np.dtype(dtype))[name]
    if "norm" in name:  # which would all be nan
        arrays = np.random.default_rng(0).standard_normal((4, 100_003)).astype(dtype)
    else:
        arrays = [np.resize(numbers(np.dtype(dtype), seed), 100_003) for seed in range(4)]
    made, real = [], compiled.loops
    monkeypatch.setattr(compiled, "loops", lambda *of: made.append(real(*of)) or made[-1])
    found = by_the_optimizer(make(), arrays[0], arrays[1:])
    assert any(made)
    monkeypatch.setenv("HPCSTRAT_COMPILE", "0")
    for one, other in zip(found, by_the_optimizer(make(), arrays[0], arrays[1:]), strict=True):
        same_bits(one, other)


def test_an_option_is_another_formula():
    seen = []

    class Own(hs.optimizers.Optimizer):
        slots = {}

        def numbers(self, rate, step):
            return {"rate": rate, "upwards": step > 1, "more": None if step < 3 else 1 + rate}

        @staticmethod
        def formula(value, gradient, *, rate, upwards, more):
            seen.append((upwards, more is None))
            moved = (rate if more is None else more) * gradient
            return value + moved if upwards else value - moved

    (value,) = by_the_optimizer(Own(0.5), np.zeros(2), 5 * [np.ones(2)])
    assert value.tolist() == [-0.5 + 0.5 + 3 * 1.5] * 2
    assert seen == [(False, True), (True, True), (True, False)]  # each was traced once


def test_numbers_may_change_their_kind_and_in_place():
    class Own(hs.optimizers.Optimizer):
        slots = {}
        scale: Any = None

        def numbers(self, rate, step):
            return {"scale": self.scale}

        @staticmethod
        def formula(value, gradient, *, scale):
            return value - gradient * (3 if scale is True else scale)

    optimizer, v, found = Own(0.5), hs.Variable(np.zeros(1)), []
    array, variable = np.array(5.0), hs.Variable(8.0)
    for optimizer.scale in (1.0, True, 1, True, np.float64(2), array, array, variable, variable):
        optimizer.apply_gradients([(np.ones(1), v)])
        found.append(-v.numpy().item() - sum(found))
        array += 1
        variable.assign_add(1.0)
    assert found == [1, 3, 1, 3, 2, 10, 11, 15, 16]


def uses_if(w, g):
    return w - g if g > 0 else w


def compares_a_number(w, g, *, step):
    return w - g * (0.1 if step == 1 else 1.0)


REFUSED = {
    "if": (uses_if, "numpy.where"),
    "if of numbers": (compares_a_number, "numbers"),
    "in": (lambda w, g: w - g * (g in (1.0, 2.0)), "numpy.where"),
    "and": (lambda w, g: np.where(w > 0 and g > 0, w, g), "numpy.where"),
    "bool": (lambda w, g: w - g * bool(g), "numpy.where"),
    "float": (lambda w, g: w - float(g), ""),
    "exp": (lambda w, g: w - np.exp(g), "exp"),
    "a power": (lambda w, g: w - g**3, "numpy.power"),
    "a power of a number": (lambda w, g, *, step: w - g * 0.5**step, "numbers"),
    "a sum of numbers": (lambda w, g, *, rate: w - (1 - rate) * g, "numbers"),
    "a sum": (lambda w, g: w - np.sum(g), "numpy.sum"),
    "an array": (lambda w, g: w - np.ones(3), "ndarray"),
    "a text": (lambda w, g: w - "1", "str"),
    "a condition as a number": (lambda w, g: w - (g > 0), "condition"),
    "a number as a condition": (lambda w, g: np.where(g, w, g), "condition"),
    "parts of an element": (lambda w, g: w - sum(g), ""),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_allowed_is_named_with_its_line(what):
    formula, message = REFUSED[what]
    code, v = formula.__code__, hs.Variable(np.zeros(2), name="v")
    line = f"{code.co_filename}:{code.co_firstlineno + (code.co_name != '<lambda>')} "
    optimizer = optimizer_of(formula)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"{re.escape(line)}.*{re.escape(message)}") as caught:
            optimizer.apply_gradients([(np.ones(2), v)])
        assert code.co_name in str(caught.value)
    assert v.numpy().tolist() == [0.0, 0.0] and optimizer.iterations == 0


RETURNED = {
    "None": lambda w, g, a: None,
    "too little": lambda w, g, a: w - g,
    "too much": lambda w, g, a: (w, a, g),
    "a list": lambda w, g, a: [w, a],
    "a number": lambda w, g, a: (w, 1.0),
    "a condition": lambda w, g, a: (w, w > g),
}


@pytest.mark.parametrize("what", RETURNED)
def test_what_is_returned_is_checked(what):
    v = hs.Variable(np.zeros(2))
    with pytest.raises(TypeError, match=r"Own\.formula returned .* 1 .*slot"):
        optimizer_of(RETURNED[what], "a").apply_gradients([(np.ones(2), v)])


@pytest.mark.parametrize("wrong", ["x", b"1", [0.5], np.ones(2), 1j], ids=repr)
def test_what_is_no_number_is_named(wrong):
    optimizer = optimizer_of(lambda w, g, *, scale: w - scale * g, options={"scale": wrong})
    v = hs.Variable(np.zeros(2))
    with pytest.raises(TypeError, match=rf"Own.*scale.*{re.escape(repr(wrong))}.* number"):
        optimizer.apply_gradients([(np.ones(2), v)])


def test_what_is_missing():
    v = hs.Variable(np.zeros(2))
    with pytest.raises(TypeError, match="scale"):
        optimizer_of(lambda w, g, *, scale: w - scale * g).apply_gradients([(np.ones(2), v)])
    kind: Any = type("Own", (hs.optimizers.Optimizer,), {"slots": {}})
    with pytest.raises(NotImplementedError, match="formula"):
        kind(0.5).apply_gradients([(np.ones(2), v)])
