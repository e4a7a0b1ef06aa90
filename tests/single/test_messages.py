"""A message names the call, what came, and what to do: one misuse of each kind of call.

Tests of misuse check more messages, next to the tests of each feature.
"""

import re
from typing import Any

import numpy as np
import pytest
from public_api import begins_with_a_call

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.data import Dataset

STRATEGY = hs.MirroredStrategy(["CPU:0"])  # made before any fixture hides the host's GPUs
with STRATEGY.scope():
    W = hs.Variable(np.zeros(3, np.float32), name="w")
WRONG: Any = 5

MISUSES = {
    "Strategy.run": (lambda: STRATEGY.run(WRONG), "5", r"run\(fn, args="),
    "Strategy.reduce": (
        lambda: STRATEGY.reduce("MOST", np.ones(3), None),
        "'MOST'",
        "ReduceOp.MEAN",
    ),
    "Strategy.gather": (lambda: STRATEGY.gather(np.ones((2, 3)), 4), "4.*(2, 3)", "axis"),
    "Strategy.experimental_distribute_dataset": (
        lambda: STRATEGY.experimental_distribute_dataset(WRONG),
        "int",
        "Dataset|iterable",
    ),
    "MirroredStrategy": (lambda: hs.MirroredStrategy(["XPU:0"]), "'XPU:0'", "'CPU:0'"),
    "Variable.assign": (lambda: W.assign(np.zeros(5)), r"'w'.*\(5,\).*\(3,\)", "shape"),
    "SGD": (lambda: hs.optimizers.SGD(0.1, momentum=2), "momentum is 2", "0 .*1"),
    "SGD.apply_gradients": (
        lambda: hs.optimizers.SGD().apply_gradients([np.ones(3)]),  # pyright: ignore[reportArgumentType]
        "ndarray",
        r"zip\(gradients, variables\)",
    ),
    "Dataset.batch": (lambda: Dataset.range(4).batch(0), "batch_size is 0", "1"),
    "Checkpoint": (lambda: Checkpoint(v=WRONG), "v is 5", "Variable"),
    "Checkpoint.restore": (
        lambda: Checkpoint(v=W).restore("/nowhere"),
        "/nowhere",
        "restore again",
    ),
    "broadcast_object": (lambda: hs.broadcast_object(lambda: 0), "lambda", "pickle"),
}


@pytest.mark.parametrize("call", MISUSES)
def test_a_message_names_the_call_what_came_and_the_way_out(call):
    misuse, came, way_out = MISUSES[call]
    with pytest.raises(Exception) as caught:
        misuse()
    text = (
        str(caught.value).partition("] ")[2]
        if isinstance(caught.value, OSError)
        else str(caught.value)
    )
    assert begins_with_a_call(text)
    assert re.match(rf"{re.escape(call)}\b.*{came}.*({way_out})", text), text


@pytest.mark.parametrize(
    "text", ["Strategy.reduce: axis is 3", "Variable 'w' is old", "barrier: late"]
)
def test_what_begins_with_a_call(text):
    assert begins_with_a_call(text)


@pytest.mark.parametrize(
    "text",
    ["", "axis is 3", "Strategy.reduction: no", "rank 0 is late", "Strategy._merge: no"],
    ids=repr,
)
def test_what_does_not(text):
    assert not begins_with_a_call(text)
