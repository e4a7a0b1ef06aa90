"""Input pipelines: datasets, and how they are distributed over replicas."""

from hpcstrat._core.types import RunOptions as RunOptions
from hpcstrat._core.types import ValueContext as ValueContext
from hpcstrat.data._arguments import AUTOTUNE as AUTOTUNE
from hpcstrat.data._arguments import AutoShardPolicy as AutoShardPolicy
from hpcstrat.data._arguments import InputContext as InputContext
from hpcstrat.data._arguments import InputOptions as InputOptions
from hpcstrat.data._arguments import InputReplicationMode as InputReplicationMode
from hpcstrat.data._arguments import Options as Options
from hpcstrat.data._dataset import Dataset as Dataset
from hpcstrat.data._dataset import assert_cardinality as assert_cardinality
from hpcstrat.data._distributed import DistributedDataset as DistributedDataset
from hpcstrat.data._distributed import DistributedIterator as DistributedIterator
from hpcstrat.data._elements import DatasetSpec as DatasetSpec
from hpcstrat.data._node import INFINITE as INFINITE_CARDINALITY
from hpcstrat.data._node import UNKNOWN as UNKNOWN_CARDINALITY
from hpcstrat.data._resuming import Optional as Optional

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "Optional",
    "Options",
    "RunOptions",
    "ValueContext",
    "assert_cardinality",
]
