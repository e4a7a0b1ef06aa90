"""The methods of a dataset that call a function of the program for its elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcstrat.data import _elements, _mapping, _sources
from hpcstrat.data._arguments import AUTOTUNE, function_of, positive, thread_count
from hpcstrat.data._node import Node
from hpcstrat.data._resuming import ResumableDataset

if TYPE_CHECKING:
    from typing_extensions import Self

# Of `interleave`. The order of elements depends on it, so it cannot be the number of cores.
_CYCLE_LENGTH = 16


class MappableDataset(ResumableDataset, _elements.DatasetLeaf):
    """The transformations of `Dataset` that take a function."""

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

    def flat_map(self, map_func: Callable[..., MappableDataset], name: str | None = None) -> Self:
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
        map_func: Callable[..., MappableDataset],
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
        map_func: Callable[..., MappableDataset], call: str
    ) -> tuple[Callable[[Any], Node], str]:
        """A function that makes a node from an element, and the name of `map_func`."""
        function = function_of(map_func, call, "map_func")

        def make(element: Any) -> Node:
            made = _mapping.call_on(function, element, call, "map_func")
            if not isinstance(made, MappableDataset):
                raise TypeError(
                    f"{call}: map_func returned {type(made).__name__}; it must return a Dataset. "
                    "To return elements, call Dataset.map"
                )
            return node_of(made)

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

        Examples:
            >>> pairs = hs.data.Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"]))
            >>> for number, word in pairs.filter(lambda number, word: number != 2):
            ...     print(number, word)
            1 a
            3 c
        """
        function = function_of(predicate, "Dataset.filter", "predicate")
        return self._of(_mapping.Filter(self._node, function))


def node_of(dataset: MappableDataset) -> Node:
    """The last node of the pipeline."""
    return dataset._node


def check_node(dataset: Any, call: str) -> Node:
    """The last node of a dataset that is an argument.

    Raises:
        TypeError: it is not a dataset.
    """
    if not isinstance(dataset, MappableDataset):
        raise TypeError(
            f"{call}: {type(dataset).__name__} is not a Dataset; make one with "
            "Dataset.from_tensor_slices"
        )
    return node_of(dataset)
