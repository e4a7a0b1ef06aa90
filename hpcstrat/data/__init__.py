"""Input pipelines: datasets, and how they are distributed over replicas."""

from hpcstrat._types import RunOptions as RunOptions
from hpcstrat._types import ValueContext as ValueContext
from hpcstrat.data._dataset import AUTOTUNE as AUTOTUNE
from hpcstrat.data._dataset import Dataset as Dataset
from hpcstrat.data._distributed import DistributedDataset as DistributedDataset
from hpcstrat.data._distributed import DistributedIterator as DistributedIterator
from hpcstrat.data._node import INFINITE as INFINITE_CARDINALITY
from hpcstrat.data._node import UNKNOWN as UNKNOWN_CARDINALITY
from hpcstrat.data._splitting import InputContext as InputContext
from hpcstrat.data._splitting import InputOptions as InputOptions
from hpcstrat.data._splitting import InputReplicationMode as InputReplicationMode

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "RunOptions",
    "ValueContext",
]
