"""Metrics of classes and errors; on batches that split unevenly, of which the last leaves replicas empty."""
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
    return results(hs, strategy, lambda: {"first": hs.metrics.SparseCategoricalAccuracy()}, CLASSES, SCORES)


def case_metrics_of_classes_in_a_column(hs, strategy):
    return results(hs, strategy, lambda: {"first": hs.metrics.SparseCategoricalAccuracy()}, CLASSES[:, None], SCORES)


def case_metrics_of_tied_classes(hs, strategy):
    return results(hs, strategy, lambda: {"first": hs.metrics.SparseCategoricalAccuracy()}, CLASSES, TIED)


@on("central", "mirrored")
def case_metrics_of_one_hot_classes(hs, strategy):
    return results(hs, strategy, lambda: {"first": hs.metrics.CategoricalAccuracy()}, np.eye(6, dtype=np.float32)[CLASSES], SCORES)


@on("central", "mirrored")
def case_metrics_of_a_confusion_matrix(hs, strategy):
    return results(hs, strategy, lambda: {"matrix": hs.metrics.ConfusionMatrix(6)}, CLASSES, PREDICTED)


@on("central", "mirrored")
def case_metrics_of_errors(hs, strategy):
    return results(hs, strategy, lambda: {
        "absolute": hs.metrics.MeanAbsoluteError(),
        "squared": hs.metrics.MeanSquaredError(),
        "root": hs.metrics.RootMeanSquaredError(),
    }, VALUES[0], VALUES[1])


@on("central", "mirrored")
def case_metrics_at_thresholds(hs, strategy):
    return results(hs, strategy, lambda: {
        "accuracy": hs.metrics.BinaryAccuracy(),
        "accuracy at 0.3": hs.metrics.BinaryAccuracy(threshold=0.3),
    }, LABELS, CHANCES)


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


def case_metrics_that_do_not_fit(hs, strategy):
    with strategy.scope():
        accuracy, matrix = hs.metrics.SparseCategoricalAccuracy(), hs.metrics.ConfusionMatrix(3)
    return {
        "classes": raises(strategy.run, lambda: matrix.update_state(np.array([0, 3]), np.array([0, 1]))),
        "predicted classes": raises(strategy.run, lambda: matrix.update_state(np.array([0, 1]), np.array([0, 3]))),
        "negative": raises(strategy.run, lambda: matrix.update_state(np.array([0, -1]), np.array([0, 1]))),
        "labels": raises(strategy.run, lambda: accuracy.update_state(CLASSES[:3], SCORES)),
        "matrix": plain(hs, matrix.result()),
    }
