"""Who has a hand in making a variable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy.typing as npt

from hpcstrat._variable_values import VariableAggregation, VariableSynchronization

_creators: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar("hpcstrat_variable_creators", default=())


@contextmanager
def variable_creator_scope(variable_creator: Callable[..., Any]) -> Iterator[None]:
    """Inside, every variable is made by `variable_creator(next_creator, **kwargs)`.

    `next_creator(**kwargs)` makes it; the innermost scope is asked first. `kwargs` are the arguments of `Variable`.
    """
    token = _creators.set((*_creators.get(), variable_creator))
    try:
        yield
    finally:
        _creators.reset(token)


class VariableType(type):
    """Lets the creators of `variable_creator_scope` have a hand in `Variable(...)`."""

    def __call__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> Any:
        make: Callable[..., Any] = super().__call__
        for creator in _creators.get():
            make = functools.partial(creator, make)
        return make(
            initial_value=initial_value,
            trainable=trainable,
            name=name,
            dtype=dtype,
            synchronization=synchronization,
            aggregation=aggregation,
            shape=shape,
        )
