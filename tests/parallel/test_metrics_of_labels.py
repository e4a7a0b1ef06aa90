"""Metrics of labels and predictions: against plain loops over all replicas' data."""

import fractions
import math

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs

metrics = hs.metrics
COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
CLASSES = 4
on_one_strategy = pytest.mark.parametrize(
    "strategy", slow_but(STRATEGIES[:1], STRATEGIES), indirect=True
)


def data(rank, step):
    """Class scores, labels, chances of 1, binary labels, weights; none on some ranks and steps."""
    random = np.random.default_rng([rank, step])
    size = [rank + 1, 3 if rank else 0, 0 if rank == 2 else 5][step]
    scores = random.integers(-3, 4, (size, CLASSES)) / 2  # ties are usual
    return {
        "scores": scores,
        "classes": random.integers(0, CLASSES, size),
        "chances": random.integers(0, 9, size) / 8,  # exact in each dtype; some are the threshold
        "labels": random.integers(0, 2, size),
        "weights": random.integers(0, 4, size) / 4,  # so that sums are exact in any order
    }


def one_hot(given):
    return np.eye(CLASSES)[given["classes"]], given["scores"]


def of_classes(given):
    return given["classes"], given["scores"]


def of_chances(given):
    return given["labels"], given["chances"]


def of_predicted(given):
    return given["classes"], given["scores"].argmax(axis=1)


def mean(value):
    """The weighted mean of `value(label, prediction)`."""

    def of(rows):
        total = sum(weight for _, _, weight in rows)
        return sum(value(*pair) * weight for *pair, weight in rows) / total

    return of


def first(scores):
    return next(i for i, score in enumerate(scores) if score == max(scores))


def matrix(rows):
    counts = np.zeros((CLASSES, CLASSES))
    for label, predicted, weight in rows:
        counts[label, predicted] += weight
    return counts


def matrix_but_for_class_1(rows):
    return matrix([row for row in rows if row[0] != 1])


CASES = {
    "Accuracy": (metrics.Accuracy, of_predicted, mean(lambda label, predicted: label == predicted)),
    "BinaryAccuracy": (
        lambda: metrics.BinaryAccuracy(threshold=0.25),
        of_chances,
        mean(lambda label, chance: label == (chance > 0.25)),
    ),
    "SparseCategoricalAccuracy": (
        metrics.SparseCategoricalAccuracy,
        of_classes,
        mean(lambda label, scores: label == first(scores)),
    ),
    "CategoricalAccuracy": (
        metrics.CategoricalAccuracy,
        one_hot,
        mean(lambda label, scores: first(label) == first(scores)),
    ),
    "MeanAbsoluteError": (metrics.MeanAbsoluteError, of_chances, mean(lambda a, b: abs(a - b))),
    "MeanSquaredError": (metrics.MeanSquaredError, of_chances, mean(lambda a, b: (a - b) ** 2)),
    "RootMeanSquaredError": (
        metrics.RootMeanSquaredError,
        of_chances,
        lambda rows: math.sqrt(mean(lambda a, b: (a - b) ** 2)(rows)),
    ),
    "ConfusionMatrix": (lambda: metrics.ConfusionMatrix(CLASSES), of_predicted, matrix),
    "ConfusionMatrix but for a class": (
        lambda: metrics.ConfusionMatrix(CLASSES, ignore_class=1),
        of_predicted,
        matrix_but_for_class_1,
    ),
}
# The conformance kit compares all of them, in float32, with TensorFlow's.
KINDS = [
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "RootMeanSquaredError",
    "ConfusionMatrix but for a class",
]
"""One of each way to compute."""


def rows_of(pair, is_weighted):
    """(label, prediction, weight) of all replicas."""
    for rank in range(N):
        for step in range(3):
            given = data(rank, step)
            yield from zip(
                *pair(given),
                given["weights"] if is_weighted else np.ones(len(given["weights"])),
                strict=True,
            )


@pytest.mark.core
@pytest.mark.parametrize(
    "is_weighted", slow_but([True], [False, True]), ids=["unweighted", "weighted"]
)
@pytest.mark.parametrize("case", slow_but(KINDS, CASES))
def test_metric(strategy, xp, case, is_weighted):
    make, pair, expected = CASES[case]
    with strategy.scope():
        metric = make()
    for step in range(3):
        given = data(RANK, step)
        arrays = [xp.asarray(one) for one in (*pair(given), given["weights"])]
        strategy.run(
            lambda arrays=arrays: metric.update_state(*(arrays if is_weighted else arrays[:2]))
        )
    want = expected([*rows_of(pair, is_weighted)])
    for _ in range(2):
        np.testing.assert_allclose(metric.result(), want, rtol=1e-12, atol=1e-15)
    found = strategy.experimental_local_results(strategy.run(metric.result))
    assert all(np.array_equal(one, metric.result()) for one in found)
    metric.reset_states()
    assert not np.any(metric.result())


@on_one_strategy
@pytest.mark.parametrize("case", slow_but(KINDS, CASES))
def test_values_of_the_host_and_of_the_device_add_up(strategy, xp, case):
    make, pair, _ = CASES[case]
    with strategy.scope():
        metric, other = make(), make()
    given = data(1, 2)
    true, predicted = pair(given)
    weights = given["weights"]

    def step():
        for place in xp.asarray, np.asarray, np.ndarray.tolist:
            for other_place in xp.asarray, np.asarray, np.ndarray.tolist:
                metric.update_state(place(true), other_place(predicted), place(weights))
                other.update_state(true, predicted, weights)

    strategy.run(step)
    np.testing.assert_allclose(metric.result(), other.result(), rtol=1e-12)


@on_one_strategy
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "case", slow_but([*KINDS, "SparseCategoricalAccuracy", "MeanAbsoluteError"], CASES)
)
def test_dtypes(strategy, xp, case, dtype):
    make, pair, expected = CASES[case]
    with strategy.scope():
        metric = make()
    true, predicted = pair(data(1, 2))
    if pair is not of_predicted:
        predicted = predicted.astype(dtype)
    strategy.run(lambda: metric.update_state(xp.asarray(true.astype(dtype)), xp.asarray(predicted)))
    rows = [*zip(*pair(data(1, 2)), np.full(5, N), strict=True)]
    np.testing.assert_allclose(metric.result(), expected(rows), rtol=1e-12)


@on_one_strategy
@pytest.mark.parametrize(
    "true, predicted",
    [
        ([0, 3], [0, 1]),
        ([0, 1], [0, -1]),
        ([0, 1], [0.0, 0.7]),
        ([0.0, 1.5], [0, 1]),
        ([0, 1], [0.0, math.nan]),
        ([0, 2.5], [0, 1]),
    ],
    ids=[
        "label",
        "prediction",
        "probability for a class",
        "label with a fraction",
        "nan for a class",
        "ignored class with a fraction",
    ],
)
def test_what_is_not_a_class(strategy, xp, true, predicted):
    """An error at once on the host; on a GPU, whose kernels cannot raise, in all ranks' result."""
    with strategy.scope():
        metric = metrics.ConfusionMatrix(3, ignore_class=2)
    says = "labels or predictions are not below num_classes, are negative, or have fractions; pass"
    true, predicted = xp.array(true), xp.array(predicted)
    if xp is np:
        with pytest.raises(ValueError, match=f"ConfusionMatrix.update_state: {says}"):
            strategy.run(lambda: metric.update_state(true, predicted))
    else:
        strategy.run(lambda: metric.update_state(true, predicted) if RANK == N - 1 else None)
        for read in metric.result, lambda: strategy.run(metric.result):
            with pytest.raises(ValueError, match=f"ConfusionMatrix.result: .*{says}"):
                read()
        metric.reset_state()
    assert not np.any(metric.result())
    strategy.run(lambda: metric.update_state(true[:1], predicted[:1]))  # the next call works
    assert metric.result()[0, 0] == N


def test_a_label_that_is_ignored_need_not_be_a_class(strategy, xp):
    with strategy.scope():
        metric = metrics.ConfusionMatrix(2, ignore_class=255)
    strategy.run(lambda: metric.update_state(xp.array([0, 255, 1]), xp.array([1, 0, 1])))
    assert metric.result().tolist() == [[0, N], [0, N]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, bool, np.uint64], ids=str)
def test_classes_of_any_dtype_count_if_they_are_whole(strategy, xp, dtype):
    with strategy.scope():
        metric = metrics.ConfusionMatrix(2)
    strategy.run(
        lambda: metric.update_state(xp.array([0, 1, 1], dtype), xp.array([1, 0, 1], dtype))
    )
    assert metric.result().tolist() == [[0, N], [N, N]]


def test_an_ignored_class_of_weight(strategy, xp):
    with strategy.scope():
        metric = metrics.ConfusionMatrix(2, ignore_class=0)
    strategy.run(
        lambda: metric.update_state(xp.array([0, 1]), xp.array([1, 0]), xp.array([0.5, 2.0]))
    )
    assert metric.result().tolist() == [[0, 0], [2 * N, 0]]


@on_one_strategy
@pytest.mark.parametrize(
    "make, arguments, says",
    [
        (
            metrics.SparseCategoricalAccuracy,
            ([0, 1], [[1.0, 2.0]]),
            r"y_true has shape \(2,\) and y_pred \(1, 2\)",
        ),
        (
            metrics.SparseCategoricalAccuracy,
            ([0, 1], [1.0, 2.0]),
            "y_pred must have one more dimension",
        ),
        (
            metrics.CategoricalAccuracy,
            ([0, 1], [[1.0, 2.0]]),
            r"y_true has shape \(2,\) and y_pred \(1, 2\)",
        ),
        (
            metrics.CategoricalAccuracy,
            (np.ones((2, 0)), np.ones((2, 0))),
            "its last dimension must be that of classes",
        ),
        (
            metrics.BinaryAccuracy,
            ([0, 1], [[1.0]]),
            r"y_true has shape \(2,\) and y_pred \(1, 1\); they must be equal",
        ),
        (
            metrics.BinaryAccuracy,
            ([0, 1], [0.0, 1.0], [1.0, 1.0, 1.0]),
            r"sample_weight has shape \(3,\) and the values",
        ),
        (
            metrics.MeanAbsoluteError,
            ([0, 1], [0.0, 1.0], np.ones((2, 2))),
            "sample_weight has shape",
        ),
    ],
    ids=[
        "fewer class indices",
        "scores without classes",
        "class indices for one-hot labels",
        "no classes",
        "one more dimension",
        "more weights",
        "weights of two dimensions",
    ],
)
def test_shapes_that_do_not_fit(strategy, xp, make, arguments, says):
    with strategy.scope():
        metric = make()
    with pytest.raises(ValueError, match=f"{make.__name__}.update_state: .*{says}"):
        strategy.run(lambda: metric.update_state(*map(xp.asarray, arguments)))
    assert metric.result() == 0


def test_a_matrix_of_no_classes():
    with pytest.raises(ValueError, match="ConfusionMatrix: num_classes is 0; it must be at least"):
        metrics.ConfusionMatrix(0)


# ---- complex numbers


def complex_pair(rank, complex_ones, dtype):
    """Labels and predictions that differ by `k (3 + 4j)`, which is `5 k` long, for k = 1 to rank + 2.

    `complex_ones` says whether labels, predictions or both have an imaginary part.
    """
    k = np.arange(1, rank + 3)
    label = {"both": 1 - 2j, "labels": 2 + 4j, "predictions": 2.0}[complex_ones]
    true, predicted = k * label, k * (label - (3 + 4j))
    if complex_ones == "labels":
        predicted = predicted.real
    return tuple(x.astype(dtype) if x.dtype.kind == "c" else x for x in (true, predicted))


@on_one_strategy
@pytest.mark.parametrize("complex_ones", ["both", "labels", "predictions"])
@pytest.mark.parametrize("dtype", [np.complex128, np.complex64])
def test_errors_of_complex_numbers(strategy, xp, complex_ones, dtype):
    with strategy.scope():
        kinds = metrics.MeanAbsoluteError, metrics.MeanSquaredError, metrics.RootMeanSquaredError
        found, weighted = [kind() for kind in kinds], [kind() for kind in kinds]
    true, predicted = map(xp.asarray, complex_pair(RANK, complex_ones, dtype))
    assert {true.dtype.kind, predicted.dtype.kind} == set("c" if complex_ones == "both" else "cf")

    def step():
        for metric in found:
            metric.update_state(true, predicted)
        for metric in weighted:
            metric.update_state(true, predicted, xp.full(RANK + 2, RANK + 1.0))

    strategy.run(step)
    k = np.concatenate([np.arange(1, rank + 3) for rank in range(N)])
    weights = np.concatenate([np.full(rank + 2, rank + 1) for rank in range(N)])
    for group, weight in (found, None), (weighted, weights):
        squared = np.average(25 * k**2, weights=weight)
        want = [np.average(5 * k, weights=weight), squared, math.sqrt(squared)]
        np.testing.assert_allclose([metric.result() for metric in group], want, rtol=1e-12)


@on_one_strategy
def test_accuracy_of_complex_numbers(strategy, xp):
    """Predictions are right if both parts are: here in 1 of 3, and in 1 of 2 for real labels."""
    with strategy.scope():
        accuracy = metrics.Accuracy()
    own = RANK + 1

    def step():
        accuracy.update_state(xp.array([own * 1j, 2, own]), xp.array([own * 1j, 2 + 1j, own * 1j]))
        accuracy.update_state(xp.array([1.0, own]), xp.array([1 + 0j, own + 1j]))

    strategy.run(step)
    assert accuracy.result() == pytest.approx(2 / 5, rel=1e-15)


COMPLEX = {
    "values": (metrics.Mean, ([1j, 2],)),
    "values, a number": (metrics.Mean, (2 + 1j,)),
    "values of 64 bits": (metrics.Sum, (np.zeros(2, np.complex64),)),
    "values of a function": (
        lambda: metrics.MeanMetricWrapper(lambda y, p: y - p, "of a function"),
        ([1j, 2], [0, 0]),
    ),
    "sample_weight of a sum": (metrics.Sum, ([1.0, 2.0], [1j, 2])),
    "sample_weight of errors": (metrics.MeanSquaredError, ([0.0, 1.0], [0.0, 1.0], [1j, 1])),
    "sample_weight of counts": (lambda: metrics.ConfusionMatrix(2), ([0, 1], [0, 1], [1j, 1])),
    "y_pred for a threshold": (metrics.BinaryAccuracy, ([0, 1], [0.2j, 0.7])),
    "y_pred, scores": (metrics.SparseCategoricalAccuracy, ([0, 1], [[1j, 0], [0, 1]])),
    "y_true, class indices": (metrics.SparseCategoricalAccuracy, ([0, 1j], [[1, 0], [0, 1]])),
    "y_true, one-hot": (metrics.CategoricalAccuracy, ([[1j, 0]], [[1, 0]])),
    "y_true of a matrix": (lambda: metrics.ConfusionMatrix(2), ([0, 1j], [0, 1])),
    "y_pred of a matrix": (lambda: metrics.ConfusionMatrix(2), ([0, 1], [0, 1j])),
}
"""By what is complex: the metric, and the arguments."""


@on_one_strategy
@pytest.mark.parametrize("case", COMPLEX)
def test_complex_numbers_that_are_refused(strategy, xp, case):
    """Before anything has changed."""
    make, given = COMPLEX[case]
    argument = case.split()[0].rstrip(",")
    with strategy.scope():
        metric = make()
    call = f"{type(metric).__name__}.update_state"
    says = (
        rf"{call}: {argument} has dtype complex\d+, and must be real; pass abs\({argument}\), or "
    )
    with pytest.raises(TypeError, match=rf"{says}{argument}.real and {argument}.imag to two"):
        strategy.run(lambda: metric.update_state(*map(xp.asarray, given)))
    assert not metric.totals.numpy().any()


@on_one_strategy
def test_complex_numbers_among_python_objects(strategy):
    with strategy.scope():
        mean, error = metrics.Mean(), metrics.MeanAbsoluteError()
    values = [3 + 4j, fractions.Fraction(1, 2)]
    for one in values, np.array([np.complex64(1j), 2], object):
        with pytest.raises(TypeError, match="Mean.update_state: values has dtype complex128, and"):
            strategy.run(lambda one=one: mean.update_state(one))
    assert mean.result() == 0
    strategy.run(lambda: error.update_state(values, [0, 0]))
    assert error.result() == 2.75
