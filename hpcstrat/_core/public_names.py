"""Public names: how they show, and what to write instead of those of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

_IN_REPLICA = "in a replica function hs.get_replica_context()"
_NOTHING = "nothing: the first strategy starts MPI, and the end of the program ends it"
_REDUCE = f"strategy.reduce('SUM', value, axis=None), or {_IN_REPLICA}.all_reduce('SUM', value)"
_GATHER = f"strategy.gather(value, axis=0), or {_IN_REPLICA}.all_gather(value, axis=0)"
_BROADCAST = f"hs.broadcast_object(obj), or {_IN_REPLICA}.broadcast(value)"
_SCATTER = "strategy.scatter(array)"
_COMM = "hs.rank(), hs.size() and the methods of a strategy, or import MPI from mpi4py"
_MODULE = (
    "hs.torch.broadcast(module) once, and hs.torch.all_reduce_gradients('SUM', module) in each step"
)
_START_EQUAL = "nothing: variables start equal on all ranks; for PyTorch hs.torch.broadcast(module)"
_LOADER = "strategy.experimental_distribute_dataset(loader), which splits each batch"
_GRADIENT = "gradients as formulas, or take those of PyTorch or JAX: docs/interoperation.md"
_ARRAY = "np.array(values), or on a GPU strategy.xp.array(values)"
_COMMUNICATION = "nothing: a strategy chooses how its replicas communicate"
_STRATEGY = "hs.MirroredStrategy, hs.MultiWorkerMirroredStrategy or hs.CentralStorageStrategy"

INSTEAD = {
    # PyTorch
    "get_rank": "hs.rank()",
    "get_world_size": "hs.size()",
    "init_process_group": _NOTHING,
    "is_initialized": _NOTHING,
    "destroy_process_group": _NOTHING,
    "all_reduce": _REDUCE,
    "all_gather": _GATHER,
    "broadcast_object_list": _BROADCAST,
    "DistributedDataParallel": _MODULE,
    "DataParallel": _MODULE,
    "DistributedSampler": _LOADER,
    "DataLoader": _LOADER,
    "manual_seed": f"torch.manual_seed(seed + hs.rank()), or {_IN_REPLICA}.random_generator(seed)",
    "tensor": _ARRAY,
    "save": "hs.checkpoint.Checkpoint(w=w).save(path), or hs.on_lead(np.save, path, array)",
    "load": "hs.checkpoint.Checkpoint(w=w).restore(path), or np.load(path) on every rank",
    "nn": "models as formulas, or as modules of PyTorch with hs.torch",
    "optim": "hs.optimizers",
    # Horovod
    "init": _NOTHING,
    "shutdown": _NOTHING,
    "allreduce": _REDUCE,
    "allgather": _GATHER,
    "broadcast": _BROADCAST,
    "broadcast_parameters": _START_EQUAL,
    "broadcast_variables": _START_EQUAL,
    "DistributedOptimizer": f"hs.optimizers, which sum over the replicas; for PyTorch {_MODULE}",
    "DistributedGradientTape": _GRADIENT,
    # mpi4py
    "MPI": _COMM,
    "COMM_WORLD": _COMM,
    "Get_rank": "hs.rank()",
    "Get_size": "hs.size()",
    "reduce": _REDUCE,
    "Allreduce": _REDUCE,
    "gather": _GATHER,
    "Allgather": _GATHER,
    "bcast": _BROADCAST,
    "Bcast": _BROADCAST,
    "scatter": _SCATTER,
    "Scatter": _SCATTER,
    "Barrier": "hs.barrier()",
    # TensorFlow
    "GradientTape": _GRADIENT,
    "constant": _ARRAY,
    "distribute": "the names of tf.distribute on hs itself, such as hs.MirroredStrategy",
    "experimental": "its names on hs itself, such as hs.MultiWorkerMirroredStrategy",
    "keras": "hs.optimizers, hs.losses and hs.metrics",
    "train": "hs.checkpoint",
    "TPUStrategy": _STRATEGY,
    "ParameterServerStrategy": _STRATEGY,
    "CommunicationOptions": _COMMUNICATION,
    "CommunicationImplementation": _COMMUNICATION,
    "CrossDeviceOps": _COMMUNICATION,
    "ReductionToOneDevice": _COMMUNICATION,
    "HierarchicalCopyAllReduce": _COMMUNICATION,
    "NcclAllReduce": _COMMUNICATION,
}
"""By names that people type on `hpcstrat` from habit, what to write instead."""


def getattr_of(
    module: str, late: Sequence[str], instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A module's `__getattr__`.

    Args:
        module: the module's name.
        late: its modules that are imported when a program asks for them.
        instead: names that it lacks, and what to write instead.
    """

    def find(name: str) -> Any:
        if name in late:
            return importlib.import_module(f"{module}.{name}")
        if instead is not None and name in instead:
            # Without its name, from which Python would guess another attribute beside these words.
            raise AttributeError(
                f"{module}.{name} does not exist; write {instead[name]}", name=None, obj=None
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def show_as_public(*modules: ModuleType) -> None:
    """Gives what is exported the name of the first module that exports it.

    So `repr`, tracebacks and pickles have the name that programs write, `hpcstrat.Variable`, and
    not that of a private file.
    """
    for module in modules:
        for name, thing in vars(module).items():
            is_ours = isinstance(thing, (type, FunctionType)) and (
                thing.__module__.startswith("hpcstrat.") and "._" in thing.__module__
            )
            if is_ours and not name.startswith("_"):
                thing.__module__ = module.__name__
                thing.__name__ = thing.__qualname__ = name
