"""Input pipelines: datasets, and how they are distributed over replicas."""

from hpcstrat.data._node import INFINITE as INFINITE_CARDINALITY
from hpcstrat.data._node import UNKNOWN as UNKNOWN_CARDINALITY
from hpcstrat.data.dataset import AUTOTUNE as AUTOTUNE
from hpcstrat.data.dataset import Dataset as Dataset
from hpcstrat.data.distributed import DistributedDataset as DistributedDataset
from hpcstrat.data.distributed import DistributedIterator as DistributedIterator
from hpcstrat.data.options import InputContext as InputContext
from hpcstrat.data.options import InputOptions as InputOptions
from hpcstrat.data.options import InputReplicationMode as InputReplicationMode
from hpcstrat.data.options import RunOptions as RunOptions
from hpcstrat.data.options import ValueContext as ValueContext

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
