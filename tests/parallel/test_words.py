"""What people type from habit or by mistake, and what they read then: the same on all ranks."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import Dataset

N = MPI.COMM_WORLD.size
DEVICES = (
    "4 is not a list of devices; there are as many replicas as ranks (`mpirun -n 4`), so leave it "
    "out, or name one device per rank"
)

CASES = {
    # strategies
    "hs.MirroredStrategy(4)": f"TypeError: MirroredStrategy: {DEVICES}",
    "hs.CentralStorageStrategy(4)": f"TypeError: CentralStorageStrategy: {DEVICES}",
    "hs.Strategy()": "TypeError: Strategy: make a MirroredStrategy, a MultiWorkerMirroredStrategy, "
    "a CentralStorageStrategy or a OneDeviceStrategy",
    "hs.MirroredStrategy('CPU:0')": "TypeError: MirroredStrategy: the string 'CPU:0' is not a list "
    "of devices; pass one with one device per rank, such as ['CPU:0']",
    "s.scatter([[1, 2], [3]])": "ValueError: Strategy.scatter: axis 0 does not exist in a leaf "
    "of the value, the number 1; a list is a nest, so pass np.array(value)",
    # arguments that a function does not take: Python's own error, on all ranks
    "s.reduce('SUM', x)": "TypeError: Strategy.reduce() missing 1 required positional argument: "
    "'axis'",
    "s.run(lambda b: b, args=(1, 2))": "TypeError: <lambda>() takes 1 positional argument but 2 "
    "were given",
    "list(pairs.map(lambda b: b))": "TypeError: <lambda>() takes 1 positional argument but 2 were "
    "given",
    "hs.on_lead(of_one)": "TypeError: of_one() missing 1 required positional argument: 'a'",
    "s.distribute_datasets_from_function(lambda: pairs)": "TypeError: <lambda>() takes 0 positional "
    "arguments but 1 was given",
    "s.experimental_distribute_values_from_function(lambda: 1)": "TypeError: <lambda>() takes 0 "
    "positional arguments but 1 was given",
    "s.extended.update(w, lambda: 1)": "TypeError: <lambda>() takes 0 positional arguments but 1 was "
    "given",
    "s.run(lambda: C().merge_call(of_none))": "TypeError: of_none() takes 0 positional arguments but "
    "1 was given",
    "Dataset.from_tensor_slices(ones, ones)": "TypeError: Dataset.from_tensor_slices() takes 1 "
    "positional argument but 2 were given",
    "Dataset.range(3, name='three')": "TypeError: Dataset.range() got an unexpected keyword argument "
    "'name'",
    # datasets
    "pairs.batch('8')": "TypeError: Dataset.batch: batch_size is '8'; it must be an int",
    "pairs.batch(8.0)": "TypeError: Dataset.batch: batch_size is 8.0; it must be an int",
    "s.experimental_distribute_dataset(pairs.batch)": "TypeError: "
    "Strategy.experimental_distribute_dataset: batch is a method of a Dataset; call it, and pass "
    "its result",
    "pairs.padded_batch(4)": "AttributeError: Dataset.padded_batch does not exist; write "
    "dataset.map(lambda x: np.pad(x, (0, size - len(x)))).batch(n)",
    "Dataset.counter()": "AttributeError: Dataset.counter does not exist; write Dataset.range(start, "
    "sys.maxsize, step)",
    "pairs.apply(hs.data.assert_cardinality(4))": "AttributeError: Dataset.apply does not exist; "
    "write function(dataset)",
    "Dataset.range(3, output_type='flaot')": "TypeError: Dataset.range: dtype is 'flaot', which NumPy "
    "does not take (data type 'flaot' not understood); write a dtype's name, such as 'float32'",
    # variables
    "hs.Variable(1.0, dtype='flaot32')": "TypeError: Variable: dtype is 'flaot32', which NumPy "
    "does not take (data type 'flaot32' not understood); write a dtype's name, such as 'float32'",
    "w.grad": "AttributeError: 'Variable' object has no attribute 'grad'",
    # names of other libraries
    "hs.get_rank()": "AttributeError: hpcstrat.get_rank does not exist; write hs.rank()",
    "hs.init()": "AttributeError: hpcstrat.init does not exist; write nothing: the first strategy "
    "starts MPI, and the end of the program ends it",
    "hs.Allreduce": "AttributeError: hpcstrat.Allreduce does not exist; write strategy.reduce('SUM', "
    "value, axis=None), or in a replica function hs.get_replica_context().all_reduce('SUM', value)",
    "hs.anyrank": "AttributeError: module 'hpcstrat' has no attribute 'anyrank'",
    "hs.optimizers.get_rank": "AttributeError: module 'hpcstrat.optimizers' has no attribute "
    "'get_rank'",
    # checkpoints
    "Checkpoint(w=w).restore('/nothing')": "FileNotFoundError: [Errno 2] Checkpoint.restore of "
    "/nothing: there is no such file; nothing was changed; correct this, and restore again",
    "Manager(w, 'x')": "TypeError: CheckpointManager: checkpoint is Variable; pass a Checkpoint, such "
    "as Checkpoint(w=w)",
    # the program
    "hs.on_lead(None)": "TypeError: on_lead: fn is None; pass the function itself and its "
    "arguments, as in on_lead(np.save, path, array)",
    # metrics
    "hs.metrics.Mean(5)": "TypeError: Mean: name is 5; it must be a string",
    "hs.metrics.Mean(dtype='flaot')": "TypeError: Mean: dtype is 'flaot', which NumPy does not take "
    "(data type 'flaot' not understood); write a dtype's name, such as 'float32'",
}


def of_one(a):
    return a


def of_none():
    pass


@pytest.fixture(scope="module")
def names():
    strategy = hs.MirroredStrategy(["CPU:0"] * N)
    with strategy.scope():
        w = hs.Variable(np.zeros(3, np.float32), name="w", aggregation="SUM")
    return {
        **{"hs": hs, "np": np, "Dataset": Dataset, "Checkpoint": Checkpoint},
        **{"of_one": of_one, "of_none": of_none},
        **{"Manager": hs.checkpoint.CheckpointManager, "C": hs.get_replica_context},
        **{"s": strategy, "w": w, "x": strategy.run(lambda: np.ones(3)), "ones": np.ones(3)},
        "pairs": Dataset.from_tensor_slices((np.ones((4, 2)), np.arange(4))).batch(4),
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
    assert {code: said(code, names) for code in CASES} == CASES
    assert names["s"].reduce("SUM", names["x"], axis=None).tolist() == [N] * 3


def test_copies_and_pickles(names):
    w, x = names["w"], names["x"]
    assert copy.copy(w).numpy().tolist() == pickle.loads(pickle.dumps(w)).tolist() == [0, 0, 0]
    assert repr(pickle.loads(pickle.dumps(x))) == repr(x)
    for method in (hs.Strategy.reduce, hs.ReplicaContext.scan, Dataset.zip, hs.Variable.item):
        assert pickle.loads(pickle.dumps(method)) == method
