"""Pads the elements of a batch to one shape, at the ends of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hpcstrat._core import nests


def shapes_for(
    shapes: Any, structure: nests.Structure, actual: Sequence[Any]
) -> list[tuple[Any, ...] | None]:
    """The shape that each leaf of an element is padded to; `None` means the largest leaf's shape.

    Raises:
        ValueError: the shapes differ from the leaves in structure or in number of dimensions.
    """
    if shapes is None:
        return [None] * len(actual)
    try:
        given: list[Any] = structure.flatten_up_to(shapes)
    except ValueError as error:
        raise ValueError(
            f"Dataset.padded_batch: padded_shapes is {shapes}; it must be a nest with the "
            f"elements' structure, {structure}, and a shape for each leaf"
        ) from error
    padded: list[tuple[Any, ...] | None] = [
        None if shape is None else tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        for shape in given
    ]
    for wanted, own in zip(padded, actual, strict=True):
        if wanted is not None and len(wanted) != len(own):
            raise ValueError(
                f"Dataset.padded_batch: the padded shape {list(wanted)} does not match an element "
                f"of shape {list(own)}; pass as many sizes as it has, with None for the size of "
                "the largest element"
            )
    return padded


def mark_unknown(shape: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shape with `None` in place of negative sizes."""
    return tuple([None if size is None or size < 0 else size for size in shape])


def pad_together(elements: Sequence[Any], shapes: Any, values: Any) -> Any:
    """The elements, padded and stacked. See `Dataset.padded_batch`."""
    first, structure = nests.flatten(elements[0])
    rows = []
    for element in elements:
        leaves, other = nests.flatten(element)
        if other != structure:
            raise ValueError(
                "Dataset.padded_batch: the elements of a batch must be nests of the same "
                f"structure; they are {structure} and {other}"
            )
        rows.append(leaves)
    wanted = shapes_for(shapes, structure, [leaf.shape for leaf in first])
    fill = _values_for(values, structure, first)
    return structure.unflatten(map(_pad_column, zip(*rows, strict=True), wanted, fill))


def _pad_column(leaves: Sequence[Any], wanted: tuple[Any, ...] | None, value: Any) -> Any:
    dtypes = {leaf.dtype.kind if leaf.dtype.kind in "SU" else leaf.dtype for leaf in leaves}
    if len(dtypes) > 1 or len({leaf.ndim for leaf in leaves}) > 1:
        kinds = sorted({f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in leaves})
        raise ValueError(
            "Dataset.padded_batch: the elements of a batch must have the same dtype and number of "
            f"dimensions; they have {', '.join(kinds)}"
        )
    largest = np.max([leaf.shape for leaf in leaves], axis=0).astype(np.int64).tolist()
    shape = (
        largest
        if wanted is None
        else [
            most if size is None or size < 0 else size
            for size, most in zip(wanted, largest, strict=True)
        ]
    )
    if any(most > size for most, size in zip(largest, shape, strict=True)):
        raise ValueError(
            f"Dataset.padded_batch: an element is larger than the padded shape {shape}: the "
            f"largest sizes in its batch are {largest}; pad to a larger shape, or to None, which "
            "means the largest element's"
        )
    dtype = np.result_type(*leaves)
    column = np.full((len(leaves), *shape), np.zeros((), dtype) if value is None else value, dtype)
    for row, leaf in zip(column, leaves, strict=True) if shape else ():
        row[tuple(map(slice, leaf.shape))] = leaf
    return column if shape else np.array(leaves, dtype)


def _values_for(values: Any, structure: nests.Structure, leaves: Sequence[Any]) -> list[Any]:
    """The value that each leaf of an element is padded with; `None` for zeros or empty strings.

    Raises:
        TypeError: a value cannot be converted to the leaf's dtype.
        ValueError: the values have another structure.
    """
    given: list[Any] = [values] * len(leaves)
    if isinstance(values, (tuple, list, dict)):
        try:
            given = structure.flatten_up_to(cast("Any", values))
        except ValueError as error:
            raise ValueError(
                f"Dataset.padded_batch: padding_values is {values}; it must be one value, or a "
                f"nest with the elements' structure, {structure}, and a value for each leaf"
            ) from error
    for value, leaf in zip(given, leaves, strict=True):
        if value is not None and not _becomes(np.asarray(value), leaf.dtype):
            raise TypeError(
                f"Dataset.padded_batch: padding_values has {value!r} for a leaf of dtype "
                f"{leaf.dtype}; pass a value of that dtype"
            )
    return given


def _becomes(value: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bool:
    """Whether a value can be converted to this dtype: integers exactly, floats with rounding."""
    if value.ndim or value.dtype.kind not in "biufc" or dtype.kind not in "biufc":
        return value.ndim == 0 and value.dtype.kind == dtype.kind
    if dtype.kind == "b" or value.dtype.kind == "b":
        return value.dtype.kind == dtype.kind
    if value.dtype.kind in "iu" and dtype.kind in "iu":
        return np.iinfo(dtype).min <= int(value) <= np.iinfo(dtype).max
    return np.can_cast(value.dtype, dtype, "same_kind")
