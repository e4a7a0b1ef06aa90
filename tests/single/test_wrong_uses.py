"""Wrong uses that need one process only: a message names the call, what came, and what to do."""

import sys
import threading
from typing import Any

import numpy as np
import pytest
from public_api import begins_with_a_call

import hpcstrat
from hpcstrat import InputReplicationMode, compat
from hpcstrat.data import Dataset

hs: Any = hpcstrat  # whose arguments have wrong types here
S = hs.MirroredStrategy(["CPU:0"])  # made before any fixture hides the host's GPUs
SGD, V1, Checkpoint = hs.optimizers.SGD, compat.v1, hs.checkpoint.Checkpoint
G = np.ones(3)
with S.scope():
    W = hs.Variable(np.zeros(3), name="w")


def across(fn):
    """Calls `fn` in the cross-replica context."""
    with S.scope():
        return fn()


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


def v1_input(mode):
    V1.MirroredStrategy().make_input_fn_iterator(lambda context: Dataset.range(4), mode)


def applied(*arguments):
    return lambda: SGD().apply_gradients(*arguments)


# What the message says, in this order, and the program.
CASES: dict[type[Exception], dict[str, Any]] = {
    TypeError: {
        # the program
        "any_rank: flag is 'no'.*True or False": lambda: hs.any_rank("no"),
        "any_rank: flag is 3.*count > 0": lambda: hs.any_rank(3),
        "any_rank: flag is <function is_lead": lambda: hs.any_rank(hs.is_lead),
        "function: fn is 5.*a function": lambda: hs.function(5),
        "progress: iterable is 5.*range": lambda: hs.progress(5),
        "broadcast_object: .*lambda.*pickle": lambda: hs.broadcast_object(lambda: 0),
        "Variable: name is 5.*string": lambda: hs.Variable(1.0, name=5),
        # strategies and datasets
        "Dataset: a leaf of an element is None": lambda: Dataset.from_tensor_slices(None),
        # optimizers and checkpoints
        r"SGD\.apply_gradients: name is \[Variable\('w'.*zip\(gradients, variables\)": (
            applied([1.0], [W])
        ),
        r"SGD\.apply_gradients: name is True.*skip_gradients_aggregation": (
            applied([(G, W)], True)
        ),
        "Checkpoint: v is 5.*Variable": lambda: Checkpoint(v=5),
        "device: strategy is of type str; pass a strategy": lambda: hs.torch.device("cuda"),
    },
    ValueError: {
        "extend_timeout: seconds is -1.*from 0 up": lambda: hs.extend_timeout(-1),
        "extend_timeout: seconds is nan": lambda: hs.extend_timeout(np.nan),
        "extend_timeout: seconds is None": lambda: hs.extend_timeout(None),
        r"Variable\.assign of 'w'.*\(5,\).*\(3,\).*shape": lambda: W.assign(np.zeros(5)),
        "Variable 'w'.*float64.*float32.*copy": lambda: S.run(
            lambda: W.__array__(np.float32, copy=False)
        ),
        r"Strategy\.reduce: .*'MOST'.*ReduceOp\.MEAN": lambda: S.reduce("MOST", G, None),
        r"Strategy\.gather: .*4.*\(2, 3\).*axis": lambda: S.gather(np.ones((2, 3)), 4),
        r"MirroredStrategy\.make_input_fn_iterator: replication_mode.*PER_WORKER": lambda: v1_input(
            InputReplicationMode.PER_REPLICA
        ),
        # losses
        "compute_average_loss: the loss has no dim": lambda: hs.losses.compute_average_loss(2.0),
        "compute_average_loss: global_batch_size is -1": lambda: hs.losses.compute_average_loss(
            [2.0], global_batch_size=-1
        ),
        # optimizers
        r"SGD\.apply_gradients: .*ndarray.*zip\(gradients, variables\)": applied([G, G]),
        r"SGD\.apply_gradients: .*\(ndarray, float\).*zip\(": applied([(G, 1.0)]),
        r"SGD\.apply_gradients: .*'w' comes first.*second": applied([(W, G)]),
        r"SGD\.apply_gradients: none of the 1 var.* gradient": applied([(None, W)]),
        r"SGD\.gradient_buffers: got \[\].*at least one": lambda: SGD().gradient_buffers([]),
    },
    RuntimeError: {
        "DistributedInputIterator.get_next.*before initialize": lambda: v1_iterator().get_next(),
        "compute_average_loss.*cross-replica context": lambda: across(
            lambda: hs.losses.compute_average_loss([2.0])
        ),
        "scale_regularization_loss.*cross-replica context": lambda: across(
            lambda: hs.losses.scale_regularization_loss(2.0)
        ),
        "CheckpointManager.* in the thread": lambda: in_a_thread(
            hs.checkpoint.CheckpointManager(Checkpoint(), "x").__enter__
        ),
    },
    FileNotFoundError: {
        r"Checkpoint\.restore.*/nowhere.*restore again": lambda: Checkpoint(v=W).restore("/nowhere")
    },
}


@pytest.mark.parametrize(
    ("error", "facts"), [(error, facts) for error, of_it in CASES.items() for facts in of_it]
)
def test_a_message_names_the_call_what_came_and_the_way_out(error, facts):
    with pytest.raises(error, match=facts) as caught:
        CASES[error][facts]()
    text = getattr(caught.value, "strerror", None) or str(caught.value)
    assert begins_with_a_call(text)
    assert S.run(lambda: 3) == 3 and not W.numpy().any()  # the next calls work


@pytest.mark.parametrize("call", ["as_tensors", "device"])
def test_without_pytorch(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = rf"^{call} needs PyTorch, which cannot be imported .*; install it"
    with pytest.raises(ImportError, match=facts):
        getattr(hs.torch, call)(S)
