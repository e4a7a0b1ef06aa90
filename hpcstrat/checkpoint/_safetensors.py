"""The format of a checkpoint: a safetensors file whose header begins with the file's size and checksum.

It holds text and numbers, so reading it cannot run code as unpickling can. Any safetensors reader
opens it. We write it ourselves because the safetensors package needs all arrays in memory at once,
and has no checksum.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._storage.base import PART
from hpcstrat.checkpoint._atomic_file import followed, numbered, replacing
from hpcstrat.checkpoint._pieces import Piece, write_pieces

_VERSION = 1
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_LARGEST_HEADER = 100_000_000  # the limit of safetensors readers
# Of fixed length, so that the checksum can be filled in at the end without moving anything.
_HEAD = '{{"__metadata__":{{"hpcstrat":"{version}","bytes":"{nbytes:020}","crc32":"{checksum:08x}"'
_HEAD_PATTERN = re.compile(
    rb'\{"__metadata__":\{"hpcstrat":"(?P<version>\d{1,9})","bytes":"(?P<nbytes>\d{20})","crc32":"(?P<checksum>[0-9a-f]{8})"'
)
# The dtype names of safetensors. Other dtypes are stored as bytes; so is complex64, whose name
# older readers refuse.
_NAMES = {
    **{
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
    },
    **{
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
    },
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_SIZES = {
    name: 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize for dtype, name in _NAMES.items()
}


class Entry(NamedTuple):
    """An array without its contents.

    Attributes:
        dtype: NumPy's name of the dtype.
        itemsize: bytes of one element.
        shape: the shape.
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Contents:
    """The bytes of a checkpoint, with a checksum of 0.

    Args:
        entries: the arrays, by name.
        metadata: JSON values without floats, by name.
        parts: returns the bytes of an array, part by part, in this machine's byte order.
        step: the step of the program after which it is made; `None` where nobody counts them.

    Attributes:
        header: what comes before the arrays.
        nbytes: of the whole.

    Raises:
        ValueError: there are too many arrays for the format.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        parts: Callable[[str], Iterable[Bytes]],
        step: int | None = None,
    ) -> None:
        self._names = list(sizes(entries))
        self._parts = parts
        self.header: bytes = _header(
            [(name, entries[name]) for name in self._names], metadata, step
        )
        self.nbytes: int = len(self.header) + sum(entry.nbytes for entry in entries.values())

    def views(self) -> Iterator[memoryview]:
        """The header and the arrays, part by part; each part is valid until the next."""
        yield memoryview(self.header)
        for name in self._names:
            for part in self._parts(name):
                yield part.data

    def pieces(self) -> Iterator[Piece]:
        """`views`, each with its place in the file."""
        start = 0
        for view in self.views():
            yield Piece(start, view)
            start += len(view)

    def seal(self, file: int, checksum: int) -> None:
        """Writes the checksum to a file in which all else is."""
        # Arrays are read only once, while they are written, so the checksum is known only now. Its
        # own eight digits count as zeros.
        os.pwrite(file, b"%08x" % checksum, self.header.index(b'"crc32":"') + len(b'"crc32":"'))


def sizes(entries: Mapping[str, Entry]) -> dict[str, int]:
    """Bytes of each array, in the order of the file."""
    # Large elements first, so that every array is aligned to its element size, and readers can map
    # it.
    names = sorted(entries, key=lambda name: (-entries[name].itemsize, name))
    return {name: entries[name].nbytes for name in names}


def write(path: str, contents: Contents, keep: int | None = None) -> None:
    """Writes a checkpoint in place of the file that is there, streamed; see `replacing`.

    Args:
        path: the file.
        contents: what is read while it is written.
        keep: see `replacing`.

    Raises:
        OSError: the file system's error.
    """
    with replacing(path, keep) as file:
        contents.seal(
            file.fileno(), write_pieces(file.fileno(), contents.pieces(), contents.nbytes)
        )


def _header(
    entries: list[tuple[str, Entry]], metadata: Mapping[str, Any], step: int | None
) -> bytes:
    """The length of the header and the header itself, with a checksum of 0."""
    described, others, offset = {}, {}, 0
    for name, entry in entries:
        kind, shape = _NAMES.get(entry.dtype), entry.shape
        if kind is None:
            kind, shape = "U8", (*shape, entry.itemsize)
            others[name] = entry.dtype
        described[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    own = f'"dtypes":{json.dumps(_json(others))},"objects":{json.dumps(_json(metadata))}'
    if step is not None:
        own += f',"step":"{step}"'
    body = "".join(f",{_json(name)}:{_json(entry)}" for name, entry in described.items())
    rest = f",{own}}}{body}}}".encode()
    length = len(_HEAD.format(version=_VERSION, nbytes=0, checksum=0)) + len(rest)
    # The arrays begin behind the header, at a multiple of 8 bytes, as readers that map the file
    # want it.
    padding = -length % 8
    length += padding
    if length > _LARGEST_HEADER:
        raise ValueError(
            f"Checkpoint.save: the names and shapes of {len(entries)} arrays make a header of "
            f"{length} bytes, and the format allows {_LARGEST_HEADER}; make several checkpoints"
        )
    head = _HEAD.format(
        version=_VERSION, nbytes=_LENGTH_BYTES + length + offset, checksum=0
    ).encode()
    return length.to_bytes(_LENGTH_BYTES, "little") + head + rest + b" " * padding


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


class CheckpointFile:
    """A whole and undamaged checkpoint, open for reading.

    Args:
        path: the file.
        work: called repeatedly while the file is read, to show progress.
        checked: the number of its first bytes that are a checkpoint, whose checksum is known to be
            right; by default the whole file is, and its own checksum is compared.

    Attributes:
        entries: the arrays, by name.
        metadata: what was written besides the arrays.
        step: the step of the program after which it was made; `None` where nobody counted them.

    Raises:
        FileNotFoundError: there is no such file; the message names older ones.
        OSError: the file cannot be read.
        ValueError: the file is not a checkpoint, has a newer format, or is truncated or damaged.
    """

    def __init__(
        self, path: str, work: Callable[[], None] = lambda: None, checked: int | None = None
    ) -> None:
        self.path = path
        self._work = work
        self._checked = checked
        self.step: int | None = None
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, Any] = {}
        self._starts: dict[str, int] = {}
        # One buffer for the whole file: a checkpoint may be as large as memory.
        self._buffer: Bytes = np.empty(PART, np.uint8)
        try:
            # O_NONBLOCK: opening a FIFO must not wait for a writer; it is refused below.
            self._file = open(
                path,
                "rb",
                buffering=0,
                opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK),
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"there is no such file{_what_else(path, '; ')}", path
            ) from error
        try:
            header = self._checked_header()
            try:
                self._parse(header)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{path} is not a checkpoint of hpcstrat, though it begins like one: {error!r}"
                ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def parts(self, name: str) -> Iterator[Bytes]:
        """The bytes of an array, at most `PART` at once; each part is valid until the next.

        Raises:
            OSError: the file cannot be read.
        """
        self._file.seek(self._starts[name])
        return self._read(self.entries[name].nbytes)

    def _read(self, nbytes: int) -> Iterator[Bytes]:
        while nbytes:
            part = self._buffer[: min(nbytes, PART)]
            read = 0
            while read < part.size:
                count = self._file.readinto(part[read:].data)
                if not count:
                    raise OSError(errno.EIO, "the file became shorter while it was read", self.path)
                read += count
            nbytes -= part.size
            self._work()
            yield part

    def _checked_header(self) -> bytes:
        """The header, after a check of the whole file.

        The checksum comes first. Whatever is read after it can be trusted to be what some program
        wrote, but not that the program was this one: `_parse` still checks every number before it
        is used.
        """
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it is not a regular file"
            )
        actual = self._size()
        start = self._file.read(_LENGTH_BYTES + 256)
        head = _HEAD_PATTERN.match(start, _LENGTH_BYTES)
        if head is None:
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it does not begin like one"
                f"{_what_else(self.path, '. Before it ')}"
            )
        # Before the checksum, which a newer format may compute in another way.
        if int(head["version"]) != _VERSION:
            raise ValueError(
                f"{self.path} has format {int(head['version'])}, but this version of hpcstrat "
                f"reads format {_VERSION}; restore it with the version that wrote it"
            )
        length, nbytes = int.from_bytes(start[:_LENGTH_BYTES], "little"), int(head["nbytes"])
        if nbytes != actual:
            what = "is cut off" if actual < nbytes else "has data after its end"
            raise ValueError(
                f"{self.path} {what}: it has {actual} bytes and should have {nbytes}"
                f"{_what_else(self.path, '. Before it ')}"
            )
        if self._checked is None:
            self._check(head, start)
        if length > min(actual - _LENGTH_BYTES, _LARGEST_HEADER):
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: its header would have {length} bytes"
            )
        self._file.seek(_LENGTH_BYTES)
        return b"".join(part.tobytes() for part in self._read(length))

    def _check(self, head: re.Match[bytes], start: bytes) -> None:
        """Compares the file's checksum; `start` was read already."""
        checksum = zlib.crc32(
            start[: head.start("checksum")] + b"00000000" + start[head.end("checksum") :]
        )
        for part in self._read(self._size() - len(start)):
            checksum = zlib.crc32(part.data, checksum)
        if checksum != int(head["checksum"], 16):
            raise ValueError(
                f"{self.path} is damaged: its checksum is {checksum:08x} and should be "
                f"{head['checksum'].decode()}{_what_else(self.path, '. Before it ')}"
            )

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size if self._checked is None else self._checked

    def _parse(self, header: bytes) -> None:
        described = _parsed(header)
        own = described.pop("__metadata__")
        self.step = _step_in(own)
        others = _parsed(own["dtypes"])
        self.metadata = _parsed(own["objects"])
        if not isinstance(self.metadata, dict):
            raise ValueError("its metadata have no names")
        end = start = _LENGTH_BYTES + len(header)
        for name, fields in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            shape = tuple(fields["shape"])
            if not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name} has shape {shape}")
            if name in others:
                entry = Entry(str(others[name]), shape[-1], shape[:-1])
            else:
                entry = Entry(_DTYPES[fields["dtype"]], _SIZES[fields["dtype"]], shape)
            if fields["data_offsets"] != [end - start, end - start + entry.nbytes]:
                raise ValueError(f"{name} is not where it should be")
            self.entries[name] = entry
            self._starts[name] = end
            end += entry.nbytes
        if end != self._size():
            raise ValueError(f"its arrays end at byte {end}")


def step_in(path: str) -> int | None:
    """The step after which a file was made, if it says so: its contents are not checked, and may be damaged."""
    try:
        # Not blocked by a FIFO, whose contents are no header.
        with open(
            path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
        ) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return _step_in(_parsed(file.read(min(length, _LARGEST_HEADER)))["__metadata__"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _step_in(own: Mapping[str, str]) -> int | None:
    if "step" not in own:
        return None
    if not re.fullmatch(
        "[0-9]{1,18}", own["step"]
    ):  # which 64 bits hold, as the launcher's memory has them
        raise ValueError(f"its step is {reprlib.repr(own['step'])}")
    return int(own["step"])


def _parsed(text: str | bytes) -> Any:
    # No file of ours has floats, or a name twice: such a file could be read in two ways.
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_float=_refused, parse_constant=_refused
    )


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number} is not an integer")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _what_else(path: str, begin: str) -> str:
    """The older checkpoints that exist, for the end of a message."""
    path = followed(path)
    names = ", ".join(f"{path}.{number}" for number in numbered(path))
    return f"{begin}there is {names}" if names else ""
