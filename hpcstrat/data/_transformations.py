"""The methods of a dataset that return another dataset, or reduce it to one value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data import _batching, _combining, _elements, _indexing, _mapping, _sources
from hpcstrat.data._arguments import AUTOTUNE, function_of, positive, seed_of, thread_count, whole
from hpcstrat.data._node import INFINITE, UNKNOWN, Node
from hpcstrat.data._resuming import ResumableDataset

if TYPE_CHECKING:
    from typing_extensions import Self

# Of `interleave`. The order of elements depends on it, so it cannot be the number of cores.
_CYCLE_LENGTH = 16


class TransformableDataset(ResumableDataset, _elements.DatasetLeaf):
    """The transformations of `Dataset`."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Stacks consecutive elements: shapes `(...)` become `(batch_size, ...)`.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            drop_remainder: whether to drop a last batch that is shorter.
            num_parallel_calls: accepted and ignored: batching is a single copy.
            deterministic: accepted and ignored.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                shape or dtype.
        """
        size = positive(batch_size, "Dataset.batch", "batch_size")
        return type(self)(_batching.Batch(self._node, (size,), bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Pads consecutive elements to one shape, at the ends of their dimensions, and stacks them.

        If all sizes are given, a replica loads only its own elements; otherwise every replica loads
        the whole batch, to find the largest element.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            padded_shapes: a nest of shapes with the elements' structure; a size of `None` or -1
                means that of the largest element of the batch, and `None` means so for all sizes.
            padding_values: one value for all leaves, or a nest with the elements' structure. `None`
                means 0, `False` or an empty string.
            drop_remainder: whether to drop a last batch that is shorter.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                dtype or number of dimensions, exceed the padded shape, or do not match the nests.
            TypeError: while iterating: a padding value cannot be converted to the leaf's dtype.
        """
        size = positive(batch_size, "Dataset.padded_batch", "batch_size")
        padding = padded_shapes, padding_values
        return type(self)(_batching.Batch(self._node, (size,), bool(drop_remainder), padding))

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Self:
        """The rows of the batches, in batches of another size: `unbatch`, then `batch`.

        Args:
            batch_size: the number of rows; or several numbers, which the batches have in turn.
            drop_remainder: whether to drop a last batch that is shorter.

        Raises:
            ValueError: a size is not positive. While iterating: as `unbatch`.
        """
        sizes = batch_size if isinstance(batch_size, (list, tuple, np.ndarray)) else [batch_size]
        sizes = tuple([positive(size, "Dataset.rebatch", "batch_size") for size in sizes])
        if not sizes:
            raise ValueError("Dataset.rebatch: batch_size has no sizes; pass one or more")
        rows = _batching.Unbatch(self._node)
        return type(self)(_batching.Batch(rows, sizes, bool(drop_remainder)))

    def unbatch(self) -> Self:
        """The rows of the elements: arrays of shape `(n, ...)` become n elements of shape `(...)`.

        Directly after `batch` nothing is stacked, so elements that cannot be stacked are accepted.

        Raises:
            ValueError: while iterating: a leaf has no dimensions, or first dimensions differ.
        """
        return type(self)(_batching.Unbatch(self._node))

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Datasets of `size` elements each.

        If elements are nests, a window is a nest of datasets, one for each leaf. Make arrays from
        windows with `flat_map(lambda window: window.batch(size))`, or with `map` and `reduce`.

        Args:
            size: the number of elements of a window; the last windows may be shorter.
            shift: the number of elements from the start of one window to the start of the next;
                `None` means `size`.
            stride: the number of elements of this dataset from one element of a window to the next.
            drop_remainder: whether to drop windows that are shorter.

        Raises:
            ValueError: `size`, `shift` or `stride` is not positive.
        """
        size = positive(size, "Dataset.window", "size")
        shift = size if shift is None else positive(shift, "Dataset.window", "shift")
        stride = positive(stride, "Dataset.window", "stride")
        drops = bool(drop_remainder)
        return type(self)(_batching.Window(self._node, size, shift, stride, drops, type(self)))

    def shard(self, num_shards: int, index: int) -> Self:
        """Every `num_shards`-th element, starting at `index`.

        Raises:
            ValueError: `num_shards` is not positive, or `index` is not in `[0, num_shards)`.
        """
        call = "Dataset.shard"
        num_shards, index = whole(num_shards, call, "num_shards"), whole(index, call, "index")
        if not 0 <= index < num_shards:
            raise ValueError(
                f"{call}: index is {index}; it must be in [0, {num_shards}), below num_shards"
            )
        text = f"shard({num_shards}, {index})"
        return type(self)(_indexing.Slice(self._node, text, index, step=num_shards))

    def repeat(self, count: int | None = None) -> Self:
        """All elements, `count` times; without end if `count` is `None` or negative.

        Without a count, it ends after a round without elements; directly after `shuffle`, only if
        the first round has none.
        """
        count = -1 if count is None else max(-1, whole(count, "Dataset.repeat", "count"))
        return type(self)(_indexing.Repeat(self._node, count))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Self:
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
        """
        buffer_size = whole(buffer_size, "Dataset.shuffle", "buffer_size")
        if buffer_size < 1 and buffer_size != UNKNOWN:
            raise ValueError(
                f"Dataset.shuffle: buffer_size is {buffer_size}; it must be at least 1, or "
                "UNKNOWN_CARDINALITY for all"
            )
        if buffer_size == UNKNOWN and self._node.cardinality() == INFINITE:
            raise ValueError(
                "Dataset.shuffle: buffer_size is UNKNOWN_CARDINALITY, which means all elements, "
                "but the dataset is infinite; give a size, or shuffle before Dataset.repeat"
            )
        seed = seed_of(seed, "Dataset.shuffle")
        reshuffle = bool(reshuffle_each_iteration)
        return type(self)(_indexing.Shuffle(self._node, buffer_size, seed, reshuffle))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """The result of `map_func` for each element: a nest of arrays or array-likes.

        A replica calls `map_func` only for its own elements; after `batch`, for whole batches. A
        list that it returns counts as a tuple.

        Args:
            map_func: receives the element, or the members of a tuple as separate arguments.
            num_parallel_calls: how many calls run at once, in threads; `AUTOTUNE` means 8.
                `map_func` must then be thread-safe. Threads help if it reads files, or spends its
                time in NumPy functions that release Python's lock.
            deterministic: accepted and ignored: the order is always kept.

        Raises:
            ValueError: `num_parallel_calls` is neither positive nor `AUTOTUNE`.
            TypeError: while iterating: a leaf cannot become an array.
        """
        function = function_of(map_func, "Dataset.map", "map_func")
        threads = thread_count(num_parallel_calls, "Dataset.map") or 1
        return type(self)(_mapping.Map(self._node, function, threads, type(self)))

    def flat_map(self, map_func: Callable[..., TransformableDataset]) -> Self:
        """The elements of the datasets that `map_func` makes, one dataset after the other.

        Every rank calls `map_func` for all elements; if the datasets can be indexed, it loads only
        its own elements of them. A shuffle within them has a different order in each dataset and in
        each pass. With a seed, these orders are the same in every program.

        Args:
            map_func: receives an element, or the members of a tuple as separate arguments; returns
                a `Dataset`. To distribute the result, batch it after `flat_map`.

        Raises:
            TypeError: while iterating: `map_func` did not return a `Dataset`.
        """
        function, name = self._maker(map_func, "Dataset.flat_map")
        return type(self)(_mapping.Interleave(self._node, f"flat_map({name})", function))

    def interleave(
        self,
        map_func: Callable[..., TransformableDataset],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """The elements of the datasets that `map_func` makes, several of which take turns.

        Args:
            map_func: as for `flat_map`.
            cycle_length: how many datasets take turns; `None` or `AUTOTUNE` means 16 on any host.
            block_length: the number of elements per turn.
            num_parallel_calls: how many threads read the datasets, each one block ahead; `AUTOTUNE`
                means 8. Threads help if generators make the elements; to run a `Dataset.map` in
                `map_func` in threads, pass `num_parallel_calls` to it as well.
            deterministic: accepted and ignored: the order is always kept.

        Raises:
            ValueError: a length, or `num_parallel_calls` if not `AUTOTUNE`, is not positive.
            TypeError: while iterating: `map_func` did not return a `Dataset`.
        """
        call = "Dataset.interleave"
        function, name = self._maker(map_func, call)
        cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = positive(cycle, call, "cycle_length")
        block = positive(block_length, call, "block_length")
        threads = thread_count(num_parallel_calls, call)
        text = f"interleave({name}, {cycle}, {block})"
        return type(self)(_mapping.Interleave(self._node, text, function, cycle, block, threads))

    @staticmethod
    def _maker(
        map_func: Callable[..., TransformableDataset], call: str
    ) -> tuple[Callable[[Any], Node], str]:
        """A function that makes a node from an element, and the name of `map_func`."""
        function = function_of(map_func, call, "map_func")

        def make(element: Any) -> Node:
            made = _mapping.call_on(function, element, call, "map_func")
            if not isinstance(made, TransformableDataset):
                raise TypeError(
                    f"{call}: map_func returned {type(made).__name__}; it must return a Dataset. "
                    "To return elements, call Dataset.map"
                )
            return node_of(made)

        return make, _sources.name_of(map_func)

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]]) -> Self:
        """The results of `scan_func` for a state and each element. Every rank loads all elements.

        Args:
            initial_state: a nest of arrays or array-likes: the state at the start of an iteration.
            scan_func: receives the state and the element, a tuple as one argument; returns the next
                state and the resulting element. If it raises, the state does not change.

        Raises:
            TypeError: a leaf of the state cannot become an array. While iterating: `scan_func` did
                not return a pair.
            ValueError: while iterating: the structure of the state changed.
        """
        function = function_of(scan_func, "Dataset.scan", "scan_func")
        return type(self)(_mapping.Scan(self._node, initial_state, function))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combines all elements into one. Not collective: each rank that calls it loads them all.

        Args:
            initial_state: a nest of arrays or array-likes; the result if there are no elements.
            reduce_func: receives the state and an element, a tuple as one argument; returns the
                next state.

        Returns:
            The last state: a nest of NumPy arrays and scalars. NumPy's rules may change its dtypes.

        Raises:
            TypeError: a leaf of a state cannot become an array.
            ValueError: the structure of the state changed.
        """
        function = function_of(reduce_func, "Dataset.reduce", "reduce_func")
        return _mapping.reduce(self._node, initial_state, function)

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """The elements for which `predicate` is true. Every rank loads all elements."""
        function = function_of(predicate, "Dataset.filter", "predicate")
        return type(self)(_mapping.Filter(self._node, function))

    def take(self, count: int) -> Self:
        """The first `count` elements; all if there are fewer, or if `count` is negative."""
        count = whole(count, "Dataset.take", "count")
        stop = count if count >= 0 else None
        return type(self)(_indexing.Slice(self._node, f"take({count})", stop=stop))

    def skip(self, count: int) -> Self:
        """The elements after the first `count`; none if `count` is negative."""
        count = whole(count, "Dataset.skip", "count")
        stop = None if count >= 0 else 0
        return type(self)(_indexing.Slice(self._node, f"skip({count})", max(0, count), stop))

    def concatenate(self, dataset: Self) -> Self:
        """The elements, then those of `dataset`.

        Raises:
            TypeError: `dataset` is not a `Dataset`, or its elements differ in structure, dtype or
                number of dimensions; strings may differ in length. If functions or generators make
                elements, it is raised while iterating, when each rank makes each dataset's first.
        """
        return type(self)(
            _combining.Concatenate(self._node, check_node(dataset, "Dataset.concatenate"))
        )

    def enumerate(self, start: int = 0) -> Self:
        """Pairs of a count, an int64 scalar that starts at `start`, and the element."""
        start = whole(start, "Dataset.enumerate", "start")
        return type(self)(_combining.Enumerate(self._node, start))

    def cache(self, filename: str = "") -> Self:
        """Keeps the order, and in memory the results of functions, generators and reads.

        Args:
            filename: must be empty: `Dataset.save` and `Dataset.load` keep elements in files.

        Raises:
            NotImplementedError: `filename` is not empty.
        """
        if filename:
            raise NotImplementedError(
                f"Dataset.cache: filename is {filename!r}, but results are kept in memory; to keep "
                "them in files, call Dataset.save once, then Dataset.load"
            )
        return type(self)(_indexing.cache(self._node))

    def prefetch(self, buffer_size: int | None) -> Self:
        """The same elements; as the last transformation, it has a thread prepare them ahead.

        Elsewhere in a pipeline it changes nothing. A strategy on GPUs prepares batches ahead
        anyway: see `InputOptions`.

        Args:
            buffer_size: how many elements to prepare ahead, or 0; `None` and `AUTOTUNE` mean 2.

        Raises:
            ValueError: `buffer_size` is less than -1.
        """
        buffer_size = AUTOTUNE if buffer_size is None else buffer_size
        buffer_size = whole(buffer_size, "Dataset.prefetch", "buffer_size")
        if buffer_size < AUTOTUNE:
            raise ValueError(
                f"Dataset.prefetch: buffer_size is {buffer_size}; it must be at least 0, or "
                "AUTOTUNE, which is -1"
            )
        ahead = _indexing.PREFETCHED if buffer_size < 0 else buffer_size
        text = f"prefetch({buffer_size})"
        return type(self)(_indexing.Annotated(self._node, text, prefetched=ahead))


def node_of(dataset: TransformableDataset) -> Node:
    """The last node of the pipeline."""
    return dataset._node


def check_node(dataset: Any, call: str) -> Node:
    """The last node of a dataset that is an argument.

    Raises:
        TypeError: it is not a dataset.
    """
    if not isinstance(dataset, TransformableDataset):
        raise TypeError(
            f"{call}: {type(dataset).__name__} is not a Dataset; make one with "
            "Dataset.from_tensor_slices"
        )
    return node_of(dataset)
