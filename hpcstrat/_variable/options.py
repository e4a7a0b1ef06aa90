"""Choices for a new variable: synchronization, aggregation, and the creators that take part in making it."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hpcstrat._core.call_name import constructor_signature
from hpcstrat._core.types import FIRST_REPLICA, Aggregation, ReduceOp


class VariableSynchronization(enum.Enum):
    """When replicas' writes to a variable come together."""

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How the values that replicas write to a variable become one."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"


OPERATIONS: dict[VariableAggregation, Aggregation] = {
    VariableAggregation.SUM: ReduceOp.SUM,
    VariableAggregation.MEAN: ReduceOp.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA: FIRST_REPLICA,
}
"""The operation of each aggregation."""

NO_AGGREGATION = (
    "it has no aggregation, so the replicas' values do not become one; make it with "
    "aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA'"
)
"""What is wrong with a variable of aggregation `NONE` where replicas' values meet."""

# ---- creators

creators: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar(
    "hpcstrat_variable_creators", default=()
)
"""The creators of every scope that this line is in, from the outside in."""


@contextmanager
def variable_creator_scope(variable_creator: Callable[..., Any]) -> Iterator[None]:
    """Inside, every variable is made by `variable_creator(next_creator, **kwargs)`.

    `next_creator(**kwargs)` makes it; the innermost scope is asked first. `kwargs` are the
    arguments of `Variable`.
    """
    token = creators.set((*creators.get(), variable_creator))
    try:
        yield
    finally:
        creators.reset(token)


# A metaclass, because TensorFlow's programs call `Variable(...)`, which a creator may answer with
# any object.
class VariableType(type):
    """Passes `Variable(...)` through the creators of `variable_creator_scope`."""

    if not TYPE_CHECKING:  # to which a variable is made by its `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            make, asked = super().__call__, creators.get()
            if not asked:
                return make(*args, **kwargs)
            given = cls.__signature__.bind(*args, **kwargs)
            given.apply_defaults()
            # From the outside in, so the innermost scope wraps last and is asked first.
            for creator in asked:
                make = functools.partial(creator, make)
            return make(**given.arguments)

    @property
    def __signature__(cls) -> inspect.Signature:
        """See `constructor_signature`."""
        return constructor_signature(cls)
