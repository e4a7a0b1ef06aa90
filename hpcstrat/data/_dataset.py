"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._core.types import as_dtype
from hpcstrat.data import _computing, _ordering, _sources
from hpcstrat.data._arguments import (
    NamesWhatIsAbsent,
    Options,
    check_options,
    say_what_is_absent,
    whole,
)
from hpcstrat.data._iterators import DatasetIterator, Position, Progress, incompatibility, length
from hpcstrat.data._node import Node


@final
class Dataset(metaclass=NamesWhatIsAbsent):
    """A pipeline that yields elements: nests of NumPy arrays or, without dimensions, NumPy scalars.

    Make a dataset with `range`, `from_tensors`, `from_tensor_slices`, `from_generator` or `zip`, or
    transform another dataset. Datasets are lazy, can be iterated over repeatedly, and never change.
    Each iteration yields new arrays, safe to write to; only the results of a function given to
    `map` are passed on as they are.

    A function that raises ends the iteration, on all ranks of a strategy.

    As in `tf.data`, a list becomes an array where an element is expected; tuples, dicts,
    namedtuples and dataclasses make nests, in which `None` stays as it is. A function of an
    element receives the members of a tuple as separate arguments.

    An argument of the wrong type, such as text for a size, raises a TypeError that names it.

    Examples:
        >>> import numpy as np
        >>> import hpcstrat as hs
        >>> x, y = np.linspace(0, 1, 5), np.array([0, 0, 1, 1, 1])
        >>> dataset = hs.data.Dataset.from_tensor_slices((x, y)).shuffle(5, seed=1)
        >>> for points, labels in dataset.map(lambda x, y: (2 * x, y)).batch(2):
        ...     print(points, labels)
        [2. 0.] [1 0]
        [0.5 1. ] [0 1]
        [1.5] [1]
    """

    def __init__(self, node: Any = None) -> None:
        if not isinstance(node, Node):  # the last of a pipeline; programs know no nodes
            raise TypeError(
                "Dataset: make one with range, from_tensors, from_tensor_slices, from_generator or "
                "zip"
            )
        self._node, self._progress = node, Progress(node)

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """The integers `range(*args)`, each a scalar of dtype `output_type`.

        Raises:
            TypeError: an argument is not an int.
            ValueError: the step is 0.

        Examples:
            >>> print(*hs.data.Dataset.range(5, 0, -2, output_type=np.float32))
            5.0 3.0 1.0
        """
        call = "Dataset.range"
        numbers = range(*[whole(number, call, "an argument") for number in args])
        return Dataset(_sources.Integers(numbers, as_dtype(call, output_type)))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: the nest of arrays `tensors`.

        Raises:
            TypeError: a leaf cannot become an array.

        Examples:
            >>> dataset = hs.data.Dataset.from_tensors(([1, 2, 3], "abc"))
            >>> for array, text in dataset.repeat(2):
            ...     print(array, text)
            [1 2 3] abc
            [1 2 3] abc
        """
        return Dataset(_sources.tensors(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """The slices of a nest of arrays of shapes `(n, ...)`: n elements.

        The arrays are not copied, so do not change them while the dataset is used. A `numpy.memmap`
        stays on disk, and so does an array in a file (h5py, zarr, netCDF4): whatever can be
        indexed, has a shape and a dtype, and shares no memory. Its rows are read when they are
        needed, consecutive rows of a batch together, and each replica reads only its own. A read
        may fail on one rank, so ranks compare their steps, as with functions.

        Raises:
            TypeError: a leaf cannot become an array.
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
        return Dataset(_sources.slices(tensors))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """The elements that a generator function yields; each iteration calls the function once.

        Args:
            generator: a function that returns an iterable. Under a strategy it runs on every rank
                and must yield the same elements on all.
            output_types: a nest of dtypes, to which the elements' leaves are converted.
            output_shapes: a nest of shapes, which the leaves must have; `None` for sizes that vary.
            args: arrays or array-likes, with which `generator` is called.
            output_signature: a nest of `TensorSpec`, instead of types and shapes. Without either,
                elements are taken as they come.

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
        return Dataset(
            _sources.generated(generator, output_types, output_shapes, args, output_signature)
        )

    @staticmethod
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Elements of several datasets side by side, until one dataset ends.

        Args:
            *args: one nest of datasets, whose structure the elements have, or several datasets,
                which make a tuple.
            datasets: the nest, instead of `args`.

        Raises:
            TypeError: a leaf is not a `Dataset`, the nest is empty, or both arguments are given.

        Examples:
            >>> numbers = hs.data.Dataset.range(100)
            >>> words = hs.data.Dataset.from_tensor_slices(["once", "upon", "a"])
            >>> for element in hs.data.Dataset.zip({"number": numbers, "word": words}):
            ...     print(element["number"], element["word"])
            0 once
            1 upon
            2 a
        """
        if args and datasets is not None:
            raise TypeError(
                "Dataset.zip: datasets came besides other arguments; pass one or the other"
            )
        nest = args if datasets is None else datasets
        leaves, structure = nests.flatten(nest[0] if args and len(args) == 1 else nest)
        if not leaves:
            raise TypeError("Dataset.zip: there is no dataset; pass a nest with at least one")
        nodes = [check_node(leaf, "Dataset.zip") for leaf in leaves]
        return Dataset(_ordering.zipped(nodes, structure))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """The result of `map_func` for each element: a nest of arrays or array-likes.

        A replica calls `map_func` only for its own elements; after `batch`, for whole batches. A
        list that it returns counts as a tuple.

        Args:
            map_func: receives the element, or the members of a tuple as separate arguments.
            num_parallel_calls: how many calls run at once, and how many elements ahead, in threads;
                `AUTOTUNE` means 8. `map_func` must then be thread-safe. Threads help if it reads
                files, or spends its time in NumPy functions that release Python's lock.
            deterministic: accepted and ignored: the order is always kept.

        Raises:
            ValueError: `num_parallel_calls` is neither positive nor `AUTOTUNE`.
            TypeError: while iterating: a leaf cannot become an array.

        Examples:
            >>> pairs = hs.data.Dataset.from_tensor_slices(([1, 2, 3], [10, 20, 30]))
            >>> print(*pairs.map(lambda x, y: x + y))
            11 22 33
            >>> print(*pairs.batch(2).map(np.dot))
            50 90
        """
        return Dataset(_computing.Map(self._node, map_func, num_parallel_calls))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which `predicate` is true. Every rank loads all elements.

        Raises:
            TypeError: while iterating, if `predicate` returns `None` or several values.

        Examples:
            >>> pairs = hs.data.Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"]))
            >>> for number, word in pairs.filter(lambda number, word: number != 2):
            ...     print(number, word)
            1 a
            3 c
        """
        return Dataset(_computing.Filter(self._node, predicate))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Stacks consecutive elements: shapes `(...)` become `(batch_size, ...)`.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            drop_remainder: whether to drop a last batch that is shorter.
            num_parallel_calls: accepted and ignored: batching is a single copy.
            deterministic: accepted and ignored.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                shape or dtype.

        Examples:
            >>> five = hs.data.Dataset.range(5)
            >>> print(*five.batch(2))
            [0 1] [2 3] [4]
            >>> print(*five.batch(2, drop_remainder=True))
            [0 1] [2 3]
        """
        return Dataset(_computing.Batch(self._node, batch_size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """The rows of the elements: arrays of shape `(n, ...)` become n elements of shape `(...)`.

        Directly after `batch` nothing is stacked, so elements that cannot be stacked are accepted.

        Raises:
            ValueError: while iterating: a leaf has no dimensions, or first dimensions differ.

        Examples:
            >>> pairs = hs.data.Dataset.from_tensors(([[1, 2], [3, 4]], ["a", "b"]))
            >>> for row, word in pairs.unbatch():
            ...     print(row, word)
            [1 2] a
            [3 4] b
        """
        return Dataset(_computing.Unbatch(self._node))

    def cache(self) -> Dataset:
        """The same elements in the order of the first iteration, kept for the next iterations.

        It keeps in memory the results of functions, generators and reads; each replica keeps those
        that it loads.

        Examples:
            >>> calls = []
            >>> dataset = hs.data.Dataset.range(3).map(lambda x: calls.append(x) or x * x).cache()
            >>> print(*dataset, "then", *dataset, "by", len(calls), "calls")
            0 1 4 then 0 1 4 by 3 calls
        """
        return Dataset(_computing.cache(self._node))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Dataset:
        """The elements in random order, each drawn from a buffer of the next `buffer_size`.

        An element moves forward by at most `buffer_size - 1` places. If the source can be indexed,
        only indices are shuffled: then a buffer of the whole dataset costs nothing and is best.

        Args:
            buffer_size: in elements; `UNKNOWN_CARDINALITY` means the whole dataset.
            seed: equal seeds give equal orders. Without it, replicas share a random seed.
            reshuffle_each_iteration: whether each iteration, and each round of a `repeat`, has its
                own order.

        Raises:
            ValueError: `buffer_size` is not positive, or means the whole of an infinite dataset.

        Examples:
            >>> dataset = hs.data.Dataset.range(8).shuffle(8, seed=1)
            >>> print(*dataset, "then", *dataset)
            5 0 1 4 2 6 3 7 then 6 1 4 0 3 2 5 7
            >>> print(*hs.data.Dataset.range(8).shuffle(2, seed=1))
            1 0 2 4 5 6 3 7
        """
        reshuffle = bool(reshuffle_each_iteration)
        return Dataset(_ordering.Shuffle(self._node, buffer_size, seed, reshuffle))

    def repeat(self, count: int | None = None) -> Dataset:
        """All elements, `count` times; without end if `count` is `None` or negative.

        Without a count, it ends after a round without elements; directly after `shuffle`, only if
        the first round has none.

        Examples:
            >>> print(*hs.data.Dataset.range(3).shuffle(3, seed=1).repeat(3))
            0 1 2 2 0 1 1 2 0
            >>> print(*hs.data.Dataset.range(3).repeat(2).batch(4))
            [0 1 2 0] [1 2]
        """
        return Dataset(_ordering.Repeat(self._node, count))

    def take(self, count: int) -> Dataset:
        """The first `count` elements; all if there are fewer, or if `count` is negative.

        Examples:
            >>> print(*hs.data.Dataset.range(10).take(3))
            0 1 2
        """
        return Dataset(_ordering.take(self._node, count))

    def skip(self, count: int) -> Dataset:
        """The elements after the first `count`; none if `count` is negative.

        Examples:
            >>> samples = hs.data.Dataset.range(10)
            >>> print(*samples.take(7), "to train,", *samples.skip(7), "to test")
            0 1 2 3 4 5 6 to train, 7 8 9 to test
        """
        return Dataset(_ordering.skip(self._node, count))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every `num_shards`-th element, starting at `index`.

        Raises:
            ValueError: `num_shards` is not positive, or `index` is not in `[0, num_shards)`.

        Examples:
            >>> for index in range(3):
            ...     print(*hs.data.Dataset.range(8).shard(num_shards=3, index=index))
            0 3 6
            1 4 7
            2 5
        """
        return Dataset(_ordering.shard(self._node, num_shards, index))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs of a count, an int64 scalar that starts at `start`, and the element.

        Examples:
            >>> words = hs.data.Dataset.from_tensor_slices(["to", "be"])
            >>> for number, word in words.enumerate(start=1):
            ...     print(number, word)
            1 to
            2 be
        """
        return Dataset(_ordering.enumerated(self._node, start))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """The elements, then those of `dataset`.

        Raises:
            TypeError: `dataset` is not a `Dataset`, or its elements differ in structure, dtype or
                number of dimensions; strings may differ in length. If functions or generators make
                elements, it is raised while iterating, when each rank makes each dataset's first.

        Examples:
            >>> low, high = hs.data.Dataset.range(3), hs.data.Dataset.range(10, 12)
            >>> print(*low.concatenate(high).batch(2))
            [0 1] [ 2 10] [11]
        """
        other = check_node(dataset, "Dataset.concatenate")
        return Dataset(_ordering.Concatenate(self._node, other))

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """The same elements; as the last transformation, it has a thread prepare them ahead.

        Elsewhere in a pipeline it changes nothing. A strategy on GPUs prepares batches ahead
        anyway: see `InputOptions`.

        Args:
            buffer_size: how many elements to prepare ahead, or 0; `None` and `AUTOTUNE` mean 2.

        Raises:
            ValueError: `buffer_size` is less than -1.

        Examples:
            >>> dataset = hs.data.Dataset.range(5).map(lambda x: x * x).batch(2)
            >>> print(*dataset.prefetch(hs.data.AUTOTUNE))
            [0 1] [4 9] [16]
        """
        return Dataset(_ordering.Prefetch(self._node, buffer_size))

    def with_options(self, options: Options) -> Dataset:
        """This dataset: options change nothing; see `Options`.

        Raises:
            TypeError: `options` is not an `Options`.
            NotImplementedError: its `auto_shard_policy` is `AutoShardPolicy.OFF`.

        Examples:
            >>> print(*hs.data.Dataset.range(3).with_options(hs.data.Options()))
            0 1 2
        """
        check_options(options, "Dataset.with_options")
        return self

    def cardinality(self) -> int:
        """The number of elements; -1 if it is infinite, -2 if it is unknown.

        Examples:
            >>> ten = hs.data.Dataset.range(10)
            >>> datasets = [ten.batch(4), ten.repeat(), ten.filter(lambda x: x > 3)]
            >>> [dataset.cardinality() for dataset in datasets]
            [3, -1, -2]
        """
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """An element's nest of `TensorSpec`; a size is `None` if it varies or is unknown.

        The dtype of strings has the length of the longest string that is known; other elements may
        be shorter or longer. To find the spec, the function of `map` is called on the first
        element, and a generator without a signature is started.

        Examples:
            >>> five = hs.data.Dataset.range(5)
            >>> five.batch(2).element_spec
            TensorSpec(shape=(None,), dtype=int64, name=None)
            >>> five.batch(2, drop_remainder=True).element_spec
            TensorSpec(shape=(2,), dtype=int64, name=None)
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> DatasetIterator:
        """The same as `iter`: elements are nests of NumPy arrays anyway.

        Examples:
            >>> iterator = hs.data.Dataset.range(5).batch(2).as_numpy_iterator()
            >>> next(iterator)
            array([0, 1])
        """
        return iter(self)

    def __iter__(self) -> DatasetIterator:
        iterator = DatasetIterator(self._node, *self._progress.begin())
        self._progress.note(iterator)
        return iterator

    def __len__(self) -> int:
        return length(self._node.cardinality(), "Dataset")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return repr(self._node)

    if not TYPE_CHECKING:  # type checkers would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            say_what_is_absent(name)
            # Python's own error; or that of a function, in a property that it asks again.
            return super().__getattribute__(name)

    def _position(self) -> Position:
        return self._progress.position()

    def _incompatibility(self, position: Position) -> str | None:
        return incompatibility(self._node, position)

    def _seek(self, position: Position) -> None:
        self._progress.seek(position)


def check_node(dataset: Any, call: str) -> Node:
    """The last node of a dataset that is an argument.

    Raises:
        TypeError: it is not a dataset.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{call}: {type(dataset).__name__} is not a Dataset; make one with "
            "Dataset.from_tensor_slices"
        )
    return dataset._node
