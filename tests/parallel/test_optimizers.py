"""What optimizers agree on between ranks, and how they take a learning rate."""

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def stepped(strategy, gradient, rate):
    """A table of 4 rows of ones after one step of SGD with a gradient of ones, if any."""
    with strategy.scope():
        table = hs.Variable(np.ones((4, 2)))
        optimizer = hs.optimizers.SGD(rate)
    strategy.run(lambda: optimizer.apply_gradients([(gradient(strategy.xp), table)]))
    return table


def dense(xp):
    return xp.ones((4, 2))


def rows(xp):
    return hs.IndexedSlices(xp.ones((2, 2)), xp.array([1, 3]), (4, 2))


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank's learning rate is the only one
@pytest.mark.parametrize("gradient", [dense, rows])
def test_learning_rates_that_differ_are_refused(strategy, gradient):
    with pytest.raises(hs.ReplicaMismatchError, match=r"SGD\.apply_gradients"):
        stepped(strategy, gradient, 0.5 if RANK else 0.25)
    table = stepped(strategy, gradient, 0.5)
    assert table.numpy()[3].tolist() == [1 - 0.5 * N] * 2


@pytest.mark.mpi(min_size=2)  # one rank's slots are the only ones
def test_slots_that_start_differently_are_refused(strategy, xp):
    def step(start):
        optimizer = hs.optimizers.Adagrad(0.5, initial_accumulator_value=start, epsilon=0.0)
        strategy.run(lambda: optimizer.apply_gradients([(xp.ones(3), v)]))

    with strategy.scope():
        v = hs.Variable(np.zeros(3))
    with pytest.raises(hs.ReplicaMismatchError, match="rank 1: .* with initial value=1.5"):
        step(0.5 + RANK)
    assert v.numpy().tolist() == [0] * 3
    step(0.0)
    assert v.numpy().tolist() == [-0.5] * 3


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


@pytest.mark.core
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64])
def test_each_row_is_summed_by_itself(strategy, xp, dtype):
    """However many other rows there are, and whatever is in them: one is infinite, one is NaN."""
    count = 3000
    with strategy.scope():
        table, optimizer = hs.Variable(np.zeros((count, 2), dtype)), hs.optimizers.SGD(1.0)
    slope = np.stack([np.arange(count) % 7 + 1.0, np.arange(count) % 5], axis=1)
    slope[100], slope[200] = np.inf, np.nan
    names = np.tile(np.arange(count), 4)  # each four times, far from each other

    def replica():
        values = xp.asarray((slope[names] * (RANK + 1)).astype(dtype))
        optimizer.apply_gradients([(hs.IndexedSlices(values, xp.asarray(names)), table)])

    strategy.run(replica)
    found, expected = table.numpy(), (-4 * sum(range(1, N + 1)) * slope).astype(dtype)
    assert not np.isfinite(found[[100, 200]]).any()
    np.testing.assert_array_equal(
        np.delete(found, [100, 200], axis=0), np.delete(expected, [100, 200], axis=0)
    )


def test_rows_without_a_gradient_stay(strategy):
    assert stepped(strategy, rows, 0.5).numpy()[[0, 2]].tolist() == [[1, 1]] * 2


def test_slices_of_a_scalar_are_refused(strategy, xp):
    with strategy.scope():
        v, optimizer = hs.Variable(1.0), hs.optimizers.SGD(1.0)

    def replica():
        gradient = hs.IndexedSlices(xp.ones(1), xp.array([0]))
        with pytest.raises(ValueError, match=r"SGD\.apply_gradients: .* the variable is a scalar"):
            optimizer.apply_gradients([(gradient, v)])

    strategy.run(replica)
    assert v.numpy() == 1


LARGE = [(5,), (300, 400), (3,), (400, 300)]  # each rank updates whole chunks of the large ones

LAYOUTS = {
    "new arrays": lambda xp, g: g,
    "not contiguous": lambda xp, g: xp.repeat(g, 2, axis=-1)[..., ::2],
    "transposed": lambda xp, g: xp.ascontiguousarray(g.T).T,
    "of another dtype": lambda xp, g: g.astype(np.float64),
    "read-only": lambda xp, g: xp.broadcast_to(g[:1], g.shape),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.core if layout == "transposed" else ())
        for layout in LAYOUTS
    ],
)
def test_large_gradients_of_every_layout(strategy, layout):
    xp = strategy.xp

    def gradient(shape, rank):  # whole numbers, so that sums are exact
        values = np.arange(np.prod(shape)).reshape(shape) % 97 + 1000 * rank
        return values if layout != "read-only" else np.broadcast_to(values[:1], shape)

    with strategy.scope():
        variables = [hs.Variable(np.full(shape, 7, np.float32)) for shape in LARGE]
        optimizer = hs.optimizers.SGD(1.0)
    for _ in range(2):
        gradients = [
            LAYOUTS[layout](xp, xp.asarray(gradient(shape, RANK).astype(np.float32)))
            for shape in LARGE
        ]
        strategy.run(
            lambda given: optimizer.apply_gradients(zip(given, variables, strict=True)),
            args=(gradients,),
        )
        for given, shape in zip(gradients, LARGE, strict=True):
            assert np.array_equal(hs.asnumpy(given), gradient(shape, RANK))  # they are the caller's
    for variable, shape in zip(variables, LARGE, strict=True):
        assert np.array_equal(
            variable.numpy(), 7 - 2 * sum(gradient(shape, rank) for rank in range(N))
        )


@pytest.mark.core
def test_gradients_that_are_other_variables_values(strategy):
    numbers = np.arange(120_000).reshape(300, 400) % 97
    with strategy.scope():
        one, other = (
            hs.Variable(numbers.astype(np.float32)),
            hs.Variable((numbers[::-1] + 5).astype(np.float32)),
        )
        optimizer = hs.optimizers.SGD(1.0)
    for _ in range(3):
        before = one.numpy(), other.numpy()
        strategy.run(
            lambda: optimizer.apply_gradients([(other.value(), one), (one.value(), other)])
        )
        assert np.array_equal(one.numpy(), before[0] - N * before[1])
        assert np.array_equal(other.numpy(), before[1] - N * before[0])


def test_no_variable_at_all_is_no_step(strategy):
    optimizer = hs.optimizers.SGD(0.5)
    assert strategy.run(lambda: optimizer.apply_gradients([])) is None
    with strategy.scope():
        optimizer.apply_gradients(zip([], [], strict=True))
    optimizer.apply_gradients(iter([]))
    assert optimizer.iterations == 0


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_variables_on_one_rank_only_are_a_mismatch(strategy):
    with strategy.scope():
        v = hs.Variable(np.ones(2))
    optimizer = hs.optimizers.SGD(0.5)
    with pytest.raises(hs.ReplicaMismatchError, match=r"SGD\.apply_gradients\(no variable\)"):
        strategy.run(lambda: optimizer.apply_gradients([] if RANK else [(strategy.xp.ones(2), v)]))
    assert v.numpy().tolist() == [1, 1]


@pytest.mark.mpi(min_size=2)  # one process is all of them
def test_variables_of_no_scope_are_named_as_such(strategy):
    v = hs.Variable(np.ones(2), name="w")
    with pytest.raises(
        RuntimeError,
        match=r"SGD.apply_gradients to 'w': .* made outside .* `with strategy.scope\(\):`",
    ):
        strategy.run(lambda: hs.optimizers.SGD(0.5).apply_gradients([(np.ones(2), v)]))


def test_reprs_tell_the_arguments_and_the_steps_done(strategy):
    with strategy.scope():
        v = hs.Variable(np.ones(2))
        optimizer = hs.optimizers.SGD(0.5, momentum=0.9)
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.ones(2), v)]))
    assert repr(optimizer) == ("SGD(learning_rate=0.5, momentum=0.9, nesterov=False, iterations=1)")
    rate = hs.optimizers.schedules.CosineDecay(0.1, 10)
    for one in (
        hs.optimizers.Adam(rate),
        hs.optimizers.AdamW(rate),
        hs.optimizers.Adagrad(),
        hs.optimizers.RMSprop(),
    ):
        assert repr(one).startswith(f"{type(one).__name__}(learning_rate={one.learning_rate!r}, ")
        assert "epsilon=1e-07" in repr(one)


def test_of_many_subsets_of_the_variables_only_some_are_kept(strategy):
    """Any number of them may occur; the buffers stay."""
    with strategy.scope():
        variables = [hs.Variable(np.zeros(3)) for _ in range(6)]
        optimizer = hs.optimizers.SGD(1.0)
    buffers = optimizer.gradient_buffers(variables)
    steps = np.zeros(6)
    for subset in 3 * list(range(1, 64)):
        members = [i for i in range(6) if subset >> i & 1]
        gradients = [strategy.xp.full(3, float(i + 1)) for i in members]
        pairs = [(gradient, variables[i]) for gradient, i in zip(gradients, members, strict=True)]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        steps[members] += 1
    assert [v.numpy().tolist() for v in variables] == [
        [-N * (i + 1) * steps[i]] * 3 for i in range(6)
    ]
    assert all(
        one is other
        for one, other in zip(buffers, optimizer.gradient_buffers(variables), strict=True)
    )
    assert len(optimizer._state.plans) == 1 + 16
