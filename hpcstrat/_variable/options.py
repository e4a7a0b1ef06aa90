"""Choices for a new variable: its synchronization and its aggregation."""

from __future__ import annotations

import enum

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
