"""The GPU kernels, run on the host, compared with the same operations on NumPy arrays."""

import contextlib
import functools
import itertools
import re
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import (
    ElementRange,
    Shard,
    device_update,
    gpu,
    layout,
    packing,
    rows,
    slabs,
)
from kernels_on_host import ElementwiseKernel, Fault, RawKernel, compile_together, is_available
from package_kernels import DTYPES, optimizers_of, rule_of

pytestmark = [
    pytest.mark.slow,  # they are compiled first, which takes more than a minute
    pytest.mark.skipif(not is_available(), reason="there is no C++ compiler"),
    pytest.mark.xdist_group("kernels"),  # in one process, to compile once
]

SIZES = (0, 1, 1009)
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, -1e-41, 1e-6, 6e4, -3e38, 1e300)
"""Special in some dtype, or after a cast: zeros, infinities, subnormal and huge numbers."""


class Kernel(ElementwiseKernel):
    """A kernel compiled together with all others: calls are only added to `wanted`, if a list."""

    wanted: list[Any] | None = None

    def __init__(self, *arguments, preamble="", no_return):
        super().__init__(*arguments, preamble=preamble)

    def __call__(self, *arguments, size=None):
        if Kernel.wanted is None:
            super().__call__(*arguments, size=size)
        else:
            Kernel.wanted.append(
                (self, self.dtypes([getattr(argument, "dtype", None) for argument in arguments]))
            )


class OnHost(np.ndarray):
    """An array that exposes its address as CuPy's arrays do; its elements are arrays, too."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and self.ndim == 1:
            return super().__getitem__(slice(key, key + 1)).reshape(())
        return super().__getitem__(key)


def accumulator(dtype):
    """What numbers are added in."""
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


COMBINATIONS = {np.add: np.add, None: lambda total, next: next}
"""How values of a row are combined, each with NumPy's function."""


@pytest.fixture(scope="module")
def cupy():
    """The part of CuPy that the package's kernels need, with kernels for the host."""
    names = ("argsort", "asarray", "diff", "flatnonzero", "empty")
    module = types.SimpleNamespace(
        ElementwiseKernel=Kernel,
        RawKernel=RawKernel,
        ascontiguousarray=lambda array: np.ascontiguousarray(array).view(OnHost),
        zeros=lambda *arguments: np.zeros(*arguments).view(OnHost),
        **{name: getattr(np, name) for name in names},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "load_cupy", lambda wanted_by: module)
        patch.setattr(gpu, "array_module", lambda *arrays: module)
        names = ("update_kernel", "squares_kernel", "add_kernel", "scale_kernel")
        caches = [*(getattr(device_update, name) for name in names), rows._kernel, packing._kernel]
        for cache in caches:
            cache.cache_clear()
        Kernel.wanted = []
        for dtype in DTYPES:
            for make in optimizers_of(dtype).values():
                value, gradient, slots = arrays_of(make(), dtype, 3)
                update(make(), 1, [value], [gradient], slots)
            for combination in COMBINATIONS:
                rows.combine_rows(np.zeros(3, np.int64), np.zeros((3, 2), dtype), combination)
        wanted, Kernel.wanted = Kernel.wanted, None
        compile_together(wanted)
        yield module
        for cache in caches:
            cache.cache_clear()


def numbers(random, size, dtype):
    """Normal numbers with special ones among them."""
    found = random.standard_normal(size)
    # NumPy and C++ differ in products of complex numbers with infinities.
    if dtype.kind == "c":
        return (found + 1j * random.standard_normal(size)).astype(dtype)
    found[::7] = random.choice(SPECIAL, found[::7].size)
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def arrays_of(optimizer, dtype, size, steps=1):
    """A variable, a gradient and slots as they are before this step."""
    random = np.random.default_rng(steps)
    value, *slots = (np.full(size, each, dtype) for each in (1, *optimizer.slots.values()))
    for step in range(1, steps):
        operations(optimizer, step, value, numbers(random, size, dtype), slots)
    return numbers(random, size, dtype), numbers(random, size, dtype), slots


def update(optimizer, step, values, gradients, slots=()):
    """One step of some variables with the kernels; slots are those of the only variable."""
    shards, place = [], 0
    for i, value in enumerate(values):
        elements = ElementRange(0, value.size)
        message = elements.bytes(value.itemsize).shift(place)
        shards.append(Shard(i, value.dtype, elements, message, ()))
        place += -(-value.nbytes // slabs.GPU_ALIGNMENT) * slabs.GPU_ALIGNMENT
    message = np.full(place, 0xFF, np.uint8).view(OnHost)  # NaN between the variables
    for shard, gradient in zip(shards, gradients, strict=True):
        message[shard.message.slice] = gradient.view(np.uint8)
    pairs = [pair for pair in zip(shards, values, strict=True) if pair[1].size]
    runs = [device_update.Run(shard, value, tuple(slots)) for shard, value in pairs]
    made = device_update.DeviceUpdate(lambda alone: runs, shards)
    rule = rule_of(optimizer, step)
    made.prepare(rule)
    made.run(rule, [message])


def operations(optimizer, step, value, gradient, slots):
    """The same step with NumPy's operations."""
    rule = rule_of(optimizer, step)
    numbers = rule.numbers
    if rule.clip is not None:
        wide = abs(gradient.astype(accumulator(gradient.dtype))).astype(np.float64)
        numbers = (rule.clip.scale((wide**2).sum()), *numbers)
    rule.kernel.run(numbers, value, gradient, slots)


def check_equal(found, expected, scale, ulps):
    """Checks that numbers are equal within some units in the last place of the largest input."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    kind, eps = found.dtype, ml_dtypes.finfo(found.dtype).eps
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    found, expected = found.astype(wide), expected.astype(wide)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(found[~finite], expected[~finite])
    if ulps == 0:
        np.testing.assert_array_equal(found[finite], expected[finite])
        np.testing.assert_array_equal(np.signbit(found[finite]), np.signbit(expected[finite]))
        return
    # Intermediate results may be subnormal.
    tiny = 1e4 * ml_dtypes.finfo(accumulator(kind)).tiny
    far = finite & (abs(found - expected) > tiny + ulps * eps * scale)
    assert not far.any(), list(zip(found[far], expected[far], scale[far], strict=True))[:5]


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_is_what_the_operations_give(cupy, dtype):
    """In all bits, except for complex numbers and norms."""
    for (name, make), size, step in itertools.product(optimizers_of(dtype).items(), SIZES, (1, 4)):
        optimizer, ulps = make(), 4 if dtype.kind == "c" or "norm" in name else 0
        value, gradient, slots = arrays_of(optimizer, dtype, size, step)
        found, expected = ([array.copy() for array in (value, *slots)] for _ in range(2))
        update(optimizer, step, found[:1], [gradient], found[1:])
        operations(optimizer, step, expected[0], gradient, expected[1:])
        into = [abs(one.astype(np.complex128)) for one in (value, gradient, *slots, *expected)]
        scale = np.nan_to_num(np.sum([*into, into[1] ** 2], axis=0), nan=np.inf, posinf=np.inf)
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other, scale, ulps)


# ---- packing


SHAPES = {
    "none has elements": [(0,), (2, 0)],
    "of all sizes": [(), (0,), (3, 5), (70_001,), (1,), (2, 3, 4)],
    "as many as one launch takes": [(1 + i % 7,) for i in range(packing.ENTRIES)],
    "more than one launch takes": [(1 + i % 7,) for i in range(packing.ENTRIES + 5)],
}
KINDS = ("bool", "float16", "float32", "complex128")


@pytest.mark.parametrize("shapes", SHAPES)
def test_packing_copies_each_array_to_its_place_and_back(cupy, shapes):
    random = np.random.default_rng(1)
    for dtype, alignment in itertools.product(map(np.dtype, KINDS), (1, 256)):
        forms = [(shape, dtype) for shape in SHAPES[shapes]]
        forms[1:1] = [((4, 3), np.dtype(np.uint8))]  # in another group
        form = layout.layout_of(*map(tuple, zip(*forms, strict=True)), alignment)
        arrays = [
            random.integers(0, 256, (*shape, one.itemsize), np.uint8).view(one)[..., 0].view(OnHost)
            for shape, one in forms
        ]
        # In both memory orders.
        arrays = [array.T.copy().T if i % 2 else array for i, array in enumerate(arrays)]
        message, expected = (np.full(form.nbytes, 7, np.uint8).view(OnHost) for _ in range(2))
        form.write(expected, arrays)
        unpacked = [np.empty(array.shape, array.dtype).view(OnHost) for array in arrays]
        for group in form.groups:
            kernel = packing.PackKernel(form, group)
            for _ in range(2):  # the second time over the result of the first
                kernel(arrays, message)
            kernel.unpack(message, unpacked)
        assert message.tobytes() == expected.tobytes()  # bytes between arrays have not changed
        assert [one.tobytes() for one in unpacked] == [array.tobytes() for array in arrays]


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, np.float16, np.float64])
def test_arrays_that_are_aligned_as_their_numbers_only(cupy, dtype):
    """Others than CuPy align a complex number as its two real numbers; the kernel checks."""
    dtype, count = np.dtype(dtype), 5
    real = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    form = layout.layout_of(((count,),), (dtype,))
    memory, message = (np.zeros(256, np.uint8) for _ in range(2))
    place = -memory.ctypes.data % 64 + real  # a multiple of `real`, and of no more
    array = memory[place : place + count * dtype.itemsize].view(dtype)
    array[:] = np.arange(count) * (1 - 2j if dtype.kind == "c" else 1)
    start = -message.ctypes.data % 64 + real
    message = message[start : start + form.nbytes].view(OnHost)
    pack = packing.PackKernel(form, form.groups[0])
    pack([array.view(OnHost)], message)
    assert message.tobytes() == array.tobytes()
    back = np.zeros_like(memory)[place : place + array.nbytes].view(dtype).view(OnHost)
    pack.unpack(message, [back])
    assert back.tobytes() == array.tobytes()


# ---- rows


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_combined_one_after_the_other(cupy, dtype):
    random, wide = np.random.default_rng(2), accumulator(dtype)
    for count, shape in itertools.product([0, 1, 2, 500], [(), (3,), (2, 0), (2, 3)]):
        names = random.integers(0, 20, count)
        values = numbers(random, count * int(np.prod(shape)), dtype).reshape(count, *shape)
        values = np.asarray(values, order="F")
        for combination, ufunc in COMBINATIONS.items():
            rows_found, combined = rows.combine_rows(names, values, combination)
            assert rows_found.tolist() == sorted(set(names.tolist()))
            assert (combined.shape, combined.dtype) == ((rows_found.size, *shape), dtype)
            for row, found in zip(rows_found, combined, strict=True):
                first, *others = values[names == row].astype(wide)
                expected = functools.reduce(ufunc, others, first)
                np.testing.assert_array_equal(
                    found.astype(wide), expected.astype(dtype).astype(wide)
                )


# ---- what a kernel must not do is found

CHANCE = "which comes first is chance"
OUTSIDE = "8 bytes at an address that is outside of what its arguments say"
THREADS = {
    "atomicAdd(&y[0], x)": None,
    "y[i] = x; y[i] += y[i]": None,
    "double own[4] = {}; own[i % 4] = x; own[(int)x % 4] += 1; y[i] = own[(int)x % 3]": None,
    "if (i) atomicAdd(&y[0], y[i])": None,
    "y[0] += x": f"thread 1 reads word 0 of y, which thread 0 writes: {CHANCE}",
    "y[i / 2] = x": f"thread 1 writes word 0 of y, which thread 0 writes: {CHANCE}",
    "y[i] = x; x = y[7 - i]": f"thread 4 writes word 4 of y, which thread 3 reads: {CHANCE}",
    # the same memory
    "y[i] = z[i + 1]": f"thread 1 writes word 1 of y, which thread 0 reads: {CHANCE}",
    "atomicAdd(&y[0], x); x = y[0]": "thread 1 adds by an atomic operation to word 0 of y, which thread 0 writes",
    "atomicAdd(&y[i % 2], x); if (i == 6) x = y[1]": "thread 6 reads word 1 of y, which another thread adds by an atomic",
    "y[i + 1] = x": f"thread 7 writes {OUTSIDE}",
    "x = z[-i]": f"thread 1 reads {OUTSIDE}",
    "y[i] = *(double*)((char*)&z[0] + 4)": "thread 0 reads 8 bytes at an address that is not a multiple of them",
}


@pytest.fixture(scope="module")
def threads():
    """The kernels of `THREADS`, compiled in one run of the compiler."""
    parameters = "raw float64 z", "float64 x, raw float64 y"
    made = {text: ElementwiseKernel(*parameters, text) for text in THREADS}
    compile_together([(one, (np.dtype(np.float64),) * 3) for one in made.values()])
    return made


@pytest.mark.parametrize("operation", THREADS)
def test_threads_meet_by_atomic_operations_only(threads, operation):
    y, fault = np.zeros(8), THREADS[operation]
    expects = pytest.raises(Fault, match=re.escape(fault)) if fault else contextlib.nullcontext()
    with expects:
        threads[operation](y, np.arange(8.0), y)
