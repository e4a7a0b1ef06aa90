"""The package's private names that tests use, because they have no public face."""

from hpcstrat import (
    _context,
    _devices,
    _driver,
    _edge,
    _failure,
    _gpu,
    _guard,
    _job_memory,
    _launcher,
    _mpi,
    _nest,
    _output,
    _program,
    _settings,
    _world,
)
from hpcstrat._arrays import as_native, is_numeric
from hpcstrat._cli import check, info, inventory
from hpcstrat._cli.timeline import advise, timeline
from hpcstrat._cli.timeline_shares import KINDS, Rank, Timeline, TraceSpan, move_waiting, read, share_out, stretches
from hpcstrat._communicators import host, mismatch, nccl_link, nccl_start, packing, protocol, shared_memory
from hpcstrat._communicators.base import Outgoing
from hpcstrat._communicators.call_state import CallState
from hpcstrat._communicators.connection import connect, connect_devices
from hpcstrat._communicators.device import StagedCommunicator
from hpcstrat._communicators.hierarchical import HierarchicalCommunicator
from hpcstrat._communicators.host import SoloCommunicator
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.nccl import NcclCommunicator
from hpcstrat._communicators.nccl_start import load_nccl
from hpcstrat._communicators.packing import Layout, layout_of
from hpcstrat._communicators.protocol import (
    CallDescription,
    CallSignature,
    Listed,
    VariableId,
    signature_of,
)
from hpcstrat._communicators.reduction import (
    REDUCTIONS,
    Reduction,
    accumulator,
    check_reducible,
    reduce_chunk,
    reduce_flat,
    slice_of,
)
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._communicators.transports import STAGING
from hpcstrat._edge import call_named, current_call
from hpcstrat._group import ReplicaGroup, UpdatesOn, Workers
from hpcstrat._job_memory import State
from hpcstrat._launcher import Launcher, expand_tasks, find
from hpcstrat._memory import segment
from hpcstrat._memory.allocator import ALIGNMENT, RangeAllocator, SlabAllocator, gpu_memory, private_memory
from hpcstrat._memory.segment import available_memory, physical_memory, private_segment
from hpcstrat._run import leftovers, mpiexec, policy, restarts
from hpcstrat._run.mpiexec import LaunchError
from hpcstrat._spans import COMMUNICATION, RUN, UPDATE, WAITING
from hpcstrat._storage import base as storage
from hpcstrat._storage import compiled, library_cache, rows, rule
from hpcstrat._storage.base import PART, host_parts
from hpcstrat._storage.central_device import CentralDeviceStorage
from hpcstrat._storage.factory import replica_storage
from hpcstrat._storage.marks import Range, ranges_in
from hpcstrat._storage.mirrored_device import MirroredDeviceStorage
from hpcstrat._storage.plan import Plan
from hpcstrat._strategies.base import Strategy
from hpcstrat._strategies.mirrored import mirrored_group
from hpcstrat._strategies.reduction import _Inner
from hpcstrat._timeline import recorder, start
from hpcstrat._timeline.recorder import Recorder
from hpcstrat._timeline.spans import GpuSpans, Span, Spans
from hpcstrat._timeline.start import difference
from hpcstrat._timeline.trace import GPU_TRACKS, TraceFile, join_parts, part_name
from hpcstrat._values import select
from hpcstrat._watchdog import channels
from hpcstrat._watchdog.channels import SLOT, SharedMemoryChannel, StatusChannel
from hpcstrat._watchdog.rank_status import LIMIT, RankStatus, user_frame_of
from hpcstrat._watchdog.stall_detector import SETTLING_SECONDS, StallDetector
from hpcstrat._watchdog.watchdog import Watchdog
from hpcstrat.checkpoint import _atomic_file, _safetensors
from hpcstrat.checkpoint._new_file import NewFile
from hpcstrat.checkpoint._pieces import Piece, share_of, write_pieces
from hpcstrat.checkpoint._safetensors import CheckpointFile, Contents, Entry
from hpcstrat.checkpoint._snapshot import Checksum, SnapshotMemory
from hpcstrat.cluster_resolver._slurm import expand_nodes
from hpcstrat.data import _checksum, _element_ops, _node
from hpcstrat.data._distributed import check_sharding, distribute_dataset, distribute_from_function
from hpcstrat.data._sources import Slices
from hpcstrat.data._splitting import Step
from hpcstrat.metrics._counts import _count_classes
from hpcstrat.metrics._means import PairMean, _add_both, _add_values_of
from hpcstrat.metrics._thresholds import _count_exceeded
from hpcstrat.optimizers.base import state_of_optimizer
