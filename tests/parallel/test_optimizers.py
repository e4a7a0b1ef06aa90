"""What optimizers agree on between ranks, and how they take a learning rate."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture(scope="module", params=[hs.CentralStorageStrategy, hs.MirroredStrategy])
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def stepped(strategy, gradient, rate):
    """A table of 4 rows of ones after one step of SGD, whose gradient is all ones where there is one."""
    with strategy.scope():
        table = hs.Variable(np.ones((4, 2)))
        optimizer = hs.optimizers.SGD(rate)
    strategy.run(lambda: optimizer.apply_gradients([(gradient(strategy.xp), table)]))
    return table


def dense(xp):
    return xp.ones((4, 2))


def rows(xp):
    return hs.IndexedSlices(xp.ones((2, 2)), xp.array([1, 3]), (4, 2))


@pytest.mark.skipif(N == 1, reason="one rank's learning rate is everyone's")
@pytest.mark.parametrize("gradient", [dense, rows])
def test_learning_rates_that_differ_are_refused(strategy, gradient):
    with pytest.raises(hs.ReplicaMismatchError, match=r"SGD\.apply_gradients"):
        stepped(strategy, gradient, 0.5 if RANK else 0.25)
    table = stepped(strategy, gradient, 0.5)
    assert table.numpy()[3].tolist() == [1 - 0.5 * N] * 2


@pytest.mark.parametrize("gradient", [dense, rows])
def test_only_a_parameter_without_a_default_is_the_step(strategy, gradient):
    rates = {
        lambda: 0.5: 0.5,
        lambda factor=0.5: factor: 0.5,
        lambda *rest, **more: 0.5: 0.5,
        lambda step: 0.5 + step: 0.5,
        hs.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9): 0.5,
    }
    for rate, expected in rates.items():
        assert stepped(strategy, gradient, rate).numpy()[1].tolist() == [1 - expected * N] * 2


def test_rows_without_a_gradient_stay(strategy):
    assert stepped(strategy, rows, 0.5).numpy()[[0, 2]].tolist() == [[1, 1]] * 2
