r"""The format of a checkpoint, a safetensors file: its header and its checksums.

It holds text and numbers, so reading it cannot run code as unpickling can. Any safetensors reader
opens it. We write it ourselves because the safetensors package needs all arrays in memory at once,
and has no checksums. The bytes, in order:

    8 bytes           N, the length of the header, little-endian
    N bytes           the header: JSON, padded with spaces so that N is a multiple of 8
    all other bytes   the arrays, without gaps, in this machine's byte order; those with the largest
                      elements first, so each starts at a multiple of its element size, up to 8

The header, here with line breaks:

    {"__metadata__": {                      its values are strings, as safetensors requires
       "hpcstrat": "1",                     the version of our format
       "bytes": "00000000000000012345",     the size of the whole file, in 20 digits
       "crc32": "0123abcd",                 of the first 8 + N bytes, with these 8 digits as zeros
       "checksums": "89abcdef...",          8 digits for each array: its `checksum`
       "dtypes": "{\"z\":\"complex64\"}",   JSON: the dtypes for which we use no safetensors name
       "objects": "{\"optimizer\":...}",    JSON: each object's kind and counts; not plain variables
       "step": "1000"},                     the step after which it was made; missing if unknown
     "model/w": {                           each array, in the order of the data
       "data_offsets": [0, 4096],           its start and end, from the end of the header
       "dtype": "F32", "shape": [32, 32]},
     ...}

An array that is named in `dtypes` is stored as `U8`, with a last axis for the bytes of an element.
The head, up to `crc32`, has a fixed layout: a reader checks it before it parses any JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcstrat._core.atomic_file import find_numbers, follow_link
from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import ByteRange
from hpcstrat._storage.parts import PART

VERSION = 1
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors readers
# Of fixed length, so that checksums can be filled in at the end without moving anything.
_HEAD = '{{"__metadata__":{{"hpcstrat":"{version}","bytes":"{nbytes:020}","crc32":"{crc:08x}"'
_HEAD_PATTERN = re.compile(
    rb'\{"__metadata__":\{"hpcstrat":"(?P<version>\d{1,9})",'
    rb'"bytes":"(?P<nbytes>\d{20})","crc32":"(?P<crc>[0-9a-f]{8})"'
)
# The dtype names of safetensors. Other dtypes are stored as bytes; so is complex64, whose name
# older readers refuse.
_DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}

CHECKSUM_BYTES = 1 << 20
# A prime: rows then start at other places than the pages and sectors of any device, and of two that
# were swapped, not all sums stay as they were.
_ROW_WORDS = 1021


def checksum(data: Bytes | memoryview, value: int = 0) -> int:
    """The checksum `value`, continued with `data`: several times as fast as a CRC of all bytes.

    Of each whole `CHECKSUM_BYTES` it is the CRC-32 of the sums of the columns, in rows of 1,021
    words of 64 bits, and of the rest; of what remains at the end it is the CRC-32. So it detects
    flipped bits, and pages that are old, lost or swapped.

    Args:
        data: a multiple of `CHECKSUM_BYTES`, except at the end.
        value: the checksum so far.
    """
    data = np.frombuffer(data, np.uint8)
    whole = data.size // CHECKSUM_BYTES * CHECKSUM_BYTES
    in_rows = CHECKSUM_BYTES // 8 // _ROW_WORDS * _ROW_WORDS
    for words in data[:whole].view(np.uint64).reshape(-1, CHECKSUM_BYTES // 8):
        value = zlib.crc32(words[:in_rows].reshape(-1, _ROW_WORDS).sum(axis=0).data, value)
        value = zlib.crc32(words[in_rows:].data, value)
    return zlib.crc32(data[whole:].data, value)


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


class Header:
    """The bytes before the arrays.

    Args:
        entries: the arrays, by name.
        metadata: JSON values without floats, by name.
        step: the step of the program after which it is made; `None` if unknown.

    Attributes:
        names: the arrays, in the order of the file.
        size: its bytes.

    Raises:
        ValueError: there are too many arrays for the format.
    """

    def __init__(
        self, entries: Mapping[str, Entry], metadata: Mapping[str, Any], step: int | None
    ) -> None:
        # Large elements first: every array is aligned to its element size, and readers can map it.
        self.names: list[str] = sorted(entries, key=lambda name: (-entries[name].itemsize, name))
        described, others, end = {}, {}, 0
        for name in self.names:
            dtype, itemsize, shape = entries[name]
            start, end = end, end + entries[name].nbytes
            if dtype not in _DTYPE_NAMES:
                others[name] = dtype
                shape = (*shape, itemsize)
            described[name] = {
                "dtype": _DTYPE_NAMES.get(dtype, "U8"),
                "shape": shape,
                "data_offsets": (start, end),
            }
        own = {"dtypes": _json(others), "objects": _json(metadata)}
        if step is not None:
            own["step"] = str(step)
        own_text = json.dumps(own, separators=(",", ":"))[1:]
        body = "".join(f",{_json(name)}:{_json(entry)}" for name, entry in described.items())
        self._rest = f",{own_text}{body}}}".encode()
        unpadded = len(self._bytes(0, 0, [0] * len(entries)))
        # The arrays start at a multiple of 8 bytes, for readers that map the file.
        self._rest += b" " * (-unpadded % 8)
        self.size: int = LENGTH_BYTES + unpadded + -unpadded % 8
        self._nbytes = self.size + end
        if self.size > LARGEST_HEADER:
            raise ValueError(
                f"Checkpoint.save: the names and shapes of {len(entries)} arrays make a header of "
                f"{self.size} bytes, and the format allows {LARGEST_HEADER}; make several "
                "checkpoints"
            )

    def sealed(self, checksums: Sequence[int]) -> bytes:
        """Its bytes, with the checksum of each array."""
        length = (self.size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        crc = zlib.crc32(length + self._bytes(self._nbytes, 0, checksums))
        return length + self._bytes(self._nbytes, crc, checksums)

    def _bytes(self, nbytes: int, crc: int, checksums: Sequence[int]) -> bytes:
        head = _HEAD.format(version=VERSION, nbytes=nbytes, crc=crc)
        digits = "".join(f"{one:08x}" for one in checksums)
        return f'{head},"checksums":"{digits}"'.encode() + self._rest


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def write_file(file: int, header: Header, parts: Iterable[tuple[str, Bytes]]) -> None:
    """Writes a whole checkpoint, and returns before the bytes are on disk.

    Args:
        file: an empty file, open for writing.
        header: its header.
        parts: the bytes of the arrays, each part after the array's name, in the order of
            `header.names`. All parts but the last of an array are as long as `checksum` asks. Each
            is read once, before the next.

    Raises:
        OSError: the file system's error.
    """
    checksums, start = dict.fromkeys(header.names, 0), header.size
    for name, part in parts:
        checksums[name] = checksum(part, checksums[name])
        _write(file, part.data, start)
        start += part.size
    _write(file, memoryview(header.sealed([*checksums.values()])), 0)


def _write(file: int, data: memoryview, start: int) -> None:
    end = start
    while data:  # a write may take less than it was given
        written = os.pwrite(file, data, end)
        data, end = data[written:], end + written
    # The disk starts now, during the work on the next part, not when everything is written. (These
    # pages are not read soon; Linux starts to write them, whatever the name says.)
    with contextlib.suppress(OSError):
        os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)


_DTYPES = {
    name: (dtype, 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
    for dtype, name in _DTYPE_NAMES.items()
}
_STRANGE = "is not a checkpoint of hpcstrat"
_WRONG = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # JSON of any program


class CheckpointFile:
    """A whole and undamaged checkpoint, open for reading.

    Args:
        path: the file.
        work: called repeatedly while the file is read, to show progress.

    Attributes:
        entries: the arrays, by name.
        metadata: what was written in addition to the arrays.
        step: the step of the program after which it was made; `None` if unknown.

    Raises:
        FileNotFoundError: there is no such file; the message names older files.
        OSError: the file cannot be read.
        ValueError: the file is not a checkpoint, has another format, or is truncated or damaged.
    """

    def __init__(self, path: str, work: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._work = work
        self.step: int | None = None
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, ByteRange] = {}
        # One buffer for the whole file: a checkpoint may be as large as memory.
        self._buffer: Bytes = np.empty(PART, np.uint8)
        try:
            self._file = open(path, "rb", buffering=0, opener=_open_at_once)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"there is no such file{_older_files(path, '; ')}", path
            ) from error
        try:
            header = self._read_header()
            try:
                checksums = self._parse(header)
            except _WRONG as error:
                raise self._refusal(f"{_STRANGE}, though it starts like one: {error!r}") from error
            for (name, place), expected in zip(self._places.items(), checksums, strict=True):
                found = 0
                for part in self._read(place):
                    found = checksum(part, found)
                where = f" in {name}, bytes {place.start} to {place.stop} of the file"
                self._require(where, found, expected)
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
        return self._read(self._places[name])

    def _read(self, place: ByteRange) -> Iterator[Bytes]:
        self._file.seek(place.start)
        for here in place.split(PART):
            part = self._buffer[: here.size]
            read = 0
            while read < part.size:
                count = self._file.readinto(part[read:].data)
                if not count:
                    raise OSError(errno.EIO, "the file became shorter while it was read", self.path)
                read += count
            self._work()
            yield part

    def _read_header(self) -> bytes:
        """The header, after a check of the head, the length and the checksum.

        A right checksum means that the file is as some program wrote it, but not that hpcstrat
        did: `_parse` still checks every number before it is used.
        """
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(f"{_STRANGE}: it is not a regular file")
        start = self._file.read(LENGTH_BYTES + 256)
        head = _HEAD_PATTERN.match(start, LENGTH_BYTES)
        if head is None:
            raise self._refusal(f"{_STRANGE}: it does not start like one")
        # Before the checksum, which another format may compute in another way.
        version, nbytes = int(head["version"]), int(head["nbytes"])
        if version != VERSION:
            raise self._refusal(
                f"has format {version}, but this version of hpcstrat reads format {VERSION}; "
                "restore it with the version that wrote it"
            )
        if nbytes != status.st_size:
            what = "is cut off" if status.st_size < nbytes else "has data after its end"
            raise self._refusal(f"{what}: it has {status.st_size} bytes and should have {nbytes}")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if length > min(nbytes - LENGTH_BYTES, LARGEST_HEADER):
            raise self._refusal(f"is damaged in its header, which would have {length} bytes")
        header = ByteRange(0, LENGTH_BYTES + length)
        whole = b"".join(part.tobytes() for part in self._read(header))
        crc = zlib.crc32(whole[: head.start("crc")] + b"00000000" + whole[head.end("crc") :])
        self._require(" in its header", crc, int(head["crc"], 16))
        return whole[LENGTH_BYTES:]

    def _parse(self, header: bytes) -> list[int]:
        """Sets the attributes; returns the checksums of the arrays."""
        described = _parse_json(header)
        own = described.pop("__metadata__")
        if "step" in own:
            if not re.fullmatch("[0-9]{1,18}", own["step"]):
                raise ValueError(f"its step is {reprlib.repr(own['step'])}")
            self.step = int(own["step"])
        others = _parse_json(own["dtypes"])
        self.metadata = _parse_json(own["objects"])
        if not isinstance(self.metadata, dict):
            raise ValueError("its metadata have no names")
        end = start = LENGTH_BYTES + len(header)
        for name, fields in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            shape = tuple(fields["shape"])
            # Of as many axes as an array may have, and one for bytes; `Entry` multiplies them.
            if len(shape) > 65 or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
                raise ValueError(f"{name} has shape {reprlib.repr(shape)}")
            if name in others:
                entry = Entry(str(others[name]), shape[-1], shape[:-1])
            else:
                entry = Entry(*_DTYPES[fields["dtype"]], shape)
            place = ByteRange(end, end + entry.nbytes)
            if fields["data_offsets"] != list(place.shift(-start)):
                raise ValueError(f"{name} is not where it should be")
            self.entries[name], self._places[name], end = entry, place, place.stop
        if end != os.fstat(self._file.fileno()).st_size:
            raise ValueError(f"its arrays end at byte {end}")
        digits = own["checksums"]
        if len(digits) != 8 * len(self._places):
            raise ValueError(f"it has {len(digits) / 8} checksums of {len(self._places)} arrays")
        return [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]

    def _require(self, where: str, found: int, expected: int) -> None:
        if found != expected:
            raise self._refusal(
                f"is damaged{where}: its checksum is {found:08x} and should be {expected:08x}"
            )

    def _refusal(self, problem: str) -> ValueError:
        return ValueError(f"{self.path} {problem}{_older_files(self.path, '. Before it ')}")


def _open_at_once(path: str, flags: int) -> int:
    # A FIFO must not wait for a writer: it is refused, because it is not a checkpoint.
    return os.open(path, flags | os.O_NONBLOCK)


def _parse_json(text: str | bytes) -> Any:
    # No file of ours has floats, or a name twice: such a file could be read in two ways.
    return json.loads(
        text, object_pairs_hook=_require_unique, parse_float=_refuse, parse_constant=_refuse
    )


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number} is not an integer")


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(by_name := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice")
    return by_name


def _older_files(path: str, start: str) -> str:
    """The end of a message: the older files that exist, after `start`."""
    path = follow_link(path)
    names = ", ".join(f"{path}.{number}" for number in find_numbers(path))
    return f"{start}there is {names}" if names else ""
