"""The sources of elements: ranges, arrays in memory or files, and generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core.arrays import as_array, is_stored
from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._node import UNKNOWN, Chunk, EpochPass, Keys, Node

_CHUNK = 1 << 16  # keys (half a megabyte), so that a dataset of any length starts immediately
_FEW = 32  # elements that ranks compare: a single element may be equal by chance


class Indexed(Node):
    """A source with random access; a key is an element's position."""

    def __init__(self, size: int, *inputs: Node) -> None:
        super().__init__(*inputs)
        self.keys, self.gathers = size, True
        self.user_code = any(node.user_code for node in inputs)
        self._size = size

    def cardinality(self) -> int:
        return self._size

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for start in range(0, self._size, _CHUNK):
            yield np.arange(start, min(self._size, start + _CHUNK), dtype=np.int64)


@final
class Integers(Indexed):
    """The integers of a range."""

    def __init__(self, numbers: range, dtype: np.dtype[Any]) -> None:
        super().__init__(len(numbers))
        self._numbers, self._dtype = numbers, dtype

    def __repr__(self) -> str:
        return f"Dataset.{self._numbers!r}"

    def spec(self) -> Any:
        return TensorSpec((), self._dtype)

    def fetch(self, keys: Keys) -> Any:
        integers = keys * self._numbers.step + self._numbers.start
        return integers.astype(self._dtype, copy=False)


def tensors(nest: Any) -> Node:
    """See `Dataset.from_tensors`."""
    element = _elements.as_element(nest)
    rows = _elements.map_leaves(lambda leaf: np.asarray(leaf)[np.newaxis], element)
    return Slices(rows, 1, f"Dataset.from_tensors({_elements.spec_of(element)})")


def slices(nest: Any) -> Node:
    """See `Dataset.from_tensor_slices`."""
    arrays = _elements.as_element(nest, _as_rows)
    size = _elements.leading_size(_elements.flatten(arrays)[0], "Dataset.from_tensor_slices")
    return Slices(arrays, size)


@final
class Slices(Indexed):
    """The slices of arrays along their first dimension.

    The arrays are not copied, and stay in files.
    """

    def __init__(self, arrays: Any, size: int, text: str | None = None) -> None:
        super().__init__(size)
        self._leaves, self._structure = _elements.flatten(arrays)
        self._text = text or f"Dataset.from_tensor_slices({size} of {self.spec()})"
        # Reading a file may fail on a single rank, so steps are compared as if it ran user code.
        self.user_code = any(isinstance(leaf, StoredArray) for leaf in self._leaves)
        # This runs for each batch, and the structure itself takes four times as long as `tuple`.
        is_flat = self._structure.num_nodes == 1 + len(self._leaves)
        is_tuple = is_flat and self._structure.type is tuple
        self._nested: Callable[[list[Any]], Any] = tuple if is_tuple else self._structure.unflatten

    def __repr__(self) -> str:
        return self._text

    def spec(self) -> Any:
        return self._structure.unflatten(
            TensorSpec(leaf.shape[1:], leaf.dtype) for leaf in self._leaves
        )

    def checksums(self, every: bool) -> list[tuple[str, int]]:
        return [(repr(self), _elements.checksum_of_arrays(self._leaves, every))]

    def fetch(self, keys: Keys) -> Any:
        size = len(keys)
        # Without a shuffle, the rows are consecutive: a slice is then a single copy, or a single
        # sequential read of a file.
        if size and keys[-1] - keys[0] == size - 1:
            if np.count_nonzero(keys[1:] > keys[:-1]) == size - 1:
                run = slice(int(keys[0]), int(keys[0]) + size)
                return self._nested([leaf[run].copy() for leaf in self._leaves])
        return self._nested([leaf.take(keys, 0) for leaf in self._leaves])


@final
class StoredArray:
    """An array in a file (h5py, zarr, netCDF4), whose rows are read when they are needed.

    It is indexed only by slices of rows, which all libraries support. Its dtype is that of the
    arrays that are read, which can differ from that of the file.
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
        return self._read(rows.start, rows.stop)

    def take(self, rows: npt.NDArray[np.int64], axis: int) -> npt.NDArray[Any]:
        """Rows in any order; each row is read once, and neighbours are read together."""
        assert axis == 0
        wanted, places = np.unique(rows, return_inverse=True)
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
        parts = [self._read(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]
        return np.concatenate(parts or [self._read(0, 0)]).take(places, 0)

    def _read(self, start: int, stop: int) -> npt.NDArray[Any]:
        array = as_array("Dataset.from_tensor_slices", self._source[start:stop], on_gpu=False)
        expected = stop - start, *self.shape[1:]
        if array.shape != expected:
            raise ValueError(
                f"Dataset.from_tensor_slices: a {type(self._source).__name__} of shape "
                f"{self.shape} returned an array of shape {array.shape} for the rows {start} to "
                f"{stop}; it must not change while the dataset is used"
            )
        return array


def _as_rows(value: Any) -> Any:
    """`value` as an array whose rows are elements: as `as_leaf`, but a stored array stays put."""
    return StoredArray(value) if is_stored(value) else _elements.as_leaf(value)


def generated(
    generator: Any, types: Any, shapes: Any, args: tuple[Any, ...] | None, signature: Any
) -> Node:
    """See `Dataset.from_generator`."""
    call = "Dataset.from_generator"
    if not callable(generator):
        raise TypeError(
            f"{call}: generator is {type(generator).__name__}; it must be a function that returns "
            "an iterator, because each iteration calls it again (pass `f`, not `f()`)"
        )
    if signature is not None and not (types is None and shapes is None):
        raise TypeError(
            f"{call}: output_signature replaces output_types and output_shapes; pass one or the "
            "other"
        )
    if shapes is not None:
        if types is None:
            raise TypeError(
                f"{call}: output_shapes came without output_types; pass both, or an "
                "output_signature"
            )
        dtypes, structure = _elements.flatten(types)
        sizes: list[Any] = structure.flatten_up_to(shapes)
        signature = structure.unflatten(map(TensorSpec, sizes, dtypes))
    for spec in [] if signature is None else _elements.flatten(signature)[0]:
        if not isinstance(spec, TensorSpec):
            raise TypeError(
                f"{call}: output_signature has a leaf {spec!r}; each must be a TensorSpec"
            )
    arrays = tuple(map(_elements.as_element, args or ()))
    return Generated(generator, arrays, types, signature)


@final
class Generated(Node):
    """The elements that a generator function yields, one by one: an item is the element itself.

    Args:
        generator: the function.
        args: its arguments.
        types: a nest of dtypes, to which elements are cast, if there is no signature.
        signature: the elements' nest of `TensorSpec`, which they are checked against.
    """

    def __init__(
        self,
        generator: Callable[..., Any],
        args: tuple[Any, ...],
        types: Any,
        signature: Any,
    ) -> None:
        super().__init__()
        self._generator, self._args = generator, args
        self._signature = signature
        self._convert = _own_element
        if signature is not None:
            specs, _ = _elements.flatten(signature)
            self._convert = _converter([(spec.dtype, spec.shape) for spec in specs], signature)
        elif types is not None:
            dtypes, _ = _elements.flatten(types)
            self._convert = _converter([(dtype, None) for dtype in dtypes], types)

    def __repr__(self) -> str:
        return f"Dataset.from_generator({name_of(self._generator)})"

    def spec(self) -> Any:
        if self._signature is not None:
            return self._signature
        element = self.first()
        if element is None:
            raise ValueError(
                "Dataset.element_spec: the generator yields nothing and has no output_signature, "
                "so its elements' shapes and dtypes are unknown; pass an output_signature to "
                "Dataset.from_generator"
            )
        return _elements.spec_of(element)

    def cardinality(self) -> int:
        return UNKNOWN

    def chunks(self, epoch: EpochPass) -> Iterator[Chunk]:
        for number, value in enumerate(self._generator(*self._args)):
            element = self._convert(value)
            if epoch.checksum.takes(number, _FEW):
                epoch.checksum.add(element)
            yield [element]


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


def name_of(function: Any) -> str:
    """A function's name, the same on all ranks."""
    return getattr(function, "__name__", type(function).__name__)
