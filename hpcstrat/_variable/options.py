"""Choices for a new variable: its synchronization, its aggregation and its creators."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hpcstrat._core.types import FIRST_REPLICA, Aggregation, ReduceOp


class VariableSynchronization(enum.Enum):
    """When the replicas' writes to a variable are aggregated.

    Examples:
        `ON_READ` keeps a value per replica. The others keep one value, which each write changes:

        >>> with hs.MirroredStrategy().scope():
        ...     mean = hs.Variable(0.0, synchronization="ON_READ", aggregation="MEAN")
        ...     weight = hs.Variable(0.0)
        >>> mean.synchronization, weight.synchronization
        (<VariableSynchronization.ON_READ: 'ON_READ'>, <VariableSynchronization.AUTO: 'AUTO'>)
        >>> mean.trainable, weight.trainable
        (False, True)
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"


class VariableAggregation(enum.Enum):
    """How the values that replicas write to a variable are combined into one.

    Examples:
        When three replicas add 1, 2 and 4, `SUM` adds 7, `MEAN` 7 / 3 and `ONLY_FIRST_REPLICA` 1;
        `NONE` raises `ValueError`. The name of a member does as well:

        >>> hs.Variable(0.0, aggregation="MEAN").aggregation
        <VariableAggregation.MEAN: 'MEAN'>
    """

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
    "it has no aggregation, so the replicas' values cannot be combined; make it with "
    "aggregation='SUM', 'MEAN' or 'ONLY_FIRST_REPLICA'"
)
"""The end of the error where a variable without aggregation would have to combine values."""

# ---- creators

creators: ContextVar[tuple[Callable[..., Any], ...]] = ContextVar(
    "hpcstrat_variable_creators", default=()
)
"""The creators of all enclosing scopes, outermost first."""


@contextmanager
def variable_creator_scope(variable_creator: Callable[..., Any]) -> Iterator[None]:
    """A scope in which every variable is made by `variable_creator(next_creator, **kwargs)`.

    `next_creator(**kwargs)` makes the variable, or calls the creator of the next outer scope; the
    innermost creator is called first. `kwargs` are the arguments of `Variable`.

    Examples:
        >>> def in_model(next_creator, **kwargs):
        ...     return next_creator(**{**kwargs, "name": f"model/{kwargs['name']}"})
        >>> with hs.variable_creator_scope(in_model):
        ...     bias = hs.Variable(0.0, name="bias")
        >>> bias.name
        'model/bias'
    """
    token = creators.set((*creators.get(), variable_creator))
    try:
        yield
    finally:
        creators.reset(token)


# A metaclass, because programs call `Variable(...)`, and a creator may return any object.
class VariableType(type):
    """Passes `Variable(...)` through the creators of `variable_creator_scope`."""

    if not TYPE_CHECKING:  # type checkers take the signature of `__init__`

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            make, in_scope = super().__call__, creators.get()
            if not in_scope:
                return make(*args, **kwargs)
            given = cls.__signature__.bind(*args, **kwargs)
            given.apply_defaults()
            # Outermost first, so that the innermost creator wraps last and is called first.
            for creator in in_scope:
                make = functools.partial(creator, make)
            return make(**given.arguments)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of `__init__`; `inspect` would take those of `__call__` above."""
        return inspect.signature(functools.partial(cls.__init__, None))
