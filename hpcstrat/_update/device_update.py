"""Updates on a GPU, on the current stream: a kernel for each run of elements.

The host does not wait for a norm: its gradients' scale is a number in the GPU's memory, which the
kernels of the update read.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Interval, Shard, divide_up, round_up
from hpcstrat._update.formula import Kernel
from hpcstrat._update.rule import Clip, UpdateRule
from hpcstrat._update.update import KeptByMessage, Run, Update, gradients_of

Operands: TypeAlias = "Sequence[tuple[Array, ...]]"
"""Of each run of variables the gradient, the value and the slots."""
_MOST_THREADS = 1 << 14
"""The most threads that read a gradient for its norm, each of them every so many elements."""
_COLUMNS = 128
"""To so many their sums are added up next. Their order is always the same: ranks with the same
gradients get the same norm, bit for bit."""


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients.

    Args:
        runs_of: returns the runs of the shards; those of so many elements, or more, alone.
        shards: this rank's part of each variable, in the order of the message.
    """

    def __init__(self, runs_of: Callable[[int], Sequence[Run]], shards: Sequence[Shard]) -> None:
        self._shards = [shard for shard in shards if shard.elements]
        self._runs_of = functools.cache(runs_of)
        self._operands = KeptByMessage(functools.partial(self._operands_in, sys.maxsize))
        self._of_variables = KeptByMessage(functools.partial(self._operands_in, 1))
        self._norms: dict[bool, GradientNorms] = {}  # by whether they are global

    def _operands_in(self, alone: int, messages: Sequence[Array]) -> Operands:
        runs = self._runs_of(alone)
        gradients = gradients_of([run.shard for run in runs], messages)
        return [
            (gradient, run.value, *run.slots)
            for run, (gradient,) in zip(runs, gradients, strict=True)
        ]

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._operands.clear()
        self._of_variables.clear()

    def prepare(self, rule: UpdateRule) -> None:
        """See `Update.prepare`."""
        for run in {run.shard.dtype: run for run in self._runs_of(sys.maxsize)}.values():
            prepare_on_gpu(rule, run.shard.dtype)
        if rule.clip is not None and self._shards:
            norms = GradientNorms(self._shards, rule.clip)
            self._norms[rule.clip.is_global] = norms

    def run(self, rule: UpdateRule, messages: Sequence[Array]) -> None:
        """See `Update.run`."""
        clip = rule.clip
        if clip is None or not self._shards:
            for gradient, value, *slots in self._operands.of(messages):
                apply_on_gpu(rule, rule.numbers, value, gradient, slots)
            return
        scales = self._norms[clip.is_global].scales(messages[0], clip.limit)
        operands = self._operands if clip.is_global else self._of_variables
        for i, (gradient, value, *slots) in enumerate(operands.of(messages)):
            numbers = (scales[0 if clip.is_global else i], *rule.numbers)
            apply_on_gpu(rule, numbers, value, gradient, slots)


class GradientNorms:
    """The norms of the gradients in a message: of each, or of all together.

    Args:
        shards: the variables in the message; all have elements.
        clip: which norms.
    """

    def __init__(self, shards: Sequence[Shard], clip: Clip) -> None:
        xp = gpu.load_cupy("an update")
        # Of all gradients of a dtype together the gaps between them are left out: the memory of a
        # message has been that of others.
        dtypes = {
            shard.dtype: [one for one in shards if one.dtype == shard.dtype] for shard in shards
        }
        together = [*dtypes.values()] if clip.is_global else [[shard] for shard in shards]
        places = [Interval(of[0].message.start, of[-1].message.stop) for of in together]
        threads = [
            min(_MOST_THREADS, round_up(place.size // of[0].dtype.itemsize, _COLUMNS))
            for place, of in zip(places, together, strict=True)
        ]
        sums = xp.zeros((len(places), max(threads)))
        self._reads = [
            (
                squares_kernel(of[0].dtype),
                place.slice,
                of[0].dtype,
                (xp.asarray(_elements_by_unit(of)), place.size // of[0].dtype.itemsize, count),
                row[:count],
            )
            for place, of, count, row in zip(places, together, threads, sums, strict=True)
        ]
        rows = 1 if clip.is_global else len(places)
        self._sums, self._added = sums, xp.zeros((len(places), _COLUMNS))
        self._scales = xp.zeros(rows)
        self._views = [self._scales[i] for i in range(rows)]
        self.scales(xp.zeros(shards[-1].message.stop, np.uint8), clip.limit)  # compiles all

    def scales(self, message: Array, limit: float) -> Sequence[Array]:
        """The scale of each gradient, or of all, as arrays without dimensions."""
        for squares, place, dtype, given, sums in self._reads:
            squares(message[place].view(dtype), *given, sums)
        add_kernel()(self._sums, self._sums.shape[1], self._added)
        scale_kernel()(self._added, self._added.size // self._scales.size, limit, self._scales)
        return self._views


def _elements_by_unit(shards: Sequence[Shard]) -> Array:
    """How many elements are in each 256 bytes of the message, which each shard starts anew."""
    start, stop = shards[0].message.start, shards[-1].message.stop
    counts = np.zeros(divide_up(stop - start, ALIGNMENT), np.int32)
    full = ALIGNMENT // shards[0].dtype.itemsize
    for shard in shards:
        first = (shard.message.start - start) // ALIGNMENT
        last = first + divide_up(shard.elements.size, full) - 1
        counts[first:last] = full
        counts[last] = shard.elements.size - (last - first) * full
    return counts


def prepare_on_gpu(rule: UpdateRule, dtype: np.dtype[Any]) -> None:
    """Checks that a rule can update variables of a dtype, and compiles its kernel.

    Raises:
        TypeError: the rule needs real numbers.
    """
    kernel = rule.kernel
    if kernel is None:
        return
    if kernel.of_reals and dtype.kind == "c":
        functions = ", ".join([f"numpy.{name}" for name in kernel.of_reals])
        clips = " with clipvalue" * ("clipvalue" in rule.agreed)
        raise TypeError(
            f"{current_call()}: the update{clips} takes {functions} of elements, and a variable is "
            f"of {dtype.name}, which has no order on a GPU. Make its real and imaginary parts two "
            "variables, or take an optimizer and options that only add, multiply, divide and take "
            "roots, such as Adam without clipvalue"
        )
    arrays = gpu.load_cupy("an update").zeros((2 + kernel.slots, 1), dtype)
    update_kernel(kernel, dtype)(*[1.0] * kernel.numbers, *arrays)


def apply_on_gpu(
    rule: UpdateRule, numbers: Sequence[Any], value: Array, gradient: Array, slots: Sequence[Array]
) -> None:
    """Applies a rule to flat CuPy arrays; its numbers may be in the GPU's memory."""
    if rule.kernel is not None:
        update_kernel(rule.kernel, value.dtype)(*numbers, gradient, value, *slots)
    else:
        rule.assign(value, gradient)


# ---- kernels


def _elementwise(
    inputs: Sequence[str], outputs: Sequence[str], lines: Sequence[str], name: str
) -> Any:
    """A kernel with these parameters, which runs these lines of CUDA C++ in each thread `i`."""
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(inputs),
        ", ".join(outputs),
        "\n".join(lines),
        f"hpcstrat_{name}",
        preamble=_SQUARE,
        no_return=True,
    )


_SQUARE = """
__device__ inline double square_of(double x) { return x * x; }
template <class Real> __device__ double square_of(complex<Real> x) {
    return (double)x.real() * x.real() + (double)x.imag() * x.imag();
}
"""


def _computed(dtype: np.dtype[Any]) -> str:
    """The type that a kernel computes with."""
    return "float" if dtype.itemsize == 2 else "T"


@functools.cache
def update_kernel(kernel: Kernel, dtype: np.dtype[Any]) -> Any:
    """The update of each element.

    SGD, for example, is in CUDA C++:

        const T number_0 = (T)given_0;
        T gradient = (T)given_gradient;
        T value = (T)given_value;
        const auto step_0 = number_0 * gradient;
        const auto step_1 = value - step_0;
        const auto new_value = step_1;
        value = new_value;
        given_value = (T)value;
    """
    computed, numbers = _computed(dtype), range(kernel.numbers)
    used = {one - 2 - kernel.slots for _, operands in kernel.steps for one in operands}
    taken = [i for i in numbers if i in used]
    return _elementwise(
        [*[f"float64 given_{i}" for i in numbers], "T given_gradient"],
        [f"T given_{name}" for name in kernel.arrays],
        [
            *[
                f"const {computed} number_{i} = ({computed})given_{i};"
                for i in numbers
                if i in used
            ],
            *[
                f"{computed} {name} = ({computed})given_{name};"
                for name in ("gradient", *kernel.arrays)
            ],
            kernel.body,
            *[f"given_{name} = (T){name};" for name in kernel.arrays],
        ],
        kernel.name,
    )


@functools.cache
def squares_kernel(dtype: np.dtype[Any]) -> Any:
    """The sum of the squares of every so many elements: one for each thread."""
    unit = ALIGNMENT // dtype.itemsize
    return _elementwise(
        ["raw T gradient", "raw int32 elements", "int64 count", "int64 threads"],
        ["float64 sum"],
        [
            "double squares = 0;",
            "#pragma unroll 16",  # a thread then waits for 16 reads at once
            "for (long long k = i; k < count; k += threads)",
            f"if (k % {unit} < elements[k / {unit}])",
            f"squares += square_of(({_computed(dtype)})gradient[k]);",
            "sum = squares;",
        ],
        "squares",
    )


@functools.cache
def add_kernel() -> Any:
    """Adds up the sums of each row to those of `_COLUMNS`."""
    return _elementwise(
        ["raw float64 sums", "int64 threads"],
        ["float64 added"],
        [
            f"const long long row = i / {_COLUMNS}, column = i % {_COLUMNS};",
            "double sum = 0;",
            "#pragma unroll 16",
            f"for (long long k = column; k < threads; k += {_COLUMNS})",
            "sum += sums[row * threads + k];",
            "added = sum;",
        ],
        "add",
    )


@functools.cache
def scale_kernel() -> Any:
    """`Clip.scale` of the sum of so many sums."""
    return _elementwise(
        ["raw float64 sums", "int64 count", "float64 limit"],
        ["float64 scale"],
        [
            "double sum = 0;",
            "#pragma unroll 16",
            "for (long long k = 0; k < count; ++k) sum += sums[i * count + k];",
            "const double norm = sqrt(sum), not_finite = norm - norm;",
            "scale = not_finite == 0 ? norm > limit ? limit / norm : 1 : not_finite;",
        ],
        "scale",
    )


@functools.cache
def numbers_kernel(count: int) -> Any:
    """Writes its parameters to an array, from which the kernels of a graph take them."""
    return _elementwise(
        [f"float64 given_{k}" for k in range(count)],
        ["raw float64 numbers"],
        [f"numbers[{k}] = given_{k};" for k in range(count)],
        "numbers",
    )
