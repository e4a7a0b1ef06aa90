"""Metrics of classes, errors, thresholds; on batches that split unevenly, of which the last leaves replicas empty."""
import numpy as np

from _common import local, on, plain, raises, replica

RANDOM = np.random.default_rng(0)
SCORES = RANDOM.normal(size=(11, 6)).astype(np.float32)
CLASSES = RANDOM.integers(0, 6, 11)
PREDICTED = SCORES.argmax(axis=1)
TIED = np.round(SCORES)                                      # many scores are equal
LABELS = RANDOM.integers(0, 2, (11, 1)).astype(np.float32)
CHANCES = np.round(RANDOM.random((11, 1)), 1).astype(np.float32)      # some are at thresholds
VALUES = RANDOM.normal(size=(2, 11, 3)).astype(np.float32)
WEIGHTS = RANDOM.random(11).astype(np.float32)


def results(hs, strategy, make, *parts):
    """The results of the metrics that `make` gives, a dict, after each batch, without and with weights; then reset."""
    labels = {}
    for weighted in False, True:
        with strategy.scope():
            metrics = make()
        dataset = hs.data.Dataset.from_tensor_slices((*parts, WEIGHTS)).batch(4)

        def step(y_true, y_pred, weights):
            for metric in metrics.values():
                metric.update_state(y_true, y_pred, sample_weight=weights if weighted else None)
        for i, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
            strategy.run(step, args=batch)
            for name, metric in metrics.items():
                labels[f"{name} {'weighted ' * weighted}{i}"] = plain(hs, metric.result())
        for name, metric in metrics.items():
            metric.reset_state()
            labels[f"{name} reset"] = plain(hs, metric.result())
    return labels


@on("central", "mirrored")
def case_metrics_of_classes(hs, strategy):
    return results(hs, strategy, lambda: {
        "first": hs.metrics.SparseCategoricalAccuracy(),
        "top 5": hs.metrics.SparseTopKCategoricalAccuracy(),
        "top 2": hs.metrics.SparseTopKCategoricalAccuracy(2),
        "top 9": hs.metrics.SparseTopKCategoricalAccuracy(k=9),
    }, CLASSES, SCORES)


def case_metrics_of_classes_in_a_column(hs, strategy):
    return results(hs, strategy, lambda: {"first": hs.metrics.SparseCategoricalAccuracy()}, CLASSES[:, None], SCORES)


def case_metrics_of_tied_classes(hs, strategy):
    return results(hs, strategy, lambda: {
        "first": hs.metrics.SparseCategoricalAccuracy(),
        "top 2": hs.metrics.SparseTopKCategoricalAccuracy(2),
        "top 3": hs.metrics.SparseTopKCategoricalAccuracy(3),
    }, CLASSES, TIED)


@on("central", "mirrored")
def case_metrics_of_one_hot_classes(hs, strategy):
    return results(hs, strategy, lambda: {
        "first": hs.metrics.CategoricalAccuracy(),
        "top 5": hs.metrics.TopKCategoricalAccuracy(),
        "top 2": hs.metrics.TopKCategoricalAccuracy(k=2),
    }, np.eye(6, dtype=np.float32)[CLASSES], SCORES)


def case_metrics_of_scores_not_finite(hs, strategy):
    scores = SCORES + 0
    scores[0, 1], scores[1, CLASSES[1]], scores[5, 0] = np.inf, np.inf, np.nan
    return results(hs, strategy, lambda: {"top 6": hs.metrics.SparseTopKCategoricalAccuracy(6)}, CLASSES, scores)


@on("central", "mirrored")
def case_metrics_of_a_confusion_matrix(hs, strategy):
    return results(hs, strategy, lambda: {
        "matrix": hs.metrics.ConfusionMatrix(6),
        "iou of 7": hs.metrics.MeanIoU(7),
        "iou of 6": hs.metrics.MeanIoU(num_classes=6),
        "ignores": hs.metrics.MeanIoU(num_classes=6, ignore_class=2),
    }, CLASSES, PREDICTED)


def case_metrics_mean_iou_of_scores(hs, strategy):
    one_hot = np.eye(6, dtype=np.float32)[CLASSES]
    return {
        "both": results(hs, strategy, lambda: {
            "last axis": hs.metrics.MeanIoU(6, sparse_y_true=False, sparse_y_pred=False),
            "ignores": hs.metrics.MeanIoU(6, ignore_class=2, sparse_y_true=False, sparse_y_pred=False),
        }, one_hot[:, None], SCORES[:, None]),
        "predictions": results(hs, strategy, lambda: {
            "axis 1": hs.metrics.MeanIoU(6, sparse_y_pred=False, axis=1),
        }, CLASSES[:, None], SCORES[..., None]),
    }


@on("central", "mirrored")
def case_metrics_of_errors(hs, strategy):
    return results(hs, strategy, lambda: {
        "absolute": hs.metrics.MeanAbsoluteError(),
        "squared": hs.metrics.MeanSquaredError(),
        "root": hs.metrics.RootMeanSquaredError(),
    }, VALUES[0], VALUES[1])


@on("central", "mirrored")
def case_metrics_at_thresholds(hs, strategy):
    several = [0.7, 0.1, 0.3]
    return results(hs, strategy, lambda: {
        "accuracy": hs.metrics.BinaryAccuracy(),
        "accuracy at 0.3": hs.metrics.BinaryAccuracy(threshold=0.3),
        "true positives": hs.metrics.TruePositives(),
        "false positives": hs.metrics.FalsePositives(),
        "true negatives": hs.metrics.TrueNegatives(),
        "false negatives": hs.metrics.FalseNegatives(),
        "false negatives at several": hs.metrics.FalseNegatives(several),
        "precision": hs.metrics.Precision(),
        "precision at 0.3": hs.metrics.Precision(thresholds=0.3),
        "precision at several": hs.metrics.Precision(several),
        "recall": hs.metrics.Recall(),
        "recall at two": hs.metrics.Recall([0.9, 0.0]),
    }, LABELS, CHANCES)


@on("central", "mirrored")
def case_metrics_of_areas(hs, strategy):
    return results(hs, strategy, lambda: {
        "200": hs.metrics.AUC(),
        "3": hs.metrics.AUC(3),
        "2": hs.metrics.AUC(2),
        "at thresholds": hs.metrics.AUC(thresholds=[0.8, 0.3]),
        **{f"{curve} {method}": hs.metrics.AUC(num_thresholds=20, curve=curve, summation_method=method)
           for curve in ("ROC", "PR") for method in ("interpolation", "minoring", "majoring")},
    }, LABELS, CHANCES)


def case_metrics_of_logits(hs, strategy):
    return results(hs, strategy, lambda: {
        "roc": hs.metrics.AUC(from_logits=True),
        "pr": hs.metrics.AUC(curve="PR", from_logits=True),
        "precision": hs.metrics.Precision(thresholds=0.0),
    }, LABELS, 9 * CHANCES - 4)


@on("central", "mirrored")
def case_metrics_called(hs, strategy):
    with strategy.scope():
        mean, accuracy = hs.metrics.Mean(dtype=np.float32), hs.metrics.SparseCategoricalAccuracy()
    labels = {}
    for i in range(2):
        labels[f"mean {i}"] = local(hs, strategy, strategy.run(lambda: mean(np.float32(replica(hs) + 1))))[0]
        labels[f"accuracy {i}"] = local(hs, strategy, strategy.run(
            lambda: accuracy(CLASSES[:replica(hs) + 2], SCORES[:replica(hs) + 2])))[0]
    mean.reset_states()
    labels["reset"] = plain(hs, mean.result())
    return labels


@on("mirrored")
def case_metrics_merged(hs, strategy):
    with strategy.scope():
        means = [hs.metrics.Mean() for _ in range(3)]
        aucs = [hs.metrics.AUC(20) for _ in range(2)]

    def step():
        for i, metric in enumerate(means):
            metric.update_state(np.float32(replica(hs) + 2 * i))
        aucs[0].update_state(LABELS[:replica(hs) + 3], CHANCES[:replica(hs) + 3])
        aucs[1].update_state(LABELS[3:], CHANCES[3:])
        means[0].merge_state(means[1:])
        aucs[0].merge_state(aucs[1:])
        aucs[0].merge_state([])
    strategy.run(step)
    return {name: plain(hs, metric.result()) for name, metric in
            {"mean": means[0], "other": means[1], "auc": aucs[0]}.items()}


def case_metrics_that_do_not_fit(hs, strategy):
    with strategy.scope():
        accuracy, iou = hs.metrics.SparseCategoricalAccuracy(), hs.metrics.MeanIoU(3)
    return {
        "classes": raises(strategy.run, lambda: iou.update_state(np.array([0, 3]), np.array([0, 1]))),
        "predicted classes": raises(strategy.run, lambda: iou.update_state(np.array([0, 1]), np.array([0, 3]))),
        "negative": raises(strategy.run, lambda: iou.update_state(np.array([0, -1]), np.array([0, 1]))),
        "labels": raises(strategy.run, lambda: accuracy.update_state(CLASSES[:3], SCORES)),
        "threshold": raises(hs.metrics.Recall, 1.5),
        "curve": raises(hs.metrics.AUC, curve="roe"),
        "method": raises(hs.metrics.AUC, summation_method="some"),
        "too few": raises(hs.metrics.AUC, 1),
        "matrix": plain(hs, iou.result()),
    }
