"""Norms on a GPU, by sums in a fixed order, and updates that depend on them; the host never waits.

A pass is three kernels. 32 threads add up the squares of each strip of a variable, and leave as
many sums; fewer threads add up these; and one thread per variable adds up the rest, and computes
the numbers of the next kernel, which reads them from memory. Gaps between variables are in no
strip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import Interval, Shard
from hpcstrat._update.device_kernels import LANES, squares_kernel, update_kernel
from hpcstrat._update.rule import Kernel, Norms, UpdateRule
from hpcstrat._update.update import Chunk

STRIP = 256 * LANES
"""The most elements of a strip."""

Operands: TypeAlias = "Sequence[tuple[Array, Array, Sequence[Array]]]"
"""Of each run of variables the gradient, the value and the slots."""

_ADD = """
const ptrdiff_t place = i / terms, term = i % terms;
double sum = 0;
for (ptrdiff_t k = table[3 * place]; k < table[3 * place + 1]; k += table[3 * place + 2])
    sum += sums[k * terms + term];
out[place * width + term] = sum;
"""
_NORM = """
double square_{term} = 0;
for (ptrdiff_t k = table[{at}]; k < table[{at} + 1]; ++k)
    square_{term} += sums[k * width + {term}];
const double norm_{norm} = sqrt(square_{term});
norms[i * columns + {norm}] = norm_{norm};
"""


class _Run(NamedTuple):
    """What kernels take of a run of variables."""

    strips: Array  # of each strip the first element, the last, and the row of its numbers
    starts: Array  # of each variable the first element, and the row of its numbers
    sums: Interval  # the sums that its threads leave


class DeviceNorms:
    """The norms of some variables, and the updates that depend on them.

    Args:
        chunks: the runs of the variables.
        shards: this rank's part of each variable.
        is_global: whether all norms are over all variables, which then have the same numbers.
    """

    def __init__(self, chunks: Sequence[Chunk], shards: Sequence[Shard], is_global: bool) -> None:
        self._xp = gpu.load_cupy("an update")
        self._rows = 1 if is_global else len(shards)
        self._memory: dict[str, Array] = {}
        self._runs: list[_Run] = []
        self._of_variables = [Interval(0, 0)] * len(shards)  # the sums of each variable
        self._count = 0
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
                self._of_variables[shard.variable] = sums
                self._count = sums.stop
            of_rows = starts[:1] if is_global else starts
            places = Interval(first, self._count)
            self._runs.append(_Run(self._table(strips), self._table(of_rows), places))
        # A function of the object would be kept for all objects.
        self._tables_of = functools.cache(self._make_tables)

    def _table(self, rows: Sequence[Sequence[int]]) -> Array:
        return self._xp.asarray(np.array(rows, np.int64).reshape(-1))

    def _make_tables(self, are_global: tuple[bool, ...]) -> tuple[Array, Array, Array, Array]:
        """How sums are added up: to fewer; these to each variable's; both to each row's norms."""
        variables, groups, fewer = self._of_variables, [], list[Interval]()
        if all(are_global):
            variables = [Interval(0, self._count), *[Interval(0, 0)] * (len(variables) - 1)]
        for sums in variables:
            # As many threads as each of them adds up, so that both steps take equally long.
            step = math.isqrt(max(sums.size - 1, 0)) + 1 if sums else 0
            fewer.append(Interval(len(groups), len(groups) + step))
            groups += [(sums.start + k, sums.stop, step) for k in range(step)]
        whole, rows = (0, len(groups)), range(self._rows)
        of_fewer = [whole if is_global else fewer[row] for row in rows for is_global in are_global]
        all_variables = (0, len(variables))
        of_variables = [
            all_variables if is_global else (row, row + 1)
            for row in rows
            for is_global in are_global
        ]
        return (
            self._table(groups),
            self._table([(*some, 1) for some in fewer]),
            self._table(of_fewer),
            self._table(of_variables),
        )

    def _array(self, name: str, size: int) -> Array:
        """Memory of float64, made once."""
        if name not in self._memory or self._memory[name].size < size:
            self._memory[name] = self._xp.zeros(size)
        return self._memory[name]

    def run(
        self, rule: UpdateRule, operands: Operands, add_up: Callable[[Array], Array] | None
    ) -> None:
        """Applies a rule that takes norms; see `Update.run`."""
        passes, last = passes_of(rule)
        rules = [*[norms.first for norms in passes], last]
        columns = sum(len(norms.are_global) for norms in passes)
        found = self._array("norms", self._rows * columns)
        numbers: Array | None = None
        done = 0
        for norms, this, following in zip(passes, rules, rules[1:], strict=False):
            terms, given = len(norms.are_global), norms.numbers.given()
            groups, of_variables, of_fewer, of_whole = self._tables_of(norms.are_global)
            sums = self._array("sums", self._count * terms)
            for run, (gradient, value, slots) in zip(self._runs, operands, strict=True):
                square = squares_kernel(kernel_in(this), value.dtype, numbers is not None)
                constants = this.kernel_constants if numbers is None else (numbers,)
                out = sums[run.sums.scale(terms).slice]
                square(gradient, *constants, value, *slots, run.strips, out, size=run.sums.size)
            count = groups.size // 3
            fewer = self._array("fewer", count * terms)
            if count:
                add_kernel()(sums, groups, terms, terms, fewer, size=count * terms)
            width, table = terms, of_fewer
            if add_up is not None:
                width, table, count = norms.size, of_whole, len(self._of_variables)
                squares = self._array(f"squares of {width}", count * width)
                add_kernel()(fewer, of_variables, terms, width, squares, size=count * terms)
                fewer = add_up(squares.reshape(count, width)).reshape(-1)
            numbers = self._array("numbers", self._rows * len(kernel_in(following).constants) + 1)
            compute = numbers_kernel(norms.numbers.code, done, terms, len(given))
            compute(fewer, table, width, columns, *given, found, numbers, size=self._rows)
            done += terms
        for run, (gradient, value, slots) in zip(self._runs, operands, strict=True):
            update = update_kernel(kernel_in(last), value.dtype, True)
            update(gradient, numbers, run.starts, run.starts.size // 2, value, *slots)


def passes_of(rule: UpdateRule) -> tuple[list[Norms], UpdateRule]:
    """The passes for norms that a rule takes, and the update, without their numbers."""
    passes: list[Norms] = []
    while (norms := rule.norms) is not None:
        passes.append(norms)
        rule = norms.rule_with([1.0] * len(norms.are_global))
    return passes, rule


def kernel_in(rule: UpdateRule) -> Kernel:
    """The kernel of a rule that a formula made: only these take norms."""
    assert rule.kernel is not None
    return rule.kernel


@functools.cache
def add_kernel() -> Any:
    return gpu.load_cupy("an update").ElementwiseKernel(
        "raw float64 sums, raw int64 table, int64 terms, int64 width",
        "raw float64 out",
        _ADD,
        "hpcstrat_add",
        no_return=True,
    )


@functools.cache
def numbers_kernel(code: str, done: int, terms: int, given: int) -> Any:
    """The norms of a pass, after `done` earlier ones, and the numbers that depend on them."""
    numbers = [f"float64 given_{k}" for k in range(given)]
    earlier = [f"const double norm_{k} = norms[i * columns + {k}];" for k in range(done)]
    own = [
        _NORM.format(term=term, norm=done + term, at=f"2 * (i * {terms} + {term})")
        for term in range(terms)
    ]
    return gpu.load_cupy("an update").ElementwiseKernel(
        ", ".join(["raw float64 sums, raw int64 table, int64 width, int64 columns", *numbers]),
        "raw float64 norms, raw float64 numbers",
        "\n".join([*earlier, *own, code]),
        "hpcstrat_norms",
        no_return=True,
    )
