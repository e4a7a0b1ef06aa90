"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _combining, _elements, _sources
from hpcstrat.data._arguments import (
    Options,
    function_of,
    path_of,
    refuse_second,
    seed_of,
    weights_of,
    whole,
)
from hpcstrat.data._functions import check_node
from hpcstrat.data._indexing import Annotated, Counted, options_of
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, ShuffleState
from hpcstrat.data._resuming import DatasetIterator, length
from hpcstrat.data._saving import SavableDataset


@final
class Dataset(SavableDataset):
    """A pipeline that yields elements: nests of NumPy arrays or, without dimensions, NumPy scalars.

    Make a dataset with `range`, `from_tensors`, `from_tensor_slices`, `from_generator` or `zip`, or
    transform another dataset. Datasets are lazy, can be iterated over repeatedly, and never change.
    Each iteration yields new arrays, safe to write to; only the results of a function given to
    `map` are passed on as they are.

    As in `tf.data`, a list becomes an array where an element is expected; tuples, dicts,
    namedtuples and dataclasses make nests, in which `None` stays as it is. A function of an
    element receives the members of a tuple as separate arguments.

    An argument of the wrong type, such as text for a size, is a TypeError that names both.
    """

    def __init__(self, node: Node | None = None) -> None:
        if not isinstance(node, Node):
            raise TypeError(
                "Dataset: make one with range, from_tensors, from_tensor_slices, from_generator or "
                "zip"
            )
        super().__init__(node)

    @staticmethod
    def range(
        *args: int, output_type: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """The integers `range(*args)`, each a scalar of dtype `output_type`.

        Raises:
            TypeError: an argument is not an int.
            ValueError: the step is 0.
        """
        bounds = [whole(number, "Dataset.range", "an argument") for number in args]
        return Dataset(_sources.Integers(range(*bounds), output_type))

    @staticmethod
    def counter(
        start: int = 0, step: int = 1, dtype: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """The integers `start`, `start + step` and so on without end, each a scalar of `dtype`."""
        first = whole(start, "Dataset.counter", "start")
        return Dataset(_sources.Counter(first, whole(step, "Dataset.counter", "step"), dtype))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """One element: the nest of arrays `tensors`.

        Raises:
            TypeError: a leaf cannot become an array, or `name` is not a string.
        """
        refuse_second(name, "from_tensors")
        return Dataset(_sources.Tensors(tensors))

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """The slices of a nest of arrays of shapes `(n, ...)`: n elements.

        The arrays are not copied, so do not change them while the dataset is used. A `numpy.memmap`
        stays on disk, and so does an array in a file (h5py, zarr, netCDF4): whatever can be
        indexed, has a shape and a dtype, and shares no memory. Its rows are read when they are
        needed, consecutive rows of a batch together, and each replica reads only its own. A read
        may fail on one rank, so ranks compare their steps, as with functions.

        Raises:
            TypeError: a leaf cannot become an array, or `name` is not a string.
            ValueError: a leaf has no dimensions, or first dimensions differ.
        """
        refuse_second(name, "from_tensor_slices")
        return Dataset(_sources.Slices(tensors))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: tuple[Any, ...] | None = None,
        output_signature: Any = None,
        name: str | None = None,
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
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: `generator` is not a function, both a signature and types or shapes are
                given, or only shapes.
            ValueError: while iterating: an element does not match.
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
        return Dataset(_sources.generated(generator, arrays, output_types, output_signature))

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Elements of several datasets side by side, until one dataset ends.

        Args:
            *args: one nest of datasets, whose structure the elements have, or several datasets,
                which make a tuple.
            datasets: the nest, instead of `args`.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            TypeError: a leaf is not a `Dataset`, there is no leaf, or both arguments are given.
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
        return Dataset(_combining.Zip(nodes, structure))

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
        return Dataset(_combining.Sample(nodes, numbers, shuffle, bool(stop_on_empty_dataset)))

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
        """
        call = "Dataset.choose_from_datasets"
        nodes = _nodes_of(datasets, call)
        choice = check_node(choice_dataset, call)
        return Dataset(_combining.Choose(nodes, choice, bool(stop_on_empty_dataset)))

    @staticmethod
    def list_files(
        file_pattern: Any,
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The names of the matching files, as strings. All ranks must find the same files.

        Args:
            file_pattern: a pattern as `glob.glob` takes it, or several.
            shuffle: whether the order is random, and different in each iteration; `None` means
                `True`. If not, it is sorted.
            seed: the seed of the shuffle.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: no file matches.
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
        files = Dataset.from_tensor_slices(np.array(names))
        return files if shuffle is False else files.shuffle(UNKNOWN, seed)

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """The same elements, with these options added to those of the dataset; see `Options`.

        Raises:
            TypeError: `options` is not an `Options`.
        """
        if not isinstance(options, Options):
            raise TypeError(
                f"Dataset.with_options: options is {type(options).__name__}; it must be a "
                "hpcstrat.data.Options"
            )
        options = Options().merge(options)
        return Dataset(Annotated(self._node, f"with_options({options})", options))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """The dataset `transformation_func(self)`.

        Raises:
            TypeError: it is not a `Dataset`.
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
            ValueError: there is no element, or a second one.
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
        """A copy of the options of this dataset and of the datasets it was made from."""
        return options_of(self._node)

    def cardinality(self) -> int:
        """The number of elements; -1 if it is infinite, -2 if it is unknown."""
        return self._node.cardinality()

    @property
    def element_spec(self) -> Any:
        """An element's nest of `TensorSpec`; a size is `None` if it varies or is unknown.

        The dtype of strings has the length of the longest string that is known; other elements may
        be shorter or longer. To find the spec, the function of `map` is called on the first
        element, and a generator without a signature is started.
        """
        return self._node.spec()

    def as_numpy_iterator(self) -> DatasetIterator:
        """The same as `iter`: elements are nests of NumPy arrays anyway."""
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
    """
    count = whole(expected_cardinality, "assert_cardinality", "expected_cardinality")
    if count < INFINITE:
        raise ValueError(
            f"assert_cardinality: expected_cardinality is {count}; it must be at least 0, or "
            "INFINITE_CARDINALITY, which is -1"
        )
    return lambda dataset: Dataset(Counted(check_node(dataset, "assert_cardinality"), count))


def _nodes_of(datasets: Any, call: str) -> list[Node]:
    nodes = [check_node(dataset, call) for dataset in datasets]
    if not nodes:
        raise ValueError(f"{call}: there is no dataset; pass one or more")
    return nodes
