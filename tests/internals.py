"""The package's private names that tests use because no public name reaches them."""

from hpcstrat import _run as launcher
from hpcstrat._agreement import mismatch, records
from hpcstrat._core import cublas, device_names, gpu, graph, nests
from hpcstrat._core.atomic_file import replacing
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.public_names import INSTEAD
from hpcstrat._core.ranks_in_words import join_by_rank, ranks_in_words
from hpcstrat._core.types import select
from hpcstrat._memory import host_limits, layout, packing, shared_file, slabs
from hpcstrat._memory.intervals import ByteRange, ElementRange
from hpcstrat._memory.shards import Shard, runs
from hpcstrat._process import (
    blas_threads,
    failure,
    heap,
    launchers,
    mpi_library,
    output,
    reports,
    segments,
    worlds,
)
from hpcstrat._replicas.group import Workers
from hpcstrat._storage.gpu_plan import GpuPlan
from hpcstrat._strategies import function
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.mirrored import make_mirrored_group
from hpcstrat._strategies.placement import Facts, decide
from hpcstrat._transports import barrier, hosts, mailboxes, nccl_start
from hpcstrat._transports.connection import connect
from hpcstrat._transports.reduction import CHUNK, reduce_in_chunks
from hpcstrat._update import compiled, device_update, graph_numbers, rows
from hpcstrat._watchdog import channels, watchdog
from hpcstrat.checkpoint._format import (
    CHECKSUM_BYTES,
    CheckpointFile,
    Entry,
    Header,
    checksum,
    write_file,
)
from hpcstrat.checkpoint._restoring import own_value
from hpcstrat.data import _elements
from hpcstrat.data._distributing import distribute_dataset, distribute_from_function
from hpcstrat.torch import _all_reduce as all_reduce_gradients
