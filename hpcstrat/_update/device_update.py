"""Updates on a GPU, on the current stream: a kernel per run of elements, and passes for norms.

DeviceUpdate  an update; if its rule takes norms, it is made by
DeviceNorms   the passes that find the norms, and then the update

For norms, squares are added up in stages. Here a and b are in one run, and c is in another:

    elements            |       20,000 of a      |  | 9 of b |  | 10,000 of c |
    strips              |  8192  |  8192  | 3616 |  |    9   |  | 8192 | 1808 |
    sums of strips      |   256  |   256  |  256 |  |   256  |  |  256 |  256 |
    sums of variables   |           256          |  |   256  |  |     256     |
    norms               |            1           |  |    1   |  |      1      |

The 256 threads of a strip take every 256th element (`squares_kernel`). Each of these sums is added
up over the strips of a variable and, for norms over all variables, over all strips (`add_kernel`).
Then, if ranks have shards of variables, their sums are added up; and last the 256 that are left
(`norms_kernel`). The order is always the same: ranks with the same elements have the same sums, bit
for bit. What ranks exchange is an array by row, thread and term, here with 2 terms:

    norms             rows             shape
    all global        all              (1, 256, 2)
    none global       a, b, c          (3, 1, 2)     the threads' sums are added up before
    one of each       all, a, b, c     (4, 1, 2)
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Array
from hpcstrat._memory.allocator import ALIGNMENT
from hpcstrat._memory.intervals import Shard, divide_up, round_up
from hpcstrat._update.device_kernels import (
    THREADS,
    add_kernel,
    norms_kernel,
    squares_kernel,
    update_kernel,
)
from hpcstrat._update.passes import Pass
from hpcstrat._update.rule import Norms, UpdateRule
from hpcstrat._update.update import (
    AddUp,
    KeptByMessage,
    Run,
    Update,
    gradients_of,
)

Operands: TypeAlias = "Sequence[tuple[Array, ...]]"
"""Of each run of variables the gradient, the value and the slots."""
STRIP = 32 * THREADS
"""Elements of a strip; more if there would be more than `MOST_STRIPS`."""
MOST_STRIPS = 512
"""The most strips, except for one more of each variable. More threads would not read faster, and a
thread of `add_kernel` adds up a sum of each strip."""


class RunStrips(NamedTuple):
    """The strips of a run; each is some elements of one variable.

    The run of a and b in the picture, if they are of float32, has

        first   0
        starts  0,    8192,  16384, 20032
        stops   8192, 16384, 20000, 20041
        owners  0 (313 times), 1

    Attributes:
        first: the number of its first strip, counted over all runs.
        starts: the first element of each strip, counted in the run.
        stops: the element after the last of each strip.
        owners: for each 256 bytes of the run, the variable whose elements they are.
    """

    first: int
    starts: Array
    stops: Array
    owners: Array


def strip_size(shards: Sequence[Shard]) -> int:
    """The elements of a strip of full length, which are a multiple of 256 bytes."""
    count = sum([shard.elements.size for shard in shards])
    return round_up(max(STRIP, divide_up(count, MOST_STRIPS)), THREADS)


def strips_of_runs(runs: Sequence[Shard], shards: Sequence[Shard], size: int) -> list[RunStrips]:
    """The strips of each run, in NumPy arrays.

    Args:
        runs: all runs of the shards, in their order.
        shards: this rank's part of each variable, in the order of the message.
        size: the elements of a strip of full length.
    """
    found: list[RunStrips] = []
    first = 0
    rest = collections.deque(shard for shard in shards if shard.elements)
    for run in runs:
        strips: list[Shard] = []
        while rest and run.message & rest[0].message:
            strips += rest.popleft().split(size)
        variables = np.array([strip.variable for strip in strips], np.int32)
        # Bytes, counted in the run.
        starts = np.array([strip.message.start for strip in strips], np.int64) - run.message.start
        stops = np.array([strip.message.stop for strip in strips], np.int64) - run.message.start
        # Each strip starts at the next multiple of 256 bytes after the one before.
        owners = np.repeat(variables, -(-(stops - starts) // ALIGNMENT))
        assert owners.size == divide_up(run.message.size, ALIGNMENT)
        itemsize = run.dtype.itemsize
        found.append(RunStrips(first, starts // itemsize, stops // itemsize, owners))
        first += len(strips)
    return found


def strips_of_variables(shards: Sequence[Shard], size: int) -> tuple[Array, Array]:
    """The numbers of the strips of all variables together, and then of each.

    Returns:
        The first ones, and those after the last, in NumPy arrays: in the picture 0, 0, 3, 4 and
        6, 3, 4, 6.
    """
    counts = [divide_up(shard.elements.size, size) for shard in shards]
    ends = np.cumsum([0, *counts])
    return np.append(0, ends[:-1]), np.append(ends[-1], ends[1:])


class NormsPass(NamedTuple):
    """A pass that finds norms: its kernels, in the order in which they run, and what they write.

    Attributes:
        are_global: see `Pass`.
        squares: the kernel of each run that writes `sums_of_strips`.
        add: the kernel that writes `sums`.
        compute: the kernel that writes `norms` and `numbers`.
        strips: of each row of `sums`, the number of the first strip, and that after the last.
        sums_of_strips: by strip, thread and term.
        sums: by row, thread and term. A row is a variable, except if all norms are global; the
            first is all variables together, if any norm is.
        norms: of the passes before and then of this one, each by variable.
        numbers: the constants of the next pass, by variable.
    """

    are_global: tuple[bool, ...]
    squares: list[Any]
    add: Any
    compute: Any
    strips: list[Array]
    sums_of_strips: Array
    sums: Array
    norms: list[Array]
    numbers: Array


class DeviceNorms:
    """An update that depends on norms of some variables.

    Args:
        runs: the runs of the variables.
        shards: this rank's part of each variable, in the order of the message.
        norms: the norms, with any numbers.
    """

    def __init__(self, runs: Sequence[Run], shards: Sequence[Shard], norms: Norms) -> None:
        xp = gpu.load_cupy("an update")
        size, variables = strip_size(shards), len(shards)
        self._strips = [
            RunStrips(first, *map(xp.asarray, arrays))
            for first, *arrays in strips_of_runs([run.shard for run in runs], shards, size)
        ]
        strips_of_rows = [*map(xp.asarray, strips_of_variables(shards, size))]
        strips = sum([run.starts.size for run in self._strips])
        dtypes = [run.shard.dtype for run in runs]
        self._passes: list[NormsPass] = []
        found: list[Array] = []
        for k, (one, after) in enumerate(itertools.pairwise(norms.passes)):
            terms, given = len(one.are_global), len(norms.given[k + 1])
            compute = norms_kernel(len(found), one.are_global, after.code, given)
            rows = slice(not any(one.are_global), 1 if all(one.are_global) else None)
            of_rows = [numbers[rows] for numbers in strips_of_rows]
            found = [*found, *[xp.zeros(variables) for _ in range(terms)]]
            self._passes.append(
                NormsPass(
                    are_global=one.are_global,
                    squares=[squares_kernel(one.kernel, dtype, k > 0) for dtype in dtypes],
                    add=add_kernel(terms),
                    compute=compute,
                    strips=of_rows,
                    sums_of_strips=xp.zeros((strips, THREADS, terms)),
                    sums=xp.zeros((len(of_rows[0]), THREADS, terms)),
                    norms=found,
                    numbers=xp.zeros((variables, len(after.kernel.constants))),
                )
            )
        last = norms.passes[-1].kernel
        self._updates = [update_kernel(last, dtype, by_variable=True) for dtype in dtypes]

    def prepare(self, norms: Norms, runs: Sequence[Run], add_up: AddUp | None) -> None:
        """See `Update.prepare`. It finds the norms of other gradients."""
        operands = [(run.value, run.value, *run.slots) for run in runs]
        self.run(norms, operands, add_up, changes=False)
        numbers = self._passes[-1].numbers
        for update, arrays, strips in zip(self._updates, operands, self._strips, strict=True):
            update(numbers, strips.owners, *[array[:1].copy() for array in arrays])

    def run(
        self, norms: Norms, operands: Operands, add_up: AddUp | None, changes: bool = True
    ) -> None:
        """Makes the update of a rule with these norms, of which only numbers may be others.

        Args:
            norms: the norms.
            operands: the variables.
            add_up: see `Update.run`.
            changes: whether it changes the variables, and not only finds the norms.
        """
        constants: list[tuple[Any, ...]] = [norms.given[0]] * len(operands)  # of each run
        for one, given in zip(self._passes, norms.given[1:], strict=True):
            for squares, own, arrays, strips in zip(
                one.squares, constants, operands, self._strips, strict=True
            ):
                place = strips.starts, strips.stops, strips.first
                threads = THREADS * strips.starts.size
                squares(*own, *arrays, *place, one.sums_of_strips, size=threads)
            sums = one.sums
            one.add(one.sums_of_strips, *one.strips, sums, size=sums.size)
            if add_up is not None:
                # Not the sums of all threads and variables: those are many bytes to exchange.
                own = sums if all(one.are_global) else sums.sum(axis=1, keepdims=True)
                sums = add_up(own, one.are_global)
            one.compute(sums, sums.shape[1], *given, *one.norms, one.numbers)
            constants = [(one.numbers, strips.owners) for strips in self._strips]
        if not changes:
            return
        for update, own, arrays in zip(self._updates, constants, operands, strict=True):
            update(*own, *arrays)


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients.

    Args:
        runs: the runs of the shards.
        shards: this rank's part of each variable, in the order of the message.
    """

    def __init__(self, runs: Sequence[Run], shards: Sequence[Shard]) -> None:
        self._runs = runs
        self._shards = shards
        self._operands = KeptByMessage(functools.partial(_operands_in, runs))
        self._norms_by_passes: dict[tuple[Pass, ...], DeviceNorms] = {}

    def forget_messages(self) -> None:
        """See `Update.forget_messages`."""
        self._operands.clear()

    def prepare(self, rule: UpdateRule, add_up: AddUp | None = None) -> None:
        """See `Update.prepare`."""
        for dtype, run in {run.shard.dtype: run for run in self._runs}.items():
            prepare_on_gpu(rule, dtype, len(run.slots))
        if rule.norms is not None:
            made = DeviceNorms(self._runs, self._shards, rule.norms)
            made.prepare(rule.norms, self._runs, add_up)
            self._norms_by_passes[rule.norms.passes] = made

    def run(self, rule: UpdateRule, messages: Sequence[Array], add_up: AddUp | None = None) -> None:
        """See `Update.run`."""
        operands = self._operands.of(messages)
        if rule.norms is None:
            for gradient, value, *slots in operands:
                apply_on_gpu(rule, value, gradient, slots)
            return
        self._norms_by_passes[rule.norms.passes].run(rule.norms, operands, add_up)


def add_up_with_gpus(
    sums: Array, are_global: tuple[bool, ...], add_up: Callable[[Array], Array]
) -> Array:
    """`AddUp` on a host, where other ranks exchange what a GPU has.

    Args:
        sums: in NumPy, by variable and norm.
        are_global: see `AddUp`.
        add_up: adds up an array of the shape that ranks exchange.
    """
    by_variable = sums[:, np.newaxis]
    of_all = by_variable.sum(axis=0, keepdims=True)
    if all(are_global):
        own = np.pad(of_all, ((0, 0), (0, THREADS - 1), (0, 0)))  # as if one thread had added up
    else:
        own = np.concatenate([*[of_all] * any(are_global), by_variable])
    # The sums of all variables are in the only row, or those of the others add up to them.
    rows = add_up(own).sum(axis=1)[-len(sums) :]
    added = np.zeros_like(sums)
    added[: len(rows)] = rows
    return added


def _operands_in(runs: Sequence[Run], messages: Sequence[Array]) -> Operands:
    return [
        (gradient, run.value, *run.slots)
        for run, (gradient,) in zip(runs, gradients_of(runs, messages), strict=True)
    ]


def prepare_on_gpu(rule: UpdateRule, dtype: np.dtype[Any], slots: int) -> None:
    """Checks that a rule can update variables of a dtype, and compiles its kernel.

    Those of a rule with norms are only checked.

    Raises:
        TypeError: the rule needs real numbers.
    """
    kernels = [rule.kernel] if rule.norms is None else [one.kernel for one in rule.norms.passes]
    names = {name for kernel in kernels if kernel for name in kernel.of_reals}
    if names and dtype.kind == "c":
        functions = ", ".join([f"numpy.{name}" for name in sorted(names)])
        clips = " with clipvalue" * ("clipvalue" in rule.constants)
        raise TypeError(
            f"{current_call()}: the update{clips} takes {functions} of elements, and a variable is "
            f"of {dtype.name}, which has no order on a GPU. Make its real and imaginary parts two "
            "variables, or take an optimizer and options that only add, multiply, divide and take "
            "roots, such as Adam without clipvalue"
        )
    if rule.kernel is not None and rule.norms is None:
        xp = gpu.load_cupy("an update")
        value, gradient, *states = xp.zeros((2 + slots, 1), dtype)
        apply_on_gpu(rule, value, gradient, states)


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
