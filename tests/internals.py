"""The package's private names that tests use because no public name reaches them."""

from hpcstrat import _info as info
from hpcstrat import _program
from hpcstrat import _run as launcher
from hpcstrat._calls import mismatch, records
from hpcstrat._calls.collective import CallState
from hpcstrat._calls.records import (
    CallDescription,
    CallSignature,
    ManyValues,
    VariableId,
    signature_of,
)
from hpcstrat._communicators import host, nccl_collectives, nccl_start, rail, shared_memory
from hpcstrat._communicators import mpi as mpi_communicator
from hpcstrat._communicators.base import Outgoing
from hpcstrat._communicators.connection import connect, connect_devices
from hpcstrat._communicators.device import StagedCommunicator
from hpcstrat._communicators.hierarchical import HierarchicalCommunicator
from hpcstrat._communicators.host import SoloCommunicator
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.nccl import NcclCommunicator
from hpcstrat._communicators.nccl_start import load_nccl
from hpcstrat._communicators.point_to_point import PointToPoint
from hpcstrat._communicators.rail import Rail, halving_of, is_pairwise
from hpcstrat._communicators.reduction import (
    CHUNK,
    REDUCTIONS,
    Reduction,
    accumulator,
    check_reducible,
    combine_hosts,
    part_of_rank,
    reduce_by_hosts,
    reduce_chunk,
    reduce_in_chunks,
)
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core import cublas, device_names, gpu, nests
from hpcstrat._core.arrays import as_native, is_numeric
from hpcstrat._core.call_name import (
    call_named,
    current_call,
)
from hpcstrat._core.public_names import INSTEAD
from hpcstrat._core.ranks_in_words import (
    join_by_rank,
    list_by_rank,
    ranges_in_words,
    ranks_in_words,
)
from hpcstrat._core.types import select
from hpcstrat._core.user_frames import user_frame_of
from hpcstrat._memory import layout, segment
from hpcstrat._memory.allocator import (
    ALIGNMENT,
    Block,
    RangeAllocator,
    SlabAllocator,
    gpu_memory,
    private_memory,
)
from hpcstrat._memory.intervals import Interval, Shard, divide_up, merge, round_up, runs
from hpcstrat._memory.layout import Layout, PackKernel, layout_of
from hpcstrat._memory.segment import available_memory, make_private_segment, physical_memory
from hpcstrat._process import (
    blas_threads,
    failure,
    heap,
    launchers,
    mpi_library,
    output,
    pmi,
    reports,
    segments,
    settings,
    worlds,
)
from hpcstrat._process.launchers import Launcher, expand_tasks, find
from hpcstrat._replicas import contexts
from hpcstrat._replicas.group import ReplicaGroup, Workers
from hpcstrat._storage import base as storage
from hpcstrat._storage import device_plan, local, make_replica_storage, mirrored_host
from hpcstrat._storage.device import CentralDeviceStorage, MirroredDeviceStorage
from hpcstrat._storage.local import PART, host_parts
from hpcstrat._storage.mirrored_host import MirroredHostStorage
from hpcstrat._storage.order import MessageOrder
from hpcstrat._storage.plan import MessagePool, Plan
from hpcstrat._strategies import captured_step, reachable, step_graphs
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.reduce import _reduce_own
from hpcstrat._strategies.strategies import make_mirrored_group
from hpcstrat._update import compiled, device_update, rows
from hpcstrat._update.host_update import HostUpdate
from hpcstrat._variable.writing import explain_assign
from hpcstrat._watchdog import channels, watchdog
from hpcstrat._watchdog.channels import UNKNOWN, Link, MemberChannel, RankStatus, RootChannel
from hpcstrat._watchdog.stall_detector import SETTLING_SECONDS, StallDetector
from hpcstrat._watchdog.watchdog import Watchdog
from hpcstrat.checkpoint import _atomic_file
from hpcstrat.checkpoint._atomic_file import replacing
from hpcstrat.checkpoint._format import (
    CHECKSUM_BYTES,
    CheckpointFile,
    Entry,
    Header,
    checksum,
    extents_of,
    places_of,
)
from hpcstrat.checkpoint._new_file import NewFile, write_pieces, writer_to
from hpcstrat.checkpoint._objects import own_share
from hpcstrat.cluster_resolver._environment import expand_nodes
from hpcstrat.data import _elements
from hpcstrat.data._arguments import INSTEAD as DATA_INSTEAD
from hpcstrat.data._distributing import distribute_dataset, distribute_from_function
from hpcstrat.data._node import Transformation
from hpcstrat.optimizers._state import state_of_optimizer
from hpcstrat.torch import _all_reduce as all_reduce_gradients
