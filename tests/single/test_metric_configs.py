"""`get_config`, `from_config` and `variables` of metrics."""

import json

import numpy as np
import pytest

import hpcstrat as hs

metrics = hs.metrics

# What `get_config` of `tf.keras.metrics` (2.15.1) returns besides `name` and `dtype`; without
# `multi_label`, `num_labels`, `label_weights`, `top_k` and `class_id`, which do not exist here.
CONFIGS = {
    "mean": (metrics.Mean, {}),
    "sum": (metrics.Sum, {}),
    "binary_accuracy": (metrics.BinaryAccuracy, {"threshold": 0.5}),
    "sparse_top_k_categorical_accuracy": (metrics.SparseTopKCategoricalAccuracy, {"k": 5}),
    "auc": (
        metrics.AUC,
        {
            **{"num_thresholds": 200, "curve": "ROC", "summation_method": "interpolation"},
            **{"thresholds": None, "from_logits": False},
        },
    ),
    "mean_io_u": (
        lambda: metrics.MeanIoU(2),
        {
            **{"num_classes": 2, "ignore_class": None},
            **{"sparse_y_true": True, "sparse_y_pred": True, "axis": -1},
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_tensorflow(name):
    make, own = CONFIGS[name]
    assert make().get_config() == {"name": name, "dtype": "float64", **own}


@pytest.mark.parametrize(
    "metric",
    [
        metrics.Mean("loss", np.float32),
        metrics.BinaryAccuracy(threshold=0.25),
        metrics.TopKCategoricalAccuracy(2),
        metrics.MeanIoU(3, ignore_class=1, sparse_y_pred=False, axis=1),
        metrics.ConfusionMatrix(3, ignore_class=1),
        metrics.Recall([0.75, 0.25]),
        metrics.AUC(7, "PR", from_logits=True),
        metrics.AUC(thresholds=[0.5, 0.25], summation_method="minoring"),
    ],
    ids=repr,
)
def test_a_config_makes_the_same_metric(metric):
    made = type(metric).from_config(json.loads(json.dumps(metric.get_config())))
    assert made.get_config() == metric.get_config()
    assert made.variables[0].shape == metric.variables[0].shape
    assert [*metric.variables] == [metric.totals]


def scaled_error(y_true, y_pred, scale):
    return abs(y_true - y_pred) * scale


def test_the_config_of_a_function_has_the_function():
    metric = metrics.MeanMetricWrapper(scaled_error, "error", scale=2.0)
    config = metric.get_config()
    assert config == {"name": "error", "dtype": "float64", "fn": scaled_error, "scale": 2.0}
    made = metrics.MeanMetricWrapper.from_config(config)
    made.update_state(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    assert made.result() == 2.0


def test_a_metric_of_the_program_extends_its_config():
    class Largest(metrics.Metric):
        def __init__(self, name=None, dtype=None, first=0.0, *, scale=1.0):
            super().__init__(name, dtype, (1,))
            self.first, self._scale = first, scale

        def update_state(self, values):
            raise NotImplementedError

        def combine(self, totals):
            return totals[0]

        def get_config(self):
            return {**super().get_config(), "scale": self._scale}

    config = Largest(first=2.0, scale=3.0).get_config()
    assert config == {"name": "largest", "dtype": "float64", "first": 2.0, "scale": 3.0}
    assert Largest.from_config(config).get_config() == config


@pytest.mark.parametrize(
    "true, predicted, says",
    [
        ((3,), (3, 2, 1), r"y_true have shape \(3,\) and those of y_pred \(3, 1\); they must"),
        ((3, 2), (3,), r"MeanIoU\.update_state: y_pred has shape \(3,\) and so no axis 1 of"),
        ((3,), (), r"MeanIoU\.update_state: y_pred has shape \(\) and so no axis 1 of scores"),
    ],
)
def test_scores_of_other_shapes(true, predicted, says):
    iou = metrics.MeanIoU(3, sparse_y_pred=False, axis=1)
    with pytest.raises(ValueError, match=says):
        iou.update_state(np.zeros(true, int), np.zeros(predicted))
    iou.update_state(np.zeros(0, int), np.zeros((0, 3)))
    assert iou.result() == 0
