"""What people type from habit or by mistake, and what they read then: the same on all ranks."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from internals import INSTEAD, Missing
from mpi4py import MPI
from public_api import PUBLIC_MODULES, public_names

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import Dataset

N = MPI.COMM_WORLD.size
ONE_EACH = (
    "this is one value per replica; reduce it first: strategy.reduce('MEAN', value, axis=None), or "
    "look at all of them: strategy.experimental_local_results(value). A replica function is given "
    "its own: strategy.run(fn, args=(value,))"
)
NO_TAPE = (
    "nothing records operations; compute gradients by a formula, or with PyTorch or JAX: "
    "docs/interoperation.md"
)
REDUCE = (
    "write strategy.reduce('SUM', values, axis=None), or in a replica function "
    "hs.get_replica_context().all_reduce('SUM', value)"
)
WRAP = (
    "write hs.torch.broadcast(module) once, and hs.torch.all_reduce_gradients('SUM', module) in "
    "each step"
)
DEVICES = (
    "4 is not a list of devices; there are as many replicas as ranks (`mpirun -n 4`), so leave it "
    "out, or name one device per rank"
)
ARGS = (
    "the members of args. args=(batch,) passes a batch as one argument, a tuple or not; args=batch "
    "passes the members of a tuple as separate arguments"
)
MEMBERS = "the members of the element, a tuple, are separate arguments"
ELEMENT = "the element is not a tuple, so it is the only argument"
PER_REPLICA = {
    f"x.{name}": f"AttributeError: PerReplica.{name} does not exist: {ONE_EACH}"
    for name in ("values", "shape", "dtype", "sum", "mean", "numpy", "item", "tolist", "T")
}

CASES = {
    # strategies
    "hs.MirroredStrategy(4)": f"TypeError: MirroredStrategy: {DEVICES}",
    "hs.CentralStorageStrategy(4)": f"TypeError: CentralStorageStrategy: {DEVICES}",
    "hs.Strategy()": "TypeError: Strategy: make a MirroredStrategy, a MultiWorkerMirroredStrategy, "
    "a CentralStorageStrategy or a OneDeviceStrategy",
    "s.reduce('SUM', x)": "TypeError: Strategy.reduce() missing 1 required positional argument: "
    "'axis'; axis=None reduces over the replicas, axis=0 over the elements of each as well",
    "hs.MirroredStrategy('CPU:0')": "TypeError: MirroredStrategy: the string 'CPU:0' is not a list "
    "of devices; pass one with one device per rank, such as ['CPU:0']",
    "s.run(lambda: C().scan('SUM'))": "TypeError: ReplicaContext.scan() missing 1 required "
    "positional argument: 'value'; the operation comes first: scan('SUM', value)",
    "s.gather(x)": "TypeError: Strategy.gather() missing 1 required positional argument: 'axis'; "
    "axis=0 joins along the first dimension",
    "s.run(lambda: C().all_reduce('SUM'))": "TypeError: ReplicaContext.all_reduce() missing 1 "
    "required positional argument: 'value'; the operation comes first: all_reduce('SUM', value)",
    "s.run(lambda: C().all_gather(ones))": "TypeError: ReplicaContext.all_gather() missing 1 "
    "required positional argument: 'axis'; axis=0 joins along the first dimension",
    "s.run(lambda: C().neighbor_exchange(1))": "TypeError: ReplicaContext.neighbor_exchange() "
    "missing 1 required positional argument: 'to_right'; pass a value for each side, None for "
    "nothing",
    "s.scatter([[1, 2], [3]])": "ValueError: Strategy.scatter: axis 0 does not exist in a leaf "
    "of the value, the number 1; a list is a nest, so pass np.array(value)",
    "s.run(lambda b: b, args=(1, 2))": "TypeError: <lambda>() takes 1 positional argument but 2 "
    f"were given\nStrategy.run: fn was given 2 positional arguments, {ARGS}",
    "s.run(lambda a, b: b, args=((1, 2),))": "TypeError: <lambda>() missing 1 required positional "
    f"argument: 'b'\nStrategy.run: fn was given 1 positional argument, {ARGS}",
    "s.run(lambda b: b)": "TypeError: <lambda>() missing 1 required positional argument: 'b'\n"
    f"Strategy.run: fn was given 0 positional arguments, {ARGS}",
    # the note is about the replica function's own call only
    "s.run(lambda: of_one())": "TypeError: of_one() missing 1 required positional argument: 'a'",
    "s.run(int, args=('x',))": "ValueError: invalid literal for int() with base 10: 'x'",
    "s.run(len, args=(5,))": "TypeError: object of type 'int' has no len()",
    # datasets
    "singles.batch(number=8)": "TypeError: Dataset.batch() got an unexpected keyword argument "
    "'number'",
    "singles.shuffle()": "TypeError: Dataset.shuffle() missing 1 required positional argument: "
    "'buffer_size'",
    "singles.batch('8')": "TypeError: Dataset.batch: batch_size is '8'; it must be an int",
    "singles.batch(8.0)": "TypeError: Dataset.batch: batch_size is 8.0; it must be an int",
    "Dataset.from_tensor_slices(ones, ones)": "TypeError: Dataset.from_tensor_slices: name is "
    "array([1., 1., 1.]); pass arrays of one element as a tuple: from_tensor_slices((x, y))",
    "Dataset.from_tensors(ones, ones)": "TypeError: Dataset.from_tensors: name is array([1., 1., "
    "1.]); pass arrays of one element as a tuple: from_tensors((x, y))",
    "list(pairs.map(lambda b: b))": "TypeError: <lambda>() takes 1 positional argument but 2 were "
    f"given\nDataset.map: map_func was given 2 arguments; {MEMBERS}",
    "list(pairs.filter(lambda b: True))": "TypeError: <lambda>() takes 1 positional argument but 2 "
    f"were given\nDataset.filter: predicate was given 2 arguments; {MEMBERS}",
    "list(pairs.flat_map(lambda b: pairs))": "TypeError: <lambda>() takes 1 positional argument "
    f"but 2 were given\nDataset.flat_map: map_func was given 2 arguments; {MEMBERS}",
    "list(singles.map(lambda x, y: x))": "TypeError: <lambda>() missing 1 required positional "
    f"argument: 'y'\nDataset.map: map_func was given 1 argument; {ELEMENT}",
    "pairs.reduce(0, lambda a, b, c: a)": "TypeError: <lambda>() missing 1 required positional "
    "argument: 'c'\nDataset.reduce: reduce_func was given 2 arguments; the state and the element",
    "s.experimental_distribute_dataset(singles.batch)": "TypeError: "
    "Strategy.experimental_distribute_dataset: batch is a method of a Dataset; call it, and pass "
    "its result",
    # variables
    "hs.Variable(1.0, requires_grad=True)": "TypeError: Variable.__init__() got an unexpected "
    f"keyword argument 'requires_grad'; {NO_TAPE}",
    "hs.Variable(1.0, dtype='flaot32')": "TypeError: Variable: dtype is 'flaot32', which NumPy "
    "does not take (data type 'flaot32' not understood); write a dtype's name, such as 'float32'",
    "w.grad": f"AttributeError: Variable.grad does not exist: {NO_TAPE}",
    "w.backward()": f"AttributeError: Variable.backward does not exist: {NO_TAPE}",
    "w.data": "AttributeError: Variable.data does not exist: write w.value(), or w.numpy() for a "
    "copy on the host",
    "w.detach()": "AttributeError: Variable.detach does not exist: write w.value(), or w.numpy() "
    "for a copy on the host",
    "w.to('cuda')": "AttributeError: Variable.to does not exist: hs.asnumpy(w) is a copy on the "
    "host; the strategy decides where a variable is",
    "w.garbage": "AttributeError: 'Variable' object has no attribute 'garbage'",
    # names of other libraries
    "hs.get_rank()": "AttributeError: hpcstrat.get_rank does not exist: write hs.rank()",
    "hs.get_world_size()": "AttributeError: hpcstrat.get_world_size does not exist: write "
    "hs.size()",
    "hs.all_reduce": f"AttributeError: hpcstrat.all_reduce does not exist: {REDUCE}",
    "hs.allreduce": f"AttributeError: hpcstrat.allreduce does not exist: {REDUCE}",
    "hs.comm": "AttributeError: hpcstrat.comm does not exist: a strategy and hs.rank(), hs.size() "
    "take its place; mpi4py's own is MPI.COMM_WORLD",
    "hs.save": "AttributeError: hpcstrat.save does not exist: write "
    "hs.checkpoint.Checkpoint(w=w).save(path), or np.save in hs.on_lead",
    "hs.init()": "AttributeError: hpcstrat.init does not exist: leave it out, because the first "
    "strategy starts MPI and the end of the program ends it",
    "hs.DistributedDataParallel": "AttributeError: hpcstrat.DistributedDataParallel does not "
    f"exist: {WRAP}",
    "hs.DistributedOptimizer": "AttributeError: hpcstrat.DistributedOptimizer does not exist: the "
    f"optimizers of hs.optimizers sum the replicas' gradients themselves; for PyTorch's {WRAP}",
    "hs.anyrank": "AttributeError: module 'hpcstrat' has no attribute 'anyrank'",
    "hs.checkpoint.load": "AttributeError: hpcstrat.checkpoint.load does not exist: write "
    "hs.checkpoint.Checkpoint(w=w).restore(path), or np.load on every rank",
    "s.rank": "AttributeError: MirroredStrategy.rank does not exist: write hs.rank(), or "
    "hs.replica_id() in a replica function",
    "s.size": "AttributeError: MirroredStrategy.size does not exist: write "
    "strategy.num_replicas_in_sync",
    "s.all_reduce('SUM', 1)": f"AttributeError: MirroredStrategy.all_reduce does not exist: {REDUCE}",
    "s.run(lambda: C().size)": "AttributeError: ReplicaContext.size does not exist: write "
    "context.num_replicas_in_sync",
    "s.run(lambda: C().allreduce(1))": "AttributeError: ReplicaContext.allreduce does not exist: "
    "write context.all_reduce('SUM', value)",
    # checkpoints
    "Checkpoint(w)": "TypeError: Checkpoint.__init__() takes 1 positional argument but 2 were "
    "given; objects need names: Checkpoint(w=w)",
    "Manager(Checkpoint(w=w), 'x', max_to_keep=3)": "TypeError: "
    "CheckpointManager.__init__() got an unexpected keyword argument 'max_to_keep'; write keep, "
    "the number of files to keep",
    "Checkpoint(w=w).load('x')": "AttributeError: Checkpoint.load does not exist: write "
    "restore(path)",
    "Checkpoint(w=w).restore('/nothing')": "FileNotFoundError: [Errno 2] Checkpoint.restore of "
    "/nothing: there is no such file; nothing was changed; correct this, and restore again",
    # the program
    "hs.on_lead(None)": "TypeError: on_lead: fn is None; pass the function itself and its "
    "arguments, as in on_lead(np.save, path, array)",
    "hs.on_lead(lambda a: a)": "TypeError: <lambda>() missing 1 required positional argument: 'a'\n"
    "on_lead: fn is called with what follows it, as in on_lead(np.save, path, array)",
    "hs.on_lead(of_one)": "TypeError: of_one() missing 1 required positional argument: 'a'\n"
    "on_lead: fn is called with what follows it, as in on_lead(np.save, path, array)",
    "hs.on_lead(lambda: of_one())": "TypeError: of_one() missing 1 required positional argument: 'a'",
    "s.distribute_datasets_from_function(lambda: singles)": "TypeError: <lambda>() takes 0 positional "
    "arguments but 1 was given\nStrategy.distribute_datasets_from_function: dataset_fn is called "
    "with an InputContext",
    "s.experimental_distribute_values_from_function(lambda: 1)": "TypeError: <lambda>() takes 0 "
    "positional arguments but 1 was given\nStrategy.experimental_distribute_values_from_function: "
    "value_fn is called with a ValueContext",
    "s.extended.update(w, lambda: 1)": "TypeError: <lambda>() takes 0 positional arguments but 1 was "
    "given\nStrategyExtended.update: fn is called with the variable, and then args",
    "s.run(lambda: C().merge_call(of_none))": "TypeError: of_none() takes 0 positional arguments but "
    "1 was given\nReplicaContext.merge_call: merge_fn is called with the strategy, and then args",
    # losses and metrics
    "hs.losses.CrossEntropyLoss()": "AttributeError: hpcstrat.losses.CrossEntropyLoss does not exist: "
    "write softmax_cross_entropy(labels, logits), which also returns the gradient",
    "hs.metrics.F1Score()": "AttributeError: hpcstrat.metrics.F1Score does not exist: "
    "MeanMetricWrapper makes a metric from a function of y_true and y_pred; others are ON_READ "
    "variables that sum",
    "hs.metrics.Mean().compute()": "AttributeError: Mean.compute does not exist: write result()",
    "hs.metrics.Mean(5)": "TypeError: Mean: name is 5; it must be a string",
    "hs.metrics.Mean(dtype='flaot')": "TypeError: Mean: dtype is 'flaot', which NumPy does not take "
    "(data type 'flaot' not understood); write a dtype's name, such as 'float32'",
    "Dataset.range(3, output_type='flaot')": "TypeError: Dataset.range: dtype is 'flaot', which NumPy "
    "does not take (data type 'flaot' not understood); write a dtype's name, such as 'float32'",
    "Manager(w, 'x')": "TypeError: CheckpointManager: checkpoint is Variable; pass a Checkpoint, such "
    "as Checkpoint(w=w)",
    "hs.metrics.Accuracy().update_state()": "TypeError: Metric.update_state() missing 2 required "
    "positional arguments: 'y_true' and 'y_pred'",
}


def of_one(a):
    return a


def of_none():
    pass


@pytest.fixture(scope="module")
def names():
    pairs = Dataset.from_tensor_slices((np.ones((4, 2)), np.arange(4))).batch(4)
    strategy = hs.MirroredStrategy(["CPU:0"] * N)
    with strategy.scope():
        w = hs.Variable(np.zeros(3, np.float32), name="w", aggregation="SUM")
    return {
        **{"hs": hs, "np": np, "Dataset": Dataset, "Checkpoint": Checkpoint, "of_one": of_one},
        "of_none": of_none,
        **{"Manager": hs.checkpoint.CheckpointManager, "C": hs.get_replica_context},
        **{"s": strategy, "w": w, "x": strategy.run(lambda: np.ones(3)), "ones": np.ones(3)},
        **{"pairs": pairs, "singles": pairs.map(lambda x, _: x)},
    }


def said(code: str, names: dict[str, Any]) -> str:
    """The error of a program, and its notes."""
    try:
        result = eval(code, names)
    except Exception as error:
        is_alone = error.__suppress_context__ or error.__context__ is None
        assert error.__cause__ is None and is_alone, "a chain of errors"
        notes = getattr(error, "__notes__", [])
        text = f"{type(error).__name__}: {error}".removesuffix(" (found by rank 0)")
        return "\n".join([text, *notes])
    return f"no error, but {result!r}"


def test_each_says_what_to_write(names):
    cases = {**CASES, **(PER_REPLICA if N > 1 else {})}
    if not hs.is_lead():  # where alone `on_lead` calls the function
        for code in cases:
            if code.startswith("hs.on_lead("):
                cases[code] = cases[code].partition("\n")[0]
    assert {code: said(code, names) for code in cases} == cases
    assert names["s"].reduce("SUM", names["x"], axis=None).tolist() == [N] * 3


def test_missing_attributes_are_missing(names):
    w, s, x = names["w"], names["s"], names["x"]
    for thing, missing in ((w, "grad detach"), (s, "rank size"), (Dataset, "random")):
        for name in missing.split():
            assert not hasattr(thing, name)
            assert getattr(thing, name, 5) == 5
    assert "grad" not in dir(w) and "assign" in dir(w)
    assert "rank" not in dir(s) and "run" in dir(s)
    assert copy.copy(w).numpy().tolist() == pickle.loads(pickle.dumps(w)).tolist() == [0, 0, 0]
    assert repr(pickle.loads(pickle.dumps(x))) == repr(x)
    for method in (hs.Strategy.reduce, hs.ReplicaContext.scan, Dataset.load, hs.Variable.item):
        assert pickle.loads(pickle.dumps(method)) == method


def test_no_name_of_the_table_exists():
    places = public_names(with_methods=False)
    modules = {module.__name__: module for module in PUBLIC_MODULES}
    for owner, names in INSTEAD.items():
        if owner in modules:
            assert not names.keys() & vars(modules[owner]).keys(), owner
            continue
        (cls,) = {thing for name, thing in places.items() if name.endswith(f".{owner}")}
        for name in names:
            assert isinstance(vars(cls)[name], Missing), f"{owner}.{name}"
            assert not any(name in vars(base) for base in cls.__mro__[1:]), f"{owner}.{name}"


def test_a_name_of_ones_own():
    class Own(hs.MirroredStrategy):
        @property
        def rank(self):
            return "mine"

    own = Own(["CPU:0"] * N)
    assert own.rank == "mine"
    assert "rank" in dir(own) and "size" not in dir(own)
