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
from hpcstrat._memory.intervals import divide_up
from hpcstrat._memory.shards import Shard
from hpcstrat._memory.slabs import GPU_ALIGNMENT
from hpcstrat._update.formula import Kernel
from hpcstrat._update.rule import Clip, UpdateRule
from hpcstrat._update.update import KeptByMessage, Run, Update, gradients_of

Operands: TypeAlias = "Sequence[tuple[Array, ...]]"
"""Of each run of variables the gradient, the value and the slots."""
_MOST_THREADS = 1 << 14
"""The most threads that read a gradient for its norm, each of them every so many elements."""
COLUMNS = 128
"""To so many their sums are added up next. The order is always the same: ranks with the same
gradients get the same norm, bit for bit."""


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients.

    Args:
        runs_of: returns the runs of the shards; those of so many elements, or more, alone.
        shards: this rank's part of each variable, in the order of the message.
    """

    def __init__(self, runs_of: Callable[[int], Sequence[Run]], shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._present = [i for i, shard in enumerate(shards) if shard.elements]
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
        # Once, because graphs keep the addresses of their memory.
        if rule.clip is not None and self._shards and rule.clip.is_global not in self._norms:
            self._norms[rule.clip.is_global] = GradientNorms(self._shards, rule.clip)

    def run(self, rule: UpdateRule, messages: Sequence[Array]) -> None:
        """See `Update.run`."""
        clip = rule.clip
        if clip is None or not self._shards:  # a rank may have none
            for gradient, value, *slots in self._operands.of(messages):
                apply_on_gpu(rule, rule.numbers, value, gradient, slots)
            return
        scales = self._norms[clip.is_global].scales(messages[0], clip.limit)
        if clip.is_global:
            for gradient, value, *slots in self._operands.of(messages):
                apply_on_gpu(rule, (scales[0], *rule.numbers), value, gradient, slots)
            return
        operands = self._of_variables.of(messages)
        for i, (gradient, value, *slots) in zip(self._present, operands, strict=True):
            apply_on_gpu(rule, (scales[i], *rule.numbers), value, gradient, slots)


class GradientNorms:
    """The norms of the gradients in a message: of each, or of all together.

    Args:
        shards: the variables in the message.
        clip: which norms.
    """

    def __init__(self, shards: Sequence[Shard], clip: Clip) -> None:
        xp = gpu.load_cupy("an update")
        # Of all gradients of a dtype together the gaps between them are left out: the memory of a
        # message has been that of others.
        kinds = dict.fromkeys(shard.dtype for shard in shards)
        of_dtypes = [[shard for shard in shards if shard.dtype == dtype] for dtype in kinds]
        together = of_dtypes if clip.is_global else [[shard] for shard in shards]
        self._sums = xp.zeros((len(together), _MOST_THREADS))
        self._reads: list[tuple[Any, ...]] = []
        for of_row, sums in zip(together, self._sums, strict=True):
            if present := [shard for shard in of_row if shard.elements]:
                dtype = present[0].dtype
                place = slice(present[0].message.start, present[-1].message.stop)
                count = (place.stop - place.start) // dtype.itemsize
                threads = min(_MOST_THREADS, count)
                given = xp.asarray(_elements_by_unit(present)), count, threads, sums[:threads]
                self._reads.append((squares_kernel(dtype), place, dtype, given))
        rows = 1 if clip.is_global else len(shards)
        self._added, self._scales = xp.zeros((rows, COLUMNS)), xp.zeros(rows)
        self._views = [self._scales[i] for i in range(rows)]
        for squares, _, dtype, (elements, _, threads, sums) in self._reads:  # compiles it
            squares(xp.zeros(1, dtype), elements, 0, threads, sums)
        self._finish(clip.limit)

    def scales(self, message: Array, limit: float) -> Sequence[Array]:
        """The scale of each gradient, or of all, as arrays without dimensions."""
        for squares, place, dtype, given in self._reads:
            squares(message[place].view(dtype), *given)
        return self._finish(limit)

    def _finish(self, limit: float) -> Sequence[Array]:
        add_kernel()(self._sums, self._sums.size // len(self._added), self._added)
        scale_kernel()(self._added, limit, self._scales)
        return self._views


def _elements_by_unit(shards: Sequence[Shard]) -> Array:
    """How many elements are in each 256 bytes of the message, which each shard starts anew."""
    start, stop = shards[0].message.start, shards[-1].message.stop
    counts = np.zeros(divide_up(stop - start, GPU_ALIGNMENT), np.int32)
    full = GPU_ALIGNMENT // shards[0].dtype.itemsize
    for shard in shards:
        first = (shard.message.start - start) // GPU_ALIGNMENT
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
        clips = " with clipvalue" * ("clipvalue" in rule.names)
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
            *[f"const {computed} number_{i} = ({computed})given_{i};" for i in taken],
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
    unit = GPU_ALIGNMENT // dtype.itemsize
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
    """Adds up so many sums of each row to `COLUMNS`."""
    return _elementwise(
        ["raw float64 sums", "int64 count"],
        ["float64 added"],
        [
            f"const long long row = i / {COLUMNS}, column = i % {COLUMNS};",
            "double sum = 0;",
            "#pragma unroll 16",
            f"for (long long k = column; k < count; k += {COLUMNS})",
            "sum += sums[row * count + k];",
            "added = sum;",
        ],
        "add",
    )


@functools.cache
def scale_kernel() -> Any:
    """`Clip.scale` of the sum of each row."""
    return _elementwise(
        ["raw float64 sums", "float64 limit"],
        ["float64 scale"],
        [
            "double sum = 0;",
            "#pragma unroll 16",
            f"for (long long k = 0; k < {COLUMNS}; ++k) sum += sums[i * {COLUMNS} + k];",
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
