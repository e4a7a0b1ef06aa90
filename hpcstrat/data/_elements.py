"""Elements, nests of arrays: they are converted, stacked, described and compared."""

from __future__ import annotations

import functools
import math
import mmap
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._core.arrays import as_array
from hpcstrat._core.types import TensorSpec

# A sample must be cheap compared with a first epoch, and yet show a shuffle, a cast or an offset.
_SAMPLE_ROWS = 64, 1024  # minimum and maximum
_SAMPLE_BYTES = 1 << 16  # approximately
_ROW_ELEMENTS = 512  # per row of a sample
_FILE_SAMPLE = 4, 8  # rows, and elements per row, of a file: each may cost a disk read
_CHUNK_BYTES = 1 << 20  # keeps the copy of a non-contiguous array small
_ARRAYS = np.ndarray, np.generic


def flatten(element: Any) -> tuple[list[Any], nests.Structure]:
    """The leaves of an element, and its structure. As in `tf.data`, `None` is a part of that."""
    return nests.flatten(element, none_is_leaf=False)


def map_leaves(fn: Callable[[Any], Any], element: Any) -> Any:
    """An element like `element` whose leaves are `fn(leaf)`.

    Raises:
        TypeError: `element` is `None`.
    """
    if element is None:
        raise TypeError(describe_non_numeric(element))
    return nests.map_leaves(fn, element, none_is_leaf=False)


def as_leaf(value: Any) -> Any:
    """`value` as an array, or as a NumPy scalar if it has no dimensions.

    As in TensorFlow, Python floats become `float32` and Python ints `int32` if they fit; arrays
    keep their dtype.
    """
    try:
        array = as_array("Dataset", value, on_gpu=False)
    except ValueError as error:
        raise ValueError(
            f"Dataset: a {type(value).__name__} cannot become an array: {error}; "
            "pass a tuple, whose members may have different shapes"
        ) from error
    if not isinstance(value, (np.ndarray, np.generic)):
        if array.dtype in (np.int64, np.float64) and _of_python_numbers(value):
            array = _narrow(array)
    if array.dtype == object:
        raise TypeError(describe_non_numeric(value))
    return array[()]


def describe_non_numeric(value: Any) -> str:
    """The message for a leaf that does not hold numbers, booleans or strings."""
    if not hasattr(value, "__array__"):
        return (
            f"Dataset: a leaf of an element is {reprlib.repr(value)}, {type(value).__name__}; it "
            "must be an array, or something that np.asarray turns into numbers, booleans or strings"
        )
    name = getattr(value, "name", None)
    which = f"{type(value).__name__} {name!r}" if isinstance(name, str) else type(value).__name__
    dtype = getattr(value, "dtype", "object")
    return (
        f"Dataset: a leaf of an element is a {which} of dtype {dtype}, which NumPy holds as Python "
        "objects; it must hold numbers, booleans or strings: cast it with np.asarray(leaf, "
        "dtype=str), or dtype=float"
    )


def _of_python_numbers(value: Any) -> bool:
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return type(value) in (int, float, list, tuple)


def _narrow(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32 if array.dtype == np.float64 else np.int32)
    return narrow if narrow.dtype == np.float32 or np.array_equal(array, narrow) else array


def as_element(value: Any, convert: Callable[[Any], Any] = as_leaf) -> Any:
    """`value` with `convert(leaf)`, an array, in place of every leaf.

    As in `tf.data`, a list is an array, not a nest.
    """
    return map_leaves(convert, _without_lists(value))


def _without_lists(value: Any) -> Any:
    if isinstance(value, list):
        return as_leaf(value)
    if isinstance(value, tuple):
        members = [_without_lists(member) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if type(value) is dict:
        return {key: _without_lists(member) for key, member in value.items()}
    return value


def with_columns(batch: Any) -> Any:
    """`batch` with each list of Python numbers or strings (a column of a table) as an array."""
    if isinstance(batch, list) and batch and _are_of_python(batch):
        return as_leaf(batch)
    if type(batch) in (list, tuple):
        return type(batch)(with_columns(member) for member in batch)
    if type(batch) is dict:
        return {key: with_columns(member) for key, member in batch.items()}
    return batch


def _are_of_python(values: list[Any]) -> bool:
    return all(
        _are_of_python(value)
        if isinstance(value, list)
        else type(value) in (bool, int, float, complex, str)
        for value in values
    )


def stack(elements: Sequence[Any]) -> Any:
    """The nest of arrays of shape `(len(elements), ...)` whose rows are the elements."""
    rows, structures = zip(*map(flatten, elements), strict=True)
    structure, columns = structures[0], []
    for other in structures:
        if other != structure:
            raise _structure_error(nests.describe(structure), nests.describe(other))
    for leaves in zip(*rows, strict=True):
        if len({leaf.shape for leaf in leaves}) > 1 or len(dtypes_of(leaves)) > 1:
            raise _kind_error([_kind(leaf, leaf.shape) for leaf in leaves])
        columns.append(np.stack(leaves) if leaves[0].shape else np.array(leaves))
    return structure.unflatten(columns)


def dtypes_of(leaves: Iterable[Any]) -> set[Any]:
    """The dtypes of arrays to be stacked, where the lengths of strings do not count."""
    return {leaf.dtype.kind if leaf.dtype.kind in "SU" else leaf.dtype for leaf in leaves}


_Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""What arrays to be stacked must share: the dtype, without the length of strings, and the shape."""


def kinds_of_rows(batch: Any) -> tuple[str, tuple[_Kind, ...]]:
    """What all parts of a batch must share: a row's structure, as text, and its arrays' kinds."""
    leaves, structure = flatten(batch)
    return nests.describe(structure), tuple([_kind(leaf, leaf.shape[1:]) for leaf in leaves])


def mismatch_error(parts: Iterable[tuple[str, tuple[_Kind, ...]]]) -> ValueError:
    """The error that `stack` would raise for all rows of a batch whose parts differ."""
    structures, kinds = zip(*parts, strict=True)
    if len(set(structures)) > 1:
        return _structure_error(*sorted(set(structures))[:2])
    return _kind_error(
        next(column for column in map(set, zip(*kinds, strict=True)) if len(column) > 1)
    )


def _kind(leaf: Any, shape: tuple[int, ...]) -> _Kind:
    return _name(leaf.dtype), shape


# NumPy builds the name on each call, which takes as long as the rest of a step's comparison.
@functools.lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return {"S": "bytes", "U": "str"}.get(dtype.kind) or dtype.name


def _structure_error(first: str, second: str) -> ValueError:
    return ValueError(
        "Dataset.batch: the elements of a batch must be nests of the same structure; they are "
        f"{first} and {second}"
    )


def _kind_error(kinds: Iterable[_Kind]) -> ValueError:
    text = ", ".join(sorted({f"{dtype}{list(shape)}" for dtype, shape in kinds}))
    return ValueError(
        "Dataset.batch: the elements of a batch must have the same shape and dtype; they have "
        f"{text}; pad or cast them with Dataset.map first"
    )


def unstack(batch: Any, call: str = "Dataset") -> Iterator[Any]:
    """Copies of the rows of a nest of arrays with equal first dimensions.

    Copies, because a row that is kept must not keep the others.
    """
    leaves, structure = flatten(batch)
    leading_size(leaves, call)
    columns = [
        # Scalars are copies, but records are views.
        leaf if leaf.ndim == 1 and leaf.dtype.kind != "V" else (row.copy() for row in leaf)
        for leaf in leaves
    ]
    is_array = leaves[0] is batch
    yield from columns[0] if is_array else map(structure.unflatten, zip(*columns, strict=True))


def rows(batch: Any, start: int, stop: int) -> Any:
    """A copy of the rows `start` to `stop` of every leaf."""
    return map_leaves(lambda leaf: leaf[start:stop].copy(), batch)


def copy_of(element: Any) -> Any:
    """A copy of an element, safe to write to."""
    # Most elements are arrays, and an array needs no nest.
    return _copy(element) if isinstance(element, _ARRAYS) else map_leaves(_copy, element)


def _copy(array: Any) -> Any:
    # Scalars other than records cannot be written to, and NumPy copies them slowly.
    return array.copy() if isinstance(array, (np.ndarray, np.void)) else array


def leading_size(leaves: Sequence[Any], call: str) -> int:
    """The number of rows, the same in all leaves."""
    sizes = {leaf.shape[0] if leaf.shape else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves) or "none"
        raise ValueError(
            f"{call}: the arrays must have a first dimension, all the same; their shapes are "
            f"{shapes}"
        )
    return sizes.pop()


def spec_of(element: Any) -> Any:
    """The nest of `TensorSpec` that describes `element`."""
    return map_leaves(lambda leaf: TensorSpec(leaf.shape, leaf.dtype), element)


def common_spec(first: Any, second: Any, call: str) -> Any:
    """The spec that covers both: differing sizes are `None`, strings have the greater length.

    Raises:
        TypeError: they differ in structure, dtype or number of dimensions.
    """
    ours, structure = flatten(first)
    theirs, other = flatten(second)
    if structure != other or any(
        len(dtypes_of(pair)) > 1 or len(pair[0].shape) != len(pair[1].shape)
        for pair in zip(ours, theirs, strict=True)
    ):
        raise TypeError(
            f"{call}: elements must have the same structure, dtype and number of dimensions; they "
            f"are {first} and {second}"
        )

    def common(first: TensorSpec, second: TensorSpec) -> TensorSpec:
        shape = [m if m == n else None for m, n in zip(first.shape, second.shape, strict=True)]
        return TensorSpec(shape, np.result_type(first.dtype, second.dtype))

    return structure.unflatten(map(common, ours, theirs))


def checksum_of(array: np.ndarray[Any, Any], value: int = 0) -> int:
    """The checksum `value`, continued with the shape, dtype and contents of a host array.

    It compares bytes, so NaNs can be equal. Python objects in the array are skipped: their
    addresses differ between ranks.
    """
    value = zlib.crc32(f"{array.dtype} {array.shape}".encode(), value)
    if array.nbytes <= _CHUNK_BYTES or array.ndim == 0:
        return _checksum_of_contents(array, value)
    rows = max(1, _CHUNK_BYTES * len(array) // array.nbytes)
    for start in range(0, len(array), rows):
        value = _checksum_of_contents(array[start : start + rows], value)
    return value


def checksum_of_arrays(arrays: Sequence[Any], every: bool) -> int:
    """One checksum of several arrays with dimensions.

    It covers samples; if `every`, the whole of each array that is in memory.
    """
    value = 0
    for array in arrays:
        whole = every and isinstance(array, np.ndarray) and not _is_memory_map(array)
        value = checksum_of(array, value) if whole else checksum_of_sample(array, value)
    return value


def checksum_of_sample(array: Any, value: int = 0) -> int:
    """As `checksum_of`, of rows spread from first to last; the array must have dimensions.

    The sample has many rows and a CRC depends on their order, so a reshuffle is noticed even if
    most rows are equal. The sample of a file (a memory map or a `StoredArray`) is small.
    """
    if not isinstance(array, np.ndarray):
        size = math.prod(array.shape[1:])
        count = max(2, min(_FILE_SAMPLE[0], _SAMPLE_BYTES // max(1, size * array.dtype.itemsize)))
        rows = array.take(_spread(array.shape[0], count), 0).reshape(-1, size)
        sample = rows[:, _spread(size, _FILE_SAMPLE[1])]
        return checksum_of(sample, zlib.crc32(str(array.shape).encode(), value))
    if array.size == 0:
        return checksum_of(array, value)
    shape, row_bytes = array.shape, array.nbytes // len(array)
    rows, elements = (
        min(_SAMPLE_ROWS[1], max(_SAMPLE_ROWS[0], _SAMPLE_BYTES // max(1, row_bytes))),
        _ROW_ELEMENTS,
    )
    if _is_memory_map(array):
        rows, elements = _FILE_SAMPLE
    indices, size = _spread(len(array), rows), math.prod(shape[1:])
    if size <= elements:
        sample = array[indices]
    else:
        sample = array[
            (indices[:, np.newaxis], *np.unravel_index(_spread(size, elements), shape[1:]))
        ]
    return checksum_of(sample, zlib.crc32(str(shape).encode(), value))


def _spread(size: int, count: int) -> npt.NDArray[np.int64]:
    """Up to `count` distinct, evenly spread indices below `size`, with the first and the last."""
    count = min(size, count)
    return np.arange(count) * (size - 1) // max(1, count - 1)


def _checksum_of_contents(array: np.ndarray[Any, Any], value: int) -> int:
    dtype = array.dtype
    if dtype.names is not None:  # padding between the fields is undefined
        for name in dtype.names:
            value = _checksum_of_contents(array[name], value)
        return value
    if dtype.kind == "O":
        return value
    # Long double has undefined padding; variable-length strings are stored elsewhere.
    if dtype.char in "gGT":
        return zlib.crc32(repr(array.tolist()).encode(), value)
    return zlib.crc32(array.tobytes(), value)


def _is_memory_map(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, mmap.mmap)
