"""Means of values: Mean and Sum, and errors, which are means over predictions."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat.metrics._metric import Metric, PairMetric, as_numbers, as_weights

_SCALARS = (float, int, np.float64, np.float32)
"""The types of most losses."""


class _WeightedMean(Metric):
    """Its totals are the weighted sum of the values and the sum of the weights."""

    def __init__(self, name: str | None = None, dtype: npt.DTypeLike | None = None) -> None:
        super().__init__(name, dtype)

    def _add_values(self, values: Any, sample_weight: Any) -> None:
        if sample_weight is None and type(values) in _SCALARS:
            self._write(np.array((values, 1.0)))
            return
        call = f"{type(self).__name__}.update_state"
        values = as_numbers(call, "values", values)
        if sample_weight is None:
            self._add(_sum, values)
        else:
            self._add(_sum, values, as_weights(call, sample_weight, values.shape))

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the weighted mean; 0 before the first value."""
        total, count = totals
        return total / count if count else np.float64(0.0)


def _sum(xp: Any, values: Any, weights: Any = None) -> tuple[Any, Any]:
    """The weighted sum of the values, and the sum of the weights."""
    if weights is not None:
        return (values * weights).sum(), weights.sum()
    if not values.ndim:
        return values, 1
    if xp is np and values.dtype.kind == "b":
        return np.count_nonzero(values), values.size
    return xp.add.reduce(values, axis=None, dtype=np.float64), values.size


class _ValueMean(_WeightedMean):
    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Adds values, an array of any shape, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> loss.update_state([1.0, 2.0, 6.0], sample_weight=[1, 1, 0])  # without the last
            >>> print(loss.result())
            1.5
        """
        self._add_values(values, sample_weight)


class Mean(_ValueMean):
    """The mean of all values.

    Examples:
        >>> import hpcstrat as hs
        >>> loss = hs.metrics.Mean()
        >>> loss.update_state([1.0, 2.0, 6.0])
        >>> print(loss.result())
        3.0
    """


class Sum(_ValueMean):
    """The sum of all values, each times its weight.

    Examples:
        >>> import hpcstrat as hs
        >>> total = hs.metrics.Sum()
        >>> total.update_state([[1.0, 2.0], [3.0, 4.0]], sample_weight=[1, 10])  # per row
        >>> print(total.result())
        73.0
    """

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Takes the weighted sum."""
        return totals[0]


class MeanMetricWrapper(_WeightedMean):
    """The mean of a function of labels and predictions, for your own metric.

    Args:
        fn: called with labels, predictions and `kwargs`; returns an array of values, of NumPy or
            CuPy as its arguments.
        name: the metric's name; by default the function's.
        dtype: the dtype of `result`, `float64` by default.
        **kwargs: passed to the function.

    Examples:
        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> def relative_error(y_true, y_pred):
        ...     return abs(y_true - y_pred) / y_true
        >>> error = hs.metrics.MeanMetricWrapper(relative_error)
        >>> error.update_state(np.array([1.0, 4.0]), np.array([2.0, 3.0]))
        >>> print(error.result())
        0.625
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(fn.__name__ if name is None else name, dtype)
        self._fn = functools.partial(fn, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`, with the function itself.

        Examples:
            >>> def near(y_true, y_pred, within):
            ...     return abs(y_true - y_pred) < within
            >>> metric = hs.metrics.MeanMetricWrapper(near, within=0.1)
            >>> {name: value for name, value in metric.get_config().items() if name != "fn"}
            {'name': 'near', 'dtype': 'float64', 'within': 0.1}
        """
        return {**super().get_config(), "fn": self._fn.func, **self._fn.keywords}

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the function's values, each with its weight.

        For a replica function; never communicates.

        Raises:
            TypeError: the values or the weights are not numbers.
            ValueError: the weights do not fit the values.

        Examples:
            >>> bias = hs.metrics.MeanMetricWrapper(lambda true, pred: pred - true, name="bias")
            >>> bias.update_state(np.zeros(3), np.array([1.0, 2.0, -9.0]), sample_weight=[1, 1, 0])
            >>> print(bias.result())
            1.5
        """
        self._add_values(self._fn(y_true, y_pred), sample_weight)


class PairMean(PairMetric, _WeightedMean):
    """The mean of a value for each label and its prediction."""

    def _new(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> tuple[Any, Any]:
        return _sum(xp, self._values(xp, true, predicted), weights)

    @abc.abstractmethod
    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        """Computes the values, by the functions of `xp`."""


# ---- errors


def _errors(true: Any, predicted: Any) -> Any:
    # Cast first: differences of unsigned integers wrap around.
    return true.astype(np.float64) - predicted


class MeanAbsoluteError(PairMean):
    """The mean of the absolute errors, `|y_true - y_pred|`.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanAbsoluteError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        1.0
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return abs(_errors(true, predicted))


class MeanSquaredError(PairMean):
    """The mean of the squared errors, `(y_true - y_pred)**2`.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.MeanSquaredError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        4.0
    """

    def _values(self, xp: Any, true: Any, predicted: Any) -> Any:
        return _errors(true, predicted) ** 2


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared errors.

    Examples:
        >>> import hpcstrat as hs
        >>> error = hs.metrics.RootMeanSquaredError()
        >>> error.update_state([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 8.0])
        >>> print(error.result())
        2.0
    """

    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the root of the mean."""
        return np.sqrt(super().combine(totals))
