"""The strategies with the methods of `tf.compat.v1.distribute`."""

from hpcstrat._core.types import ReduceOp as ReduceOp
from hpcstrat.compat.v1._strategies import CentralStorageStrategyV1 as CentralStorageStrategy
from hpcstrat.compat.v1._strategies import DistributedInputIterator as DistributedInputIterator
from hpcstrat.compat.v1._strategies import MirroredStrategyV1 as MirroredStrategy
from hpcstrat.compat.v1._strategies import OneDeviceStrategyV1 as OneDeviceStrategy
from hpcstrat.data import InputReplicationMode as InputReplicationMode

__all__ = [
    "CentralStorageStrategy",
    "DistributedInputIterator",
    "InputReplicationMode",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
]
