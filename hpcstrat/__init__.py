"""The Strategy API of `tf.distribute` for NumPy and CuPy: `mpirun -n 4 python train.py`."""

import sys as _sys
import typing as _typing

from hpcstrat import checkpoint as checkpoint
from hpcstrat import compat as compat
from hpcstrat import data as data
from hpcstrat import losses as losses
from hpcstrat import metrics as metrics
from hpcstrat import optimizers as optimizers
from hpcstrat._core.public_names import INSTEAD as _INSTEAD
from hpcstrat._core.public_names import getattr_of as _getattr_of
from hpcstrat._core.public_names import show_as_public as _show_as_public
from hpcstrat._core.types import DistributedValues as DistributedValues
from hpcstrat._core.types import IndexedSlices as IndexedSlices
from hpcstrat._core.types import Mirrored as Mirrored
from hpcstrat._core.types import PerReplica as PerReplica
from hpcstrat._core.types import PerReplicaSpec as PerReplicaSpec
from hpcstrat._core.types import ReduceOp as ReduceOp
from hpcstrat._core.types import ReplicaMismatchError as ReplicaMismatchError
from hpcstrat._core.types import TensorSpec as TensorSpec
from hpcstrat._program import any_rank as any_rank
from hpcstrat._program import asnumpy as asnumpy
from hpcstrat._program import barrier as barrier
from hpcstrat._program import broadcast_object as broadcast_object
from hpcstrat._program import extend_timeout as extend_timeout
from hpcstrat._program import function as function
from hpcstrat._program import is_lead as is_lead
from hpcstrat._program import local_rank as local_rank
from hpcstrat._program import local_size as local_size
from hpcstrat._program import on_lead as on_lead
from hpcstrat._program import progress as progress
from hpcstrat._program import rank as rank
from hpcstrat._program import size as size
from hpcstrat._replicas.contexts import in_cross_replica_context as in_cross_replica_context
from hpcstrat._start import start as _start
from hpcstrat._strategies.base import Strategy as Strategy
from hpcstrat._strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from hpcstrat._strategies.current import get_replica_context as get_replica_context
from hpcstrat._strategies.current import get_strategy as get_strategy
from hpcstrat._strategies.current import has_strategy as has_strategy
from hpcstrat._strategies.current import replica_id as replica_id
from hpcstrat._strategies.extended import StrategyExtended as StrategyExtended
from hpcstrat._strategies.mirrored import MirroredStrategy as MirroredStrategy
from hpcstrat._strategies.mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from hpcstrat._strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from hpcstrat._strategies.replica_context import ReplicaContext as ReplicaContext
from hpcstrat._variable.options import VariableAggregation as VariableAggregation
from hpcstrat._variable.options import VariableSynchronization as VariableSynchronization
from hpcstrat._variable.variable import Variable as Variable
from hpcstrat.data import DistributedDataset as DistributedDataset
from hpcstrat.data import DistributedIterator as DistributedIterator
from hpcstrat.data import InputContext as InputContext
from hpcstrat.data import InputOptions as InputOptions
from hpcstrat.data import InputReplicationMode as InputReplicationMode
from hpcstrat.data import RunOptions as RunOptions
from hpcstrat.data import ValueContext as ValueContext

if _typing.TYPE_CHECKING:
    from hpcstrat import torch as torch
else:  # hidden from type checkers, which would take every name for one of hpcstrat's
    __getattr__ = _getattr_of(__name__, ["torch"], _INSTEAD)  # PyTorch takes long to import

__version__ = "0.1.0"

_show_as_public(
    *(checkpoint, data, losses, metrics, optimizers, compat.v1),
    _sys.modules[__name__],
)
_start()
