"""The methods of a dataset class that make a dataset: of numbers, arrays, functions and files."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements, _sources
from hpcstrat.data._arguments import path_of, refuse_second, seed_of, whole
from hpcstrat.data._node import UNKNOWN
from hpcstrat.data._saving import SavableDataset

if TYPE_CHECKING:
    from typing_extensions import Self


class SourceDataset(SavableDataset):
    """The class methods of `Dataset` that need no other dataset."""

    @classmethod
    def range(
        cls, *args: int, output_type: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Self:
        """The integers `range(*args)`, each a scalar of dtype `output_type`.

        Raises:
            TypeError: an argument is not an int.
            ValueError: the step is 0.

        Examples:
            >>> print(*hs.data.Dataset.range(5, 0, -2, output_type=np.float32))
            5.0 3.0 1.0
        """
        bounds = [whole(number, "Dataset.range", "an argument") for number in args]
        return cls._of(_sources.Integers(range(*bounds), output_type))

    @classmethod
    def counter(
        cls, start: int = 0, step: int = 1, dtype: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Self:
        """The integers `start`, `start + step` and so on without end, each a scalar of `dtype`.

        Examples:
            >>> print(*hs.data.Dataset.counter(10, step=-5).take(4))
            10 5 0 -5
        """
        first = whole(start, "Dataset.counter", "start")
        return cls._of(_sources.Counter(first, whole(step, "Dataset.counter", "step"), dtype))

    @classmethod
    def from_tensors(cls, tensors: Any, name: str | None = None) -> Self:
        """One element: the nest of arrays `tensors`.

        Raises:
            TypeError: a leaf cannot become an array, or `name` is not a string.

        Examples:
            >>> dataset = hs.data.Dataset.from_tensors(([1, 2, 3], "abc"))
            >>> for array, text in dataset.repeat(2):
            ...     print(array, text)
            [1 2 3] abc
            [1 2 3] abc
        """
        refuse_second(name, "from_tensors")
        return cls._of(_sources.Tensors(tensors))

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> Self:
        """The slices of a nest of arrays of shapes `(n, ...)`: n elements.

        The arrays are not copied, so do not change them while the dataset is used. A `numpy.memmap`
        stays on disk, and so does an array in a file (h5py, zarr, netCDF4): whatever can be
        indexed, has a shape and a dtype, and shares no memory. Its rows are read when they are
        needed, consecutive rows of a batch together, and each replica reads only its own. A read
        may fail on one rank, so ranks compare their steps, as with functions.

        Raises:
            TypeError: a leaf cannot become an array, or `name` is not a string.
            ValueError: a leaf has no dimensions, or first dimensions differ.

        Examples:
            >>> points, names = [[1, 2], [3, 4], [5, 6]], ["a", "b", "c"]
            >>> dataset = hs.data.Dataset.from_tensor_slices((points, names))
            >>> for array, text in dataset:
            ...     print(array, text)
            [1 2] a
            [3 4] b
            [5 6] c
        """
        refuse_second(name, "from_tensor_slices")
        return cls._of(_sources.Slices(tensors))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Self:
        """The elements that a generator function yields; each iteration calls the function once.

        Args:
            generator: a function that returns an iterable. Under a strategy it runs on every rank
                and must yield the same elements on all.
            output_types: a nest of dtypes, to which the elements' leaves are converted.
            output_shapes: a nest of shapes, which the leaves must have; `None` for sizes that vary.
            args: arrays or array-likes, with which `generator` is called.
            output_signature: a nest of `TensorSpec`, instead of types and shapes. Without either,
                elements are taken as they come.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: `generator` is not a function, both a signature and types or shapes are
                given, or only shapes.
            ValueError: while iterating: an element does not match.

        Examples:
            >>> def triangle(height):
            ...     for width in range(height):
            ...         yield np.arange(width + 1)
            >>> row = hs.TensorSpec((None,), np.int64)
            >>> rows = hs.data.Dataset.from_generator(triangle, args=(3,), output_signature=row)
            >>> print(*rows)
            [0] [0 1] [0 1 2]
        """
        call = "Dataset.from_generator"
        if not callable(generator):
            raise TypeError(
                f"{call}: generator is {type(generator).__name__}; it must be a function that "
                "returns an iterator, because each iteration calls it again (pass `f`, not `f()`)"
            )
        if output_signature is not None and not (output_types is None and output_shapes is None):
            raise TypeError(
                f"{call}: output_signature replaces output_types and output_shapes; pass one or "
                "the other"
            )
        if output_shapes is not None:
            if output_types is None:
                raise TypeError(
                    f"{call}: output_shapes came without output_types; pass both, or an "
                    "output_signature"
                )
            types, structure = _elements.flatten(output_types)
            shapes: list[Any] = structure.flatten_up_to(output_shapes)
            output_signature = structure.unflatten(map(TensorSpec, shapes, types))
        for spec in [] if output_signature is None else _elements.flatten(output_signature)[0]:
            if not isinstance(spec, TensorSpec):
                raise TypeError(
                    f"{call}: output_signature has a leaf {spec!r}; each must be a TensorSpec"
                )
        arrays = tuple(map(_elements.as_element, args or ()))
        return cls._of(_sources.generated(generator, arrays, output_types, output_signature))

    @classmethod
    def list_files(
        cls,
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Self:
        """The names of the matching files, as strings. All ranks must find the same files.

        Args:
            file_pattern: a pattern as `glob.glob` takes it, or several.
            shuffle: whether the order is random, and different in each iteration, or sorted; `None`
                means `True`.
            seed: the seed of the shuffle.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: no file matches.

        Examples:
            >>> import os, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for name in "b.npy", "a.npy", "readme.txt":
            ...         open(os.path.join(folder, name), "w").close()
            ...     paths = hs.data.Dataset.list_files(os.path.join(folder, "*.npy"), shuffle=False)
            >>> print(*paths.map(os.path.basename))
            a.npy b.npy
        """
        call = "Dataset.list_files"
        several = isinstance(file_pattern, Iterable) and not isinstance(file_pattern, str)
        patterns = [
            path_of(pattern, call, "file_pattern")
            for pattern in (file_pattern if several else [file_pattern])
        ]
        seed = seed_of(seed, call)
        names = sorted(name for pattern in patterns for name in glob.glob(pattern))
        if not names:
            raise ValueError(f"{call}: no file matches {', '.join(patterns)}")
        files = cls.from_tensor_slices(np.array(names))
        return files if shuffle is False else files.shuffle(UNKNOWN, seed)
