"""Metrics and losses: exact over uneven batches, on any number of replicas."""

import re

import numpy as np
import pytest
from mpi4py import MPI
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
on_one_strategy = pytest.mark.parametrize(
    "strategy", slow_but(STRATEGIES[:1], STRATEGIES), indirect=True
)


def make(strategy, kind, *args):
    with strategy.scope():
        return kind(*args)


def batches(rank):
    """Three batches per replica; replica 0's second batch and replica 2's last are empty."""
    sizes = [rank + 1, 3 if rank else 0, 0 if rank == 2 else 2]
    return [
        np.random.default_rng([rank, step]).integers(-9, 10, (size, 2))
        for step, size in enumerate(sizes)
    ]


def everything():
    return np.concatenate([batch for rank in range(N) for batch in batches(rank)]).astype(
        np.float64
    )


def feed(strategy, metric, xp):
    for batch in batches(RANK):
        strategy.run(lambda batch=batch: metric.update_state(xp.asarray(batch)))


def test_names():
    """As Keras makes them from the classes."""
    kinds = "Mean Sum Accuracy BinaryAccuracy CategoricalAccuracy SparseCategoricalAccuracy "
    kinds += "MeanAbsoluteError MeanSquaredError RootMeanSquaredError"
    for kind in kinds.split():
        words = "_".join(word.lower() for word in re.findall("[A-Z][a-z]*", kind))
        assert getattr(hs.metrics, kind)().name == words
        assert getattr(hs.metrics, kind)(name="own").name == "own"
    assert hs.metrics.Mean("loss").name == "loss"
    assert hs.metrics.ConfusionMatrix(2).name == "confusion_matrix"

    class ROC(hs.metrics.Mean): ...

    class PixelIoU(hs.metrics.Mean): ...

    assert [ROC().name, PixelIoU().name] == ["roc", "pixel_io_u"]


@on_one_strategy
def test_a_metric_of_the_program(strategy, xp):
    """Its totals have the shape that it asks for, and `combine` makes the result of their sum."""

    class Moments(hs.metrics.Metric):
        def __init__(self, highest, name=None, dtype=None):
            super().__init__(name, dtype, (highest + 1,))
            self.highest = highest

        def update_state(self, values):
            powers = [(values**power).sum() for power in range(self.highest + 1)]
            self.totals.assign_add(xp.stack(powers))

        def combine(self, totals):
            return totals[1:] / totals[0]

    moments = make(strategy, Moments, 2)
    assert [one.shape for one in moments.variables] == [(3,)]
    assert moments.variables[0] is moments.totals
    for power in range(2):
        strategy.run(
            lambda power=power: moments.update_state(xp.full(RANK + 1, RANK + power + 1.0))
        )
    ranks = np.arange(N)
    values = np.concatenate([np.repeat(ranks + 1, ranks + 1), np.repeat(ranks + 2, ranks + 1)])
    np.testing.assert_allclose(moments.result(), [values.mean(), (values**2).mean()], rtol=1e-14)
    assert repr(moments) == "Moments(name='moments')"


@pytest.mark.core
def test_mean_and_sum(strategy, xp):
    mean, total = make(strategy, hs.metrics.Mean), make(strategy, hs.metrics.Sum, "total")
    for _ in range(2):
        assert mean.result() == 0 and total.result() == 0
        feed(strategy, mean, xp)
        feed(strategy, total, xp)
        for _ in range(2):  # reading changes nothing
            assert mean.result() == pytest.approx(everything().mean(), rel=1e-15)
            assert total.result() == everything().sum()
        results = COMM.allgather((float(mean.result()), float(total.result())))
        assert len(set(results)) == 1
        assert type(mean.result()) is type(total.result()) is np.float64
        mean.reset_state()
        with strategy.scope():
            total.reset_state()


def test_results_in_a_replica_are_of_all_replicas(strategy, xp):
    mean = make(strategy, hs.metrics.Mean)
    feed(strategy, mean, xp)
    found = strategy.run(mean.result)
    for one in strategy.experimental_local_results(found):
        assert one == pytest.approx(everything().mean(), rel=1e-15)


@pytest.mark.core
def test_update_state_never_communicates(strategy):
    mean = make(strategy, hs.metrics.Mean)

    def replica():
        before = strategy.replica_group.communicator.calls.number
        for _ in range(RANK + 1):
            mean.update_state([1.0, 2.0, 6.0])
        if RANK == 0:
            mean.reset_state()  # in a replica: this replica's
        assert strategy.replica_group.communicator.calls.number == before

    strategy.run(replica)
    assert mean.result() == (3 if N > 1 else 0)


def test_values_of_the_host_and_of_the_device_add_up(strategy, xp):
    total = make(strategy, hs.metrics.Sum)

    def replica():
        total.update_state(xp.full(3, RANK + 1.0))
        total.update_state(np.full(2, RANK + 1.0))
        total.update_state(xp.ones(()))
        total.update_state(RANK)
        total.update_state(np.ones((2, 2)), xp.array([1.0, RANK]))

    strategy.run(replica)
    assert total.result() == sum(5 * (rank + 1) + 1 + rank + 2 + 2 * rank for rank in range(N))


def test_weights(strategy, xp):
    mean, total = make(strategy, hs.metrics.Mean), make(strategy, hs.metrics.Sum)

    def replica():
        values = xp.arange(6.0).reshape(3, 2) + RANK
        for metric in (mean, total):
            metric.update_state(values, xp.array([1.0, 0.0, RANK]))  # one weight per row
            metric.update_state(values, np.ones((3, 2)))
            metric.update_state(5.0, 2.0)

    strategy.run(replica)
    sums = counts = 0.0
    for rank in range(N):
        values = np.arange(6.0).reshape(3, 2) + rank
        sums += values[0].sum() + rank * values[2].sum() + values.sum() + 10
        counts += 2 + 2 * rank + 6 + 2
    assert total.result() == sums
    assert mean.result() == pytest.approx(sums / counts, rel=1e-15)


def test_accuracy(strategy, xp):
    accuracy = make(strategy, hs.metrics.Accuracy)
    numbers = xp.arange(4)
    strategy.run(lambda: accuracy.update_state(np.arange(4), xp.where(numbers < RANK, numbers, -1)))
    strategy.run(lambda: accuracy.update_state(xp.zeros(0), xp.zeros(0)))
    right = sum(min(rank, 4) for rank in range(N))
    assert accuracy.result() == right / (4 * N)
    strategy.run(lambda: accuracy.update_state([1, 1], [1, 0], sample_weight=[3, 1]))
    assert accuracy.result() == (right + 3 * N) / (4 * N + 4 * N)


@on_one_strategy
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint8, np.int8, bool])
def test_squared_errors_of_any_dtype(strategy, xp, dtype):
    """In their own dtype 0 - 1 is 255 and 100 * 100 is 16 for 8 bits; 300 squared is inf for 16."""
    metric = make(strategy, hs.metrics.MeanSquaredError)
    largest = {np.float64: 1e3, np.float16: 300, np.uint8: 200, np.int8: 100, bool: 1}[dtype]
    true, predicted = (
        xp.array([0, largest, 0]).astype(dtype),
        xp.array([largest, 0, 0]).astype(dtype),
    )
    strategy.run(
        lambda: metric.update_state(
            true if RANK % 2 else predicted, predicted if RANK % 2 else true
        )
    )
    assert metric.result() == 2 * largest**2 / 3


@on_one_strategy
@pytest.mark.parametrize("kind", [hs.metrics.Accuracy, hs.metrics.MeanSquaredError])
def test_shapes_that_differ(strategy, xp, kind):
    metric = make(strategy, kind)
    with pytest.raises(
        ValueError,
        match=rf"{kind.__name__}.update_state: y_true has shape \(3,\) and y_pred \(3, 1\)",
    ):
        strategy.run(lambda: metric.update_state(xp.ones(3), xp.ones((3, 1))))
    assert metric.result() == 0


@pytest.mark.mpi(min_size=2)  # with one replica the script's own level counts for it
def test_the_scripts_own_level_does_not_count(strategy):
    mean = make(strategy, hs.metrics.Mean)
    with (
        strategy.scope(),
        pytest.raises(RuntimeError, match="Mean.update_state was called in the cross-replica"),
    ):
        mean.update_state(3.0)
    assert mean.result() == 0


@pytest.mark.mpi(min_size=2)  # with one replica everything is one process's own
def test_a_metric_of_no_scope_is_refused_in_a_replica(strategy):
    mean = hs.metrics.Mean("loss")
    with pytest.raises(
        RuntimeError, match="'loss': the variable was made outside of this strategy's scope"
    ):
        strategy.run(lambda: mean.update_state(1.0))


def test_the_dtype_is_that_of_the_result(strategy, xp):
    with strategy.scope():
        mean, matrix = (
            hs.metrics.Mean(dtype=np.float32),
            hs.metrics.ConfusionMatrix(2, dtype=np.int64),
        )

    def step():
        mean.update_state(xp.asarray(RANK + 0.1))
        matrix.update_state(xp.array([0, 1]), xp.array([0, 1]))

    strategy.run(step)
    assert type(mean.result()) is np.float32
    assert mean.result() == np.float32((N - 1) / 2 + 0.1)
    assert matrix.result().dtype == np.int64
    assert matrix.result().tolist() == [[N, 0], [0, N]]


def test_a_call_updates_and_returns_the_result(strategy, xp):
    mean = make(strategy, hs.metrics.Mean)
    for step in range(3):
        found = strategy.run(
            lambda step=step: mean(xp.full(RANK + 1, step + 1.0), sample_weight=xp.array(2.0))
        )
        assert all(
            one == mean.result() == (step + 2) / 2
            for one in strategy.experimental_local_results(found)
        )


@on_one_strategy
def test_a_function_makes_a_metric(strategy, xp):
    def error(y_true, y_pred, power):
        return abs(y_true - y_pred) ** power

    cubed = make(strategy, hs.metrics.MeanMetricWrapper, error)
    assert cubed.name == "error"
    with strategy.scope():
        cubed = hs.metrics.MeanMetricWrapper(error, "cubed", power=3)
    assert cubed.name == "cubed"
    strategy.run(
        lambda: cubed.update_state(
            xp.array([1.0, 2.0]), xp.array([RANK + 1.0, 2.0]), xp.array([3.0, 1.0])
        )
    )
    assert cubed.result() == sum(3 * rank**3 for rank in range(N)) / (4 * N)


# ---- losses


@pytest.mark.core
def test_the_average_loss_of_the_global_batch(strategy, xp):
    """Uneven parts with a given global batch size: their sum is the mean of all."""
    losses = [np.arange(rank + 1, dtype=np.float32) + rank for rank in range(N)]
    size = sum(map(len, losses))
    found = strategy.run(
        lambda: hs.losses.compute_average_loss(xp.asarray(losses[RANK]), global_batch_size=size)
    )
    total = strategy.reduce("SUM", found, None)
    assert total.dtype == np.float32
    assert float(total) == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)
    found = strategy.run(
        lambda: hs.losses.compute_average_loss(xp.full((4, 2), RANK + 1.0), xp.array([1, 0, 2, 1]))
    )
    assert float(strategy.reduce("SUM", found, None)) == pytest.approx(
        2 * 4 * N * (N + 1) / 2 / (4 * N), rel=1e-15
    )
    found = strategy.run(lambda: hs.losses.scale_regularization_loss(xp.array([1.0, 5.0])))
    assert float(strategy.reduce("SUM", found, None)) == pytest.approx(6, rel=1e-15)


@on_one_strategy
def test_the_repr_is_the_name(strategy):
    with strategy.scope():
        metrics = [hs.metrics.Mean("loss"), hs.metrics.Accuracy()]
    assert repr(metrics) == "[Mean(name='loss'), Accuracy(name='accuracy')]"


@on_one_strategy
@pytest.mark.parametrize(
    "kind, args, says",
    [
        (
            hs.metrics.Mean,
            ("x",),
            "Mean.update_state: values is 'x'; it must be an array of numbers",
        ),
        (hs.metrics.Sum, ([1.0], ["x"]), "Sum.update_state: sample_weight is"),
        (
            hs.metrics.MeanSquaredError,
            ([1.0], [None, "x"]),
            "MeanSquaredError.update_state: y_pred is",
        ),
        (
            hs.metrics.Mean,
            (None,),
            "Mean.update_state: values is None; it must be an array of numbers",
        ),
        (hs.metrics.Mean, ([1.0, None],), r"Mean.update_state: values is \[1.0, None\]"),
        (hs.metrics.Mean, (["1.5"],), r"Mean.update_state: values is \['1.5'\]"),
        (hs.metrics.Sum, ([1.0], [None]), r"Sum.update_state: sample_weight is \[None\]"),
        (hs.metrics.Accuracy, (None, [1]), "Accuracy.update_state: y_true is None"),
        (
            hs.metrics.SparseCategoricalAccuracy,
            ([1], None),
            "Accuracy.update_state: y_pred is None",
        ),
        (
            lambda: hs.metrics.ConfusionMatrix(2),
            (None, None),
            "ConfusionMatrix.update_state: y_true is None",
        ),
        (
            lambda: hs.metrics.MeanMetricWrapper(lambda *_: None, "none"),
            ([1], [1]),
            "MeanMetricWrapper.update_state: values is None",
        ),
    ],
    ids=[
        *(
            "values",
            "weights",
            "predictions",
            "None",
            "None among values",
            "digits",
            "None as weight",
        ),
        *(
            "None for labels",
            "None for scores",
            "None for classes",
            "a function without result",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_the_name_of_the_call(strategy, kind, args, says):
    metric = make(strategy, kind)
    with pytest.raises(TypeError, match=says):
        strategy.run(lambda: metric.update_state(*args))
    assert not np.any(metric.result())
