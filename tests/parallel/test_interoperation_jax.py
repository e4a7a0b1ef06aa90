"""What is JAX's alone, beside test_interoperation.py: transformed functions, and no copies."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

jax = pytest.importorskip("jax", reason="JAX is not installed")

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


@pytest.fixture
def strategy(place):
    # JAX computes where the replicas do, if it can.
    device = jax.devices("cpu" if place.kind == "CPU" else None)[0]
    with jax.default_device(device), place.make(hs.CentralStorageStrategy) as made:
        yield made


def test_gradients_flow_through_losses(strategy):
    x = jax.numpy.arange(1.0, 4.0) + RANK

    def loss(w):
        losses, weights = ((w * x) ** 2)[:, None], jax.numpy.array([1, 0, 2])
        average = hs.losses.compute_average_loss(
            losses, sample_weight=weights, global_batch_size=10
        )
        return average + hs.losses.scale_regularization_loss(3 * w)

    total, gradient = (
        strategy.reduce("SUM", v, axis=None)
        for v in strategy.run(lambda: jax.value_and_grad(loss)(2.0))
    )
    squares = sum((1 + rank) ** 2 + 2 * (3 + rank) ** 2 for rank in range(N))
    assert float(total) == pytest.approx(4 * squares / 10 + 6)
    assert float(gradient) == pytest.approx(2 * 2 * squares / 10 + 3)


def test_traced_arrays_are_type_errors(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32))
        for trace in (jax.jit, jax.grad):
            with pytest.raises(
                TypeError, match="Variable.assign of 'Variable': this .*Tracer .* jax.jit, jax.grad"
            ):
                trace(lambda x: v.assign(x) and x.sum())(jax.numpy.ones(3))
    assert not v.numpy().any()


@on_the_cpu
def test_what_is_without_a_copy(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3, dtype=np.float32), aggregation="MEAN")
    array = v.numpy()
    taken = jax.numpy.from_dlpack(array)
    # JAX takes memory without a copy if its address is a multiple of 64; else it copies.
    assert array.ctypes.data % 64 or taken.unsafe_buffer_pointer() == array.ctypes.data
    before = jax.numpy.arange(5.0)
    made = strategy.experimental_distribute_values_from_function(lambda context: before)
    seen = []
    strategy.run(lambda x: seen.append(x.ctypes.data), args=(made,))
    assert seen == [before.unsafe_buffer_pointer()]

    def replica():
        taken = [jax.numpy.from_dlpack(v), jax.numpy.asarray(v), jax.numpy.array(v)]
        before = v.numpy().tolist()
        v.assign_add(np.ones(3, np.float32))
        assert [one.tolist() for one in taken] == [before] * 3  # a JAX array never changes

    strategy.run(replica)
    with strategy.scope():
        replica()
    assert v.numpy().tolist() == [2, 3, 4]
