"""Copies of variables and of objects with variables; a pickle has the variable's array."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank


def test_a_copy_is_another_variable_of_the_same_strategy(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), name="weights", aggregation="SUM", trainable=False)
        w = copy.deepcopy(v)
        w.assign(np.full(3, 5, np.float32))
        v.assign_add(xp.ones(3))
    for fact in ("name", "aggregation", "trainable", "dtype"):
        assert getattr(w, fact) == getattr(v, fact)
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([1, 1, 1], [5, 5, 5])
    assert copy.copy(v) is v  # so that its updates are not counted twice
    total, made = N * (N + 1) / 2, []
    strategy.run(lambda: w.assign(xp.full(3, RANK + 1.0)))
    assert (v.numpy().tolist(), w.numpy().tolist()) == ([1, 1, 1], [total] * 3)
    in_an_update = strategy.extended.update(v, lambda v: copy.deepcopy(v).assign(np.full(3, 2.0)))
    assert in_an_update is not v and in_an_update.name == "weights"
    assert (v.numpy().tolist(), in_an_update.numpy().tolist()) == ([1, 1, 1], [2, 2, 2])

    def replica():
        made.append(copy.deepcopy(w))
        made[0].assign_add(w)

    strategy.run(replica)
    assert (w.numpy()[0], made[0].numpy()[0]) == (total, total + total * N)


def test_each_replicas_own_value_is_copied_and_pickled(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(2), name="total", synchronization="ON_READ", aggregation="SUM")

    def replica():
        v.assign([RANK, 1.0])
        assert pickle.loads(pickle.dumps(v)).tolist() == [RANK, 1]

    strategy.run(replica)
    w = copy.deepcopy(v)
    strategy.run(lambda: v.assign([-1.0, -1.0]))
    assert w.numpy().tolist() == [N * (N - 1) / 2, N]
    strategy.run(lambda: w.assign_add([1.0, RANK]))
    assert w.numpy().tolist() == [N * (N - 1) / 2 + N, N + N * (N - 1) / 2]
    assert v.numpy().tolist() == [-N, -N]
    if N == 1:
        assert pickle.loads(pickle.dumps(v)).tolist() == [-1, -1]
        return
    with pytest.raises(
        RuntimeError, match=r"'total' has one value per replica.* read_value\(\) or numpy\(\)"
    ):
        pickle.dumps(v)


def test_a_copy_of_a_model_trains_by_itself(strategy, xp):
    def step(model, optimizer, scale):
        gradients = [xp.full(v.shape, scale * (RANK + 1.0)) for v in model["layers"]]
        optimizer.apply_gradients(zip(gradients, model["layers"], strict=True))
        model["loss"].update_state(xp.full(2, scale))

    with strategy.scope():
        layers = [hs.Variable(np.ones((2, 3))), hs.Variable(np.full(5, 1.0))]
        model = {"layers": layers, "tied": layers[0], "loss": hs.metrics.Sum()}
    strategy.run(step, args=(model, hs.optimizers.SGD(0.5), 1.0))
    other = copy.deepcopy(model)
    assert other["tied"] is other["layers"][0] is not model["layers"][0]
    strategy.run(step, args=(other, hs.optimizers.SGD(0.5), 2.0))
    for one, scale in ((model, 1.0), (other, 3.0)):
        assert one["loss"].result() == 2 * N * scale
        for v in one["layers"]:
            assert (v.numpy() == 1 - 0.5 * scale * N * (N + 1) / 2).all()


def test_an_optimizer_is_not_copied_and_a_strategy_does_not_pickle(strategy):
    with strategy.scope():
        v, optimizer = hs.Variable(1.0), hs.optimizers.Adam(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.ones(()), v)]))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Adam: .*Checkpoint"):
            copied({"v": v, "optimizer": optimizer} if copied is not copy.copy else optimizer)
    for one in (strategy, strategy.extended, {"a": [strategy]}):
        with pytest.raises(
            TypeError, match=f"{type(strategy).__name__} cannot be pick.*Checkpoint"
        ):
            pickle.dumps(one)


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, ml_dtypes.bfloat16])
def test_a_variable_pickles_as_its_array(strategy, dtype):
    array = np.array([[1, 0, 1], [1, 1, 0]]).astype(dtype)
    with strategy.scope():
        v, scalar = hs.Variable(array), hs.Variable(5)
    calls = strategy.replica_group.communicator.calls
    before = calls.number
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        message = pickle.dumps({"model": [v, v], "step": scalar}, protocol)
        found = pickle.loads(message)
        assert type(found["model"][0]) is np.ndarray and found["model"][0] is found["model"][1]
        assert found["model"][0].dtype == array.dtype and np.array_equal(found["model"][0], array)
        assert (found["step"].shape, found["step"].dtype, int(found["step"])) == ((), np.int32, 5)
        assert b"hpcstrat" not in message  # it loads without hpcstrat
        found["model"][0][...] = 0  # a copy
    assert calls.number == before and np.array_equal(v.numpy(), array)
    received = hs.broadcast_object(v)
    assert type(received) is np.ndarray and np.array_equal(received, array)


def test_other_copies_and_pickles(strategy, xp):
    """Of a variable of no scope, of each replica's value, and of methods."""
    v = hs.Variable([RANK, 2])
    assert pickle.loads(pickle.dumps(v)).tolist() == [RANK, 2]
    if RANK == 0:  # nothing is collective
        assert copy.deepcopy(v).assign([7, 7]).numpy().tolist() == [7, 7]
    assert v.numpy().tolist() == [RANK, 2]
    x = strategy.run(lambda: xp.full(2, RANK))
    assert repr(pickle.loads(pickle.dumps(x))) == repr(x)
    for method in (hs.Strategy.reduce, hs.ReplicaContext.scan, hs.Variable.item):
        assert pickle.loads(pickle.dumps(method)) == method
