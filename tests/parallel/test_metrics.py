"""Metrics: of uneven and empty batches, with weights, of the program's own; wrong uses."""

import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

metrics = hs.metrics
COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank


def make(strategy, kind, *args, **options) -> Any:
    with strategy.scope():
        return kind(*args, **options)


# ---- means and sums


def batches(rank):
    """Three batches per replica; replica 0's second batch and replica 2's last are empty."""
    sizes = [rank + 1, 3 if rank else 0, 0 if rank == 2 else 2]
    return [
        np.random.default_rng([rank, step]).integers(-9, 10, (size, 2))
        for step, size in enumerate(sizes)
    ]


def test_mean_and_sum(strategy, xp):
    mean, total = make(strategy, metrics.Mean), make(strategy, metrics.Sum, "total")
    everything = np.concatenate([batch for rank in range(N) for batch in batches(rank)])
    wanted = pytest.approx(everything.astype(float).mean(), rel=1e-15), everything.sum()
    for _ in range(2):
        assert mean.result() == total.result() == 0
        for batch in batches(RANK):
            for metric in (mean, total):
                strategy.run(lambda m=metric, batch=batch: m.update_state(xp.asarray(batch)))
        for _ in range(2):  # reading changes nothing
            assert (mean.result(), total.result()) == wanted
        assert len(set(COMM.allgather((float(mean.result()), float(total.result()))))) == 1
        assert type(mean.result()) is type(total.result()) is np.float64
        for metric in (mean, total):
            in_replicas = strategy.experimental_local_results(strategy.run(metric.result))
            assert all(one == metric.result() for one in in_replicas)
        mean.reset_state()
        with strategy.scope():
            total.reset_state()


def test_update_state_never_communicates(strategy):
    mean, calls = make(strategy, metrics.Mean), strategy.replica_group.communicator.calls

    def replica():
        before = calls.number
        for _ in range(RANK + 1):
            mean.update_state([1.0, 2.0, 6.0])
        if RANK == 0:
            mean.reset_state()  # in a replica: this replica's
        assert calls.number == before

    strategy.run(replica)
    assert mean.result() == (3 if N > 1 else 0)


def test_weights_and_values_of_the_host_and_of_the_device(strategy, xp):
    mean, total = make(strategy, metrics.Mean), make(strategy, metrics.Sum)

    def replica():
        values = xp.arange(6.0).reshape(3, 2) + RANK
        for metric in (mean, total):
            metric.update_state(values, xp.array([1.0, 0.0, RANK]))  # one weight per row
            metric.update_state(values, np.ones((3, 2)))
            metric.update_state(5.0, 2.0)
            metric.update_state(np.full(2, RANK))
            metric.update_state(xp.ones(()))
            metric.update_state(np.ones((2, 2)), xp.array([1.0, RANK]))

    strategy.run(replica)
    sums = counts = 0.0
    for rank in range(N):
        values = np.arange(6.0).reshape(3, 2) + rank
        sums += values[0].sum() + rank * values[2].sum() + values.sum() + 10 + 2 * rank + 1
        sums += 2 + 2 * rank
        counts += 2 + 2 * rank + 6 + 2 + 2 + 1 + 2 + 2 * rank
    assert total.result() == sums
    assert mean.result() == pytest.approx(sums / counts, rel=1e-15)


@pytest.mark.mpi(min_size=2)  # with one replica the script's own level counts for it
def test_the_scripts_own_level_and_a_metric_of_no_scope_are_refused(strategy):
    mean, outside = make(strategy, metrics.Mean), metrics.Mean("loss")
    said = "Mean.update_state was called in the cross-replica"
    with strategy.scope(), pytest.raises(RuntimeError, match=said):
        mean.update_state(3.0)
    assert mean.result() == 0
    said = "'loss': the variable was made outside of this strategy"
    with pytest.raises(RuntimeError, match=said):
        strategy.run(outside.update_state, args=(1.0,))


def test_the_dtype_is_that_of_the_result(mirrored, xp):
    mean = make(mirrored, metrics.Mean, dtype=np.float32)
    mirrored.run(lambda: mean.update_state(xp.asarray(RANK + 0.1)))
    assert type(mean.result()) is np.float32
    assert mean.result() == np.float32((N - 1) / 2 + 0.1)


# ---- names, and metrics of functions


def test_names():
    """As Keras makes them from the classes."""
    for kind in "Mean Accuracy SparseCategoricalAccuracy MeanAbsoluteError".split():
        words = "_".join(word.lower() for word in re.findall("[A-Z][a-z]*", kind))
        assert getattr(metrics, kind)().name == words
        assert repr(getattr(metrics, kind)(name="own")) == f"{kind}(name='own')"
    assert metrics.Mean("loss").name == "loss"
    names = [type(name, (metrics.Mean,), {})().name for name in ("ROC", "PixelIoU")]
    assert names == ["roc", "pixel_io_u"]


def test_a_function_makes_a_metric(mirrored, xp):
    def error(y_true, y_pred, power):
        return abs(y_true - y_pred) ** power

    assert make(mirrored, metrics.MeanMetricWrapper, error).name == "error"
    cubed = make(mirrored, metrics.MeanMetricWrapper, error, "cubed", power=3)
    assert cubed.name == "cubed"
    given = xp.array([1.0, 2.0]), xp.array([RANK + 1.0, 2.0]), xp.array([3.0, 1.0])
    mirrored.run(cubed.update_state, args=given)
    assert cubed.result() == sum(3 * rank**3 for rank in range(N)) / (4 * N)


# ---- what is refused, before anything has changed


def matrix_of_2():
    return metrics.ConfusionMatrix(2)


def of_a_function(function):
    return lambda: metrics.MeanMetricWrapper(function, "of a function")


NO_NUMBERS = [
    (metrics.Mean, ("x",), "values is 'x'; it must be an array of numbers"),
    (metrics.Mean, (None,), "values is None; it must be an array of numbers"),
    (metrics.Mean, ([1.0, None],), r"values is \[1.0, None\]"),
    (metrics.Mean, (["1.5"],), r"values is \['1.5'\]"),
    (metrics.Sum, ([1.0], [None]), r"sample_weight is \[None\]"),
    (metrics.MeanSquaredError, ([1.0], [None, "x"]), "y_pred is"),
    (metrics.Accuracy, (None, [1]), "y_true is None"),
    (metrics.SparseCategoricalAccuracy, ([1], None), "y_pred is None"),
    (matrix_of_2, (None, None), "y_true is None"),
    (of_a_function(lambda *_: None), ([1], [1]), "values is None"),
]
COMPLEX = [  # by what is complex
    ("values", metrics.Mean, ([1j, 2],)),
    ("values", metrics.Mean, (2 + 1j,)),
    ("values", metrics.Sum, (np.zeros(2, np.complex64),)),
    ("values", of_a_function(lambda y, p: y - p), ([1j, 2], [0, 0])),
    ("sample_weight", metrics.Sum, ([1.0, 2.0], [1j, 2])),
    ("sample_weight", metrics.MeanSquaredError, ([0.0, 1.0], [0.0, 1.0], [1j, 1])),
    ("sample_weight", matrix_of_2, ([0, 1], [0, 1], [1j, 1])),
    ("y_pred", metrics.BinaryAccuracy, ([0, 1], [0.2j, 0.7])),
    ("y_pred", metrics.SparseCategoricalAccuracy, ([0, 1], [[1j, 0], [0, 1]])),
    ("y_true", metrics.SparseCategoricalAccuracy, ([0, 1j], [[1, 0], [0, 1]])),
    ("y_true", metrics.CategoricalAccuracy, ([[1j, 0]], [[1, 0]])),
    ("y_true", matrix_of_2, ([0, 1j], [0, 1])),
    ("y_pred", matrix_of_2, ([0, 1], [0, 1j])),
]
ONE_HOT, SPARSE = metrics.CategoricalAccuracy, metrics.SparseCategoricalAccuracy
BINARY = metrics.BinaryAccuracy
SHAPES = [
    (metrics.Accuracy, (np.ones(3), np.ones((3, 1))), r"\(3,\) and y_pred \(3, 1"),
    (SPARSE, ([0, 1], [[1.0, 2.0]]), r"\(2,\) and y_pred \(1, 2\)"),
    (SPARSE, ([0, 1], [1.0, 2.0]), "y_pred must have one more dimension"),
    (ONE_HOT, ([0, 1], [[1.0, 2.0]]), r"y_true has shape \(2,\) and y_pred \(1, 2\)"),
    (ONE_HOT, (np.ones((2, 0)), np.ones((2, 0))), "its last dimension must be that of classes"),
    (BINARY, ([0, 1], [[1.0]]), r"\(1, 1\); they must be equal"),
    (BINARY, ([0, 1], [0.0, 1.0], [1.0] * 3), r"sample_weight has shape \(3,\)"),
    (BINARY, ([0, 1], [0.0, 1.0], np.ones((2, 2))), "sample_weight has shape"),
]


def test_what_is_no_number(mirrored):
    for kind, given, said in NO_NUMBERS:
        check_refused(mirrored, make(mirrored, kind), given, TypeError, said)


def test_shapes_that_do_not_fit(mirrored, xp):
    for kind, given, said in SHAPES:
        given = [xp.asarray(one) for one in given]
        check_refused(mirrored, make(mirrored, kind), given, ValueError, f".*{said}")


def test_complex_numbers_that_are_refused(mirrored, xp):
    for name, kind, given in COMPLEX:
        said = rf"{name} has dtype complex\d+, and must be real; pass abs\({name}\), or {name}.real"
        given = [xp.asarray(one) for one in given]
        check_refused(mirrored, make(mirrored, kind), given, TypeError, said)


def check_refused(strategy, metric, given, error, said):
    with pytest.raises(error, match=f"{type(metric).__name__}.update_state: {said}"):
        strategy.run(lambda: metric.update_state(*given))
    assert not metric.totals.numpy().any() and not np.any(metric.result())
