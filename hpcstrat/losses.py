"""Losses with their gradients, and their scaling: the sum over replicas is the batch's loss."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat._core import arrays, gpu
from hpcstrat._core.types import Array
from hpcstrat._replicas import contexts


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any:
    """The sum of the losses, divided by the size of the global batch.

    For a replica function; never communicates.

    The sum of the result over the replicas is the mean loss of the global batch.

    Args:
        per_example_loss: an array with one loss per example along its first dimension. The result
            for a PyTorch tensor or a JAX array is of the same kind, and gradients flow through it.
        sample_weight: weights of the losses, of the same library; their shape may lack the last
            dimensions, or have an extra last dimension of 1.
        global_batch_size: the number of examples of all replicas; by default this replica's number
            times the number of replicas, which is right if all have equal numbers.

    Returns:
        A scalar of the dtype of the losses.

    Raises:
        TypeError: the losses, the weights or the batch size are not numbers.
        ValueError: the losses have no dimension, the weights do not fit them, or the batch size is
            negative.
        RuntimeError: called in the cross-replica context.

    Examples:
        >>> losses = np.array([1.0, 2.0, 6.0])  # this replica's, of a global batch of 6
        >>> print(hs.losses.compute_average_loss(losses, global_batch_size=6))
        1.5
        >>> print(hs.losses.compute_average_loss(losses, [1, 1, 0], global_batch_size=6))
        0.5
    """
    call = "compute_average_loss"
    replicas = _replicas(call)
    losses = _as_numbers(call, "per_example_loss", per_example_loss, "sum")
    if losses.ndim == 0:
        raise ValueError(
            f"{call}: the loss has no dimension; pass one loss per example, not their sum or mean"
        )
    size = losses.shape[0] * replicas if global_batch_size is None else global_batch_size
    if arrays.as_number(call, "global_batch_size", size) < 0:
        raise ValueError(
            f"{call}: global_batch_size is {global_batch_size!r}; it must not be negative"
        )
    if sample_weight is not None:
        weights = _as_numbers(call, "sample_weight", sample_weight, "reshape")
        weights = weights.reshape(
            arrays.shape_of_weights(call, tuple(weights.shape), tuple(losses.shape))
        )
        losses = losses * (
            weights.astype(losses.dtype) if hasattr(weights, "astype") else weights.to(losses.dtype)
        )
    total = losses.sum()
    return _divide(total, size) if size else total * 0


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """The loss divided by the number of replicas, so that a sum over replicas counts it once.

    Never communicates.

    Args:
        regularization_loss: an array or a number, the same on every replica.

    Returns:
        The sum of its elements, divided by the number of replicas.

    Raises:
        TypeError: the loss is not a number.
        RuntimeError: called in the cross-replica context.

    Examples:
        >>> w = np.array([0.5, -0.5])
        >>> print(hs.losses.scale_regularization_loss(0.1 * w**2))  # with one replica
        0.05
    """
    call = "scale_regularization_loss"
    replicas = _replicas(call)
    loss = _as_numbers(call, "regularization_loss", regularization_loss, "sum")
    return _divide(loss.sum(), replicas)


def _as_numbers(call: str, argument: str, value: Any, method: str) -> Any:
    """`value` itself if it has this method, as a tensor of PyTorch does, else as a NumPy array.

    Raises:
        TypeError: it is an array, but not of numbers.
    """
    array = value if hasattr(value, method) else arrays.as_array(call, value, on_gpu=True)
    dtype = getattr(array, "dtype", None)
    if isinstance(dtype, np.dtype) and not arrays.is_numeric(dtype):
        raise TypeError(
            f"{call}: {argument} is of dtype {dtype.name}; it must be an array of numbers"
        )
    return array


def _divide(total: Any, count: int) -> Any:
    """`total / count`, in the dtype of the total if that is a float."""
    dtype = total.dtype
    # PyTorch's dtypes are not NumPy's.
    is_float = isinstance(dtype, np.dtype) and dtype.kind in "fc"
    return total / (dtype.type(count) if is_float else count)


def _replicas(call: str) -> int:
    if contexts.in_cross_replica_context():
        raise RuntimeError(
            f"{call} was called in the cross-replica context; call it inside the function of "
            "Strategy.run"
        )
    return contexts.group().communicator.size


# ---- losses with their gradients


def softmax_cross_entropy(labels: Any, logits: Any) -> tuple[Array, Array]:
    """The cross-entropy of labels and the softmax of logits, with its gradient. Never communicates.

    For `p = exp(logits) / sum(exp(logits))`, over the classes, and one-hot labels `y`, the loss is
    `-sum(y * log(p))` and the gradient `p * sum(y) - y` (Goodfellow, Bengio and Courville, "Deep
    Learning", 2016, section 6.2.2.3). The largest logit is subtracted first, so that nothing
    overflows.

    Args:
        labels: class indices, integers of shape `(...)`; or one-hot labels or probabilities, of the
            shape of `logits`.
        logits: floats, of shape `(..., classes)`.

    Returns:
        The losses, of shape `(...)`, and the gradient of their sum with respect to `logits`, of its
        shape. Both are on the device of `logits` and have its dtype; 16 bits are computed in
        `float32`.

    Raises:
        TypeError: `logits` are not floats, or class indices are not integers.
        ValueError: the shapes do not fit; or a class index is negative or not below the number of
            classes. On a GPU, where the host does not wait to check, the loss and the gradient of
            such an index are NaN.

    Examples:
        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> logits = np.log([[0.5, 0.5], [0.2, 0.8]])
        >>> losses, gradient = hs.losses.softmax_cross_entropy([0, 1], logits)
        >>> print(losses.round(4))
        [0.6931 0.2231]
        >>> print(gradient.round(4))
        [[-0.5  0.5]
         [ 0.2 -0.2]]
    """
    call = "softmax_cross_entropy"
    y, x, dtype = _as_floats(call, labels, logits, "logits")
    xp = gpu.array_module(x)
    if not x.ndim or not x.shape[-1]:
        raise ValueError(
            f"{call}: logits has shape {x.shape}; its last dimension must be that of classes"
        )
    if y.shape not in (x.shape, x.shape[:-1]):
        raise ValueError(
            f"{call}: labels has shape {y.shape} and logits {x.shape}; pass labels of the logits' "
            "shape, or class indices, which lack the last dimension"
        )
    shifted = x - x.max(axis=-1, keepdims=True)
    log_p = shifted - xp.log(xp.exp(shifted).sum(axis=-1, keepdims=True))
    p = xp.exp(log_p)
    if y.shape == x.shape:
        y = y.astype(x.dtype, copy=False)
        # Where a label is 0 nothing counts, not even the logarithm of 0.
        with np.errstate(invalid="ignore"):
            losses = -xp.where(y != 0, y * log_p, 0).sum(axis=-1)
        gradient = p * y.sum(axis=-1, keepdims=True) - y
    else:
        if y.dtype.kind not in "iu":
            raise TypeError(
                f"{call}: labels are class indices of dtype {y.dtype.name}; they must be integers"
            )
        is_class = (y >= 0) & (y < x.shape[-1])
        if xp is np and not is_class.all():
            raise ValueError(
                f"{call}: labels has class indices that are negative, or not below {x.shape[-1]}"
            )
        of_label = y[..., None] == xp.arange(x.shape[-1])
        losses, gradient = -xp.where(of_label, log_p, 0).sum(axis=-1), p - of_label.astype(x.dtype)
        if xp is not np:
            losses = xp.where(is_class, losses, np.nan)
            gradient = xp.where(is_class[..., None], gradient, np.nan)
    return losses.astype(dtype, copy=False), gradient.astype(dtype, copy=False)


def sigmoid_cross_entropy(labels: Any, logits: Any) -> tuple[Array, Array]:
    """The cross-entropy of labels and the sigmoid of logits, with its gradient. Never communicates.

    For a label `y` and `p = 1 / (1 + exp(-x))` the loss is `-y * log(p) - (1 - y) * log(1 - p)`,
    and the gradient `p - y`. It is computed as `max(x, 0) - x * y + log(1 + exp(-|x|))`, as by
    TensorFlow's `sigmoid_cross_entropy_with_logits`, so that nothing overflows.

    Args:
        labels: 0 or 1, or probabilities, of the shape of `logits`.
        logits: floats, of any shape.

    Returns:
        The losses and the gradient of their sum with respect to `logits`, of its shape. Both are on
        the device of `logits` and have its dtype; 16 bits are computed in `float32`.

    Raises:
        TypeError: `logits` are not floats.
        ValueError: the shapes differ.

    Examples:
        >>> import hpcstrat as hs
        >>> losses, gradient = hs.losses.sigmoid_cross_entropy([1, 0], [0.0, 2.0])
        >>> print(losses.round(4), gradient.round(4))
        [0.6931 2.1269] [-0.5     0.8808]
    """
    y, x, dtype = _as_pair("sigmoid_cross_entropy", labels, logits, "logits")
    xp = gpu.array_module(x)
    small = xp.exp(-abs(x))
    losses = xp.maximum(x, 0) - x * y + xp.log1p(small)
    gradient = xp.where(x >= 0, 1, small) / (1 + small) - y
    return losses.astype(dtype, copy=False), gradient.astype(dtype, copy=False)


def squared_error(labels: Any, predictions: Any) -> tuple[Array, Array]:
    """The squared error of each element, `(predictions - labels)**2`, with its gradient.

    Never communicates.

    Keras's mean squared error is the mean over the last dimension: divide the gradient by the size
    of that dimension.

    Args:
        labels: true values, of the shape of `predictions`.
        predictions: floats, of any shape.

    Returns:
        The losses and the gradient of their sum with respect to `predictions`, of its shape. Both
        are on the device of `predictions` and have its dtype; 16 bits are computed in `float32`.

    Raises:
        TypeError: `predictions` are not floats.
        ValueError: the shapes differ.

    Examples:
        >>> import hpcstrat as hs
        >>> losses, gradient = hs.losses.squared_error([1.0, 2.0], [1.5, 0.0])
        >>> print(losses, gradient)
        [0.25 4.  ] [ 1. -4.]
    """
    y, x, dtype = _as_pair("squared_error", labels, predictions, "predictions")
    errors = x - y
    return (errors * errors).astype(dtype, copy=False), (2 * errors).astype(dtype, copy=False)


def huber(labels: Any, predictions: Any, delta: float = 1.0) -> tuple[Array, Array]:
    """Huber's loss of each element, with its gradient: quadratic if small, linear if large.

    For an error `e = predictions - labels` the loss is `e**2 / 2` if `|e| <= delta`, and otherwise
    `delta * (|e| - delta / 2)` (Huber, "Robust Estimation of a Location Parameter", 1964). Keras's
    is the mean over the last dimension. Never communicates.

    Args:
        labels: true values, of the shape of `predictions`.
        predictions: floats, of any shape.
        delta: where the loss becomes linear.

    Returns:
        The losses and the gradient of their sum with respect to `predictions`, of its shape. Both
        are on the device of `predictions` and have its dtype; 16 bits are computed in `float32`.

    Raises:
        TypeError: `predictions` are not floats, or `delta` is not a number.
        ValueError: the shapes differ, or `delta` is not positive.

    Examples:
        >>> import hpcstrat as hs
        >>> losses, gradient = hs.losses.huber([1.0, 2.0], [1.5, 5.0])
        >>> print(losses, gradient)
        [0.125 2.5  ] [0.5 1. ]
    """
    bound = arrays.as_number("huber", "delta", delta)
    if not bound > 0:
        raise ValueError(f"huber: delta is {delta!r}; it must be positive")
    y, x, dtype = _as_pair("huber", labels, predictions, "predictions")
    errors = x - y
    gradient = errors.clip(-bound, bound)
    losses = gradient * (errors - gradient / 2)
    return losses.astype(dtype, copy=False), gradient.astype(dtype, copy=False)


def _as_pair(call: str, labels: Any, predictions: Any, name: str) -> tuple[Any, Any, np.dtype[Any]]:
    """`_as_floats` for equal shapes, with the labels in the dtype to compute in."""
    y, x, dtype = _as_floats(call, labels, predictions, name)
    if y.shape != x.shape:
        raise ValueError(
            f"{call}: labels has shape {y.shape} and {name} {x.shape}; they must be equal"
        )
    return y.astype(x.dtype, copy=False), x, dtype


def _as_floats(
    call: str, labels: Any, predictions: Any, name: str
) -> tuple[Any, Any, np.dtype[Any]]:
    """Labels, predictions in the dtype to compute in, and the predictions' dtype.

    Both arrays are on the predictions' device.
    """
    y, x = (arrays.as_array(call, value, on_gpu=True) for value in (labels, predictions))
    dtype = x.dtype
    if dtype.kind not in "fV" or not arrays.is_numeric(dtype):
        raise TypeError(f"{call}: {name} is of dtype {dtype.name}; it must be an array of floats")
    if not arrays.is_numeric(y.dtype) or y.dtype.kind == "c":
        raise TypeError(
            f"{call}: labels is of dtype {y.dtype.name}; it must be an array of real numbers"
        )
    y = gpu.array_module(x).asarray(y) if gpu.is_on_gpu(x) else gpu.to_host(y)
    return y, x.astype(np.float32) if dtype.itemsize == 2 else x, dtype
