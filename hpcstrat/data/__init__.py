"""Input pipelines: datasets, and how they are distributed over replicas."""

import typing as _typing

from hpcstrat._core.public_names import getattr_of as _getattr_of
from hpcstrat._core.types import RunOptions as RunOptions
from hpcstrat._core.types import ValueContext as ValueContext
from hpcstrat.data._arguments import AUTOTUNE as AUTOTUNE
from hpcstrat.data._arguments import AutoShardPolicy as AutoShardPolicy
from hpcstrat.data._arguments import InputContext as InputContext
from hpcstrat.data._arguments import InputOptions as InputOptions
from hpcstrat.data._arguments import InputReplicationMode as InputReplicationMode
from hpcstrat.data._arguments import Options as Options
from hpcstrat.data._dataset import Dataset as Dataset
from hpcstrat.data._distributed import DistributedDataset as DistributedDataset
from hpcstrat.data._distributed import DistributedIterator as DistributedIterator
from hpcstrat.data._iterators import Optional as Optional
from hpcstrat.data._node import INFINITE as INFINITE_CARDINALITY
from hpcstrat.data._node import UNKNOWN as UNKNOWN_CARDINALITY

if not _typing.TYPE_CHECKING:  # type checkers would take every name for one of these
    __getattr__ = _getattr_of(
        __name__, [], {"assert_cardinality": "assert sum(1 for _ in dataset) == n"}
    )

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "Options",
    "RunOptions",
    "ValueContext",
]
