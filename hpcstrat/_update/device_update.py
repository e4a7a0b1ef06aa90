"""Updates on a GPU: one kernel per run of elements, on the current stream, and passes for norms."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.kernel import Kernel
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import (
    NOTHING_IN_PLACE,
    InPlace,
    PerMessage,
    Run,
    Update,
    gradients_of,
    keep_per_message,
)

STRIP_THREADS = 32
"""Threads per strip of a variable, which read neighbouring elements."""
STRIP = 256 * STRIP_THREADS
"""The most elements of a strip."""
Operands: TypeAlias = "Sequence[tuple[Array, ...]]"
"""Of each run of variables the gradient, the value and the slots."""

# Tables are arrays of int64, with a row for each of the first structures. Sums are arrays of
# float64, with a column for each term.
_PREAMBLE = """
struct Strip {  // elements of a run; the row of their constants
    long long start, stop, row;
    template <class Table> __device__ Strip(const Table& table, long long i)
        : start(table[3 * i]), stop(table[3 * i + 1]), row(table[3 * i + 2]) {}
};

struct Start {  // the first element of a run that has constants in this row
    long long element, row;
    template <class Table> __device__ Start(const Table& table, long long i)
        : element(table[2 * i]), row(table[2 * i + 1]) {}
};

struct Range {  // sums, as in Python
    long long start, stop, step;
    template <class Table> __device__ Range(const Table& table, long long i)
        : start(table[3 * i]), stop(table[3 * i + 1]), step(table[3 * i + 2]) {}
};

template <class Table> __device__ long long row_at(long long element, const Table& starts) {
    long long low = 0, high = starts.size() / 2 - 1;
    while (low < high) {  // the last that starts at this element or before
        const long long middle = (low + high + 1) / 2;
        if (Start(starts, middle).element <= element) low = middle; else high = middle - 1;
    }
    return Start(starts, low).row;
}

template <class Sums>
__device__ double sum_of(const Sums& sums, Range range, long long term, long long terms) {
    double sum = 0;
    for (long long k = range.start; k < range.stop; k += range.step) sum += sums[k * terms + term];
    return sum;
}

__device__ inline double square_of(double x) { return x * x; }
template <class Real> __device__ double square_of(complex<Real> x) {
    return (double)x.real() * x.real() + (double)x.imag() * x.imag();
}
"""


def _elementwise(
    inputs: Sequence[str], outputs: Sequence[str], lines: Sequence[str], name: str
) -> Any:
    """A kernel with these parameters, which runs these lines of CUDA C++ for each element `i`."""
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(inputs),
        ", ".join(outputs),
        "\n".join(lines),
        f"hpcstrat_{name}",
        preamble=_PREAMBLE,
        no_return=True,
    )


def _computed(dtype: np.dtype[Any]) -> str:
    """The type that a kernel computes with."""
    return "float" if dtype.itemsize == 2 else "T"


def _constants(kernel: Kernel, computed: str, row: str) -> tuple[list[str], list[str]]:
    """The parameters that have a kernel's constants, and the lines that read these.

    Each is a parameter; or all are in `numbers`, in a row that this expression finds.
    """
    names = kernel.constants
    if row:
        parameters, lines = ["raw float64 numbers"], [f"const long long row = {row};"]
        places = [f"numbers[row * {len(names)} + {k}]" for k in range(len(names))]
    else:
        parameters, lines = [f"float64 given_{name}" for name in names], []
        places = [f"given_{name}" for name in names]
    for name, place in zip(names, places, strict=True):
        lines.append(f"const {computed} {name} = ({computed}){place};")
    return parameters, lines


@functools.cache
def update_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool = False) -> Any:
    """The update of each element, with constants from parameters or from rows.

    SGD, for example, is in CUDA C++:

        const T number_0 = (T)given_number_0;
        T gradient = (T)given_gradient;
        T value = (T)given_value;
        const auto step_0 = number_0 * gradient;
        const auto step_1 = value - step_0;
        value = step_1;
        given_value = (T)value;
    """
    computed, changed = _computed(dtype), ("value", *kernel.slots)
    row = "row_at(i, starts)" if has_rows else ""
    parameters, reads = _constants(kernel, computed, row)
    if has_rows:
        parameters.append("raw int64 starts")
    return _elementwise(
        [*parameters, "T given_gradient"],
        [f"T given_{name}" for name in changed],
        [
            *reads,
            *[f"{computed} {name} = ({computed})given_{name};" for name in ("gradient", *changed)],
            kernel.body,
            *[f"given_{name} = (T){name};" for name in changed],
        ],
        kernel.name,
    )


@functools.cache
def squares_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool) -> Any:
    """The sum of the squares of each term, over every 32nd element of a strip."""
    computed, arrays = _computed(dtype), ("gradient", "value", *kernel.slots)
    parameters, reads = _constants(kernel, computed, "strip.row" if has_rows else "")
    terms = range(len(kernel.terms))
    return _elementwise(
        [*parameters, *[f"raw T given_{name}" for name in arrays], "raw int64 strips"],
        ["raw float64 sums"],
        [
            f"const Strip strip(strips, i / {STRIP_THREADS});",
            *reads,
            *[f"double sum_{j} = 0;" for j in terms],
            f"const long long first = strip.start + i % {STRIP_THREADS};",
            f"for (long long k = first; k < strip.stop; k += {STRIP_THREADS}) {{",
            *[f"{computed} {name} = ({computed})given_{name}[k];" for name in arrays],
            *[f"{computed} term_{j};" for j in terms],
            kernel.body,
            *[f"sum_{j} += square_of(term_{j});" for j in terms],
            "}",
            *[f"sums[i * {len(terms)} + {j}] = sum_{j};" for j in terms],
        ],
        kernel.name,
    )


@functools.cache
def add_kernel() -> Any:
    """The sum of each range of sums, of each term."""
    return _elementwise(
        ["raw float64 sums", "raw int64 ranges", "int64 terms"],
        ["raw float64 out"],
        ["out[i] = sum_of(sums, Range(ranges, i / terms), i % terms, terms);"],
        "add",
    )


@functools.cache
def numbers_kernel(code: str, done: int, terms: int, given: int) -> Any:
    """Row `i` of the norms of a pass, after `done` earlier ones, and of what depends on them.

    It takes ranges of sums for each row and term.
    """
    lines = [f"const double norm_{k} = norms[i * columns + {k}];" for k in range(done)]
    for term in range(terms):
        squares = f"sum_of(sums, Range(ranges, i * {terms} + {term}), {term}, {terms})"
        lines += [
            f"const double norm_{done + term} = sqrt({squares});",
            f"norms[i * columns + {done + term}] = norm_{done + term};",
        ]
    taken = ["raw float64 sums", "raw int64 ranges", "int64 columns"]
    return _elementwise(
        [*taken, *[f"float64 given_{k}" for k in range(given)]],
        ["raw float64 norms", "raw float64 numbers"],
        [*lines, code],
        "norms",
    )


def _table(rows: Sequence[tuple[int, ...]]) -> Array:
    return gpu.load_cupy("an update").asarray(np.array(rows, np.int64))


def _table_of_ranges(ranges: Sequence[range]) -> Array:
    return _table([(each.start, each.stop, each.step) for each in ranges])


class RunTables(NamedTuple):
    """What kernels know of a run of variables.

    Attributes:
        dtype: their dtype.
        strips: the table of its strips, each of one variable. Gaps between variables are in none.
        starts: the table of where rows of constants start to count.
        sums: of its strips, a sum for each thread, counted over all runs.
    """

    dtype: np.dtype[Any]
    strips: Array
    starts: Array
    sums: range


def _in_groups(sums: range) -> list[range]:
    """As many groups as each has sums: to add up each, and then the results, takes equally long."""
    count = math.ceil(math.sqrt(len(sums)))
    return [sums[k::count] for k in range(count)]


class DevicePass:
    """A pass over all elements, which finds norms, and with these the constants of the next kernel.

    Squares are added up in stages; here a and b are in one run, and c is in another:

        elements |      20,000 of a     |   | 9 of b |   | 10,000 of c |
        strips   | 8192 | 8192 |  3616  |   |   9    |   | 8192 | 1808 |
        sums     |  32  |  32  |   32   |   |   32   |   |  32  |  32  |
        groups   |          10          |   |   6    |   |      8      |
        totals   |           1          |   |   1    |   |      1      |
        norms    |           1          |   |   1    |   |      1      |

    - `squares_kernel` has 32 threads for each strip, which take every 32nd element.
    - `add_kernel` adds up the sums in groups, of which there are as many as sums in each.
    - Where ranks have shards of the variables, they have different groups. So `add_kernel` adds up
      the groups to totals, and the ranks add up these.
    - `numbers_kernel` adds up the rest, with a thread for each row of constants.

    If all norms of the pass are over all variables, these are one variable here: 192 sums, 14
    groups. If that is so in all passes, there is one row.

    Args:
        norms: the norms, with any numbers.
        k: the pass.
        runs: of each run its tables.
        variables: the sums of each variable, counted over all runs.
        found: the norms of all passes, in a column for each, and a row for each of the constants.
        is_split: whether ranks have shards of variables.
    """

    def __init__(
        self,
        norms: Norms,
        k: int,
        runs: Sequence[RunTables],
        variables: Sequence[range],
        found: Array,
        is_split: bool,
    ) -> None:
        xp = gpu.load_cupy("an update")
        own, after = norms.passes[k : k + 2]
        self._terms, rows = len(own.are_global), len(found)
        self._sums = xp.zeros((max([run.sums.stop for run in runs], default=0), self._terms))
        self._squares = [
            (
                squares_kernel(own.kernel, run.dtype, has_rows=k > 0),
                run.strips,
                self._sums[run.sums.start : run.sums.stop],
            )
            for run in runs
        ]
        # Of each variable, or of all together, what is still to be added up.
        parts = [range(len(self._sums))] if all(own.are_global) else variables
        self._stages: list[tuple[Array, Array]] = []  # of each its ranges and their sums
        parts = self._add_stage([_in_groups(part) for part in parts])
        if is_split:
            parts = self._add_stage([[part] for part in parts])
        whole = range(parts[-1].stop)
        self._ranges = _table_of_ranges(
            [
                whole if is_global else parts[row]
                for row in range(rows)
                for is_global in own.are_global
            ]
        )
        done = sum([len(each.are_global) for each in norms.passes[:k]])
        self._compute = numbers_kernel(after.code, done, self._terms, len(norms.given[k + 1]))
        self._found = found
        self._numbers = xp.zeros((rows, len(after.kernel.constants)))

    def _add_stage(self, parts: Sequence[Sequence[range]]) -> list[range]:
        """Prepares to add up each of these ranges; returns where the sums of each part will be."""
        ranges = [each for part in parts for each in part]
        sums = gpu.load_cupy("an update").zeros((len(ranges), self._terms))
        self._stages.append((_table_of_ranges(ranges), sums))
        stops = itertools.accumulate(map(len, parts))
        return [range(stop - len(part), stop) for stop, part in zip(stops, parts, strict=True)]

    def run(
        self,
        constants: Sequence[Any],
        given: Sequence[float],
        operands: Operands,
        add_up: Callable[[Array], Array] | None,
    ) -> Array:
        """Finds the norms; returns the rows of the next kernel's constants.

        Args:
            constants: its own constants, or the rows of them.
            given: the numbers that these depend on beside norms.
            operands: the variables.
            add_up: see `Update.run`.
        """
        for (square, strips, sums), arrays in zip(self._squares, operands, strict=True):
            square(*constants, *arrays, strips, sums, size=len(sums))
        add, sums = add_kernel(), self._sums
        for ranges, added in self._stages:
            add(sums, ranges, self._terms, added, size=added.size)
            sums = added
        if add_up is not None:
            sums = add_up(sums)
        rows, columns = self._found.shape
        self._compute(sums, self._ranges, columns, *given, self._found, self._numbers, size=rows)
        return self._numbers


class DeviceNorms:
    """The norms of some variables, and the update that depends on them.

    Args:
        runs: the runs of the variables.
        shards: this rank's part of each variable.
        norms: the norms, with any numbers.
        is_split: whether ranks have shards of variables.
    """

    def __init__(
        self, runs: Sequence[Run], shards: Sequence[Shard], norms: Norms, is_split: bool
    ) -> None:
        are_global = [is_global for each in norms.passes for is_global in each.are_global]
        # If all norms are over all variables, these have the same constants.
        has_one_row = all(are_global)
        all_tables: list[RunTables] = []
        variables = [range(0)] * len(shards)
        count = 0  # of sums
        for run, _, _ in runs:
            strips, starts, first = [], [], count
            for shard in shards:
                if not (shard.elements and run.message & shard.message):
                    continue
                row = 0 if has_one_row else shard.variable
                start = (shard.message.start - run.message.start) // run.dtype.itemsize
                starts.append((start, row))
                own = [*Interval(start, start + shard.elements.size).split(STRIP)]
                strips += [(*strip, row) for strip in own]
                variables[shard.variable] = range(count, count + STRIP_THREADS * len(own))
                count += STRIP_THREADS * len(own)
            starts = starts[:1] if has_one_row else starts
            sums = range(first, count)
            all_tables.append(RunTables(run.dtype, _table(strips), _table(starts), sums))
        shape = (1 if has_one_row else len(shards), len(are_global))
        found = gpu.load_cupy("an update").zeros(shape)
        *before, update = norms.passes
        self._passes = [
            DevicePass(norms, k, all_tables, variables, found, is_split) for k in range(len(before))
        ]
        self._updates = [
            (update_kernel(update.kernel, run.dtype, has_rows=True), run.starts)
            for run in all_tables
        ]

    def run(
        self, norms: Norms, operands: Operands, add_up: Callable[[Array], Array] | None
    ) -> None:
        """Makes the update of a rule with these norms, of which only numbers may be others."""
        constants: tuple[Any, ...]
        constants, *later = norms.given
        for each, given in zip(self._passes, later, strict=True):
            constants = (each.run(constants, given, operands, add_up),)
        for (update, starts), arrays in zip(self._updates, operands, strict=True):
            update(*constants, starts, *arrays)


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def __init__(self, runs: Sequence[Run], shards: Sequence[Shard]) -> None:
        self._runs = runs
        self._shards = shards
        self._gradients: PerMessage[list[list[Array]]] = {}
        self._norms: dict[Any, DeviceNorms] = {}

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._gradients.clear()

    def run(
        self,
        rule: UpdateRule,
        messages: Sequence[Array],
        op: ReduceOp = ReduceOp.SUM,
        in_place: InPlace = NOTHING_IN_PLACE,
        add_up: Callable[[Array], Array] | None = None,
    ) -> None:
        """See `Update.run`."""
        gradients = keep_per_message(
            self._gradients, messages, functools.partial(gradients_of, self._runs)
        )
        operands = [
            (gradient, run.value, *run.slots)
            for run, (gradient,) in zip(self._runs, gradients, strict=True)
        ]
        if rule.norms is None:
            for gradient, value, *slots in operands:
                apply_on_gpu(rule, value, gradient, slots)
            return
        # All but the numbers that change from step to step.
        key = rule.norms.passes
        if key not in self._norms:
            is_split = add_up is not None
            self._norms[key] = DeviceNorms(self._runs, self._shards, rule.norms, is_split)
        self._norms[key].run(rule.norms, operands, add_up)


def apply_on_gpu(rule: UpdateRule, value: Array, gradient: Array, slots: Sequence[Array]) -> None:
    """Applies a rule that takes no norms to flat CuPy arrays, on the current stream.

    It may overwrite the gradient.
    """
    if rule.kernel is None:
        # An assignment has no constants and uses no scratch array: large variables need no
        # additional memory.
        xp = gpu.array_module(gradient)
        rule.apply(value, gradient, slots, xp.empty_like(gradient) if rule.constants else gradient)
        return
    update = update_kernel(rule.kernel, value.dtype)
    update(*rule.kernel_constants, gradient, value, *slots)
