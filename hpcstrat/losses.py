"""Losses of one replica's share of a batch, scaled so that their sum over replicas is the loss of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat import _context


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """The sum of the losses, divided by the size of the global batch. For a replica function; never communicates.

    The sum of the result over the replicas is the mean loss of the global batch.

    Args:
        per_example_loss: an array with one loss per example along its first dimension. For a PyTorch tensor or a JAX
            array the result is one too, and gradients flow through it.
        sample_weight: weights of the losses, of the same library; their shape may lack the last dimensions.
        global_batch_size: the number of examples of all replicas; by default this replica's number times the number of
            replicas, which is right if all replicas have equal numbers.

    Returns:
        A scalar of the dtype of the losses.

    Raises:
        ValueError: the losses have no dimension, or the batch size is negative.
        RuntimeError: called in the cross-replica context.
    """
    call = "compute_average_loss"
    replicas = _replicas(call)
    losses: Any = per_example_loss if hasattr(per_example_loss, "sum") else np.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(f"{call}: the loss has no dimension; pass one loss per example, not their sum or mean")
    size = losses.shape[0] * replicas if global_batch_size is None else global_batch_size
    if size < 0:
        raise ValueError(f"{call}: global_batch_size is {global_batch_size!r}; it must not be negative")
    if sample_weight is not None:
        weights = sample_weight if hasattr(sample_weight, "reshape") else np.asarray(sample_weight)
        weights = weights.reshape(tuple(weights.shape) + (1,) * (losses.ndim - weights.ndim))
        losses = losses * (weights.astype(losses.dtype) if hasattr(weights, "astype") else weights.to(losses.dtype))
    total = losses.sum()
    return _divided(total, size) if size else total * 0


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """The loss divided by the number of replicas, so that a sum over replicas counts it once. Never communicates.

    Args:
        regularization_loss: an array or a number, the same on every replica.

    Returns:
        The sum of its elements, divided by the number of replicas.

    Raises:
        RuntimeError: called in the cross-replica context.
    """
    replicas = _replicas("scale_regularization_loss")
    loss = regularization_loss if hasattr(regularization_loss, "sum") else np.asarray(regularization_loss)
    total = loss.sum()
    return _divided(total, replicas)


def _divided(total: Any, count: int) -> Any:
    """`total / count`, in the dtype of the total if that is a float."""
    dtype = total.dtype
    is_float = isinstance(dtype, np.dtype) and dtype.kind in "fc"  # PyTorch's dtypes are not NumPy's
    return total / (dtype.type(count) if is_float else count)


def _replicas(call: str) -> int:
    if _context.in_cross_replica_context():
        raise RuntimeError(
            f"{call} was called in the cross-replica context; call it inside the function of Strategy.run"
        )
    return _context.group().communicator.size
