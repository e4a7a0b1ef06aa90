"""The methods of a dataset that return another dataset, and `reduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data import _batching, _combining, _indexing, _mapping, _sources
from hpcstrat.data._arguments import (
    AUTOTUNE,
    function_of,
    positive,
    seed_of,
    thread_count,
    whole,
)
from hpcstrat.data._node import INFINITE, UNKNOWN, Node
from hpcstrat.data._resuming import ResumableDataset

if TYPE_CHECKING:
    from typing_extensions import Self

# Of `interleave`. The order of elements depends on it, so it cannot be the number of cores.
_CYCLE_LENGTH = 16


class Transformable(ResumableDataset):
    """The transformations of `Dataset`: by functions, then those that call none.

    A method checks its arguments, makes a node that reads `self._node`, and returns `self._of` it.
    """

    @classmethod
    def _of(cls, node: Node) -> Self:
        """The dataset of a pipeline; the constructor is not for programs, which know no nodes."""
        dataset = cls.__new__(cls)
        ResumableDataset.__init__(dataset, node)
        return dataset

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
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
            name: ignored; accepted for compatibility with TensorFlow.

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
        function = function_of(map_func, "Dataset.map", "map_func")
        threads = thread_count(num_parallel_calls, "Dataset.map") or 1
        return self._of(_mapping.Map(self._node, function, threads, self._of))

    def flat_map(self, map_func: Callable[..., Transformable], name: str | None = None) -> Self:
        """The elements of the datasets that `map_func` makes, one dataset after the other.

        Every rank calls `map_func` for all elements; if the datasets can be indexed, it loads only
        its own elements of them. A shuffle within them has a different order in each dataset and in
        each pass. With a seed, these orders are the same in every program.

        Args:
            map_func: receives an element, or the members of a tuple as separate arguments; returns
                a `Dataset`. To distribute the result, batch it after `flat_map`.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: while iterating: `map_func` did not return a `Dataset`.

        Examples:
            >>> def countdown(start):
            ...     return hs.data.Dataset.range(start, 0, -1)
            >>> print(*hs.data.Dataset.range(1, 4).flat_map(countdown))
            1 2 1 3 2 1
        """
        function, of = self._maker(map_func, "Dataset.flat_map")
        return self._of(_mapping.Interleave(self._node, f"flat_map({of})", function))

    def interleave(
        self,
        map_func: Callable[..., Transformable],
        cycle_length: int | None = None,
        block_length: int = 1,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
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
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: a length, or `num_parallel_calls` if not `AUTOTUNE`, is not positive.
            TypeError: while iterating: `map_func` did not return a `Dataset`.

        Examples:
            >>> def thrice(number):
            ...     return hs.data.Dataset.from_tensors(number).repeat(3)
            >>> four = hs.data.Dataset.range(4)
            >>> print(*four.interleave(thrice, cycle_length=2))
            0 1 0 1 0 1 2 3 2 3 2 3
            >>> print(*four.interleave(thrice, cycle_length=2, block_length=2))
            0 0 1 1 0 1 2 2 3 3 2 3
        """
        call = "Dataset.interleave"
        function, of = self._maker(map_func, call)
        cycle = _CYCLE_LENGTH if cycle_length in (None, AUTOTUNE) else cycle_length
        cycle = positive(cycle, call, "cycle_length")
        block = positive(block_length, call, "block_length")
        threads = thread_count(num_parallel_calls, call)
        text = f"interleave({of}, {cycle}, {block})"
        return self._of(_mapping.Interleave(self._node, text, function, cycle, block, threads))

    @staticmethod
    def _maker(
        map_func: Callable[..., Transformable], call: str
    ) -> tuple[Callable[[Any], Node], str]:
        """A function that makes a node from an element, and the name of `map_func`."""
        function = function_of(map_func, call, "map_func")

        def make(element: Any) -> Node:
            made = _mapping.call_on(function, element, call, "map_func")
            if not isinstance(made, Transformable):
                raise TypeError(
                    f"{call}: map_func returned {type(made).__name__}; it must return a Dataset. "
                    "To return elements, call Dataset.map"
                )
            return made._node

        return make, _sources.name_of(map_func)

    def scan(
        self,
        initial_state: Any,
        scan_func: Callable[[Any, Any], tuple[Any, Any]],
        name: str | None = None,
    ) -> Self:
        """The results of `scan_func` for a state and each element. Every rank loads all elements.

        Args:
            initial_state: a nest of arrays or array-likes: the state at the start of an iteration.
            scan_func: receives the state and the element, a tuple as one argument; returns the next
                state and the resulting element. If it raises, the state does not change.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: a leaf of the state cannot become an array. While iterating: `scan_func` did
                not return a pair.
            ValueError: while iterating: the structure of the state changed.

        Examples:
            >>> def running_mean(state, x):
            ...     count, total = state[0] + 1, state[1] + x
            ...     return (count, total), total / count
            >>> print(*hs.data.Dataset.range(5).scan((0, 0.0), running_mean))
            0.0 0.5 1.0 1.5 2.0
        """
        function = function_of(scan_func, "Dataset.scan", "scan_func")
        return self._of(_mapping.Scan(self._node, initial_state, function))

    def reduce(
        self, initial_state: Any, reduce_func: Callable[[Any, Any], Any], name: str | None = None
    ) -> Any:
        """Combines all elements into one. Not collective: each rank that calls it loads them all.

        Args:
            initial_state: a nest of arrays or array-likes; the result if there are no elements.
            reduce_func: receives the state and an element, a tuple as one argument; returns the
                next state.
            name: ignored; accepted for compatibility with TensorFlow.

        Returns:
            The last state, a nest of NumPy arrays and scalars. NumPy's rules may change its dtypes.

        Raises:
            TypeError: a leaf of a state cannot become an array.
            ValueError: the structure of the state changed.

        Examples:
            >>> print(hs.data.Dataset.range(1, 6).reduce(1, lambda product, x: product * x))
            120
        """
        function = function_of(reduce_func, "Dataset.reduce", "reduce_func")
        return _mapping.reduce(self._node, initial_state, function)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Self:
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
        function = function_of(predicate, "Dataset.filter", "predicate")
        return self._of(_mapping.Filter(self._node, function))

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Self:
        """Stacks consecutive elements: shapes `(...)` become `(batch_size, ...)`.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            drop_remainder: whether to drop a last batch that is shorter.
            num_parallel_calls: accepted and ignored: batching is a single copy.
            deterministic: accepted and ignored.
            name: ignored; accepted for compatibility with TensorFlow.

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
        size = positive(batch_size, "Dataset.batch", "batch_size")
        return self._of(_batching.Batch(self._node, (size,), bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
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
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                dtype or number of dimensions, exceed the padded shape, or do not match the nests.
            TypeError: while iterating: a padding value cannot be converted to the leaf's dtype.

        Examples:
            >>> rows = hs.data.Dataset.range(1, 5).map(lambda n: np.full(n, n))
            >>> for batch in rows.padded_batch(2, padding_values=-1):
            ...     print(batch)
            [[ 1 -1]
             [ 2  2]]
            [[ 3  3  3 -1]
             [ 4  4  4  4]]
        """
        size = positive(batch_size, "Dataset.padded_batch", "batch_size")
        padding = padded_shapes, padding_values
        return self._of(_batching.Batch(self._node, (size,), bool(drop_remainder), padding))

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None
    ) -> Self:
        """The rows of the batches, in batches of another size: `unbatch`, then `batch`.

        Args:
            batch_size: the number of rows; or several numbers, which the batches have in turn.
            drop_remainder: whether to drop a last batch that is shorter.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: a size is not positive. While iterating: as `unbatch`.

        Examples:
            >>> batches = hs.data.Dataset.range(8).batch(4)
            >>> print(*batches.rebatch(3))
            [0 1 2] [3 4 5] [6 7]
            >>> print(*batches.rebatch([1, 2]))
            [0] [1 2] [3] [4 5] [6] [7]
        """
        sizes = batch_size if isinstance(batch_size, (list, tuple, np.ndarray)) else [batch_size]
        sizes = tuple([positive(size, "Dataset.rebatch", "batch_size") for size in sizes])
        if not sizes:
            raise ValueError("Dataset.rebatch: batch_size has no sizes; pass one or more")
        rows = _batching.Unbatch(self._node)
        return self._of(_batching.Batch(rows, sizes, bool(drop_remainder)))

    def unbatch(self, name: str | None = None) -> Self:
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
        return self._of(_batching.Unbatch(self._node))

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
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
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: `size`, `shift` or `stride` is not positive.

        Examples:
            >>> windows = hs.data.Dataset.range(7).window(3, shift=2)
            >>> print(*windows.flat_map(lambda window: window.batch(3)))
            [0 1 2] [2 3 4] [4 5 6] [6]
            >>> windows = hs.data.Dataset.range(7).window(3, shift=1, stride=2, drop_remainder=True)
            >>> print(*windows.flat_map(lambda window: window.batch(3)))
            [0 2 4] [1 3 5] [2 4 6]
        """
        size = positive(size, "Dataset.window", "size")
        shift = size if shift is None else positive(shift, "Dataset.window", "shift")
        stride = positive(stride, "Dataset.window", "stride")
        drops = bool(drop_remainder)
        return self._of(_batching.Window(self._node, size, shift, stride, drops, self._of))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Self:
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
        call = "Dataset.shard"
        num_shards, index = whole(num_shards, call, "num_shards"), whole(index, call, "index")
        if not 0 <= index < num_shards:
            raise ValueError(
                f"{call}: index is {index}; it must be in [0, {num_shards}), below num_shards"
            )
        text = f"shard({num_shards}, {index})"
        return self._of(_indexing.Slice(self._node, text, index, step=num_shards))

    def repeat(self, count: int | None = None, name: str | None = None) -> Self:
        """All elements, `count` times; without end if `count` is `None` or negative.

        Without a count, it ends after a round without elements; directly after `shuffle`, only if
        the first round has none.

        Examples:
            >>> print(*hs.data.Dataset.range(3).shuffle(3, seed=1).repeat(3))
            0 1 2 2 0 1 0 1 2
            >>> print(*hs.data.Dataset.range(3).repeat(2).batch(4))
            [0 1 2 0] [1 2]
        """
        count = -1 if count is None else max(-1, whole(count, "Dataset.repeat", "count"))
        return self._of(_indexing.Repeat(self._node, count))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
        name: str | None = None,
    ) -> Self:
        """The elements in random order, each drawn from a buffer of the next `buffer_size`.

        An element moves forward by at most `buffer_size - 1` places. If the source can be indexed,
        only indices are shuffled: then a buffer of the whole dataset costs nothing and is best.

        Args:
            buffer_size: in elements; `UNKNOWN_CARDINALITY` means the whole dataset.
            seed: equal seeds give equal orders. Without it, replicas share a random seed.
            reshuffle_each_iteration: whether each iteration, and each round of a `repeat`, has its
                own order.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: `buffer_size` is not positive, or means the whole of an infinite dataset.

        Examples:
            >>> dataset = hs.data.Dataset.range(8).shuffle(8, seed=1)
            >>> print(*dataset, "then", *dataset)
            5 0 1 4 2 6 3 7 then 6 1 4 0 3 2 5 7
            >>> print(*hs.data.Dataset.range(8).shuffle(2, seed=1))
            1 0 2 4 5 6 3 7
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
        return self._of(_indexing.Shuffle(self._node, buffer_size, seed, reshuffle))

    def take(self, count: int, name: str | None = None) -> Self:
        """The first `count` elements; all if there are fewer, or if `count` is negative.

        Examples:
            >>> print(*hs.data.Dataset.counter().take(3))
            0 1 2
        """
        count = whole(count, "Dataset.take", "count")
        stop = count if count >= 0 else None
        return self._of(_indexing.Slice(self._node, f"take({count})", stop=stop))

    def skip(self, count: int, name: str | None = None) -> Self:
        """The elements after the first `count`; none if `count` is negative.

        Examples:
            >>> samples = hs.data.Dataset.range(10)
            >>> print(*samples.take(7), "to train,", *samples.skip(7), "to test")
            0 1 2 3 4 5 6 to train, 7 8 9 to test
        """
        count = whole(count, "Dataset.skip", "count")
        stop = None if count >= 0 else 0
        return self._of(_indexing.Slice(self._node, f"skip({count})", max(0, count), stop))

    def concatenate(self, dataset: Self, name: str | None = None) -> Self:
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
        return self._of(
            _combining.Concatenate(self._node, check_node(dataset, "Dataset.concatenate"))
        )

    def enumerate(self, start: int = 0, name: str | None = None) -> Self:
        """Pairs of a count, an int64 scalar that starts at `start`, and the element.

        Examples:
            >>> words = hs.data.Dataset.from_tensor_slices(["to", "be"])
            >>> for number, word in words.enumerate(start=1):
            ...     print(number, word)
            1 to
            2 be
        """
        start = whole(start, "Dataset.enumerate", "start")
        return self._of(_combining.Enumerate(self._node, start))

    def prefetch(self, buffer_size: int | None, name: str | None = None) -> Self:
        """The same elements; as the last transformation, it has a thread prepare them ahead.

        Elsewhere in a pipeline it changes nothing. A strategy on GPUs prepares batches ahead
        anyway: see `InputOptions`.

        Args:
            buffer_size: how many elements to prepare ahead, or 0; `None` and `AUTOTUNE` mean 2.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: `buffer_size` is less than -1.

        Examples:
            >>> dataset = hs.data.Dataset.range(5).map(lambda x: x * x).batch(2)
            >>> print(*dataset.prefetch(hs.data.AUTOTUNE))
            [0 1] [4 9] [16]
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
        return self._of(_indexing.Annotated(self._node, text, prefetched=ahead))


def check_node(dataset: Any, call: str) -> Node:
    """The last node of a dataset that is an argument.

    Raises:
        TypeError: it is not a dataset.
    """
    if not isinstance(dataset, Transformable):
        raise TypeError(
            f"{call}: {type(dataset).__name__} is not a Dataset; make one with "
            "Dataset.from_tensor_slices"
        )
    return dataset._node
