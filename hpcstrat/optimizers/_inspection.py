"""OptimizerVariable: what an optimizer keeps between steps, for inspection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np

from hpcstrat._core.call_name import call_named
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import Block
from hpcstrat._variable.variable import Variable, state_of
from hpcstrat.optimizers._state import OptimizerState


@final
class OptimizerVariable:
    """An array or a number that an optimizer keeps, for inspection.

    Attributes:
        name: such as `Adam/m/w` for the slot `m` of the variable `w`.
        shape: the variable's shape.
        dtype: the variable's dtype.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        read: Callable[[], np.ndarray[Any, Any]],
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._read = read

    def __repr__(self) -> str:
        return f"OptimizerVariable({self.name!r}, shape={self.shape}, dtype={self.dtype.name})"

    def numpy(self) -> Any:
        """A copy on the host, the same on every rank. Collective: all ranks call this."""
        with call_named(f"{self.name}.numpy"):
            return self._read()


def list_variables(
    state: OptimizerState, name: str, rate: float, kinds: Sequence[str]
) -> list[OptimizerVariable]:
    """The number of steps, the learning rate, and the slots of all variables, kind by kind."""
    numbers = [("iterations", np.int64(state.iterations)), ("learning_rate", np.float64(rate))]
    scalars = [OptimizerVariable(f"{name}/{number}", (), n.dtype, n.copy) for number, n in numbers]
    pairs = [state.slots[id(v)] for v in state.variables() if id(v) in state.slots]
    return scalars + [
        OptimizerVariable(
            f"{name}/{kind}/{v.name}", v.shape, v.dtype, functools.partial(_read, v, blocks[i])
        )
        for i, kind in enumerate(kinds)
        for v, blocks in pairs
    ]


def _read(variable: Variable, block: Block) -> np.ndarray[Any, Any]:
    group = state_of(variable).group
    value = None
    if block.cuts is not None:
        return _join(variable, group.storage.all_parts(block))
    with group.communicator.raise_together():
        if group.communicator.rank == group.root:
            value = _join(variable, group.storage.local.parts(block))
    return group.communicator.broadcast_obj(value, group.root)


def _join(variable: Variable, parts: Iterable[Bytes]) -> np.ndarray[Any, Any]:
    joined = np.concatenate([np.empty(0, np.uint8), *[part.copy() for part in parts]])
    return joined.view(variable.dtype).reshape(variable.shape)
