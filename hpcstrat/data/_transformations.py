"""The methods of a dataset that make another one, or one value, of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data import _batch_ops, _combine_ops, _element_ops, _elements, _index_ops, _sources
from hpcstrat.data._arguments import at_least_one, function_of, seed_of, whole
from hpcstrat.data._interleave import Interleave
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node
from hpcstrat.data._pass import ResumableDataset
from hpcstrat.data._threads import AUTOTUNED

if TYPE_CHECKING:
    from typing_extensions import Self

AUTOTUNE = -1
"""Leaves a size or a number to the library."""

_CYCLE_LENGTH = (
    16  # of `interleave`; the order of elements depends on it, so it cannot be the number of cores
)


class TransformableDataset(ResumableDataset, _elements.DatasetLeaf):
    """A part of `Dataset`, which has its last stage."""

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """Stacks consecutive elements: arrays of shape `(...)` become arrays of shape `(batch_size, ...)`.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            drop_remainder: whether to drop a last batch that is shorter.
            num_parallel_calls: accepted and ignored: to batch is a single copy.
            deterministic: accepted and ignored.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                shape or dtype.
        """
        size = at_least_one(batch_size, "Dataset.batch", "batch_size")
        return type(self)(_batch_ops.Batch(self._node, (size,), bool(drop_remainder)))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Self:
        """Pads consecutive elements to one shape, at the ends of their dimensions, and stacks them.

        If all sizes are given, a replica loads its own elements only; else every replica loads the
        whole batch, to find the largest of its elements.

        Args:
            batch_size: the number of elements; the last batch may be shorter.
            padded_shapes: a nest like the elements of shapes; a size that is `None` or -1 is that
                of the largest element of the batch. `None` means all sizes.
            padding_values: what to pad with: one value for all leaves, or a nest like the elements.
                `None` means 0, `False` or an empty string.
            drop_remainder: whether to drop a last batch that is shorter.

        Raises:
            ValueError: `batch_size` is not positive. While iterating: elements differ in structure,
                dtype or number of dimensions, or are larger than the padded shape, or the nests do
                not go with them.
            TypeError: while iterating: a padding value does not become one of the leaf's dtype.
        """
        size = at_least_one(batch_size, "Dataset.padded_batch", "batch_size")
        return type(self)(
            _batch_ops.PaddedBatch(
                self._node, size, padded_shapes, padding_values, bool(drop_remainder)
            )
        )

    def rebatch(self, batch_size: int | Sequence[int], drop_remainder: bool = False) -> Self:
        """The rows of the batches, in batches of another size: `unbatch` and `batch`.

        Args:
            batch_size: the number of rows; or several, which the batches have in turn.
            drop_remainder: whether to drop a last batch that is shorter.

        Raises:
            ValueError: a size is not positive. While iterating: as `unbatch`.
        """
        sizes = batch_size if isinstance(batch_size, (list, tuple, np.ndarray)) else [batch_size]
        sizes = tuple([at_least_one(size, "Dataset.rebatch", "batch_size") for size in sizes])
        if not sizes:
            raise ValueError("Dataset.rebatch: batch_size has no sizes; pass one or more")
        return type(self)(
            _batch_ops.Batch(_batch_ops.Unbatch(self._node), sizes, bool(drop_remainder))
        )

    def unbatch(self) -> Self:
        """The rows of the elements: arrays of shape `(n, ...)` become n elements of shape `(...)`.

        Directly after `batch` nothing is stacked, and so elements that make no batch go through.

        Raises:
            ValueError: while iterating: a leaf has no dimensions, or first dimensions differ.
        """
        return type(self)(_batch_ops.Unbatch(self._node))

    def window(
        self, size: int, shift: int | None = None, stride: int = 1, drop_remainder: bool = False
    ) -> Self:
        """Datasets of `size` elements each.

        Where elements are nests, a window is a nest of datasets, one for each leaf. Make arrays of
        windows with `flat_map(lambda window: window.batch(size))`, or with `map` and `reduce`.

        Args:
            size: the number of elements of a window; the last ones may be shorter.
            shift: the number of elements from the begin of a window to that of the next; `None`
                means `size`.
            stride: the number of elements from one element of a window to its next.
            drop_remainder: whether to drop windows that are shorter.

        Raises:
            ValueError: `size`, `shift` or `stride` is not positive.
        """
        size = at_least_one(size, "Dataset.window", "size")
        shift = size if shift is None else at_least_one(shift, "Dataset.window", "shift")
        stride = at_least_one(stride, "Dataset.window", "stride")
        return type(self)(
            _batch_ops.Window(self._node, size, shift, stride, bool(drop_remainder), type(self))
        )

    def shard(self, num_shards: int, index: int) -> Self:
        """Every `num_shards`-th element, beginning with the one at `index`.

        Raises:
            ValueError: `num_shards` is not positive, or `index` is not in `[0, num_shards)`.
        """
        call = "Dataset.shard"
        num_shards, index = whole(num_shards, call, "num_shards"), whole(index, call, "index")
        if not 0 <= index < num_shards:
            raise ValueError(
                f"{call}: index is {index} of num_shards {num_shards}; it must be in [0, "
                "num_shards)"
            )
        return type(self)(_index_ops.Shard(self._node, num_shards, index))

    def repeat(self, count: int | None = None) -> Self:
        """All elements, `count` times; infinitely often if it is `None` or negative.

        An infinite `repeat` ends after a round without elements; directly after `shuffle`, only if
        the first round has none.
        """
        count = -1 if count is None else max(-1, whole(count, "Dataset.repeat", "count"))
        return type(self)(_index_ops.Repeat(self._node, count))

    def shuffle(
        self, buffer_size: int, seed: int | None = None, reshuffle_each_iteration: bool = True
    ) -> Self:
        """The elements in random order: each is drawn from a buffer of the next `buffer_size` elements.

        So an element moves forward by at most `buffer_size - 1` places. If the source can be
        indexed, only indices are shuffled, so a `buffer_size` of the whole dataset costs nothing
        and is best.

        Args:
            buffer_size: the size of the buffer, in elements; `UNKNOWN_CARDINALITY` means the whole
                dataset.
            seed: pipelines with equal seeds have equal orders. Without one, replicas share a random
                seed.
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
        return type(self)(
            _index_ops.Shuffle(self._node, buffer_size, seed, bool(reshuffle_each_iteration))
        )

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Self:
        """The result of `map_func` for each element: a nest of arrays or array-likes.

        A list counts as a tuple.

        A replica calls `map_func` for its own elements only; after `batch`, for whole batches.

        Args:
            map_func: receives the element, or the members of a tuple as separate arguments.
            num_parallel_calls: how many calls run at once, in threads, while the order of elements
                stays; `AUTOTUNE` means 8. `map_func` must then be safe to call from several
                threads. They are of use where it reads files, or spends its time in functions of
                NumPy that release Python's lock.
            deterministic: accepted and ignored: the order is always kept.

        Raises:
            ValueError: `num_parallel_calls` is neither positive nor `AUTOTUNE`.
            TypeError: while iterating: a leaf cannot become an array.
        """
        function = function_of(map_func, "Dataset.map", "map_func")
        threads = _threads(num_parallel_calls, "Dataset.map") or 1
        return type(self)(_element_ops.Map(self._node, function, threads, type(self)))

    def flat_map(self, map_func: Callable[..., TransformableDataset]) -> Self:
        """The elements of the datasets that `map_func` makes, one dataset after the other.

        Every rank calls `map_func` for all elements, but loads its own elements of the datasets
        only, if these can be indexed. A shuffle in the datasets has an order of its own in each of
        them and in each pass. With a seed, these orders are the same in every program.

        Args:
            map_func: receives an element, or the members of a tuple as separate arguments; returns
                a `Dataset`. To distribute the result, batch it after `flat_map`.

        Raises:
            TypeError: while iterating: `map_func` returned something else.
        """
        function, name = self._maker(map_func, "Dataset.flat_map")
        return type(self)(Interleave(self._node, f"flat_map({name})", function, 1, 1, 0))

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
            cycle_length: the number of datasets that take turns; `None` or `AUTOTUNE` means 16, on
                any computer.
            block_length: the number of elements of each turn.
            num_parallel_calls: how many threads read the datasets, each of which is read one block
                ahead; `AUTOTUNE` means 8. They are of use where generators make the elements; to
                have a `Dataset.map` in `map_func` run in threads, pass it a number of its own.
            deterministic: accepted and ignored: the order is always kept.

        Raises:
            ValueError: `cycle_length` or `block_length` is not positive, or `num_parallel_calls`
                neither positive nor `AUTOTUNE`.
            TypeError: while iterating: `map_func` returned something else than a `Dataset`.
        """
        call = "Dataset.interleave"
        function, name = self._maker(map_func, call)
        cycle = (
            _CYCLE_LENGTH
            if cycle_length in (None, AUTOTUNE)
            else at_least_one(cycle_length, call, "cycle_length")
        )
        block = at_least_one(block_length, call, "block_length")
        threads = _threads(num_parallel_calls, call)
        return type(self)(
            Interleave(
                self._node, f"interleave({name}, {cycle}, {block})", function, cycle, block, threads
            )
        )

    @staticmethod
    def _maker(
        map_func: Callable[..., TransformableDataset], call: str
    ) -> tuple[Callable[[Any], Node], str]:
        """A function that makes a node of an element, and the name of `map_func`."""
        function = function_of(map_func, call, "map_func")

        def make(element: Any) -> Node:
            made = _element_ops.call_on(function, element, call, "map_func")
            if not isinstance(made, TransformableDataset):
                raise TypeError(
                    f"{call}: map_func returned {type(made).__name__}; it must return a Dataset. "
                    "For an element of another kind call Dataset.map"
                )
            return node_of(made)

        return make, _sources.name_of(map_func)

    def scan(self, initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]]) -> Self:
        """What `scan_func` makes of a state and each element. Every rank loads all elements.

        Args:
            initial_state: a nest of arrays or array-likes, with which each iteration begins.
            scan_func: receives the state and the element, a tuple as one argument; returns the next
                state and the element of the result. If it raises, the state stays as it was.

        Raises:
            TypeError: a leaf of the state cannot become an array. While iterating: `scan_func` did
                not return a pair.
            ValueError: while iterating: the structure of the state changed.
        """
        function = function_of(scan_func, "Dataset.scan", "scan_func")
        return type(self)(_element_ops.Scan(self._node, initial_state, function))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combines all elements into one.

        It does not communicate: each rank that calls it loads all elements.

        Args:
            initial_state: a nest of arrays or array-likes, and the result if there are no elements.
            reduce_func: receives the state and an element, a tuple as one argument; returns the
                next state.

        Returns:
            The last state: a nest of NumPy arrays and scalars. Its dtypes may have changed, by
                NumPy's rules.

        Raises:
            TypeError: a leaf of a state cannot become an array.
            ValueError: the structure of the state changed.
        """
        function = function_of(reduce_func, "Dataset.reduce", "reduce_func")
        state = _elements.as_element(initial_state)
        for element in self._node.elements(EpochPass()):
            result = _element_ops.call_with(
                function, (state, element), "Dataset.reduce", "reduce_func"
            )
            following = _elements.as_element(tuple(result) if type(result) is list else result)
            state = _element_ops.same_structure(state, following, "Dataset.reduce", "reduce_func")
        return state

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """The elements for which `predicate` is true. Every rank loads all elements to find out."""
        return type(self)(
            _element_ops.Filter(self._node, function_of(predicate, "Dataset.filter", "predicate"))
        )

    def take(self, count: int) -> Self:
        """The first `count` elements; all if there are fewer, or if `count` is negative."""
        return type(self)(_index_ops.Take(self._node, whole(count, "Dataset.take", "count")))

    def skip(self, count: int) -> Self:
        """The elements after the first `count`; nothing if `count` is negative."""
        return type(self)(_index_ops.Skip(self._node, whole(count, "Dataset.skip", "count")))

    def concatenate(self, dataset: Self) -> Self:
        """The elements, then those of `dataset`.

        Raises:
            TypeError: `dataset` is not a `Dataset`, or its elements differ in structure, dtypes or
                numbers of dimensions; strings of any length are alike. If functions or generators
                make elements, this is raised while iterating: every rank calls them for the first
                element of each dataset.
        """
        return type(self)(
            _combine_ops.Concatenate(self._node, checked_node(dataset, "Dataset.concatenate"))
        )

    def enumerate(self, start: int = 0) -> Self:
        """Pairs of a count, an int64 scalar that begins at `start`, and the element."""
        return type(self)(
            _combine_ops.Enumerate(self._node, whole(start, "Dataset.enumerate", "start"))
        )

    def cache(self, filename: str = "") -> Self:
        """Keeps the order, and in memory the results of functions, generators and reads, for later iterations.

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
        return type(self)(_element_ops.cache(self._node))

    def prefetch(self, buffer_size: int | None) -> Self:
        """The same elements, which a thread prepares ahead of their use if this is the last transformation.

        Elsewhere in a pipeline it changes nothing. For a strategy on GPUs batches are prepared
        ahead anyway: see
        `InputOptions`.

        Args:
            buffer_size: the number of elements that are prepared ahead; 0 for none. `None` and
                `AUTOTUNE` mean 2.

        Raises:
            ValueError: `buffer_size` is below -1.
        """
        buffer_size = whole(
            AUTOTUNE if buffer_size is None else buffer_size, "Dataset.prefetch", "buffer_size"
        )
        if buffer_size < AUTOTUNE:
            raise ValueError(
                f"Dataset.prefetch: buffer_size is {buffer_size}; it must be at least 0, or "
                "AUTOTUNE, which is -1"
            )
        return type(self)(_index_ops.Prefetch(self._node, buffer_size))


def node_of(dataset: TransformableDataset) -> Node:
    """The last stage of the pipeline."""
    return dataset._node


def checked_node(dataset: Any, call: str) -> Node:
    """The last stage of an argument.

    Raises:
        TypeError: it is not a dataset.
    """
    if not isinstance(dataset, TransformableDataset):
        raise TypeError(
            f"{call}: {type(dataset).__name__} is not a Dataset; make one with "
            "Dataset.from_tensor_slices"
        )
    return node_of(dataset)


def _threads(calls: int | None, call: str) -> int:
    """How many threads a `num_parallel_calls` means; 0 for `None`."""
    if calls is None:
        return 0
    return AUTOTUNED if calls == AUTOTUNE else at_least_one(calls, call, "num_parallel_calls")
