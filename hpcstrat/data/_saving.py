"""The methods of a dataset that keep its elements, in memory or in files."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call, names_call
from hpcstrat.data import _files, _indexing
from hpcstrat.data._arguments import path_of, refuse_arguments
from hpcstrat.data._node import INFINITE, EpochPass
from hpcstrat.data._transformations import TransformableDataset

if TYPE_CHECKING:
    from typing_extensions import Self


class SavableDataset(TransformableDataset):
    """The methods of `Dataset` that keep its elements."""

    @names_call("Dataset.cache")
    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Self:
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
        del name
        if not filename:
            return self._of(_indexing.cache(self._node))
        path = path_of(filename, current_call(), "filename")
        if self._node.cardinality() == INFINITE:
            raise ValueError(
                f"{current_call()}: the dataset is infinite, and all its elements are written to "
                f"{path}; call Dataset.cache before Dataset.repeat"
            )
        pipeline, communicator = self._write(path, replaces=False), connect()
        with communicator.raise_together():  # a host may not see the folder
            kept = _files.load(path, pipeline)
            communicator.exchange(signature_of(current_call(), "loaded", path))
        # Files do not tell batches from other arrays.
        batch_sizes = self._node.batch_sizes
        return self._of(_indexing.Annotated(kept, "cache()", batch_sizes=batch_sizes))

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
        self._write(path_of(path, current_call()), replaces=True)

    def _describe(self) -> str:
        """What must be equal on all ranks, and in a program that reads the same cache."""
        checksums = [f"{checksum:08x}" for _, checksum in self._node.checksums(every=False)]
        text = repr(self._node)
        return f"{text} with checksums {', '.join(checksums)}" if checksums else text

    def _write(self, path: str, replaces: bool) -> str:
        """Writes all elements on rank 0; if not `replaces`, only if none are saved there.

        Returns what `_describe` does.
        """
        communicator = connect()
        for shuffle in self._node.shuffles():
            shuffle.state()  # all ranks draw the same seeds, though only rank 0 iterates
        elements = self._node.elements(EpochPass(frozen=True))
        with communicator.raise_together():
            pipeline = self._describe()
            communicator.exchange(signature_of(current_call(), pipeline, path))
        with communicator.raise_together():
            if communicator.rank == 0 and (replaces or not _files.is_saved(path)):
                watchdog = communicator.watchdog
                with (
                    contextlib.nullcontext()
                    if watchdog is None
                    else watchdog.extend_timeout(math.inf)
                ):
                    _files.save(elements, path, pipeline)
            communicator.exchange(signature_of(current_call(), "saved", path))
        return pipeline

    @classmethod
    @names_call("Dataset.load")
    def load(
        cls,
        path: str | os.PathLike[str],
        element_spec: Any = None,
        compression: None = None,
        reader_func: None = None,
    ) -> Self:
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
        del element_spec
        refuse_arguments(current_call(), compression=compression, reader_func=reader_func)
        return cls._of(_files.load(path_of(path, current_call())))
