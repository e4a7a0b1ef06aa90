"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat import _nest
from hpcstrat._types import TensorSpec
from hpcstrat.data import _combine_ops, _element_ops, _elements, _index_ops, _sources
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node
from hpcstrat.data._pass import ResumableDataset, ResumableIterator, after

AUTOTUNE = -1
"""Leaves a size or a number to the library."""


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
            StopIteration: the pass is over.
            Exception: whatever a function of the pipeline raised. The next call returns the next element; if `batch`
                follows the function, the next batch.
        """
        try:
            return next(self._elements)
        except StopIteration:
            self._end()
            raise
        finally:
            # An element that failed counts too: a program that resumes after it must not meet it again.
            if self._taken is not None:
                self._taken += 1


@final
class Dataset(ResumableDataset):
    """A pipeline that yields elements: nests of NumPy arrays or, without dimensions, NumPy scalars.

    Make one with `range`, `from_tensors`, `from_tensor_slices`, `from_generator` or `zip`, or transform another one.
    Datasets are lazy, can be iterated over repeatedly, and never change. Each iteration yields new arrays, safe to
    write to; only the results of a function given to `map` are passed on as they are.

    As in `tf.data`, a list becomes an array where an element is expected; tuples, dicts, namedtuples and dataclasses
    make nests. A function of an element receives the members of a tuple as separate arguments.
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
            TypeError: a leaf cannot become an array.
        """
        return Dataset(_sources.Tensors(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any) -> Dataset:
        """The slices of a nest of arrays of shapes `(n, ...)`: n elements.

        The arrays are not copied, and a `numpy.memmap` stays on disk, so do not change them while the dataset is used.

        Raises:
            TypeError: a leaf cannot become an array.
            ValueError: a leaf has no dimensions, or first dimensions differ.
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
        """What a generator function yields. The function is called once for each iteration.

        Args:
            generator: a function that returns an iterable. Under a strategy it runs on every rank and must yield the
                same elements on all.
            output_types: a nest of dtypes, to which the elements' leaves are converted.
            output_shapes: a nest of shapes, which the leaves must have; `None` for sizes that vary.
            args: arrays or array-likes, with which `generator` is called.
            output_signature: a nest of `TensorSpec`, instead of types and shapes. Without either, elements are taken
                as they come.

        Raises:
            TypeError: `generator` is not a function, both a signature and types or shapes are given, or shapes only.
            ValueError: while iterating: an element does not match.
        """
        call = "Dataset.from_generator"
        if not callable(generator):
            raise TypeError(
                f"{call}: generator is {type(generator).__name__}; it must be a function that returns an iterator, "
                "because each iteration calls it again (pass `f`, not `f()`)"
            )
        if output_signature is not None and not (output_types is None and output_shapes is None):
            raise TypeError(f"{call}: output_signature replaces output_types and output_shapes; pass one or the other")
        if output_shapes is not None:
            if output_types is None:
                raise TypeError(f"{call}: output_shapes came without output_types; pass both, or an output_signature")
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
        """Elements of several datasets side by side, until one dataset ends.

        Args:
            *datasets: one nest of datasets, whose structure the elements get, or several datasets, which make a tuple.

        Raises:
            TypeError: a leaf is not a `Dataset`, or there is no leaf.
        """
        leaves, structure = _nest.flatten(datasets[0] if len(datasets) == 1 else datasets)
        if not leaves:
            raise TypeError("Dataset.zip: there is no dataset; pass a nest with at least one")
        return Dataset(_combine_ops.Zip([_node_of(leaf, "Dataset.zip") for leaf in leaves], structure))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Stacks consecutive elements: arrays of shape `(...)` become arrays of shape `(batch_size, ...)`.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            drop_remainder: whether to drop a last batch that is shorter.
            num_parallel_calls: accepted and ignored.
            deterministic: accepted and ignored.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure, shape or dtype.
        """
        batch_size = operator.index(batch_size)
        if batch_size < 1:
            raise ValueError(f"Dataset.batch: batch_size is {batch_size}; it must be at least 1")
        return Dataset(_element_ops.Batch(self._node, batch_size, bool(drop_remainder)))

    def unbatch(self) -> Dataset:
        """The rows of the elements: arrays of shape `(n, ...)` become n elements of shape `(...)`.

        Raises:
            ValueError: while iterating: a leaf has no dimensions, or first dimensions differ.
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
        """All elements, `count` times; infinitely often if it is `None` or negative.

        An infinite `repeat` ends after a round without elements; directly after `shuffle`, only if the first round has
        none.
        """
        return Dataset(_index_ops.Repeat(self._node, -1 if count is None else max(-1, operator.index(count))))

    def shuffle(self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True) -> Dataset:
        """The elements in random order: each is drawn from a buffer of the next `buffer_size` elements.

        So an element moves forward by at most `buffer_size - 1` places. If the source can be indexed, only indices are
        shuffled, so a `buffer_size` of the whole dataset costs nothing and is best.

        Args:
            buffer_size: the size of the buffer, in elements; `UNKNOWN_CARDINALITY` means the whole dataset.
            seed: pipelines with equal seeds have equal orders. Without one, replicas share a random seed.
            reshuffle_each_iteration: whether each iteration, and each round of a `repeat`, has its own order.

        Raises:
            ValueError: `buffer_size` is not positive, or means the whole of an infinite dataset.
        """
        buffer_size = operator.index(buffer_size)
        if buffer_size < 1 and buffer_size != UNKNOWN:
            raise ValueError(
                f"Dataset.shuffle: buffer_size is {buffer_size}; it must be at least 1, or UNKNOWN_CARDINALITY for all"
            )
        if buffer_size == UNKNOWN and self.cardinality() == INFINITE:
            raise ValueError(
                "Dataset.shuffle: buffer_size is UNKNOWN_CARDINALITY, which means all elements, but the dataset is "
                "infinite; give a size, or shuffle before Dataset.repeat"
            )
        seed = None if seed is None else operator.index(seed)
        return Dataset(_index_ops.Shuffle(self._node, buffer_size, seed, bool(reshuffle_each_iteration)))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """The result of `map_func` for each element: a nest of arrays or array-likes. A list counts as a tuple.

        A replica calls `map_func` for its own elements only; after `batch`, for whole batches.

        Args:
            map_func: receives the element, or the members of a tuple as separate arguments.
            num_parallel_calls: accepted and ignored.
            deterministic: accepted and ignored.

        Raises:
            TypeError: while iterating: a leaf cannot become an array.
        """
        return Dataset(_element_ops.Map(self._node, _function(map_func, "Dataset.map", "map_func")))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """The elements for which `predicate` is true. Every rank loads all elements to find out."""
        return Dataset(_element_ops.Filter(self._node, _function(predicate, "Dataset.filter", "predicate")))

    def take(self, count: int) -> Dataset:
        """The first `count` elements; all if there are fewer, or if `count` is negative."""
        return Dataset(_index_ops.Take(self._node, operator.index(count)))

    def skip(self, count: int) -> Dataset:
        """The elements after the first `count`; nothing if `count` is negative."""
        return Dataset(_index_ops.Skip(self._node, operator.index(count)))

    def concatenate(self, dataset: Dataset) -> Dataset:
        """The elements, then those of `dataset`.

        Raises:
            TypeError: `dataset` is not a `Dataset`, or its elements differ in structure, dtypes or numbers of
                dimensions.
        """
        return Dataset(_combine_ops.Concatenate(self._node, _node_of(dataset, "Dataset.concatenate")))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs of a count, an int64 scalar that begins at `start`, and the element."""
        return Dataset(_combine_ops.Enumerate(self._node, operator.index(start)))

    def cache(self) -> Dataset:
        """Keeps the order, and in memory the results of functions and generators, for later iterations."""
        return Dataset(_element_ops.cache(self._node))

    def prefetch(self, buffer_size: int | None) -> Dataset:
        """The same elements; a hint only. Batches of a distributed dataset are copied ahead anyway: see `InputOptions`.

        Args:
            buffer_size: the number of elements; `None` means `AUTOTUNE`, -1.

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
        """The number of elements; -1 if it is infinite, -2 if it is unknown."""
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """An element's nest of `TensorSpec`; a size is `None` if it varies or is unknown.

        To find out, the function of `map` is called on the first element, and a generator without a signature starts.
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> DatasetIterator:
        """An iterator over the elements, as `iter`: they are nests of NumPy arrays anyway."""
        return iter(self)

    def __iter__(self) -> DatasetIterator:
        rounds, taken = self._next_start()
        iterator = DatasetIterator(self._node, EpochPass(rounds), taken)
        self._note_begun(iterator)
        return iterator

    def __len__(self) -> int:
        size = self._node.cardinality()
        if size < 0:
            why = {INFINITE: "infinite", UNKNOWN: "unknown"}[size]
            raise TypeError(
                f"Dataset: len() has no result because the number of elements is {why}; call cardinality(), which "
                "returns a negative number instead"
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
