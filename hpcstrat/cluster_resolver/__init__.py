"""The tasks of a job, and which task this process is; as `tf.distribute.cluster_resolver`."""

from hpcstrat.cluster_resolver._environment import SlurmClusterResolver as SlurmClusterResolver
from hpcstrat.cluster_resolver._environment import (
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from hpcstrat.cluster_resolver._resolver import ClusterResolver as ClusterResolver
from hpcstrat.cluster_resolver._resolver import ClusterSpec as ClusterSpec
from hpcstrat.cluster_resolver._resolver import MPIClusterResolver as MPIClusterResolver
from hpcstrat.cluster_resolver._resolver import SimpleClusterResolver as SimpleClusterResolver
from hpcstrat.cluster_resolver._resolver import UnionResolver as UnionResolver
