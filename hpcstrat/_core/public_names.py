"""Public names: how they show, and what to write instead of those that people type from habit."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from types import FunctionType
from typing import Any

ONE_EACH = (
    "this is one value per replica; reduce it first: strategy.reduce('MEAN', value, axis=None), or "
    "look at all of them: strategy.experimental_local_results(value). A replica function is given "
    "its own: strategy.run(fn, args=(value,))"
)
"""Where a distributed value is used as a number or an array."""

_IN_RUN = "in a replica function hs.get_replica_context()"
_RANK = "write hs.rank()"
_REDUCE = f"write strategy.reduce('SUM', values, axis=None), or {_IN_RUN}.all_reduce('SUM', value)"
_GATHER = f"write strategy.gather(values, axis=0), or {_IN_RUN}.all_gather(value, axis=0)"
_BROADCAST = f"write hs.broadcast_object(obj), or {_IN_RUN}.broadcast(value)"
_SCATTER = "write strategy.scatter(array)"
_COMM = "a strategy and hs.rank(), hs.size() take its place; mpi4py's own is MPI.COMM_WORLD"
_WRAP = (
    "write hs.torch.broadcast(module) once, and hs.torch.all_reduce_gradients('SUM', module) in "
    "each step"
)
_SAVE = "write hs.checkpoint.Checkpoint(w=w).save(path), or np.save in hs.on_lead"
_LOAD = "write hs.checkpoint.Checkpoint(w=w).restore(path), or np.load on every rank"
_NO_TAPE = (
    "nothing records operations; compute gradients by a formula, or with PyTorch or JAX: "
    "docs/interoperation.md"
)
_SAVING = "Checkpoint(optimizer=optimizer) saves and restores what it keeps"
_PAD = "Dataset.padded_batch fills elements up to one shape"
_SKIPPED = "depend on all elements before them, so no replica could skip the elements of others"


def _parse(table: str) -> dict[str, dict[str, str]]:
    """By owner, at the margin, and by each word before a colon: the text after it, on one line."""
    tables: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    for line in table.replace("\n        ", " ").splitlines():
        words, _, text = line.strip().partition(": ")
        if line.startswith(" "):
            names |= dict.fromkeys(words.split(), text)
        else:
            names = tables[words] = {}
    return tables


INSTEAD = _parse(f"""\
hpcstrat
    get_rank Get_rank world_rank: {_RANK}
    get_world_size Get_size world_size: write hs.size()
    all_reduce allreduce Allreduce reduce grouped_allreduce: {_REDUCE}
    all_gather allgather Allgather gather: {_GATHER}
    broadcast bcast Bcast broadcast_object_list: {_BROADCAST}
    broadcast_parameters broadcast_variables broadcast_global_variables: leave it out, because
        variables start equal on all ranks; a PyTorch module by hs.torch.broadcast(module)
    scatter Scatter Scatterv: {_SCATTER}
    Barrier monitored_barrier: write hs.barrier()
    init init_process_group is_initialized shutdown destroy_process_group: leave it out, because the
        first strategy starts MPI and the end of the program ends it
    comm COMM_WORLD MPI: {_COMM}
    DistributedDataParallel DDP DataParallel: {_WRAP}
    DistributedOptimizer: the optimizers of hs.optimizers sum the replicas' gradients themselves;
        for PyTorch's {_WRAP}
    DistributedSampler DataLoader: strategy.experimental_distribute_dataset(loader) splits each
        batch over the replicas
    save: {_SAVE}
    load: {_LOAD}
    GradientTape DistributedGradientTape grad value_and_grad no_grad: {_NO_TAPE}
    tensor Tensor constant array: write np.array, or strategy.xp.array on a GPU
    TPUStrategy ParameterServerStrategy: write MirroredStrategy, MultiWorkerMirroredStrategy or
        CentralStorageStrategy
    distribute: hs itself has the names of tf.distribute
    optim: hs.optimizers has the optimizers
    nn: write a model as formulas, or as a module of PyTorch with hs.torch
    keras: hs.optimizers, hs.losses and hs.metrics have what there is of it
    train: hs.checkpoint has what there is of it
    manual_seed: write hs.torch.seed(seed), or random_generator(seed) of a replica context
hpcstrat.data
    at: write next(iter(dataset.skip(index)))
    get_structure: write dataset.element_spec
    FixedLengthRecordDataset: map the file with np.memmap, and pass that to
        Dataset.from_tensor_slices
    TFRecordDataset: protocol buffers need TensorFlow; write arrays with np.save once, and pass
        np.load(..., mmap_mode="r") to Dataset.from_tensor_slices
    TextLineDataset: pass a generator function, such as lambda: open(path), to
        Dataset.from_generator
    experimental: its tf.data.experimental counterparts are in hpcstrat.data itself
    DataLoader: write Dataset.from_tensor_slices((x, y)).shuffle(n).batch(size)
    TensorDataset: write Dataset.from_tensor_slices((x, y))
hpcstrat.losses
    MeanSquaredError MSE mse mean_squared_error MSELoss mse_loss: write squared_error(labels,
        predictions), which also returns the gradient
    SparseCategoricalCrossentropy sparse_categorical_crossentropy CategoricalCrossentropy
        categorical_crossentropy CrossEntropyLoss cross_entropy: write softmax_cross_entropy(labels,
        logits), which also returns the gradient
    BinaryCrossentropy binary_crossentropy BCEWithLogitsLoss: write sigmoid_cross_entropy(labels,
        logits), which also returns the gradient
    Huber: write huber(labels, predictions), which also returns the gradient
hpcstrat.metrics
    BinaryCrossentropy CategoricalCrossentropy CosineSimilarity F1Score FBetaScore Hinge
        KLDivergence LogCoshError MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson
        R2Score SparseCategoricalCrossentropy: MeanMetricWrapper makes a metric from a function of
        y_true and y_pred; others are ON_READ variables that sum
Metric
    update: write update_state(y_true, y_pred)
    compute: write result()
    reset: write reset_state()
hpcstrat.optimizers
    Adafactor: its second moments are means over rows and columns, and an update here sees one
        element at a time; use Adam, or the step `Factored` of docs/api/optimizers.md
    legacy experimental: hs.optimizers itself has the optimizers
    get: write the class, such as hs.optimizers.Adam()
    serialize: optimizer.get_config() returns the arguments
    deserialize: hs.optimizers.Adam.from_config(config) makes the optimizer
hpcstrat.checkpoint
    save: {_SAVE}
    load: {_LOAD}
    latest_checkpoint: CheckpointManager.restore_or_initialize restores the newest
Strategy
    rank local_rank replica_id: {_RANK}, or hs.replica_id() in a replica function
    size world_size num_replicas: write strategy.num_replicas_in_sync
    all_reduce allreduce Allreduce: {_REDUCE}
    all_gather allgather Allgather: {_GATHER}
    broadcast bcast Bcast: {_BROADCAST}
    barrier Barrier: write hs.barrier()
    comm: {_COMM}
    device devices: write strategy.extended.worker_devices
ReplicaContext
    size world_size: write context.num_replicas_in_sync
    replica_id: write context.rank
    reduce allreduce Allreduce: write context.all_reduce('SUM', value)
    gather allgather Allgather: write context.all_gather(value, axis=0)
    bcast Bcast: write context.broadcast(value)
    alltoall Alltoall Alltoallv: write context.all_to_all(values)
    scatter Scatter: {_SCATTER} before strategy.run
    exscan: write context.scan('SUM', value)
    barrier Barrier: write hs.barrier()
    send recv isend irecv sendrecv Send Recv Sendrecv: write context.neighbor_exchange(to_left,
        to_right), or context.all_to_all(values)
    comm: {_COMM}
Variable
    grad backward requires_grad requires_grad_: {_NO_TAPE}
    data detach: write w.value(), or w.numpy() for a copy on the host
    to cpu cuda: hs.asnumpy(w) is a copy on the host; the strategy decides where a variable is
    copy_ add_ sub_ zero_ fill_: write w.assign(value), or w.assign_add(value)
    count_up_to: write v.assign_add(1), and compare it with the limit
    initial_value: keep the array that you pass to Variable
    set_shape: a variable keeps the shape of its initial value
DistributedValues
    values shape dtype ndim size T numpy item tolist astype reshape sum mean std var max min argmax
        argmin any all dot flatten detach cpu: {ONE_EACH}
Dataset
    bucket_by_sequence_length: its batches {_SKIPPED}; sort by length before
        Dataset.from_tensor_slices, then Dataset.padded_batch and Dataset.shuffle
    from_sparse_tensor_slices: there are no sparse tensors; pass arrays to
        Dataset.from_tensor_slices
    group_by_window: its groups {_SKIPPED}; make the groups in a generator function, and pass it to
        Dataset.from_generator
    ignore_errors: an element that fails would be lost silently; catch the error in the function of
        Dataset.map, and drop such elements with Dataset.filter
    ragged_batch: there are no ragged tensors; {_PAD}
    random: write Dataset.range(n).map(lambda i: np.random.default_rng((seed, i)).random()), which
        is the same on any number of replicas
    rejection_resample: what it keeps depends on all elements before; draw with
        Dataset.sample_from_datasets from one dataset per class
    snapshot: write Dataset.cache(filename)
    sparse_batch: there are no sparse tensors; {_PAD}
    take_while: write Dataset.filter, or end a generator function and pass it to
        Dataset.from_generator
    unique: call np.unique before Dataset.from_tensor_slices
Optimizer
    step update: apply_gradients(zip(gradients, variables)) is one step
    zero_grad: leave it out, because each apply_gradients takes new gradients
    param_groups: learning_rate is an attribute; make one optimizer for each group of variables
    state_dict: hs.checkpoint.{_SAVING}, and get_config() returns its arguments
    load_state_dict set_weights: hs.checkpoint.{_SAVING}
    get_weights: write [v.numpy() for v in optimizer.variables]; hs.checkpoint.{_SAVING}
    weights: optimizer.variables lists what it keeps
    get_slot: optimizer.variables lists the slots, with names such as Adam/m/w
    compute_gradients: minimize(loss, variables) takes a function that returns the loss and its
        gradients, because no tape records them
    aggregate_gradients: apply_gradients sums over the replicas; to see the sums before, write
        hs.get_replica_context().all_reduce('SUM', gradients), and then apply_gradients(...,
        skip_gradients_aggregation=True)
    build: leave it out, because the first step makes the slots
    exclude_from_weight_decay: make a second optimizer without weight_decay for those variables
    add_variable add_variable_from_reference: the property `slots` of your own Optimizer has their
        names and initial values
    update_step: the `formula` of your own Optimizer updates an element
Checkpoint
    load read load_state_dict: write restore(path)
    write state_dict: write save(path)
CheckpointManager
    restore load: write restore_or_initialize()
    latest_checkpoint checkpoints: restore_or_initialize() restores the newest
""")
"""By the class or module that lacks the names."""

RENAMED: dict[str, dict[str, str]] = {
    "hpcstrat": {"agree": "any_rank", "patience": "extend_timeout"},
    "Strategy": {
        "experimental_run_v2": "run",
        "experimental_distribute_datasets_from_function": "distribute_datasets_from_function",
    },
}
"""Deprecated names, which work, warn and are not listed: by class or module, and the new name."""

ARGUMENTS = _parse(f"""\
Strategy.reduce
    'axis': axis=None reduces over the replicas, axis=0 over the elements of each as well
Strategy.gather
    'axis': axis=0 joins along the first dimension
ReplicaContext.all_gather
    'axis': axis=0 joins along the first dimension
ReplicaContext.all_reduce
    'value': the operation comes first: all_reduce('SUM', value)
ReplicaContext.reduce_scatter
    'value': the operation comes first: reduce_scatter('SUM', value)
ReplicaContext.scan
    'value': the operation comes first: scan('SUM', value)
ReplicaContext.neighbor_exchange
    'to_right': pass a value for each side, None for nothing
Variable
    'requires_grad': {_NO_TAPE}
OneDeviceStrategy
    'device': such as OneDeviceStrategy('CPU:0')
Checkpoint
    positional: objects need names: Checkpoint(w=w)
CheckpointManager
    'max_to_keep': write keep, the number of files to keep
    'directory': write path, the path of the newest file
""")
"""By call: words of Python's error of wrong arguments, and what to pass instead."""


# Not a `__getattr__` of the class: NumPy asks a variable for its protocols in each conversion, and
# would call it every time.
class Missing:
    """An attribute that a class lacks: reading it says what to write instead."""

    __slots__ = ("_instead", "_name")

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, _: object, owner: type) -> Any:
        raise _error(owner.__name__, self._name, self._instead)


class Renamed(Missing):
    """A method by its deprecated name."""

    __slots__ = ()

    def __get__(self, instance: object, owner: type) -> Any:
        cls, _, new = self._instead.rpartition(".")
        _warn_renamed(f"{cls}.{self._name}", self._instead)
        return getattr(owner if instance is None else instance, new)


def refuse_other_names(cls: type) -> None:
    """Sets the attributes that a class lacks or had, if the tables have any of its name."""
    names = INSTEAD.get(cls.__name__, {})
    for name, instead in names.items():
        if name not in vars(cls):
            setattr(cls, name, Missing(name, instead))
    for name, new in RENAMED.get(cls.__name__, {}).items():
        setattr(cls, name, Renamed(name, f"{cls.__name__}.{new}"))
    if names:
        cls.__dir__ = _list_attributes  # pyright: ignore[reportAttributeAccessIssue]


def _list_attributes(self: object) -> list[str]:
    """What `dir` shows, and completion offers: neither missing nor deprecated names."""
    cls = type(self)
    names = object.__dir__(self)
    return [n for n in names if not isinstance(inspect.getattr_static(cls, n, None), Missing)]


_warned: set[str] = set()


def _warn_renamed(old: str, new: str) -> None:
    """Warns the caller's caller, once per process, that a public name has changed."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f"{old} is now called {new}; use that", DeprecationWarning, stacklevel=3)


def _error(owner: str, name: str, instead: str) -> AttributeError:
    # Without its name, from which Python would guess another attribute beside these words.
    return AttributeError(f"{owner}.{name} does not exist: {instead}", name=None, obj=None)


# ---- public names show as programs write them: `hpcstrat.Variable`, not its private file


_classes: list[type] = []


def set_module(namespace: dict[str, Any], *late: str) -> None:
    """Gives what a public module exports the module's name, for `repr`, tracebacks and pickles.

    From now on a name that the module lacks raises what to write instead.

    Args:
        namespace: `globals()` of the module, after its last import.
        *late: names of modules in it that are imported when a program asks for them.
    """
    module = namespace["__name__"]
    namespace["__getattr__"] = functools.partial(_get_missing, module, late)
    for name, value in namespace.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if _is_private(value):
            value.__module__ = module
            value.__name__ = value.__qualname__ = name
            if inspect.isclass(value):
                _classes.append(value)
                refuse_other_names(value)


def _get_missing(module: str, late: tuple[str, ...], name: str) -> Any:
    """What a public module has by this name, which is not among its globals."""
    if name in late:
        return importlib.import_module(f"{module}.{name}")
    if (new := RENAMED.get(module, {}).get(name)) is not None:
        _warn_renamed(f"{module}.{name}", f"{module}.{new}")
        return getattr(sys.modules[module], new)
    if (instead := INSTEAD.get(module, {}).get(name)) is not None:
        raise _error(module, name, instead)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def set_owners() -> None:
    """Names the methods of private classes as those of public ones, for Python's errors of calls.

    Call it after the last `set_module`: before it, all classes look private.
    """
    heirs: dict[type, list[type]] = {}
    for cls in _classes:
        for base in cls.__mro__[1:]:
            if not _is_private(base):
                break  # what follows is that class's
            heirs.setdefault(base, []).append(cls)
    for base, classes in heirs.items():
        # What several classes inherit is theirs by the name of a class that they have in common.
        common = classes if len(classes) == 1 else [c for c in base.__mro__ if c in _classes]
        for name, method in vars(base).items() if common else ():
            if isinstance(method, classmethod):
                method = method.__func__
            while isinstance(method, FunctionType) and not name.startswith("_"):
                method.__module__ = common[0].__module__
                method.__qualname__ = f"{common[0].__name__}.{name}"
                method = vars(method).get("__wrapped__")


def _is_private(thing: Any) -> bool:
    return thing.__module__.startswith("hpcstrat.") and "._" in thing.__module__
