"""Updates on a GPU, on the current stream: a kernel per run of elements, and passes for norms.

DeviceUpdate  an update, by one kernel per run or, where the rule takes norms, with
DeviceNorms   what is prepared for a formula: passes for norms, and then that kernel

Squares are added up in stages. Here a and b are in one run, and c is in another:

    elements            |       20,000 of a      |  | 9 of b |  | 10,000 of c |
    strips              |  8192  |  8192  | 3616 |  |    9   |  | 8192 | 1808 |
    sums of strips      |   256  |   256  |  256 |  |   256  |  |  256 |  256 |
    sums of variables   |           256          |  |   256  |  |     256     |
    norms               |            1           |  |    1   |  |      1      |

The 256 threads of a strip take every 256th element (`squares_kernel`). Each of these sums is added
up over the strips of a variable and, for norms over all variables, over all strips (`add_kernel`).
Then the 256 that are left are added up (`norms_kernel`). No thread adds up many numbers, and ranks
with the same elements have the same sums, bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, ReduceOp
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
    NOTHING_IN_PLACE,
    InPlace,
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
"""Strips of full length. More threads would not read faster, but more sums take longer to add."""


class RunStrips(NamedTuple):
    """The strips of a run of variables, which are some elements of one variable each.

    Attributes:
        starts: the first element of each strip, counted in the run.
        stops: the element after the last of each strip.
        owners: for each 256 bytes of the run, the variable whose elements they are.
    """

    starts: Array
    stops: Array
    owners: Array


def strip_size(shards: Sequence[Shard]) -> int:
    """The elements of a strip of full length."""
    count = sum([shard.elements.size for shard in shards])
    return round_up(max(STRIP, divide_up(count, MOST_STRIPS)), THREADS)


def strips_in(run: Shard, shards: Sequence[Shard], size: int) -> RunStrips:
    """The strips of a run, in NumPy arrays.

    Args:
        run: the run.
        shards: this rank's part of each variable, in the order of the message.
        size: the elements of a strip of full length.
    """
    members = [shard for shard in shards if run.message & shard.message]
    strips = [strip for shard in members for strip in shard.split(size)]
    starts = np.array([strip.message.start for strip in strips], np.int64) - run.message.start
    stops = np.array([strip.message.stop for strip in strips], np.int64) - run.message.start
    # Each starts at the next multiple of 256 bytes after the one before.
    variables = np.array([strip.variable for strip in strips], np.int32)
    owners = np.repeat(variables, -(-(stops - starts) // ALIGNMENT))
    assert owners.size == divide_up(run.message.size, ALIGNMENT)
    return RunStrips(starts // run.dtype.itemsize, stops // run.dtype.itemsize, owners)


def strips_of(shards: Sequence[Shard], size: int) -> tuple[Array, Array]:
    """The strips of all variables together, and then those of each, counted over all runs.

    Returns:
        The first ones, and those after the last, in NumPy arrays.
    """
    counts = [divide_up(shard.elements.size, size) for shard in shards]
    ends = np.cumsum([0, *counts])
    return np.append(0, ends[:-1]), np.append(ends[-1], ends[1:])


class PassArrays(NamedTuple):
    """What the kernels of a pass for norms write, and what they take from passes before.

    Attributes:
        of_runs: for each run the sums of its strips, by strip, thread and term.
        of_strips: the same of all runs, in one array.
        of_variables: the sums of all variables and of each, by variable, thread and term.
        earlier: the norms of passes before, each by variable.
        norms: those of this pass.
        numbers: the constants of the next pass, by variable.
    """

    of_runs: list[Array]
    of_strips: Array
    of_variables: Array
    earlier: list[Array]
    norms: list[Array]
    numbers: Array


class DeviceNorms:
    """An update that depends on norms of some variables.

    Args:
        runs: the runs of the variables.
        shards: this rank's part of each variable, in the order of the message.
        passes: those of the update.
    """

    def __init__(
        self, runs: Sequence[Run], shards: Sequence[Shard], passes: Sequence[Pass]
    ) -> None:
        xp = gpu.load_cupy("an update")
        size = strip_size(shards)
        self._runs = [
            RunStrips(*map(xp.asarray, strips_in(run.shard, shards, size))) for run in runs
        ]
        self._strips_of = [*map(xp.asarray, strips_of(shards, size))]
        ends = [*itertools.accumulate([run.starts.size for run in self._runs], initial=0)]
        self._passes: list[PassArrays] = []
        earlier: list[Array] = []
        for one, after in itertools.pairwise(passes):
            terms = len(one.are_global)
            of_strips = xp.zeros((ends[-1], THREADS, terms))
            made = PassArrays(
                [of_strips[start:stop] for start, stop in itertools.pairwise(ends)],
                of_strips,
                xp.zeros((1 + len(shards), THREADS, terms)),
                earlier,
                [xp.zeros(len(shards)) for _ in range(terms)],
                xp.zeros((len(shards), len(after.kernel.constants))),
            )
            self._passes.append(made)
            earlier = [*earlier, *made.norms]

    def run(
        self, norms: Norms, operands: Operands, add_up: Callable[[Array], Array] | None
    ) -> None:
        """Makes the update of a rule with these passes.

        Args:
            norms: its norms.
            operands: the variables.
            add_up: see `Update.run`.
        """
        for k in range(len(self._passes)):
            self._find_norms(k, norms, operands, add_up)
        numbers = self._passes[-1].numbers
        for run, arrays in zip(self._runs, operands, strict=True):
            update = update_kernel(norms.passes[-1].kernel, arrays[0].dtype, by_variable=True)
            update(numbers, run.owners, *arrays)

    def _find_norms(
        self, k: int, norms: Norms, operands: Operands, add_up: Callable[[Array], Array] | None
    ) -> None:
        """Finds the norms of pass `k`, and the constants of the next."""
        (one, after), made = norms.passes[k : k + 2], self._passes[k]
        for run, arrays, sums in zip(self._runs, operands, made.of_runs, strict=True):
            constants = (self._passes[k - 1].numbers, run.owners) if k else norms.given[0]
            square = squares_kernel(one.kernel, arrays[0].dtype, by_variable=k > 0)
            square(*constants, *arrays, run.starts, run.stops, sums, size=len(sums) * THREADS)
        add, columns, sums = add_kernel(), THREADS * len(made.norms), made.of_variables
        add(made.of_strips, *self._strips_of, columns, sums, size=sums.size)
        if add_up is not None:
            # Not the sums of all threads, which would be 256 times as many bytes to exchange.
            sums = add_up(sums.sum(axis=1, keepdims=True))
        given = norms.given[k + 1]
        compute = norms_kernel(len(made.earlier), one.are_global, after.code, len(given))
        compute(sums, sums.shape[1], *given, *made.earlier, *made.norms, made.numbers)


@final
class DeviceUpdate(Update):
    """An update on a GPU, by the only message, which has the reduced gradients."""

    def __init__(self, runs: Sequence[Run], shards: Sequence[Shard]) -> None:
        self._runs = runs
        self._shards = shards
        self._gradients = KeptByMessage(functools.partial(gradients_of, runs))
        self._norms: dict[tuple[Pass, ...], DeviceNorms] = {}

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
        gradients = self._gradients.of(messages)
        operands = [
            (gradient, run.value, *run.slots)
            for run, (gradient,) in zip(self._runs, gradients, strict=True)
        ]
        if rule.norms is None:
            for gradient, value, *slots in operands:
                apply_on_gpu(rule, value, gradient, slots)
            return
        passes = rule.norms.passes
        if passes not in self._norms:
            self._norms[passes] = DeviceNorms(self._runs, self._shards, passes)
        self._norms[passes].run(rule.norms, operands, add_up)


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
