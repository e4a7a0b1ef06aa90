"""Metrics: each replica keeps its own totals, and `result` combines them."""

from hpcstrat.metrics._confusion_matrix import ConfusionMatrix as ConfusionMatrix
from hpcstrat.metrics._means import Accuracy as Accuracy
from hpcstrat.metrics._means import BinaryAccuracy as BinaryAccuracy
from hpcstrat.metrics._means import CategoricalAccuracy as CategoricalAccuracy
from hpcstrat.metrics._means import Mean as Mean
from hpcstrat.metrics._means import MeanAbsoluteError as MeanAbsoluteError
from hpcstrat.metrics._means import MeanMetricWrapper as MeanMetricWrapper
from hpcstrat.metrics._means import MeanSquaredError as MeanSquaredError
from hpcstrat.metrics._means import RootMeanSquaredError as RootMeanSquaredError
from hpcstrat.metrics._means import SparseCategoricalAccuracy as SparseCategoricalAccuracy
from hpcstrat.metrics._means import Sum as Sum
from hpcstrat.metrics._metric import Metric as Metric
