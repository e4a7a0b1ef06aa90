"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _element_ops, _elements, _index_ops, _sources
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node
from hpcstrat.data._pass import ResumableDataset, ResumableIterator, after

AUTOTUNE = -1
"""A size or number that is left to the library."""


@final
class DatasetIterator(ResumableIterator):
    """One iteration over a `Dataset`."""

    def __init__(self, node: Node, epoch: EpochPass, taken: int) -> None:
        super().__init__(node)
        self._begin(epoch, taken)

    def _begin(self, epoch: EpochPass, taken: int) -> None:
        self._epoch, self._taken = epoch, taken
        self._elements = after(self._node, taken).elements(epoch)

    def _end(self) -> None:
        self._elements, self._taken = iter(()), None

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """The next element: a nest of NumPy arrays and scalars.

        Raises:
            StopIteration: there is none.
            Exception: What a function of the pipeline raised. The next call gives the element after this one, or, with
                `batch` behind the function, after this batch.
        """
        try:
            return next(self._elements)
        except StopIteration:
            self._end()
            raise
        finally:
            if self._taken is not None:
                self._taken += 1


@final
class Dataset(ResumableDataset):
    """A pipeline that yields elements: nests of NumPy arrays and, where there are no dimensions, NumPy scalars.

    Datasets are made by `range`, `from_tensors`, `from_tensor_slices`, `from_generator` and `zip`, and from each other.
    They are lazy, can be iterated over again and again, and never change. Each iteration yields new arrays, safe to
    write to; only what a function given to `map` returns is passed on as it is.

    As in `tf.data` a list is turned into an array where an element is expected; tuples, dicts, namedtuples and
    dataclasses make nests. A function that gets an element gets the parts of a tuple as arguments of their own.
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise TypeError("Dataset: make one with range, from_tensors, from_tensor_slices, from_generator or zip")
        super().__init__(node)

    @staticmethod
    def range(*args: int, output_type: npt.DTypeLike = np.int64) -> Dataset:
        """The integers `range(*args)`, each a scalar of dtype `output_type`.

        Raises:
            ValueError: the step is 0.
        """
        return Dataset(_sources.Range(range(*map(operator.index, args)), output_type))

    @staticmethod
    def from_tensors(tensors: Any) -> Dataset:
        """One element: the nest of arrays `tensors`.

        Raises:
            TypeError: A leaf does not become an array.
        """
        return Dataset(_sources.Tensors(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """The slices of a nest of arrays of shapes `(n, ...)`: n elements.

        The arrays are referred to and not copied (a `numpy.memmap` stays on disk), so do not change them meanwhile.

        Raises:
            TypeError: A leaf does not become an array.
            ValueError: A leaf has no dimensions, or first dimensions differ.
        """
        return Dataset(_sources.Slices(tensors))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
    ) -> Dataset:
        """What a generator function yields; it is called anew for each iteration.

        Args:
            generator: a function that returns something to iterate over. Under a strategy it runs on every rank and
                must yield the same elements on all.
            output_types: a nest of dtypes to which the elements' leaves are converted.
            output_shapes: a nest of shapes, with `None` for sizes that differ, which the leaves must have.
            args: arrays, or what becomes arrays, that `generator` is called with.
            output_signature: a nest of `TensorSpec`, in place of the types and shapes. Without any, elements are taken
                as they come.

        Raises:
            TypeError: `generator` is not a function, both a signature and types or shapes are given, or shapes only.
            ValueError: in iterating: what is yielded does not fit.
        """
        call = "Dataset.from_generator"
        if not callable(generator):
            raise TypeError(
                f"{call}: generator is {type(generator).__name__}; it must be a function that returns an iterator, "
                "so that each iteration can begin anew (pass `f`, not `f()`)"
            )
        if output_signature is not None and not (output_types is None and output_shapes is None):
            raise TypeError(
                f"{call}: output_signature takes the place of output_types and output_shapes; give one or the other"
            )
        if output_shapes is not None:
            if output_types is None:
                raise TypeError(
                    f"{call}: output_shapes is given without output_types; give both, or an output_signature"
                )
            types, structure = _nest.flatten(output_types)
            shapes: list[Any] = structure.flatten_up_to(output_shapes)
            output_signature = structure.unflatten(map(TensorSpec, shapes, types))
        for spec in [] if output_signature is None else _nest.flatten(output_signature)[0]:
            if not isinstance(spec, TensorSpec):
                raise TypeError(f"{call}: output_signature has a leaf {spec!r}; each must be a TensorSpec")
        arrays = tuple(map(_elements.as_element, args or ()))
        return Dataset(_sources.Generated(generator, arrays, output_types, output_signature))

    @staticmethod
    def zip(*datasets: Any) -> Dataset:
        """Elements of several datasets side by side, until one of them ends.

        Args:
            *datasets: one nest of datasets, whose structure the elements then have, or several datasets, which make a
                tuple.

        Raises:
            TypeError: A leaf is not a `Dataset`, or there is none.
        """
        leaves, structure = _nest.flatten(datasets[0] if len(datasets) == 1 else datasets)
        if not leaves:
            raise TypeError("Dataset.zip: there is no dataset; give a nest of at least one")
        return Dataset(_index_ops.Zip([_node_of(leaf, "Dataset.zip") for leaf in leaves], structure))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Stacks consecutive elements: arrays of shape `(...)` become arrays of shape `(batch_size, ...)`.

        Args:
            batch_size: how many; the last batch has what is left.
            drop_remainder: whether a last batch that is shorter is left out.
            num_parallel_calls: taken and ignored.
            deterministic: taken and ignored.

        Raises:
            ValueError: `batch_size` is not positive. In iterating: elements differ in structure, shape or dtype.
        """
        batch_size = operator.index(batch_size)
        if batch_size < 1:
            raise ValueError(f"Dataset.batch: batch_size is {batch_size}; it must be at least 1")
        return Dataset(_element_ops.Batch(self._node, batch_size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """The rows of the elements: arrays of shape `(n, ...)` become n elements of shape `(...)`.

        Raises:
            ValueError: in iterating: a leaf has no dimensions, or first dimensions differ.
        """
        return Dataset(_element_ops.Unbatch(self._node))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every `num_shards`-th element, beginning with the one at `index`.

        Raises:
            ValueError: `num_shards` is not positive, or `index` is not in `[0, num_shards)`.
        """
        num_shards, index = operator.index(num_shards), operator.index(index)
        if not 0 <= index < num_shards:
            raise ValueError(
                f"Dataset.shard: index is {index} of num_shards {num_shards}; it must be in [0, num_shards)"
            )
        return Dataset(_index_ops.Shard(self._node, num_shards, index))

    def repeat(self, count: int | None = None) -> Dataset:
        """All elements `count` times over; without end where it is `None` or negative.

        Without end they end with a round that has no elements; directly behind `shuffle` only if it is the first.
        """
        return Dataset(_index_ops.Repeat(self._node, -1 if count is None else max(-1, operator.index(count))))

    def shuffle(self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True) -> Dataset:
        """The elements in a random order: each is drawn from a buffer of the next `buffer_size` ones.

        So an element moves forward by at most `buffer_size - 1` places. Where the source can be indexed no element is
        loaded for that, and a `buffer_size` of the whole dataset is best and costs nothing.

        Args:
            buffer_size: the size of the buffer, in elements; `UNKNOWN_CARDINALITY` stands for the whole dataset.
            seed: pipelines with equal seeds have equal orders. Without a seed one is drawn; replicas share it.
            reshuffle_each_iteration: whether each iteration, and each round of a `repeat`, has an order of its own.

        Raises:
            ValueError: `buffer_size` is not positive, or stands for the whole of a dataset without end.
        """
        buffer_size = operator.index(buffer_size)
        if buffer_size < 1 and buffer_size != UNKNOWN:
            raise ValueError(
                f"Dataset.shuffle: buffer_size is {buffer_size}; it must be at least 1, or UNKNOWN_CARDINALITY for all"
            )
        if buffer_size == UNKNOWN and self.cardinality() == INFINITE:
            raise ValueError(
                "Dataset.shuffle: buffer_size is UNKNOWN_CARDINALITY, all elements, of which there is no end; give a "
                "size, or shuffle before Dataset.repeat"
            )
        seed = None if seed is None else operator.index(seed)
        return Dataset(_index_ops.Shuffle(self._node, buffer_size, seed, bool(reshuffle_each_iteration)))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """What `map_func` returns for each element: a nest of arrays, or of what becomes arrays.

        A list stands for a tuple. A replica calls `map_func` for its own elements only, or, after `batch`, for whole
        batches.

        Args:
            map_func: gets the element, or the parts of a tuple.
            num_parallel_calls: taken and ignored.
            deterministic: taken and ignored.

        Raises:
            TypeError: in iterating: a leaf does not become an array.
        """
        return Dataset(_element_ops.Map(self._node, _function(map_func, "Dataset.map", "map_func")))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which `predicate` is true. Every rank loads every element to find out."""
        return Dataset(_element_ops.Filter(self._node, _function(predicate, "Dataset.filter", "predicate")))

    def take(self, count: int) -> Dataset:
        """The first `count` elements, or all of them where there are fewer or `count` is negative."""
        return Dataset(_index_ops.Take(self._node, operator.index(count)))

    def skip(self, count: int) -> Dataset:
        """What comes after the first `count` elements; nothing where `count` is negative."""
        return Dataset(_index_ops.Skip(self._node, operator.index(count)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """The elements, then those of `dataset`.

        Raises:
            TypeError: `dataset` is not a `Dataset`, or its elements have another structure, other dtypes or other
                numbers of dimensions.
        """
        return Dataset(_index_ops.Concatenate(self._node, _node_of(dataset, "Dataset.concatenate")))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs of a count from `start` on, an int64 scalar, and the element."""
        return Dataset(_index_ops.Enumerate(self._node, operator.index(start)))

    def cache(self) -> Dataset:
        """Keeps the order, and in memory what functions and generators made of the elements, for later iterations."""
        return Dataset(_element_ops.cache(self._node))

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """The same elements: a hint. Batches of a distributed dataset are copied ahead anyway, see `InputOptions`.

        Args:
            buffer_size: how many elements; `None` is `AUTOTUNE`, -1.

        Raises:
            ValueError: `buffer_size` is below -1.
        """
        buffer_size = AUTOTUNE if buffer_size is None else operator.index(buffer_size)
        if buffer_size < AUTOTUNE:
            raise ValueError(
                f"Dataset.prefetch: buffer_size is {buffer_size}; it must be at least 0, or AUTOTUNE, which is -1"
            )
        return Dataset(_index_ops.Prefetch(self._node, buffer_size))

    def cardinality(self) -> int:
        """The number of elements; -1 if there is no end, -2 if it is not known."""
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """The nest of `TensorSpec` of an element; `None` is a size that differs between elements or is not known.

        After `map` the function is called on the first element to find out; a generator without a signature begins.
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> DatasetIterator:
        """An iterator over the elements, which are nests of NumPy arrays in any case."""
        return iter(self)

    def __iter__(self) -> DatasetIterator:
        rounds, taken = self._next_start()
        iterator = DatasetIterator(self._node, EpochPass(rounds), taken)
        self._note_begun(iterator)
        return iterator

    def __len__(self) -> int:
        size = self._node.cardinality()
        if size < 0:
            why = {INFINITE: "infinite", UNKNOWN: "not known"}[size]
            raise TypeError(
                f"Dataset: len() has no result where the number of elements is {why}; call cardinality(), which "
                "says so without an error"
            )
        return size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return repr(self._node)


def node_of(dataset: Dataset) -> Node:
    """The last stage of the pipeline."""
    return dataset._node


def _node_of(dataset: Any, call: str) -> Node:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{call}: {type(dataset).__name__} is not a Dataset; make one with Dataset.from_tensor_slices")
    return node_of(dataset)


def _function(function: Any, call: str, argument: str) -> Callable[..., Any]:
    if not callable(function):
        raise TypeError(f"{call}: {argument} is {type(function).__name__}; it must be a function of an element")
    return function
