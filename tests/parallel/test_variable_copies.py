"""`copy.deepcopy` of a variable, and of what holds variables: copies of their own, of the same strategy."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.5),
    "momentum": lambda: hs.optimizers.SGD(hs.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), momentum=0.5),
    "Adam": lambda: hs.optimizers.Adam(lambda step: 0.1 / (step + 1)),
    "Adagrad": lambda: hs.optimizers.Adagrad(0.1),
}


def test_a_copy_is_another_variable_of_the_same_strategy(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), name="weights", aggregation="SUM", trainable=False)
    w = copy.deepcopy(v)
    assert (w.name, w.aggregation, w.trainable, w.dtype) == (v.name, v.aggregation, v.trainable, v.dtype)
    with strategy.scope():
        w.assign(np.full(3, 5, np.float32))
        assert (v.numpy().tolist(), w.numpy().tolist()) == ([0, 0, 0], [5, 5, 5])
        v.assign_add(xp.ones(3))
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([1, 1, 1], [5, 5, 5])
    strategy.run(lambda: w.assign(xp.full(3, RANK + 1.0)))
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([1, 1, 1], [N * (N + 1) / 2] * 3)


def test_a_copy_within_a_replica(strategy):
    with strategy.scope():
        v = hs.Variable([1.0, 2.0], aggregation="MEAN")
    made = []

    def replica():
        made.append(copy.deepcopy(v))
        made[0].assign_add(v)

    strategy.run(replica)
    assert (v.numpy().tolist(), made[0].numpy().tolist()) == ([1, 2], [2, 4])


@pytest.mark.core
def test_each_replica_keeps_its_own_value(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: v.assign([RANK, 1.0]))
    w = copy.deepcopy(v)
    strategy.run(lambda: v.assign([-1.0, -1.0]))
    assert w.numpy().tolist() == [N * (N - 1) / 2, N]
    strategy.run(lambda: w.assign_add([1.0, RANK]))
    assert w.numpy().tolist() == [N * (N - 1) / 2 + N, N + N * (N - 1) / 2]
    assert v.numpy().tolist() == [-N, -N]


def test_a_variable_of_no_scope_is_copied_by_each_process_alone():
    v = hs.Variable(float(RANK))
    if RANK == 0:
        w = copy.deepcopy(v)
        w.assign(7.0)
        assert w.numpy() == 7
    assert v.numpy() == RANK


@dataclass
class Model:
    layers: list[Any]
    tied: Any
    optimizer: Any
    loss: Any = field(default_factory=hs.metrics.Sum)


@pytest.mark.core
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_of_a_model_trains_as_the_model_does(strategy, xp, kind):
    def step(model, scale):
        gradients = [xp.full(v.shape, scale * (RANK + 1.0)) for v in model.layers]
        model.optimizer.apply_gradients(zip(gradients, model.layers, strict=True))
        model.loss.update_state(xp.full(2, scale))

    with strategy.scope():
        layers = [hs.Variable(np.ones((2, 3))), hs.Variable(np.full(5, 2.0))]
        model = Model(layers, layers[0], OPTIMIZERS[kind]())
    for scale in (1.0, 3.0):
        strategy.run(step, args=(model, scale))
    other = copy.deepcopy(model)
    assert other.tied is other.layers[0] is not model.layers[0]
    assert other.optimizer.iterations == 2
    for scale in (2.0, 0.5):
        strategy.run(step, args=(model, scale))
    assert model.loss.result() == 6.5 * 2 * N
    assert other.loss.result() == 4 * 2 * N
    for before, after in zip(other.layers, model.layers, strict=True):
        assert (before.numpy() != after.numpy()).all()
    for scale in (2.0, 0.5):
        strategy.run(step, args=(other, scale))
    for one, same in zip(other.layers, model.layers, strict=True):
        assert np.array_equal(one.numpy(), same.numpy())
    assert other.optimizer.iterations == model.optimizer.iterations == 4


def test_in_an_update_it_is_refused(strategy):
    with strategy.scope():
        v = hs.Variable(1.0, name="v")
        with pytest.raises(RuntimeError, match="Variable: deepcopy of 'v' was made inside an update"):
            strategy.extended.update(v, lambda v: copy.deepcopy(v))
    assert v.numpy() == 1
