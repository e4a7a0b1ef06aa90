"""Metric: each replica adds up its own totals, and `result` combines them."""

from __future__ import annotations

import abc
import inspect
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core import arrays, call_name, gpu
from hpcstrat._core.types import Array, ReduceOp, as_dtype
from hpcstrat._replicas import contexts
from hpcstrat._update.rule import UpdateRule
from hpcstrat._variable import variable
from hpcstrat._variable.options import VariableAggregation, VariableSynchronization
from hpcstrat._variable.state import in_replica_of
from hpcstrat._variable.variable import Variable
from hpcstrat._variable.writing import RULES

if TYPE_CHECKING:
    from typing_extensions import Self


class Metric(abc.ABC):
    """The base class of metrics: totals of everything that replicas have added.

    Results are exact over uneven batches.

    Args:
        name: the metric's name; by default the class's, as `mean_io_u` for `MeanIoU`.
        dtype: the dtype of `result`, `float64` by default. The totals are `float64` in any case.
        shape: the shape of the totals.

    Attributes:
        name: the metric's name.
        totals: an `ON_READ` variable that sums: each replica's own totals.

    Examples:
        >>> import hpcstrat as hs
        >>> loss, area = hs.metrics.Mean(name="loss"), hs.metrics.AUC()
        >>> print(loss.name, area.name, loss([1.0, 3.0]))  # updates, returns
        loss auc 2.0
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] = (2,),
    ) -> None:
        call = type(self).__name__
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{call}: name is {name!r}; it must be a string")
        self.name: str = _name_of(type(self)) if name is None else name
        self._dtype: np.dtype[Any] = as_dtype(call, np.float64 if dtype is None else dtype)
        # Totals, which are summed when read: results of replicas with batches of different sizes
        # could not be combined.
        self.totals: Variable = Variable(
            np.zeros(shape),
            name=self.name,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `update_state`, then `result`. Collective, as `result` is.

        In a step, `update_state` alone is faster.
        """
        self.update_state(*args, **kwargs)
        return self.result()

    @abc.abstractmethod
    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Adds to this replica's totals. For a replica function; never communicates.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> loss.update_state([1.0, 3.0])  # two examples
            >>> loss.update_state([5.0])
            >>> print(loss.result(), loss.totals.numpy())  # sum and count
            3.0 [9. 3.]
        """

    def result(self) -> Any:
        """The metric over all replicas, on the host. Collective: all ranks call this.

        Examples:
            >>> loss = hs.metrics.Mean(dtype="float32")
            >>> print(loss.result())  # before the first update
            0.0
            >>> loss.update_state([1.0, 2.0])
            >>> print(loss.result(), loss.result().dtype)
            1.5 float32
        """
        context = contexts.current.get()
        if isinstance(context, contexts.InReplica) and context.group.communicator.size > 1:
            communicator = context.group.communicator
            with call_name.call_named(f"{type(self).__name__}.result"):
                totals = gpu.to_host(
                    communicator.all_reduce([self.totals.value()], ReduceOp.SUM)[0]
                )
        else:
            totals = self.totals.numpy()
        # An overflow is inf on all ranks, instead of an exception on a rank that enabled it.
        with np.errstate(all="ignore"):
            return np.asarray(self.combine(totals)).astype(self._dtype)[()]

    @abc.abstractmethod
    def combine(self, totals: np.ndarray[Any, Any]) -> Any:
        """Computes the result from the sum of all replicas' totals, on the host. For subclasses.

        Examples:
            >>> class Largest(hs.metrics.Mean):  # of the mean and 1
            ...     def combine(self, totals):
            ...         return max(1.0, super().combine(totals))
            >>> largest = Largest()
            >>> largest.update_state([0.25, 0.75])
            >>> print(largest.result())
            1.0
        """

    def reset_state(self) -> None:
        """Resets to zero.

        Collective in the cross-replica context; in a replica context, for this replica only.

        Examples:
            >>> loss = hs.metrics.Mean()
            >>> for epoch in range(2):
            ...     loss.update_state([epoch + 1.0, epoch + 2.0])
            ...     print(loss.result())
            ...     loss.reset_state()
            1.5
            2.5
        """
        self.totals.assign(np.zeros(self.totals.shape))

    reset_states = reset_state  # its name before TensorFlow 2.5

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Adds the totals of other metrics of the same class, on each replica its own.

        Never communicates.

        Raises:
            TypeError: a metric is of another class.
            ValueError: its totals have another shape, or it belongs to another strategy. Nothing
                has changed.

        Examples:
            >>> first, second = hs.metrics.Mean(), hs.metrics.Mean()
            >>> first.update_state([1.0, 2.0, 3.0])
            >>> second.update_state([10.0])
            >>> first.merge_state([second])
            >>> print(first.result())  # of four values
            4.0
        """
        call, metrics = f"{type(self).__name__}.merge_state", list(metrics)
        state = variable.state_of(self.totals)
        for other in metrics:
            if type(other) is not type(self):
                raise TypeError(
                    f"{call}: {other!r} is a {type(other).__name__}; pass metrics of the same class"
                )
            if (
                other.totals.shape != self.totals.shape
                or variable.state_of(other.totals).group is not state.group
            ):
                raise ValueError(
                    f"{call}: {other!r} differs in its options or its strategy; they must be the "
                    "same"
                )
        for other in metrics:
            state.storage.write(
                state.block, variable.state_of(other.totals).block.array, RULES["assign_add"]
            )

    @property
    def variables(self) -> list[Variable]:
        """What it keeps: its totals.

        Examples:
            >>> matrix = hs.metrics.ConfusionMatrix(num_classes=2)
            >>> matrix.variables[0].shape  # 2 x 2 counts, one of ignored and one of invalid pairs
            (6,)
        """
        return [self.totals]

    def get_config(self) -> dict[str, Any]:
        """The arguments for `from_config`, which JSON can hold unless one is a function.

        Besides `name` and `dtype` those of `__init__` that are attributes of the same names.

        Examples:
            >>> hs.metrics.BinaryAccuracy(threshold=0.7).get_config()
            {'name': 'binary_accuracy', 'dtype': 'float64', 'threshold': 0.7}
        """
        names = inspect.signature(type(self)).parameters
        own = {name: value for name, value in vars(self).items() if name in names}
        return {"name": self.name, "dtype": self._dtype.name, **own}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A new metric of this class, from what `get_config` returned. In the strategy's scope.

        Examples:
            >>> config = hs.metrics.TopKCategoricalAccuracy(k=2).get_config()
            >>> hs.metrics.TopKCategoricalAccuracy.from_config(config).k
            2
        """
        return cls(**config)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    # ---- for subclasses

    def _add(self, compute: Callable[..., Any], *given: Any) -> None:
        """Adds `compute(xp, *given)` to this replica's totals, on its GPU if an array is on one.

        Args:
            compute: called with the module NumPy or CuPy and its arrays. Returns an array of the
                totals' shape, or a tuple of numbers.
            given: arrays of labels, predictions or values; and of weights, if any.
        """
        if gpu.array_module(*given) is np:
            self._write(np.asarray(compute(np, *given)))
            return
        state = variable.state_of(self.totals)
        stream = state.group.stream
        if stream is None or not in_replica_of(state.group):
            self._write(np.asarray(compute(np, *map(gpu.to_host, given))))
            return

        def add(totals: Array, _: Array) -> None:
            if not given[0].size:
                return  # CuPy's `argmax` refuses arrays without elements
            new = compute(stream.xp, *map(stream.here, given))
            if not isinstance(new, tuple):
                totals += new
                return
            # Making an array of them would take as many kernels more.
            for i, one in enumerate(new):
                total = totals[i : i + 1]
                total += one

        state.storage.write(state.block, state.block.array, UpdateRule(assign=add))

    def _write(self, new: np.ndarray[Any, Any]) -> None:
        """Adds a NumPy array of the totals' shape to this replica's totals."""
        state = variable.state_of(self.totals)
        if in_replica_of(state.group):
            # `assign_add` does the same after checks that take three times as long as summing a
            # batch.
            state.storage.write(state.block, new, RULES["assign_add"])
            return
        if state.needs_aggregation_to_read():
            raise RuntimeError(
                f"{type(self).__name__}.update_state was called in the cross-replica context, but "
                "each replica keeps its own totals; call it inside the function of Strategy.run"
            )
        self.totals.assign_add(new)


class PairMetric(Metric):
    """The base of metrics of labels and predictions."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds labels and predictions, each with its weight.

        For a replica function; never communicates.

        Args:
            y_true: labels or true values, of the predictions' shape unless the class says
                otherwise.
            y_pred: predictions.
            sample_weight: weights, whose shape may lack the last dimensions.

        Raises:
            TypeError: an argument is not an array of numbers.
            ValueError: the shapes do not fit; or labels or predictions are out of range, for which
                `result` raises if they are on a GPU.

        Examples:
            A weight for each example, where an example has several values:

            >>> error = hs.metrics.MeanAbsoluteError()
            >>> y_true, y_pred = np.zeros((2, 3)), np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
            >>> error.update_state(y_true, y_pred, sample_weight=[3.0, 1.0])
            >>> print(error.result())  # (3 * 1 + 1 * 2) / (3 + 1)
            1.25
        """
        call = f"{type(self).__name__}.update_state"
        true, predicted, shape = self._check(call, y_true, y_pred)
        weights = () if sample_weight is None else (as_weights(call, sample_weight, shape),)
        self._add(self._new, true, predicted, *weights)

    def _check(self, call: str, y_true: Any, y_pred: Any) -> tuple[Array, Array, tuple[int, ...]]:
        """Returns labels, predictions, and the shape of the weights."""
        true, predicted = as_pair(call, y_true, y_pred)
        return true, predicted, true.shape

    @abc.abstractmethod
    def _new(self, xp: Any, true: Any, predicted: Any, weights: Any = None) -> Any:
        """What is added to the totals; see `_add`."""


def _name_of(kind: type) -> str:
    """As Keras makes it: `TopKAccuracy` is `top_k_accuracy`, and `AUC` is `auc`."""
    return re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def as_numbers(call: str, argument: str, value: Any) -> Any:
    """`value` as an array of numbers, on the host or the GPU where it is.

    Raises:
        TypeError: it is not an array of numbers.
    """
    if type(value) is np.ndarray and value.dtype.kind in "fiub":
        return value
    array = arrays.as_array(call, value, on_gpu=True)
    if arrays.is_numeric(array.dtype):
        # Few functions of CuPy take the dtypes of `ml_dtypes`, which have 16 bits or fewer.
        return array.astype(np.float32) if array.dtype.kind == "V" else array
    # Python objects, such as fractions. NumPy would turn text into numbers, and `None` into nan.
    if array.dtype != object or not all(hasattr(item, "__float__") for item in array.flat):
        raise TypeError(
            f"{call}: {argument} is {reprlib.repr(value)}; it must be an array of numbers"
        )
    return array.astype(np.float64)


def as_pair(call: str, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Labels and predictions as arrays of equal shapes, each where it is.

    Raises:
        TypeError: an argument is not an array of numbers.
        ValueError: the shapes differ.
    """
    true, predicted = as_numbers(call, "y_true", y_true), as_numbers(call, "y_pred", y_pred)
    if true.shape != predicted.shape:
        raise ValueError(
            f"{call}: y_true has shape {true.shape} and y_pred {predicted.shape}; they must be "
            "equal"
        )
    return true, predicted


def as_weights(call: str, sample_weight: Any, shape: tuple[int, ...]) -> Any:
    """Weights as `float64`, broadcast to this shape: they may lack its last dimensions.

    Raises:
        TypeError: they are not numbers.
        ValueError: they have another shape.
    """
    weights = as_numbers(call, "sample_weight", sample_weight).astype(np.float64, copy=False)
    if weights.shape == shape:
        return weights
    reshaped = weights.reshape(arrays.shape_of_weights(call, weights.shape, shape))
    return gpu.array_module(weights).broadcast_to(reshaped, shape)


def as_classes(values: Any, classes: int) -> tuple[Any, Any]:
    """Class indices as integers, and where they are of classes: whole, and below `classes`."""
    with np.errstate(invalid="ignore"):  # NaN, on the host
        index = values.astype(np.int64, copy=False)
    return index, (index == values) & (index >= 0) & (index < classes)


def rounded_for(thresholds: Any, dtype: np.dtype[Any]) -> Any:
    """Thresholds as `float32` if predictions have 16 or 32 bits, as in Keras, else as `float64`."""
    kind = np.float32 if dtype.kind == "f" and dtype.itemsize < 8 else np.float64
    return kind(thresholds)
