"""Metrics of labels and predictions: against plain loops over all replicas' data."""

import itertools
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
THRESHOLDS = [0.75, 0.25]
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
        "chances": random.integers(0, 9, size)
        / 8,  # exact in each dtype, and some are at thresholds
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


def is_in_top(k):
    return lambda label, scores: sum(score > scores[int(label)] for score in scores) < k


def first(scores):
    return next(i for i, score in enumerate(scores) if score == max(scores))


def positives(rows, threshold):
    """TP, FP, TN, FN."""
    counts = {(label, is_above): 0.0 for label in (0, 1) for is_above in (False, True)}
    for label, chance, weight in rows:
        counts[label, bool(chance > threshold)] += weight
    return counts[1, True], counts[0, True], counts[0, False], counts[1, False]


def at(threshold, combine):
    return lambda rows: combine(*positives(rows, threshold))


def precision(tp, fp, tn, fn):
    return tp / (tp + fp) if tp + fp else 0


def recall(tp, fp, tn, fn):
    return tp / (tp + fn) if tp + fn else 0


def matrix(rows):
    counts = np.zeros((CLASSES, CLASSES))
    for label, predicted, weight in rows:
        counts[label, predicted] += weight
    return counts


def mean_iou(rows, ignored=None):
    counts = matrix([row for row in rows if row[0] != ignored])
    found = []
    for i in range(CLASSES):
        union = counts[i].sum() + counts[:, i].sum() - counts[i, i]
        found += [counts[i, i] / union] if union else []
    return sum(found) / len(found)


def area(rows):
    """The area under the ROC curve through the thresholds -0, 0.25, 0.75, 1+: trapezia."""
    corners = []
    for threshold in (-1, 0.25, 0.75, 2):
        tp, fp, tn, fn = positives(rows, threshold)
        corners.append((fp / (fp + tn), tp / (tp + fn)))
    return sum((a[0] - b[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(corners))


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
    "SparseTopK": (
        lambda: metrics.SparseTopKCategoricalAccuracy(2),
        of_classes,
        mean(is_in_top(2)),
    ),
    "TopK": (
        lambda: metrics.TopKCategoricalAccuracy(3),
        one_hot,
        mean(lambda label, scores: is_in_top(3)(first(label), scores)),
    ),
    "MeanAbsoluteError": (metrics.MeanAbsoluteError, of_chances, mean(lambda a, b: abs(a - b))),
    "MeanSquaredError": (metrics.MeanSquaredError, of_chances, mean(lambda a, b: (a - b) ** 2)),
    "RootMeanSquaredError": (
        metrics.RootMeanSquaredError,
        of_chances,
        lambda rows: math.sqrt(mean(lambda a, b: (a - b) ** 2)(rows)),
    ),
    "ConfusionMatrix": (lambda: metrics.ConfusionMatrix(CLASSES), of_predicted, matrix),
    "MeanIoU": (lambda: metrics.MeanIoU(CLASSES), of_predicted, mean_iou),
    "MeanIoU but for a class": (
        lambda: metrics.MeanIoU(CLASSES, ignore_class=1),
        of_predicted,
        lambda rows: mean_iou(rows, 1),
    ),
    "TruePositives": (metrics.TruePositives, of_chances, at(0.5, lambda tp, fp, tn, fn: tp)),
    "FalsePositives": (metrics.FalsePositives, of_chances, at(0.5, lambda tp, fp, tn, fn: fp)),
    "TrueNegatives": (metrics.TrueNegatives, of_chances, at(0.5, lambda tp, fp, tn, fn: tn)),
    "FalseNegatives": (metrics.FalseNegatives, of_chances, at(0.5, lambda tp, fp, tn, fn: fn)),
    "Precision": (lambda: metrics.Precision(0.25), of_chances, at(0.25, precision)),
    "Recall": (
        lambda: metrics.Recall(THRESHOLDS),
        of_chances,
        lambda rows: [at(threshold, recall)(rows) for threshold in THRESHOLDS],
    ),
    "AUC": (lambda: metrics.AUC(thresholds=THRESHOLDS), of_chances, area),
}
# The conformance kit compares all of them, in float32, with TensorFlow's.
KINDS = [
    "SparseTopK",
    "CategoricalAccuracy",
    "RootMeanSquaredError",
    "MeanIoU but for a class",
    "Recall",
    "AUC",
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
    if case not in ("Accuracy", "ConfusionMatrix") and not case.startswith("MeanIoU"):
        predicted = predicted.astype(dtype)
    strategy.run(lambda: metric.update_state(xp.asarray(true.astype(dtype)), xp.asarray(predicted)))
    rows = [*zip(*pair(data(1, 2)), np.full(5, N), strict=True)]
    np.testing.assert_allclose(metric.result(), expected(rows), rtol=1e-12)


@on_one_strategy
def test_scores_that_are_not_finite(strategy, xp):
    """As `tf.math.in_top_k`: it is wrong, as is a prediction for a label that is not a class."""
    with strategy.scope():
        metric = metrics.SparseTopKCategoricalAccuracy(3)
    scores = np.array([[1, np.inf, 0], [np.nan, 1, 2], [1, 2, 3], [1, 2, 3], [3, 2, 1]])
    strategy.run(lambda: metric.update_state(xp.array([0, 1, 3, -1, 2]), xp.asarray(scores)))
    assert metric.result() == 1 / 5


@on_one_strategy
def test_logits(strategy, xp):
    logits = np.array([-300.0, -2.0, -1.0, 0.5, 1.0, 300.0])
    labels = np.array([0, 0, 1, 0, 1, 1])
    with strategy.scope():
        of_logits, of_chances = metrics.AUC(from_logits=True), metrics.AUC()

    def step():
        of_logits.update_state(xp.asarray(labels), xp.asarray(logits))
        of_chances.update_state(xp.asarray(labels), xp.asarray(1 / (1 + np.exp(-logits))))

    strategy.run(step)
    assert (
        of_logits.result()
        == pytest.approx(of_chances.result(), rel=1e-12)
        == pytest.approx(8 / 9, rel=1e-2)
    )


@on_one_strategy
@pytest.mark.parametrize(
    "make, true, predicted, says",
    [
        (
            lambda: metrics.ConfusionMatrix(3),
            [0, 3],
            [0, 1],
            "labels or predictions are not below num_classes",
        ),
        (
            lambda: metrics.MeanIoU(3),
            [0, 1],
            [0, -1],
            "labels or predictions are not below num_classes",
        ),
        (
            lambda: metrics.ConfusionMatrix(3),
            [0, 1],
            [0.0, 0.7],
            "labels .*; pass class indices, such as the argmax of probabilities",
        ),
        (lambda: metrics.MeanIoU(3), [0.0, 1.5], [0, 1], "labels or predictions .* have fractions"),
        (lambda: metrics.MeanIoU(3), [0, 1], [0.0, math.nan], "labels or predictions"),
        (lambda: metrics.MeanIoU(3, ignore_class=2), [0, 2.5], [0, 1], "labels or predictions"),
        (lambda: metrics.AUC(), [0, 1], [0.5, 1.5], "predictions are not between 0 and 1"),
        (lambda: metrics.AUC(), [0, 1], [0.5, math.nan], "predictions are not between 0 and 1"),
    ],
    ids=[
        *(
            "label",
            "prediction",
            "probability for a class",
            "label with a fraction",
            "nan for a class",
        ),
        *("ignored class with a fraction", "logits", "nan"),
    ],
)
def test_what_is_out_of_range(strategy, xp, make, true, predicted, says):
    """An error at once on the host; on a GPU, whose kernels cannot raise, in all ranks' result."""
    with strategy.scope():
        metric = make()
    true, predicted = xp.array(true), xp.array(predicted)
    if xp is np:
        with pytest.raises(ValueError, match=rf"{type(metric).__name__}.update_state: {says}"):
            strategy.run(lambda: metric.update_state(true, predicted))
    else:
        strategy.run(lambda: metric.update_state(true, predicted) if RANK == N - 1 else None)
        for read in metric.result, lambda: strategy.run(metric.result):
            with pytest.raises(ValueError, match=rf"{type(metric).__name__}.result: .*{says}"):
                read()
        metric.reset_state()
    assert not np.any(metric.result())
    strategy.run(lambda: metric.update_state(true[:1], predicted[:1]))  # the next call works
    assert metric.reset_state() is None


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
            metrics.Precision,
            ([0, 1], [[1.0]]),
            r"y_true has shape \(2,\) and y_pred \(1, 1\); they must be equal",
        ),
        (
            metrics.Precision,
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


@pytest.mark.parametrize(
    "make, says",
    [
        (
            lambda: metrics.Precision(1.5),
            "Precision: thresholds is 1.5; it must be a number between 0 and 1",
        ),
        (lambda: metrics.Recall([]), r"Recall: thresholds is \[\]"),
        (lambda: metrics.AUC(1), "AUC: num_thresholds is 1; it must be at least 2"),
        (lambda: metrics.AUC(thresholds=[0.5, 2]), "AUC: thresholds is"),
        (lambda: metrics.AUC(curve="roc"), "AUC: curve is 'roc'; it must be 'ROC' or 'PR'"),  # type: ignore[arg-type]
        (
            lambda: metrics.AUC(summation_method="x"),  # type: ignore[arg-type]
            "AUC: summation_method is 'x'; it must be one of",
        ),
        (lambda: metrics.MeanIoU(0), "MeanIoU: num_classes is 0; it must be at least 1"),
        (
            lambda: metrics.TopKCategoricalAccuracy(0),
            "TopKCategoricalAccuracy: k is 0; it must be at least 1",
        ),
    ],
    ids=[
        "Precision(1.5)",
        "Recall([])",
        "AUC(1)",
        "AUC(thresholds=[0.5, 2])",
        "AUC(curve='roc')",
        "AUC(summation_method='x')",
        "MeanIoU(0)",
        "TopKCategoricalAccuracy(0)",
    ],
)
def test_options_that_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
