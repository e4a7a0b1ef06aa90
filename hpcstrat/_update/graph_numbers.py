"""The numbers of updates in a CUDA graph, such as learning rates, which change between launches."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._update.device_update import numbers_kernel
from hpcstrat._update.rule import UpdateRule

MOST_NUMBERS = 256
"""Numbers of all updates in a graph: a kernel takes them as parameters."""


class Steps(Protocol):
    """What an optimizer keeps: `iterations`, the number of steps done, and its slots."""

    iterations: int
    slots: Any


class RecordedUpdate(NamedTuple):
    """An update in a graph.

    Attributes:
        steps: of its optimizer.
        iterations: before the update that was recorded.
        next_rule: returns the rule of the next one.
        kind: the kernel of the rule, and how it clips.
    """

    steps: Steps
    iterations: int
    next_rule: Callable[[], UpdateRule]
    kind: tuple[Any, Any]


@final
class GraphNumbers:
    """The numbers of all updates in a graph, in the GPU's memory, where their kernels read them.

    Args:
        stream: of the graph.

    Attributes:
        updates: the updates, in order.
        computed: rules that `next` has computed, and no launch has used, with the optimizers' steps
            before them: a schedule is asked once in a step.
    """

    def __init__(self, stream: gpu.Stream) -> None:
        self._stream = stream
        self._memory: Array = stream.xp.empty(MOST_NUMBERS, np.float64)
        self._written: Sequence[float] = ()
        self.updates: list[RecordedUpdate] = []
        self._recorded: list[float] = []
        self._is_recording = False
        self.computed: list[tuple[Steps, int, UpdateRule]] = []

    # ---- while the function runs

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A block in which kernels get their numbers from the GPU's memory."""
        self.updates, self._recorded, self._is_recording = [], [], True
        try:
            yield
        finally:
            self._is_recording = False

    def rule_of(self, steps: Steps, next_rule: Callable[[], UpdateRule]) -> UpdateRule:
        """The rule of an optimizer's next step.

        Raises:
            RuntimeError: the stream captures, and there are too many numbers.
        """
        if self.computed and self.computed[0][:2] == (steps, steps.iterations):
            rule = self.computed.pop(0)[2]
        else:
            rule = next_rule()
        first, end = len(self._recorded), len(self._recorded) + len(rule.numbers)
        if end > MOST_NUMBERS:
            self._stream.refuse_in_graph(f"updates with more than {MOST_NUMBERS} numbers")
        if not self._is_recording or end > MOST_NUMBERS:
            return rule
        kind = rule.kernel, rule.clip
        self.updates.append(RecordedUpdate(steps, steps.iterations, next_rule, kind))
        self._recorded += rule.numbers
        if not self._stream.raw.is_capturing():
            self.write()
        # An array without dimensions is broadcast to a kernel's other operands.
        return rule._replace(numbers=tuple([self._memory[i] for i in range(first, end)]))

    def undo(self) -> None:
        """Leaves optimizers with the steps that they had before the recording."""
        for update in reversed(self.updates):
            update.steps.iterations = update.iterations

    # ---- before a launch, and after it

    def next(self) -> tuple[list[float], int] | None:
        """The numbers of the next launch, and a checksum of all on which the ranks must agree.

        `None` if an update has another kernel by now.
        """
        values, agreed = list[float](), list[float]()
        self.computed = []
        try:
            for steps, _, next_rule, kind in self.updates:
                rule = next_rule()
                self.computed.append((steps, steps.iterations, rule))
                steps.iterations += 1  # for the next update of this optimizer
                if (rule.kernel, rule.clip) != kind:
                    return None
                values += rule.numbers
                agreed += rule.agreed
        except Exception:  # a schedule's, for example: the function raises it, too
            return None
        finally:
            for steps, iterations, _ in reversed(self.computed):
                steps.iterations = iterations
        return values, zlib.crc32(np.array([*values, *agreed], np.float64).tobytes())

    def write(self, numbers: Sequence[float] | None = None) -> None:
        """Puts numbers into the GPU's memory on the stream; by default those that were recorded."""
        numbers = self._recorded if numbers is None else numbers
        if numbers and numbers != self._written:
            self._written = ()  # if it is interrupted
            numbers_kernel(len(numbers))(*numbers, self._memory, size=1)
            self._written = [*numbers]

    def count(self) -> None:
        """Counts the steps of a launch."""
        self.computed = []
        for update in self.updates:
            update.steps.iterations += 1
