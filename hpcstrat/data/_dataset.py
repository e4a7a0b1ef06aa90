"""Datasets: lazy pipelines of nests of arrays, with the methods of `tf.data.Dataset`."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from hpcstrat._core import nests
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat._core.types import TensorSpec, as_dtype
from hpcstrat.data import _combining, _elements, _files, _indexing, _sources
from hpcstrat.data._arguments import (
    Options,
    function_of,
    path_of,
    refuse_arguments,
    refuse_second,
    seed_of,
    weights_of,
    whole,
)
from hpcstrat.data._node import INFINITE, UNKNOWN, EpochPass, Node, ShuffleState
from hpcstrat.data._resuming import DatasetIterator, length
from hpcstrat.data._transformations import Transformable, check_node


@final
class Dataset(Transformable, _elements.DatasetLeaf):
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
    def range(
        *args: int, output_type: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
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
        text, dtype = f"Dataset.{numbers!r}", as_dtype(call, output_type)
        return Dataset._of(
            _sources.Integers(text, numbers.start, numbers.step, len(numbers), dtype)
        )

    @staticmethod
    def counter(
        start: int = 0, step: int = 1, dtype: npt.DTypeLike = np.int64, name: str | None = None
    ) -> Dataset:
        """The integers `start`, `start + step` and so on without end, each a scalar of `dtype`.

        Examples:
            >>> print(*hs.data.Dataset.counter(10, step=-5).take(4))
            10 5 0 -5
        """
        call = "Dataset.counter"
        start, step = whole(start, call, "start"), whole(step, call, "step")
        text = f"{call}({start}, {step})"
        return Dataset._of(_sources.Integers(text, start, step, INFINITE, as_dtype(call, dtype)))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
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
        return Dataset._of(_sources.Tensors(tensors))

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
        return Dataset._of(_sources.Slices(tensors))

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
        return Dataset._of(_sources.generated(generator, arrays, output_types, output_signature))

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
        files = Dataset.from_tensor_slices(np.array(names))
        return files if shuffle is False else files.shuffle(UNKNOWN, seed)

    @staticmethod
    @names_call("Dataset.load")
    def load(
        path: str | os.PathLike[str],
        element_spec: Any = None,
        compression: None = None,
        reader_func: None = None,
    ) -> Dataset:
        """The elements that `save` wrote to the folder `path`, in their order.

        They stay in the files until they are used, and a replica reads only its own elements.

        Args:
            path: the folder; all ranks must see the same.
            element_spec: accepted and ignored: it is stored in the folder.
            compression: must be `None`.
            reader_func: must be `None`.

        Raises:
            NotImplementedError: `compression` or `reader_func` is given.
            FileNotFoundError: there is no saved dataset at `path`.
            ValueError: its files are damaged, or have another format.

        Examples:
            >>> import tempfile
            >>> odd = hs.data.Dataset.range(6).filter(lambda x: x % 2 == 1)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     odd.save(f"{folder}/odd")
            ...     loaded = hs.data.Dataset.load(f"{folder}/odd")
            >>> odd.cardinality(), loaded.cardinality()
            (-2, 3)
        """
        refuse_arguments(current_call(), compression=compression, reader_func=reader_func)
        return Dataset._of(_files.load(path_of(path, current_call())))

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

    @names_call("Dataset.cache")
    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """The same elements in the order of the first iteration, kept for the next iterations.

        Without a file name it keeps in memory the results of functions, generators and reads; each
        replica keeps those that it loads.

        With one it is collective: all ranks call this. Rank 0 writes all elements at once, as
        `save` does, unless an earlier call or an earlier program has written them; every replica
        then reads its own. The functions before it are not called again until the folder is
        removed. A folder that is not complete, because its program ended, is not used. Call it
        where the pipeline is built, not in a function of one, which may run in a thread.

        Args:
            filename: a folder, on a file system that all ranks see; `save` and `load` take it, too.
            name: ignored; accepted for compatibility with TensorFlow.

        Raises:
            ValueError: the dataset is infinite, or the folder has the elements of another pipeline.
                Pipelines are compared by `repr(dataset)`, which has the names of functions but not
                their code, and by checksums of samples of arrays.
            Exception: as `save`, and `load`.

        Examples:
            >>> calls = []
            >>> dataset = hs.data.Dataset.range(3).map(lambda x: calls.append(x) or x * x).cache()
            >>> print(*dataset, "then", *dataset, "by", len(calls), "calls")
            0 1 4 then 0 1 4 by 3 calls
        """
        if not filename:
            return self._of(_indexing.cache(self._node))
        path = path_of(filename, current_call(), "filename")
        return self._of(_files.cache(self._node, path))

    @names_call("Dataset.save")
    def save(
        self,
        path: str | os.PathLike[str],
        compression: None = None,
        shard_func: None = None,
        checkpoint_args: None = None,
    ) -> None:
        """Writes all elements to the folder `path`.

        Collective: all ranks call this, and rank 0 writes.

        A dataset that was saved there before is replaced, once the new one is complete. Shuffles
        have the order of their first iteration. The format is not TensorFlow's.

        Args:
            path: the folder, on a file system that all ranks see.
            compression: must be `None`: `load` maps the files into memory.
            shard_func: must be `None`: each leaf has one file.
            checkpoint_args: must be `None`.

        Raises:
            NotImplementedError: an argument other than `path` is given.
            FileExistsError: there is something other than a saved dataset at `path`.
            TypeError: an element is not a nest of tuples, lists and dicts with text keys, or a leaf
                has no fixed size.
            ValueError: elements differ in structure, or there are no elements.
            OSError: the file system's error.
            ReplicaMismatchError: the ranks' pipelines, their arrays, or the paths differ.
            Exception: whatever a function of the pipeline raised.

        Examples:
            >>> import tempfile
            >>> squares = hs.data.Dataset.range(5).map(lambda x: x * x)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     squares.save(f"{folder}/squares")
            ...     print(*hs.data.Dataset.load(f"{folder}/squares").batch(2))
            [0 1] [4 9] [16]
        """
        refuse_arguments(
            current_call(),
            compression=compression,
            shard_func=shard_func,
            checkpoint_args=checkpoint_args,
        )
        _files.save(self._node, path_of(path, current_call()))

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
        return Dataset._of(_indexing.Annotated(self._node, f"with_options({options})", options))

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
        return _indexing.options_of(self._node)

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
    return lambda dataset: Dataset._of(
        _indexing.Counted(check_node(dataset, "assert_cardinality"), count)
    )


def _nodes_of(datasets: Any, call: str) -> list[Node]:
    nodes = [check_node(dataset, call) for dataset in datasets]
    if not nodes:
        raise ValueError(f"{call}: there is no dataset; pass one or more")
    return nodes
