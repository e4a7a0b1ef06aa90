"""Wrong uses that need only one process: each raises what the docstring says."""

import threading
from typing import Any

import numpy as np
import pytest
from public_api import begins_with_a_call

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint, CheckpointManager
from hpcstrat.data import Dataset

V1 = hs.compat.v1
VARIABLE = hs.Variable(np.ones(3), name="w")
PAIRS = r"pass zip\(gradients, variables\)"
A_DATASET: Any = Dataset.range(4)
A_NUMBER: Any = 5
A_FUNCTION: Any = hs.function


def applied(pairs: Any, name: Any = None):
    hs.optimizers.SGD().apply_gradients(pairs, name)


def across(fn):
    """Calls `fn` in the cross-replica context."""
    with hs.MirroredStrategy().scope():
        return fn()


def read_without_a_copy(dtype):
    strategy = hs.MirroredStrategy()
    with strategy.scope():
        v = hs.Variable(np.ones(3), name="w")
    strategy.run(lambda: v.__array__(dtype, copy=False))


def in_a_thread(fn):
    raised = []

    def run():
        try:
            fn()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise raised[0]


def v1_iterator():
    return V1.MirroredStrategy().make_dataset_iterator(Dataset.range(4).batch(2))


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    # the program
    "extend_timeout: negative": (
        lambda _: hs.extend_timeout(-1),
        ValueError,
        "extend_timeout: seconds is -1; it must",
    ),
    "extend_timeout: nan": (
        lambda _: hs.extend_timeout(np.nan),
        ValueError,
        "extend_timeout: seconds is nan",
    ),
    "any_rank: text": (
        lambda _: hs.any_rank("no"),
        TypeError,
        "any_rank: flag is 'no'; it must be True or False",
    ),
    "any_rank: None": (lambda _: hs.any_rank(None), TypeError, "any_rank: flag is None"),
    "any_rank: a count": (
        lambda _: hs.any_rank(3),
        TypeError,
        "any_rank: flag is 3; .* `count > 0`",
    ),
    "any_rank: a function": (
        lambda _: hs.any_rank(hs.is_lead),
        TypeError,
        "any_rank: flag is <function is_lead",
    ),
    "any_rank: an array": (
        lambda _: hs.any_rank(np.ones(1)),
        TypeError,
        r"any_rank: flag is array\(\[1\.\]\)",
    ),
    "function of a number": (
        lambda _: A_FUNCTION(5),
        TypeError,
        "function: fn is 5; pass a function",
    ),
    "progress of a number": (
        lambda _: hs.progress(A_NUMBER),
        TypeError,
        "progress: iterable is 5; pass .* range",
    ),
    "Variable: name": (
        lambda _: hs.Variable(1.0, name=A_NUMBER),
        TypeError,
        "Variable: name is 5; it must be a string",
    ),
    "Variable: another dtype without a copy": (
        lambda _: read_without_a_copy(np.float32),
        ValueError,
        "Variable 'w' is of dtype float64; as float32 it is read with a copy only",
    ),
    "broadcast_object": (
        lambda _: hs.broadcast_object(lambda: 0),
        TypeError,
        "broadcast_object: .*cannot travel between ranks",
    ),
    # strategies
    "a number as dataset": (
        lambda _: hs.MirroredStrategy().experimental_distribute_dataset(5),
        TypeError,
        "Strategy.experimental_distribute_dataset: int is not a dataset",
    ),
    "a dataset as its function": (
        lambda _: hs.MirroredStrategy().distribute_datasets_from_function(A_DATASET),
        TypeError,
        "Strategy.distribute_datasets_from_function: dataset_fn is Dataset",
    ),
    "v1: too early": (
        lambda _: v1_iterator().get_next(),
        RuntimeError,
        r"DistributedInputIterator.get_next was called before initialize; call initialize\(\)",
    ),
    "v1: another mode": (
        lambda _: V1.MirroredStrategy().make_input_fn_iterator(
            lambda context: Dataset.range(4), hs.InputReplicationMode.PER_REPLICA
        ),
        ValueError,
        "MirroredStrategy.make_input_fn_iterator: replication_mode is .*PER_WORKER",
    ),
    # losses
    "average loss: no dimension": (
        lambda _: hs.losses.compute_average_loss(2.0),
        ValueError,
        "compute_average_loss: the loss has no dimension",
    ),
    "average loss: negative batch": (
        lambda _: hs.losses.compute_average_loss([2.0], global_batch_size=-1),
        ValueError,
        "compute_average_loss: global_batch_size is -1",
    ),
    "average loss across replicas": (
        lambda _: across(lambda: hs.losses.compute_average_loss([2.0])),
        RuntimeError,
        "compute_average_loss was called in the cross-replica context",
    ),
    "regularization loss across replicas": (
        lambda _: across(lambda: hs.losses.scale_regularization_loss(2.0)),
        RuntimeError,
        "scale_regularization_loss was called in the cross-replica context",
    ),
    # optimizers
    "a gradient and a variable": (
        lambda _: applied([1.0], [VARIABLE]),
        TypeError,
        r"SGD.apply_gradients: name is \[Variable\('w'.*; pass .* as zip\(gradients, variables\)",
    ),
    "gradients are summed already, by position": (
        lambda _: applied([(np.ones(3), VARIABLE)], True),
        TypeError,
        "SGD.apply_gradients: name is True; pass skip_gradients_aggregation by its name",
    ),
    "gradients and variables": (
        lambda _: applied([np.ones(3), np.ones(3)]),
        ValueError,
        f"SGD.apply_gradients: it takes .* one is ndarray; {PAIRS}",
    ),
    "two gradients": (
        lambda _: applied([(np.ones(3), 1.0)]),
        ValueError,
        rf"one is \(ndarray, float\); {PAIRS}",
    ),
    "the variable first": (
        lambda _: applied([(VARIABLE, np.ones(3))]),
        ValueError,
        "the variable 'w' comes first in its pair; pass the variable second",
    ),
    "no gradient of any": (
        lambda _: applied([(None, VARIABLE)]),
        ValueError,
        "none of the 1 variables has a gradient",
    ),
    "buffers of nothing": (
        lambda _: hs.optimizers.SGD().gradient_buffers([]),
        ValueError,
        r"SGD.gradient_buffers: got \[\]; pass a list of variables, at least one",
    ),
    # datasets
    "slices of None": (
        lambda _: Dataset.from_tensor_slices(None),
        TypeError,
        "Dataset: a leaf of an element is None",
    ),
    "unbatch of numbers": (
        lambda _: list(Dataset.range(4).unbatch()),
        ValueError,
        r"Dataset\.unbatch: .*first dimension",
    ),
    "len without end": (
        lambda _: len(Dataset.range(4).repeat()),
        TypeError,
        r"Dataset: len\(\) .* infinite",
    ),
    # checkpoints
    "a manager in a thread": (
        lambda _: in_a_thread(CheckpointManager(Checkpoint(), "x").__enter__),
        RuntimeError,
        "CheckpointManager.* in the thread",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use(name, monkeypatch):
    wrong, error, match = CASES[name]
    with pytest.raises(error, match=match) as caught:
        wrong(monkeypatch)
    assert begins_with_a_call(str(caught.value))


def test_the_end_of_the_data_is_pythons():
    iterator = v1_iterator()
    iterator.initialize()
    strategy = V1.MirroredStrategy()
    assert [strategy.experimental_run(lambda x: x.sum(), iterator) for _ in range(2)] == [
        0 + 1,
        2 + 3,
    ]
    with pytest.raises(StopIteration):
        iterator.get_next()
    with pytest.raises(StopIteration):
        strategy.experimental_run(lambda x: x, iterator)
    distributed = iter(strategy.experimental_distribute_dataset(Dataset.range(2).batch(2)))
    assert distributed.get_next().tolist() == [0, 1]
    with pytest.raises(StopIteration):
        distributed.get_next()
