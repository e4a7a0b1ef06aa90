"""Metrics of labels and predictions: arrays of any place and dtype, classes, complex numbers.

The conformance kit compares their values with TensorFlow's.
"""

import fractions
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

metrics = hs.metrics
N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def make(strategy, kind, *args, **options) -> Any:
    with strategy.scope():
        return kind(*args, **options)


def data(rank, step):
    """Class scores, labels, chances of 1, binary labels, weights; none on rank 0 in step 1."""
    random = np.random.default_rng([rank, step])
    size = [rank + 1, 3 if rank else 0, 20][step]
    return {
        "scores": random.integers(-3, 4, (size, 4)) / 2,  # ties are usual
        "classes": random.integers(0, 4, size),
        "chances": random.integers(0, 9, size) / 8,  # exact in each dtype; some are the threshold
        "labels": random.integers(0, 2, size),
        "weights": random.integers(0, 4, size) / 4,  # so that sums are exact in any order
    }


def one_hot(given):
    return np.eye(4)[given["classes"]], given["scores"]


def of_classes(given):
    return given["classes"], given["scores"]


def of_chances(given):
    return given["labels"], given["chances"]


def of_predicted(given):
    return given["classes"], given["scores"].argmax(axis=1)


# Of each the metric, its labels and predictions, and how often 9 updates count in its result.
CASES = {
    "Accuracy": (metrics.Accuracy, of_predicted, 1),
    "BinaryAccuracy": (lambda: metrics.BinaryAccuracy(threshold=0.25), of_chances, 1),
    "SparseCategoricalAccuracy": (metrics.SparseCategoricalAccuracy, of_classes, 1),
    "CategoricalAccuracy": (metrics.CategoricalAccuracy, one_hot, 1),
    "MeanAbsoluteError": (metrics.MeanAbsoluteError, of_chances, 1),
    "MeanSquaredError": (metrics.MeanSquaredError, of_chances, 1),
    "RootMeanSquaredError": (metrics.RootMeanSquaredError, of_chances, 1),
    "ConfusionMatrix": (lambda: metrics.ConfusionMatrix(4), of_predicted, 9),
    "ConfusionMatrix but for a class": (
        lambda: metrics.ConfusionMatrix(4, ignore_class=1),
        *(of_predicted, 9),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arrays_of_any_place_and_dtype(mirrored, xp, case):
    kind, pair, times = CASES[case]
    given = data(RANK, 2)
    (true, predicted), weights = pair(given), given["weights"]
    metric, expected = make(mirrored, kind), make(mirrored, kind)
    mirrored.run(lambda: expected.update_state(true, predicted, weights))
    assert np.any(expected.result())

    def step():
        for place in xp.asarray, np.asarray, np.ndarray.tolist:
            for other_place in xp.asarray, np.asarray, np.ndarray.tolist:
                metric.update_state(place(true), other_place(predicted), place(weights))

    mirrored.run(step)
    np.testing.assert_allclose(metric.result(), times * expected.result(), rtol=1e-12)
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        metric.reset_state()
        cast = predicted if pair is of_predicted else predicted.astype(dtype)
        arrays = [xp.asarray(one) for one in (true.astype(dtype), cast, weights)]
        mirrored.run(lambda given=arrays: metric.update_state(*given))
        np.testing.assert_allclose(metric.result(), expected.result(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint8, np.int8, bool])
def test_squared_errors_of_any_dtype(mirrored, xp, dtype):
    """In their own dtype 0 - 1 is 255 and 100 * 100 is 16 for 8 bits; 300 squared is inf for 16."""
    metric = make(mirrored, metrics.MeanSquaredError)
    largest = {np.float64: 1e3, np.float16: 300, np.uint8: 200, np.int8: 100, bool: 1}[dtype]
    pair = [xp.array(one).astype(dtype) for one in ([0, largest, 0], [largest, 0, 0])]
    mirrored.run(lambda: metric.update_state(*(pair if RANK % 2 else pair[::-1])))
    assert metric.result() == 2 * largest**2 / 3


# ---- confusion matrices


MATRICES = [
    (255, ([0, 255, 1], [1, 0, 1]), [[0, 1], [0, 1]]),  # an ignored label that is no class
    (0, ([0, 1], [1, 0], [0.5, 2.0]), [[0, 0], [2, 0]]),
    *(
        (None, (np.array([0, 1, 1], dtype), np.array([1, 0, 1], dtype)), [[0, 1], [1, 1]])
        for dtype in (np.float32, np.float16, bool, np.uint64)
    ),
]


def test_confusion_matrices(mirrored, xp):
    for ignored, given, expected in MATRICES:
        metric = make(mirrored, metrics.ConfusionMatrix, 2, ignore_class=ignored)
        mirrored.run(
            lambda metric=metric, given=given: metric.update_state(*map(xp.asarray, given))
        )
        assert metric.result().tolist() == (N * np.array(expected)).tolist()


NO_CLASSES = {
    "label": ([0, 3], [0, 1]),
    "prediction": ([0, 1], [0, -1]),
    "probability for a class": ([0, 1], [0.0, 0.7]),
    "label with a fraction": ([0.0, 1.5], [0, 1]),
    "nan for a class": ([0, 1], [0.0, math.nan]),
    "ignored class with a fraction": ([0, 2.5], [0, 1]),
}


@pytest.mark.parametrize("case", NO_CLASSES)
def test_what_is_not_a_class(mirrored, xp, case):
    """An error at once on the host; on a GPU, whose kernels cannot raise, in all ranks' result."""
    metric = make(mirrored, metrics.ConfusionMatrix, 3, ignore_class=2)
    says = "labels or predictions are not below num_classes, are negative, or have fractions; pass"
    true, predicted = map(xp.array, NO_CLASSES[case])
    if xp is np:
        with pytest.raises(ValueError, match=f"ConfusionMatrix.update_state: {says}"):
            mirrored.run(lambda: metric.update_state(true, predicted))
    else:
        mirrored.run(lambda: metric.update_state(true, predicted) if RANK == N - 1 else None)
        for read in metric.result, lambda: mirrored.run(metric.result):
            with pytest.raises(ValueError, match=f"ConfusionMatrix.result: .*{says}"):
                read()
        metric.reset_state()
    assert not np.any(metric.result())
    mirrored.run(lambda: metric.update_state(true[:1], predicted[:1]))  # the next call works
    assert metric.result()[0, 0] == N


def test_a_matrix_of_no_classes():
    with pytest.raises(ValueError, match="ConfusionMatrix: num_classes is 0; it must be at least"):
        metrics.ConfusionMatrix(0)


# ---- complex numbers


@pytest.mark.parametrize("dtype", [np.complex128, np.complex64])
def test_errors_of_complex_numbers(mirrored, xp, dtype):
    """Labels and predictions differ by `k (3 + 4j)`, which is `5 k` long, for k = 1 to rank + 2."""
    kinds = metrics.MeanAbsoluteError, metrics.MeanSquaredError, metrics.RootMeanSquaredError
    k, each = xp.arange(1, RANK + 3), np.concatenate([np.arange(1, r + 3) for r in range(N)])
    weights = np.concatenate([np.full(rank + 2, rank + 1) for rank in range(N)])
    difference, shift = (k * (3 + 4j)).astype(dtype), (k * (1 - 2j)).astype(dtype)
    for pair in (difference + shift, shift), (difference, 0.0 * k), (0.0 * k, difference):
        for given, weight in ([], None), ([xp.full(RANK + 2, RANK + 1.0)], weights):
            found = [make(mirrored, kind) for kind in kinds]
            for metric in found:
                mirrored.run(metric.update_state, args=(*pair, *given))
            squared = np.average(25 * each**2, weights=weight)
            want = [np.average(5 * each, weights=weight), squared, math.sqrt(squared)]
            np.testing.assert_allclose([metric.result() for metric in found], want, rtol=1e-12)


def test_accuracy_of_complex_numbers(mirrored, xp):
    """Predictions are right if both parts are: here in 1 of 3, and in 1 of 2 for real labels."""
    accuracy, own = make(mirrored, metrics.Accuracy), RANK + 1

    def step():
        accuracy.update_state(xp.array([own * 1j, 2, own]), xp.array([own * 1j, 2 + 1j, own * 1j]))
        accuracy.update_state(xp.array([1.0, own]), xp.array([1 + 0j, own + 1j]))

    mirrored.run(step)
    assert accuracy.result() == pytest.approx(2 / 5, rel=1e-15)


def test_complex_numbers_among_python_objects(mirrored):
    average, error = make(mirrored, metrics.Mean), make(mirrored, metrics.MeanAbsoluteError)
    values = [3 + 4j, fractions.Fraction(1, 2)]
    for one in values, np.array([np.complex64(1j), 2], object):
        with pytest.raises(TypeError, match="Mean.update_state: values has dtype complex128, and"):
            mirrored.run(lambda one=one: average.update_state(one))
    assert average.result() == 0
    mirrored.run(lambda: error.update_state(values, [0, 0]))
    assert error.result() == 2.75
