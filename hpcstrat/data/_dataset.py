"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, final

from hpcstrat._core import nests
from hpcstrat.data import _combining
from hpcstrat.data._arguments import Options, function_of, seed_of, weights_of, whole
from hpcstrat.data._functions import check_node
from hpcstrat.data._indexing import Annotated, Counted, options_of
from hpcstrat.data._making import SourceDataset
from hpcstrat.data._node import INFINITE, EpochPass, Node, ShuffleState
from hpcstrat.data._resuming import DatasetIterator, length


@final
class Dataset(SourceDataset):
    """A pipeline that yields elements: nests of NumPy arrays or, without dimensions, NumPy scalars.

    Make a dataset with `range`, `from_tensors`, `from_tensor_slices`, `from_generator` or `zip`, or
    transform another dataset. Datasets are lazy, can be iterated over repeatedly, and never change.
    Each iteration yields new arrays, safe to write to; only the results of a function given to
    `map` are passed on as they are.

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

    def __init__(self, *args: Any) -> None:
        raise TypeError(
            "Dataset: make one with range, from_tensors, from_tensor_slices, from_generator or zip"
        )

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Elements of several datasets side by side, until one dataset ends.

        Args:
            *args: one nest of datasets, whose structure the elements have, or several datasets,
                which make a tuple.
            datasets: the nest, instead of `args`.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: a leaf is not a `Dataset`, the nest is empty, or both arguments are given.

        Examples:
            >>> numbers = hs.data.Dataset.counter()
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
        return Dataset._of(_combining.Zip(nodes, structure))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
    ) -> Dataset:
        """Elements of several datasets, each from a dataset drawn at random.

        Args:
            datasets: the datasets; their elements must match, as for `concatenate`.
            weights: the probability of each dataset, up to a common factor; equal by default.
            seed: equal seeds give equal draws. Without it, replicas share a random seed.
            stop_on_empty_dataset: whether to end when a dataset without further elements is drawn.
                If not, the others continue.
            rerandomize_each_iteration: whether each iteration has its own draws; by default all
                have the same.

        Raises:
            TypeError: an item is not a `Dataset`, their elements do not match, or `weights` are not
                numbers.
            ValueError: there are no datasets, or `weights` has another length, a negative number,
                or only zeros.

        Examples:
            >>> low, high = hs.data.Dataset.range(5), hs.data.Dataset.range(100, 105)
            >>> mixed = hs.data.Dataset.sample_from_datasets([low, high], weights=[3, 1], seed=0)
            >>> print(*mixed)
            0 1 2 3 100 101 4 102 103 104
        """
        call = "Dataset.sample_from_datasets"
        nodes = _nodes_of(datasets, call)
        if isinstance(weights, Dataset):
            raise TypeError(
                f"{call}: weights is a Dataset, but weights that change are not possible; pass "
                "numbers"
            )
        numbers = None if weights is None else weights_of(weights, call, len(nodes))
        shuffle = ShuffleState(seed_of(seed, call), bool(rerandomize_each_iteration))
        return Dataset._of(_combining.Sample(nodes, numbers, shuffle, bool(stop_on_empty_dataset)))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Elements of several datasets, each from the dataset that `choice_dataset` selects.

        Args:
            datasets: the datasets; their elements must match, as for `concatenate`.
            choice_dataset: yields integers, each the index of a dataset.
            stop_on_empty_dataset: whether to end when a dataset without further elements is chosen.
                If not, that choice is skipped.

        Raises:
            TypeError: an item is not a `Dataset`, or their elements do not match.
            ValueError: there are no datasets. While iterating: a choice is not the index of a
                dataset.

        Examples:
            >>> low, high = hs.data.Dataset.range(5), hs.data.Dataset.range(100, 105)
            >>> turns = hs.data.Dataset.from_tensor_slices([0, 0, 1]).repeat()
            >>> print(*hs.data.Dataset.choose_from_datasets([low, high], turns))
            0 1 100 2 3 101 4
        """
        call = "Dataset.choose_from_datasets"
        nodes = _nodes_of(datasets, call)
        choice = check_node(choice_dataset, call)
        return Dataset._of(_combining.Choose(nodes, choice, bool(stop_on_empty_dataset)))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """The same elements, with these options added to those of the dataset; see `Options`.

        Raises:
            TypeError: `options` is not an `Options`.

        Examples:
            >>> first, second = hs.data.Options(), hs.data.Options()
            >>> first.deterministic, second.experimental_slack = True, False
            >>> dataset = hs.data.Dataset.range(8).with_options(first).with_options(second)
            >>> dataset.options().deterministic, dataset.options().experimental_slack
            (True, False)
        """
        if not isinstance(options, Options):
            raise TypeError(
                f"Dataset.with_options: options is {type(options).__name__}; it must be a "
                "hpcstrat.data.Options"
            )
        options = Options().merge(options)
        return Dataset._of(Annotated(self._node, f"with_options({options})", options))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """The dataset `transformation_func(self)`.

        Raises:
            TypeError: the function returns something other than a `Dataset`.

        Examples:
            >>> def every_other(dataset):
            ...     return dataset.shard(2, index=0)
            >>> print(*hs.data.Dataset.range(10).apply(every_other).apply(every_other))
            0 4 8
        """
        made = function_of(transformation_func, "Dataset.apply", "transformation_func")(self)
        if not isinstance(made, Dataset):
            raise TypeError(
                f"Dataset.apply: transformation_func returned {type(made).__name__}; it must "
                "return a Dataset"
            )
        return made

    def get_single_element(self, name: str | None = None) -> Any:
        """The only element: a nest of NumPy arrays. Not collective.

        Raises:
            ValueError: there is not exactly one element.

        Examples:
            >>> dataset = hs.data.Dataset.range(6).map(lambda x: x * x)
            >>> dataset.batch(len(dataset)).get_single_element()
            array([ 0,  1,  4,  9, 16, 25])
        """
        elements = [*itertools.islice(self._node.elements(EpochPass()), 2)]
        if len(elements) != 1:
            raise ValueError(
                "Dataset.get_single_element: the dataset has "
                f"{'more than one element' if elements else 'no elements'}, and must have one; "
                "make it one by Dataset.batch, or choose one by Dataset.take(1)"
            )
        return elements[0]

    def options(self) -> Options:
        """A copy of the options of this dataset and of the datasets it was made from.

        Examples:
            >>> options = hs.data.Options()
            >>> options.experimental_distribute.auto_shard_policy = hs.data.AutoShardPolicy.OFF
            >>> dataset = hs.data.Dataset.range(8).with_options(options).batch(4)
            >>> print(dataset.options().experimental_distribute.auto_shard_policy.name)
            OFF
        """
        return options_of(self._node)

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
        rounds, taken = self._next_start()
        iterator = DatasetIterator(self._node, EpochPass(rounds), taken)
        self._note_start(iterator)
        return iterator

    def __len__(self) -> int:
        return length(self._node.cardinality(), "Dataset")

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return repr(self._node)


def assert_cardinality(expected_cardinality: int) -> Callable[[Dataset], Dataset]:
    """A function for `Dataset.apply`, which announces the number of elements to `cardinality`.

    Args:
        expected_cardinality: the number, or `INFINITE_CARDINALITY`. An iteration that finds another
            number of elements ends with a ValueError.

    Raises:
        ValueError: the number is less than -1.

    Examples:
        >>> odd = hs.data.Dataset.range(6).filter(lambda x: x % 2 == 1)
        >>> three = odd.apply(hs.data.assert_cardinality(3))
        >>> odd.cardinality(), three.cardinality(), len(three.batch(2))
        (-2, 3, 2)
    """
    count = whole(expected_cardinality, "assert_cardinality", "expected_cardinality")
    if count < INFINITE:
        raise ValueError(
            f"assert_cardinality: expected_cardinality is {count}; it must be at least 0, or "
            "INFINITE_CARDINALITY, which is -1"
        )
    return lambda dataset: Dataset._of(Counted(check_node(dataset, "assert_cardinality"), count))


def _nodes_of(datasets: Any, call: str) -> list[Node]:
    nodes = [check_node(dataset, call) for dataset in datasets]
    if not nodes:
        raise ValueError(f"{call}: there is no dataset; pass one or more")
    return nodes
