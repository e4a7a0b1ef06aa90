"""The sources of elements: ranges, arrays in memory or files, generators, and other iterables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, is_stored
from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import INFINITE, UNKNOWN, Chunk, EpochPass, Node, only_row

_CHUNK = 1 << 16  # keys (half a megabyte), so that a dataset of any length starts immediately
_ENDLESS_CHUNK = 1 << 10
_FEW = 32  # elements that ranks compare: a single element may be equal by chance


class Indexed(Node):
    """A source with random access; a key is an element's position."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.user_code = 1, False

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        size = self.cardinality()
        for start in range(0, size, _CHUNK):
            yield np.arange(start, min(size, start + _CHUNK), dtype=np.int64)[:, np.newaxis]

    def load(self, item: Any) -> Any:
        return only_row(self.fetch(item[np.newaxis]))


@final
class Integers(Indexed):
    """The integers `start`, `start + step` and so on: `count` of them, or without end."""

    def __init__(self, text: str, start: int, step: int, count: int, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._text, self._start, self._step, self._count = text, start, step, count
        self._dtype = dtype

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        return TensorSpec((), self._dtype)

    def cardinality(self) -> int:
        return self._count

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        if self._count != INFINITE:
            return super().chunks(epoch)
        starts = itertools.count(0, _ENDLESS_CHUNK)
        return (np.arange(start, start + _ENDLESS_CHUNK)[:, np.newaxis] for start in starts)

    def fetch(self, chunk: Chunk) -> Any:
        return (chunk[:, 0] * self._step + self._start).astype(self._dtype, copy=False)


@final
class Tensors(Indexed):
    """A single element."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._element = _elements.as_element(tensors)

    def __repr__(self) -> str:
        return f"Dataset.from_tensors({self.spec()})"

    def spec(self) -> Any:
        return _elements.spec_of(self._element)

    def cardinality(self) -> int:
        return 1

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        arrays = [np.atleast_1d(leaf) for leaf in _elements.flatten(self._element)[0]]
        return [(repr(self), _elements.checksum_of_arrays(arrays, every))]

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.map_leaves(
            lambda leaf: np.repeat(np.asarray(leaf)[np.newaxis], len(chunk), 0), self._element
        )


@final
class Slices(Indexed):
    """The slices of arrays along their first dimension.

    The arrays are not copied, and stay in files.
    """

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._leaves, self._structure = _elements.flatten(_elements.as_element(tensors, _as_rows))
        # Reading a file may fail on a single rank, so steps are compared as if it ran user code.
        self.user_code = any(isinstance(leaf, StoredArray) for leaf in self._leaves)
        self._size = _elements.leading_size(self._leaves)
        # This runs for each batch, and the structure itself takes four times as long as `tuple`.
        is_flat = self._structure.num_nodes == 1 + len(self._leaves)
        is_tuple = is_flat and self._structure.type is tuple
        self._nested: Callable[[list[Any]], Any] = tuple if is_tuple else self._structure.unflatten

    def __repr__(self) -> str:
        return f"Dataset.from_tensor_slices({self._size} of {self.spec()})"

    def spec(self) -> Any:
        return self._structure.unflatten(
            TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in self._leaves
        )

    def cardinality(self) -> int:
        return self._size

    @property
    def fetches_freely(self) -> bool:
        return True

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        return [(repr(self), _elements.checksum_of_arrays(self._leaves, every))]

    def fetch(self, chunk: Chunk) -> Any:
        rows, size = chunk[:, 0], len(chunk)
        # Without a shuffle, the rows are consecutive: a slice is then a single copy, or a single
        # sequential read of a file.
        if size and rows[-1] - rows[0] == size - 1:
            if np.count_nonzero(rows[1:] > rows[:-1]) == size - 1:
                run = slice(int(rows[0]), int(rows[0]) + size)
                return self._nested([leaf[run].copy() for leaf in self._leaves])
        return self._nested([leaf.take(rows, 0) for leaf in self._leaves])


@final
class StoredArray:
    """An array in a file (h5py, zarr, netCDF4), whose rows are read when they are needed.

    It is indexed only by slices, which all libraries support. Its dtype is that of the arrays that
    are read, which can differ from that of the file.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.shape: tuple[int, ...] = tuple(source.shape)
        try:
            empty = source[0:0]
        except TypeError as error:
            raise TypeError(_elements.describe_non_numeric(source)) from error
        self.dtype: np.dtype[Any] = as_array("Dataset", empty, on_gpu=False).dtype
        if self.dtype == object:
            raise TypeError(_elements.describe_non_numeric(source))

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        """Consecutive rows, in one read."""
        return self._read((rows.start, rows.stop))

    def take(self, rows: npt.NDArray[np.int64], axis: int) -> npt.NDArray[Any]:
        """Rows in any order; each row is read once, and neighbours are read together."""
        assert axis == 0
        wanted, places = np.unique(rows, return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        parts = [
            self._read((int(run[0]), int(run[-1]) + 1) if len(run) else (0, 0)) for run in runs
        ]
        return np.concatenate(parts).take(places, 0)

    def elements(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Single elements, by their positions in the flattened array, with one read each."""
        places = zip(
            *[axis.tolist() for axis in np.unravel_index(positions, self.shape)], strict=True
        )
        parts = [self._read(*[(i, i + 1) for i in place]).reshape(1) for place in places]
        return np.concatenate([np.empty(0, self.dtype), *parts])

    def _read(self, *bounds: tuple[int, int]) -> npt.NDArray[Any]:
        slices = tuple([slice(*bound) for bound in bounds])
        array = as_array(
            "Dataset", self._source[slices[0] if len(slices) == 1 else slices], on_gpu=False
        )
        expected = *[stop - start for start, stop in bounds], *self.shape[len(bounds) :]
        if array.shape != expected:
            raise ValueError(
                f"Dataset.from_tensor_slices: a {type(self._source).__name__} of shape "
                f"{self.shape} returned an array of shape {array.shape} for the indices {slices}; "
                "it must not change while the dataset is used"
            )
        return array


def _as_rows(value: Any) -> Any:
    """`value` as an array whose rows are elements: as `as_leaf`, but a stored array stays put."""
    return StoredArray(value) if is_stored(value) else _elements.as_leaf(value)


@final
class Produced(Node):
    """A source whose elements come from user code, one by one: an item is the element itself.

    Args:
        text: how it is described.
        produce: returns one pass over the elements, as arrays that the caller owns.
        compared: the number of elements at the start of a pass that the ranks compare.
        signature: the elements' nest of `TensorSpec`; `None` for that of the first element.
        are_batches: whether the elements are batches, of sizes that may differ.
    """

    def __init__(
        self,
        text: str,
        produce: Callable[[], Iterator[Any]],
        compared: int,
        signature: Any = None,
        are_batches: bool = False,
    ) -> None:
        super().__init__()
        self.batch_sizes = (0,) if are_batches else ()
        self._text, self._produce, self._compared = text, produce, compared
        self._signature = signature
        self._are_batches = are_batches

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        if self._signature is not None:
            return self._signature
        for element in self.elements(EpochPass(frozen=True)):
            if not self._are_batches:
                return _elements.spec_of(element)
            return _elements.map_leaves(
                lambda leaf: TensorSpec((None, *leaf.shape[1:]), leaf.dtype), element
            )
        if self._are_batches:
            raise ValueError(
                f"DistributedDataset.element_spec: {self!r} has no batches, so their shapes and "
                "dtypes are unknown; give it at least one batch"
            )
        raise ValueError(
            "Dataset.element_spec: the generator yields nothing and has no output_signature, so "
            "its elements' shapes and dtypes are unknown; pass an output_signature to "
            "Dataset.from_generator"
        )

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for number, element in enumerate(self._produce()):
            if epoch.checksum.takes(number, self._compared):
                epoch.checksum.add(element)
            yield [element]


def generated(
    generator: Callable[..., Iterable[Any]],
    args: tuple[Any, ...] = (),
    types: Any = None,
    signature: Any = None,
) -> Produced:
    """The elements of a generator function, cast to `types` or checked against `signature`."""

    def produce() -> Iterator[Any]:
        convert = _own_element
        if signature is not None:
            specs, _ = _elements.flatten(signature)
            convert = _converter([(spec.dtype, spec.shape) for spec in specs], signature)
        elif types is not None:
            convert = _converter([(dtype, None) for dtype in _elements.flatten(types)[0]], types)
        for value in generator(*args):
            yield convert(value)

    return Produced(f"Dataset.from_generator({name_of(generator)})", produce, _FEW, signature)


def _own_element(value: Any) -> Any:
    return _elements.copy_of(_elements.as_element(value))


def _converter(
    kinds: list[tuple[Any, tuple[int | None, ...] | None]], like: Any
) -> Callable[[Any], Any]:
    """A function that casts to the dtypes, checks the shapes (`None`: any), and nests as `like`."""
    _, structure = _elements.flatten(like)

    def convert(value: Any) -> Any:
        arrays = []
        try:
            for leaf, (dtype, shape) in zip(structure.flatten_up_to(value), kinds, strict=True):
                array = np.array(leaf, dtype)  # a copy: generators may reuse their arrays
                if shape is not None and not (
                    len(shape) == array.ndim
                    and all(m in (None, n) for m, n in zip(shape, array.shape, strict=True))
                ):
                    raise ValueError(f"shape {array.shape} is not {shape}")
                arrays.append(array[()])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Dataset.from_generator: the generator's element does not match {like}: {error}; "
                "correct one or the other"
            ) from error
        return structure.unflatten(arrays)

    return convert


def batches_of(iterable: Any) -> Produced:
    """The batches of a re-iterable object, or of a generator function."""

    def produce() -> Iterator[Any]:
        for batch in iterable if hasattr(iterable, "__iter__") else iterable():
            yield _elements.map_leaves(
                lambda leaf: np.array(_elements.as_leaf(leaf)), _elements.with_columns(batch)
            )

    text = name_of(iterable) if callable(iterable) else type(iterable).__name__
    return Produced(text, produce, 1, are_batches=True)


def name_of(function: Any) -> str:
    """A function's name, the same on all ranks."""
    return getattr(function, "__name__", type(function).__name__)
