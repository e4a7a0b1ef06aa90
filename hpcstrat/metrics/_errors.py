"""Errors of predictions: absolute and squared."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hpcstrat.metrics._means import PairMean

_ERROR = "const double error = (double)label[j] - (double)predicted[j];"


def _errors(true: Any, predicted: Any) -> Any:
    # Cast first: differences of unsigned integers wrap around.
    return true.astype(np.float64) - predicted


class MeanAbsoluteError(PairMean):
    """The mean of the absolute errors, `|y_true - y_pred|`."""

    _KERNEL = f"{_ERROR} value = fabs(error);"

    def __init__(
        self, name: str = "mean_absolute_error", dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(name, dtype)

    def _values(self, true: Any, predicted: Any) -> Any:
        return np.abs(_errors(true, predicted))


class MeanSquaredError(PairMean):
    """The mean of the squared errors, `(y_true - y_pred)**2`."""

    _KERNEL = f"{_ERROR} value = error * error;"

    def __init__(
        self, name: str = "mean_squared_error", dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(name, dtype)

    def _values(self, true: Any, predicted: Any) -> Any:
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

    def __init__(
        self, name: str = "root_mean_squared_error", dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(name, dtype)

    def _combine(self, totals: np.ndarray[Any, Any]) -> Any:
        return np.sqrt(super()._combine(totals))
