"""Saves a dataset to a folder, one file per leaf, and loads it through memory maps.

The folder of elements `(x, {"y": y})`:

    dataset.json       format, pipeline, count, nest, and the kinds (dtype and shape) of each leaf
    leaf0              the bytes of all x, back to back
    leaf0.kinds.npy    the index of each x's kind, if the x have several kinds
    leaf1              the same for y
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import operator
import os
import reprlib
import secrets
import shutil
import tokenize
from collections.abc import Iterator
from typing import Any, BinaryIO, final

import numpy as np

from hpcstrat._calls.records import signature_of
from hpcstrat._communicators.connection import connect
from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import TensorSpec
from hpcstrat.data import _elements
from hpcstrat.data._indexing import Annotated
from hpcstrat.data._node import INFINITE, Chunk, EpochPass, Node
from hpcstrat.data._sources import Indexed, Slices

_HEADER = "dataset.json"  # written last: a folder that has it is complete
_FORMAT = 1
_KINDS = "biufcSUmM"  # the dtypes whose bytes are the whole value
_HOUR = 3600.0  # seconds that the others wait longer for each element, which may take long to make


class _LeafWriter:
    """Writes one leaf of all elements: the bytes to one file, the kinds to another."""

    def __init__(self, folder: str, index: int, files: contextlib.ExitStack) -> None:
        self._path = os.path.join(folder, f"leaf{index}")
        self._file: BinaryIO = files.enter_context(open(self._path, "wb"))
        self._kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        self._kind_of: list[int] = []

    def add(self, leaf: Any) -> None:
        array = np.asarray(leaf)
        if array.dtype.kind not in _KINDS or array.dtype.names is not None:
            raise TypeError(
                f"{current_call()}: a leaf has the dtype {array.dtype}; it must hold numbers, "
                "booleans or strings of fixed size: cast it with Dataset.map"
            )
        kind = array.dtype.str, array.shape
        self._kind_of.append(self._kinds.setdefault(kind, len(self._kinds)))
        if array.nbytes:
            self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def finish(self) -> list[Any]:
        """Flushes the files to disk, and returns the dtype and shape of each kind."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if len(self._kinds) > 1:
            np.save(f"{self._path}.kinds.npy", np.array(self._kind_of, np.int32))
        return [[dtype, list(shape)] for dtype, shape in self._kinds]


def _is_saved(path: str) -> bool:
    """Whether `path` is the folder of a saved dataset, which is complete."""
    return os.path.exists(os.path.join(path, _HEADER))


def cache(node: Node, path: str) -> Node:
    """The node that reads the elements from the folder `path`, once they are in it. Collective."""
    if node.cardinality() == INFINITE:
        raise ValueError(
            f"{current_call()}: the dataset is infinite, and all its elements are written to "
            f"{path}; call Dataset.cache before Dataset.repeat"
        )
    pipeline, communicator = save(node, path, replaces=False), connect()
    with communicator.raise_together():  # a host may not see the folder
        kept = load(path, pipeline)
        communicator.exchange(signature_of(current_call(), "loaded", path))
    # Files do not tell batches from other arrays.
    return Annotated(kept, "cache()", batch_sizes=node.batch_sizes)


def save(node: Node, path: str, replaces: bool = True) -> str:
    """Writes all elements on rank 0; if not `replaces`, only if none are saved there. Collective.

    Returns:
        What must be equal on all ranks, and in a program that reads the same cache.
    """
    communicator = connect()
    for shuffle in node.shuffles():
        shuffle.state()  # all ranks draw the same seeds, though only rank 0 iterates
    elements = node.elements(EpochPass(frozen=True))
    with communicator.raise_together():
        checksums = ", ".join(f"{checksum:08x}" for _, checksum in node.checksums(every=False))
        pipeline = f"{node!r} with checksums {checksums}" if checksums else repr(node)
        communicator.exchange(signature_of(current_call(), pipeline, path))
    with communicator.raise_together():
        if communicator.rank == 0 and (replaces or not _is_saved(path)):
            watchdog = communicator.watchdog
            with watchdog.extend_timeout(_HOUR) if watchdog else contextlib.nullcontext():
                _save(elements, path, pipeline, replaces)
        communicator.exchange(signature_of(current_call(), "saved", path))
    return pipeline


def _save(elements: Iterator[Any], path: str, pipeline: str, replaces: bool) -> None:
    """Writes elements to a folder, which becomes `path` when it is complete."""
    path = os.path.abspath(path)
    if os.path.lexists(path) and not _is_saved(path):
        raise FileExistsError(
            errno.EEXIST, f"{current_call()}: the path exists and is not a saved dataset", path
        )
    partial = f"{path}.partial-{secrets.token_hex(4)}"
    os.makedirs(partial)
    try:
        with contextlib.ExitStack() as files:
            _write(elements, partial, files, pipeline)
        _move(partial, path, replaces)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _move(partial: str, path: str, replaces: bool) -> None:
    """Makes a complete folder `path`, or removes it: if not `replaces`, the first one is kept."""
    replaced: list[str] = []
    # Another program may do the same at this moment. Python has no call that exchanges
    # two folders.
    while True:
        try:
            os.rename(partial, path)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if not replaces:  # programs may have mapped the files that are there
            shutil.rmtree(partial)
            break
        previous = f"{path}.previous-{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, previous)
            replaced.append(previous)
    for folder in replaced:
        shutil.rmtree(folder)


def _write(
    elements: Iterator[Any], folder: str, files: contextlib.ExitStack, pipeline: str
) -> None:
    columns: list[_LeafWriter] = []
    structure, skeleton, count, communicator = None, None, 0, connect()
    for element in elements:
        communicator.work()
        count += 1
        leaves, other = _elements.flatten(element)
        if structure is None:
            structure, skeleton = other, _skeleton(element, iter(range(len(leaves))))
            columns = [_LeafWriter(folder, i, files) for i in range(len(leaves))]
        if other != structure:
            raise ValueError(
                f"{current_call()}: elements must be nests of the same structure; they are "
                f"{structure} and {other}"
            )
        for column, leaf in zip(columns, leaves, strict=True):
            column.add(leaf)
    if structure is None:
        raise ValueError(
            f"{current_call()}: there are no elements, so their shapes and dtypes are unknown"
        )
    header = {
        "format": _FORMAT,
        "pipeline": pipeline,
        "count": count,
        "nest": skeleton,
        "leaves": [column.finish() for column in columns],
    }
    with open(os.path.join(folder, _HEADER), "w") as file:
        json.dump(header, file)


def _skeleton(nest: Any, numbers: Iterator[int]) -> Any:
    """The structure of a nest as JSON, with numbers in place of leaves."""
    if nest is None:
        return None
    if type(nest) in (tuple, list):
        return {type(nest).__name__: [_skeleton(member, numbers) for member in nest]}
    if type(nest) is dict and all(type(key) is str for key in nest):
        return {"dict": {key: _skeleton(nest[key], numbers) for key in sorted(nest)}}
    leaves, _ = _elements.flatten(nest)
    if len(leaves) != 1 or leaves[0] is not nest:
        raise TypeError(
            f"{current_call()}: elements hold a {type(nest).__name__}; they must be nests of "
            "tuples, lists and dicts with text keys: convert them with Dataset.map"
        )
    return next(numbers)


def _rebuild(skeleton: Any, leaves: list[Any]) -> Any:
    if skeleton is None or isinstance(skeleton, int):
        return skeleton if skeleton is None else leaves[skeleton]
    ((kind, members),) = skeleton.items()
    if kind == "dict":
        return {key: _rebuild(member, leaves) for key, member in members.items()}
    rebuilt = [_rebuild(member, leaves) for member in members]
    return tuple(rebuilt) if kind == "tuple" else rebuilt


def load(path: str, pipeline: str | None = None) -> Node:
    """The elements that were saved in the folder `path`; they are read when they are needed.

    Raises:
        ValueError: they are damaged, or those of another pipeline than `pipeline`.
    """
    header_path = os.path.join(path, _HEADER)
    try:
        with open(header_path) as file:
            header = json.load(file)
        names = {"format", "count", "nest", "leaves"}
        if not isinstance(header, dict) or not names <= header.keys():
            raise ValueError("it must have a format, a count, a nest and leaves")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            errno.ENOENT, f"{current_call()}: there is no saved dataset", path
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{current_call()}: {header_path} is not a header of a dataset: {error}; save it again"
        ) from error
    if header["format"] != _FORMAT:
        raise ValueError(
            f"{current_call()}: {path} has the format {reprlib.repr(header['format'])}; this "
            f"version reads {_FORMAT}"
        )
    if pipeline not in (None, header.get("pipeline")):
        raise ValueError(
            f"{current_call()}: {path} has the elements of {header.get('pipeline')}, and the "
            f"dataset is {pipeline}; remove the folder, or choose another name"
        )
    count, skeleton = header["count"], header["nest"]
    try:
        if not _is_size(count):
            raise ValueError(f"its count is {count!r}")
        columns = [
            _Stored(os.path.join(path, f"leaf{i}"), kinds, count)
            for i, kinds in enumerate(header["leaves"])
        ]
        if sorted(_numbers_in(skeleton)) != [*range(len(columns))]:
            raise ValueError(f"its nest does not have each of the {len(columns)} leaves once")
    # NumPy raises the TokenError, for a damaged header of its own.
    except (FileNotFoundError, RecursionError, TypeError, ValueError, tokenize.TokenError) as error:
        raise ValueError(
            f"{current_call()}: {path} is damaged: {error}; remove it, and save the dataset again"
        ) from error
    if all(column.whole is not None for column in columns):
        return Slices(_rebuild(skeleton, [column.whole for column in columns]))
    return _Saved(path, skeleton, columns, count)


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _numbers_in(skeleton: Any) -> Iterator[int]:
    """The numbers of the leaves of a skeleton; a ValueError if it is not one of `_skeleton`."""
    if skeleton is None or type(skeleton) is int:
        yield from [] if skeleton is None else [skeleton]
        return
    items = [*skeleton.items()] if isinstance(skeleton, dict) else []
    if len(items) != 1 or type(items[0][1]) is not {"tuple": list, "list": list, "dict": dict}.get(
        items[0][0]
    ):
        raise ValueError(f"a part of its nest is {reprlib.repr(skeleton)}")
    members = items[0][1]
    for member in members.values() if isinstance(members, dict) else members:
        yield from _numbers_in(member)


class _Stored:
    """One leaf of all elements, in a memory map.

    `whole` has all as one array of shape `(count, ...)` if they have one shape and dtype, else it
    is `None`. If the files do not hold what the header describes, it raises a ValueError or a
    TypeError, before any memory is allocated.
    """

    def __init__(self, path: str, kinds: list[Any], count: int) -> None:
        self._kinds = [_as_kind(*kind) for kind in kinds]
        sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in self._kinds]
        counts = [count]
        if len(sizes) != 1:
            # Mapped: reading it would allocate as much memory as its header claims.
            self._kind_of = np.asarray(np.lib.format.open_memmap(f"{path}.kinds.npy", "r"))
            if self._kind_of.shape != (count,) or self._kind_of.dtype != np.int32:
                raise ValueError(f"{path}.kinds.npy does not hold {count} numbers")
            if not 0 <= self._kind_of.min() <= self._kind_of.max() < len(sizes):
                raise ValueError(f"{path}.kinds.npy has numbers that are not below {len(sizes)}")
            counts = np.bincount(self._kind_of, minlength=len(sizes)).tolist()
        actual, nbytes = os.path.getsize(path), sum(map(operator.mul, counts, sizes))
        if actual != nbytes:
            raise ValueError(f"{path} has {actual} bytes; it must have {nbytes}")
        self._bytes: Any = (
            np.asarray(np.memmap(path, np.uint8, "r")) if nbytes else np.empty(0, np.uint8)
        )
        self.whole: Any = None
        if len(sizes) == 1:
            ((dtype, shape),) = self._kinds
            empty = np.broadcast_to(np.zeros((), dtype), (count, *shape))
            self.whole = self._bytes.view(dtype).reshape(count, *shape) if nbytes else empty
        else:
            self._ends = np.cumsum(np.array(sizes)[self._kind_of])

    def at(self, index: int) -> Any:
        """A copy of the leaf of one element."""
        if self.whole is not None:
            return self.whole[index].copy()
        dtype, shape = self._kinds[self._kind_of[index]]
        end = int(self._ends[index])
        data = self._bytes[end - dtype.itemsize * math.prod(shape) : end]
        return np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()[()]

    def spec(self) -> TensorSpec:
        """The spec of the leaf; sizes in which elements differ are `None`."""
        try:
            specs = [TensorSpec(shape, dtype) for dtype, shape in self._kinds]
            return functools.reduce(_elements.common_spec, specs)
        except TypeError:
            raise TypeError(
                "Dataset.element_spec: the saved elements differ in dtype or number of dimensions"
            ) from None


def _as_kind(dtype: Any, shape: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and the shape of elements; an error if `_LeafWriter` does not write such."""
    parsed = np.dtype(dtype) if isinstance(dtype, str) else None
    if parsed is None or parsed.kind not in _KINDS:
        raise ValueError(f"elements have the dtype {dtype!r}")
    # An empty string has no bytes, but arrays of them do.
    is_shape = isinstance(shape, list) and all(map(_is_size, shape))
    if not is_shape or (shape and not parsed.itemsize):
        raise ValueError(f"elements of dtype {dtype} have the shape {reprlib.repr(shape)}")
    return parsed, tuple(shape)


@final
class _Saved(Indexed):
    """Saved elements that differ in shape."""

    def __init__(self, path: str, skeleton: Any, columns: list[_Stored], count: int) -> None:
        super().__init__()
        # Elements of one batch may not match, and only a replica that loads both notices: steps
        # are compared as if they came from user code.
        self.user_code = True
        self._path, self._skeleton, self._columns, self._count = path, skeleton, columns, count

    def __repr__(self) -> str:
        return f"Dataset.load({os.path.basename(os.path.normpath(self._path))!r})"

    def spec(self) -> Any:
        return _rebuild(self._skeleton, [column.spec() for column in self._columns])

    def cardinality(self) -> int:
        return self._count

    def load(self, item: Any) -> Any:
        return _rebuild(self._skeleton, [column.at(int(item[0])) for column in self._columns])

    def fetch(self, chunk: Chunk) -> Any:
        return _elements.stack([self.load(item) for item in chunk])
