"""Updates on a GPU: one kernel per run of elements, on the current stream, and passes for norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.kernel import Kernel
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import (
    NOTHING_IN_PLACE,
    Chunk,
    InPlace,
    PerMessage,
    Update,
    gradients_of,
    keep_per_message,
)

LANES = 32
"""Threads per strip of a variable, which read neighbouring elements."""
STRIP = 256 * LANES
"""The most elements of a strip."""
Operands: TypeAlias = "Sequence[tuple[Array, Array, Sequence[Array]]]"
"""Of each run of variables the gradient, the value and the slots."""
_Table: TypeAlias = "Sequence[Sequence[int]]"

_FIND_ROW = """
ptrdiff_t low = 0, high = variables - 1;
while (low < high) {  // the last variable that starts at this element or before
    const ptrdiff_t middle = (low + high + 1) / 2;
    if (starts[2 * middle] <= i) low = middle; else high = middle - 1;
}
const ptrdiff_t row = starts[2 * low + 1];
"""
_ADD_SQUARES = """
const ptrdiff_t row = strips[i / {lanes} * 3 + 2];
{constants}
{zeros}
const ptrdiff_t stop = strips[i / {lanes} * 3 + 1];
for (ptrdiff_t k = strips[i / {lanes} * 3] + i % {lanes}; k < stop; k += {lanes}) {{
    {body}
}}
{results}
"""
# `table`, for each result: its first sum, the end, and the step.
_ADD = """
const ptrdiff_t place = i / terms, term = i % terms;
double sum = 0;
for (ptrdiff_t k = table[3 * place]; k < table[3 * place + 1]; k += table[3 * place + 2])
    sum += sums[k * terms + term];
out[place * width + term] = sum;
"""
# `table`, for each row and term: its first sum and the end.
_NORM = """
double square_{term} = 0;
for (ptrdiff_t k = table[{at}]; k < table[{at} + 1]; ++k)
    square_{term} += sums[k * width + {term}];
const double norm_{norm} = sqrt(square_{term});
norms[i * columns + {norm}] = norm_{norm};
"""


def _elementwise(
    taken: Sequence[str], changed: Sequence[str], lines: Sequence[str], name: str
) -> Any:
    """A kernel with these parameters, which runs these lines of CUDA C++ for each element `i`."""
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(taken), ", ".join(changed), "\n".join(lines), f"hpcstrat_{name}", no_return=True
    )


def _taken(
    kernel: Kernel, dtype: np.dtype[Any], has_rows: bool
) -> tuple[str, list[str], list[str]]:
    """What it computes with, the parameters of its constants, and what reads these.

    They are passed, or in `numbers`, a row for each variable.
    """
    computed, constants = "float" if dtype.itemsize == 2 else "T", kernel.constants
    places = [f"given_{name}" for name in constants]
    if has_rows:
        places = [f"numbers[row * {len(constants)} + {k}]" for k in range(len(constants))]
    reads = [
        f"const {computed} {name} = ({computed}){place};"
        for name, place in zip(constants, places, strict=True)
    ]
    return computed, [] if has_rows else [f"float64 given_{name}" for name in constants], reads


@functools.cache
def update_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool = False) -> Any:
    """The update of each element."""
    computed, parameters, reads = _taken(kernel, dtype, has_rows)
    changed = ("value", *kernel.slots)
    body = [f"{computed} {name} = ({computed})given_{name};" for name in ("gradient", *changed)]
    after = [f"given_{name} = (T){name};" for name in changed]
    if has_rows:
        parameters = ["raw float64 numbers", "raw int64 starts", "int64 variables"]
        body.insert(0, _FIND_ROW)
    return _elementwise(
        ["T given_gradient", *parameters],
        [f"T given_{name}" for name in changed],
        [*body, *reads, kernel.body, *after],
        kernel.name,
    )


@functools.cache
def squares_kernel(kernel: Kernel, dtype: np.dtype[Any], has_rows: bool) -> Any:
    """The sums of the squares of each term, of some elements of a strip."""
    computed, parameters, reads = _taken(kernel, dtype, has_rows)
    arrays, terms = ("gradient", "value", *kernel.slots), range(len(kernel.terms))
    square = "(double)term_{0} * (double)term_{0}"
    if dtype.kind == "c":
        parts = [f"(double)term_{{0}}.{part}() * term_{{0}}.{part}()" for part in ("real", "imag")]
        square = " + ".join(parts)
    body = [
        *[f"{computed} {name} = ({computed})given_{name}[k];" for name in arrays],
        *[f"{computed} term_{j};" for j in terms],
        kernel.body,
        *[f"sum_{j} += {square.format(j)};" for j in terms],
    ]
    taken = ["raw T given_gradient", *parameters, *["raw float64 numbers"][:has_rows]]
    taken += [f"raw T given_{name}" for name in arrays[1:]]
    code = _ADD_SQUARES.format(
        lanes=LANES,
        constants="\n".join(reads),
        zeros="\n".join(f"double sum_{j} = 0;" for j in terms),
        body="\n".join(body),
        results="\n".join(f"sums[i * {len(terms)} + {j}] = sum_{j};" for j in terms),
    )
    return _elementwise([*taken, "raw int64 strips"], ["raw float64 sums"], [code], kernel.name)


@functools.cache
def add_kernel() -> Any:
    """Adds up sums; see `_ADD`."""
    taken = ["raw float64 sums", "raw int64 table", "int64 terms", "int64 width"]
    return _elementwise(taken, ["raw float64 out"], [_ADD], "add")


@functools.cache
def numbers_kernel(code: str, done: int, terms: int, given: int) -> Any:
    """The norms of a pass, after `done` earlier ones, and the numbers that depend on them."""
    taken = ["raw float64 sums", "raw int64 table", "int64 width", "int64 columns"]
    earlier = [f"const double norm_{k} = norms[i * columns + {k}];" for k in range(done)]
    own = [
        _NORM.format(term=term, norm=done + term, at=f"2 * (i * {terms} + {term})")
        for term in range(terms)
    ]
    return _elementwise(
        [*taken, *[f"float64 given_{k}" for k in range(given)]],
        ["raw float64 norms", "raw float64 numbers"],
        [*earlier, *own, code],
        "norms",
    )


class DeviceNorms:
    """The norms of some variables, and the update that depends on them.

    A pass is a kernel per run, two more, and one more where ranks have parts of variables. 32
    threads add up the squares of each strip of a variable, and leave as many sums; fewer threads
    add up these; and one thread per variable, or one if all norms are global, adds up the rest, and
    computes the numbers of the next kernel, which reads them from memory. Gaps between variables
    are in no strip.

    Args:
        chunks: the runs of the variables.
        shards: this rank's part of each variable.
        norms: the norms, with any numbers.
        is_split: whether other ranks have other parts.
    """

    def __init__(
        self, chunks: Sequence[Chunk], shards: Sequence[Shard], norms: Norms, is_split: bool
    ) -> None:
        self._xp = gpu.load_cupy("an update")
        # If all norms are over all variables, these have the same numbers.
        is_global = all([all(each.are_global) for each in norms.passes])
        self._rows = 1 if is_global else len(shards)
        self._sums_of = [Interval(0, 0)] * len(shards)  # the sums of each variable
        self._count = 0
        runs: list[tuple[np.dtype[Any], Array, Interval]] = []  # of each its strips and its sums
        # Of each run the kernel and where rows start.
        self._updates: list[tuple[Any, Array, int]] = []
        for run, _, _ in chunks:
            strips, starts, first = [], [], self._count
            for shard in shards:
                if not (shard.elements and run.message & shard.message):
                    continue
                row = 0 if is_global else shard.variable
                start = (shard.message.start - run.message.start) // run.dtype.itemsize
                own = [*Interval(start, start + shard.elements.size).split(STRIP)]
                strips += [(*strip, row) for strip in own]
                starts.append((start, row))
                sums = Interval(0, LANES * len(own)).shift(self._count)
                self._sums_of[shard.variable] = sums
                self._count = sums.stop
            starts = starts[:1] if is_global else starts
            runs.append((run.dtype, self._on_gpu(strips), Interval(first, self._count)))
            update = update_kernel(norms.passes[-1].kernel, run.dtype, True)
            self._updates.append((update, self._on_gpu(starts), len(starts)))
        found = self._xp.zeros(self._rows * sum([len(each.are_global) for each in norms.passes]))
        self._passes = [
            self._prepare(k, norms, runs, found, is_split) for k in range(len(norms.passes) - 1)
        ]

    def _on_gpu(self, rows: Sequence[Sequence[int]]) -> Array:
        return self._xp.asarray(np.array(rows, np.int64).reshape(-1))

    def _prepare(
        self,
        k: int,
        norms: Norms,
        runs: Sequence[tuple[np.dtype[Any], Array, Interval]],
        found: Array,
        is_split: bool,
    ) -> Callable[..., tuple[Array]]:
        """Pass `k`, which adds its norms to those that were `found`.

        It takes its constants, the numbers that are given to its code, the operands, and `add_up`.
        It returns the constants of the next kernel.
        """
        xp, rows, are_global = self._xp, self._rows, norms.passes[k].are_global
        terms, columns = len(are_global), found.size // rows
        of_groups, of_variables, of_rows = self._tables(are_global, is_split)
        groups, to_variables, table = map(self._on_gpu, (of_groups, of_variables, of_rows))
        sums, few = xp.zeros(self._count * terms), xp.zeros(len(of_groups) * terms)
        # What the ranks add up has as many columns in every pass.
        width = norms.most if is_split else terms
        summed = xp.zeros((len(of_variables), width))
        numbers = xp.zeros(rows * len(norms.passes[k + 1].kernel.constants))
        squares = [
            (
                squares_kernel(norms.passes[k].kernel, dtype, has_rows=k > 0),
                strips,
                sums[of_run.scale(terms).slice],
                of_run.size,
            )
            for dtype, strips, of_run in runs
        ]
        add, flat = add_kernel(), summed.reshape(-1)
        done = sum([len(each.are_global) for each in norms.passes[:k]])
        compute = numbers_kernel(norms.passes[k + 1].code, done, terms, len(norms.given[k + 1]))

        def run(
            constants: Sequence[Any],
            given: Sequence[float],
            operands: Operands,
            add_up: Callable[[Array], Array] | None,
        ) -> tuple[Array]:
            for (square, *of_run, threads), (gradient, value, slots) in zip(
                squares, operands, strict=True
            ):
                square(gradient, *constants, value, *slots, *of_run, size=threads)
            add(sums, groups, terms, terms, few, size=few.size)
            total = few
            if add_up is not None:
                add(few, to_variables, terms, width, flat, size=len(of_variables) * terms)
                total = add_up(summed).reshape(-1)
            compute(total, table, width, columns, *given, found, numbers, size=rows)
            return (numbers,)

        return run

    def _tables(self, are_global: tuple[bool, ...], is_split: bool) -> tuple[_Table, ...]:
        """How sums are added up: to fewer; these to each variable's; to the norms of each row."""
        variables, groups, fewer = self._sums_of, [], list[Interval]()
        if all(are_global):
            variables = [Interval(0, self._count), *[Interval(0, 0)] * (len(variables) - 1)]
        for sums in variables:
            # As many threads as each of them adds up, so that both steps take equally long.
            step = math.isqrt(max(sums.size - 1, 0)) + 1 if sums else 0
            fewer.append(Interval(len(groups), len(groups) + step))
            groups += [(sums.start + k, sums.stop, step) for k in range(step)]
        parts = [Interval(k, k + 1) for k in range(len(fewer))] if is_split else fewer
        whole = Interval(0, parts[-1].stop)
        table = [
            whole if is_global else parts[row]
            for row in range(self._rows)
            for is_global in are_global
        ]
        return groups, [(*some, 1) for some in fewer], table

    def run(
        self, norms: Norms, operands: Operands, add_up: Callable[[Array], Array] | None
    ) -> None:
        """Makes the update of a rule with these norms, of which only numbers may be others."""
        constants: tuple[Any, ...]
        constants, *given_later = norms.given
        for run, given in zip(self._passes, given_later, strict=True):
            constants = run(constants, given, operands, add_up)
        for (update, *rows), (gradient, value, slots) in zip(self._updates, operands, strict=True):
            update(gradient, *constants, *rows, value, *slots)


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard]) -> None:
        self._chunks = chunks
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
            self._gradients, messages, functools.partial(gradients_of, self._chunks)
        )
        operands = [
            (gradient, value, slots)
            for (_, value, slots), (gradient,) in zip(self._chunks, gradients, strict=True)
        ]
        if rule.norms is None:
            for gradient, value, slots in operands:
                apply_on_gpu(rule, value, gradient, slots)
            return
        # All but the numbers that change from step to step.
        key = rule.norms.passes
        if key not in self._norms:
            is_split = add_up is not None
            self._norms[key] = DeviceNorms(self._chunks, self._shards, rule.norms, is_split)
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
    update_kernel(rule.kernel, value.dtype)(gradient, *rule.kernel_constants, value, *slots)
