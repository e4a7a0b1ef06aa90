"""A file with a checkpoint: it is checked as a whole, and read part by part.

`_format` describes the format.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval
from hpcstrat._storage.local import PART
from hpcstrat.checkpoint._atomic_file import find_numbers, follow_link
from hpcstrat.checkpoint._format import (
    DTYPE_NAMES,
    HEAD_PATTERN,
    LARGEST_HEADER,
    LENGTH_BYTES,
    VERSION,
    Entry,
    checksum,
)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SIZES = {
    name: 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    for dtype, name in DTYPE_NAMES.items()
}
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
        ValueError: the file is not a checkpoint, has a newer format, or is truncated or damaged.
    """

    def __init__(self, path: str, work: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._work = work
        self.step: int | None = None
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, Any] = {}
        self._places: dict[str, Interval] = {}
        # One buffer for the whole file: a checkpoint may be as large as memory.
        self._buffer: Bytes = np.empty(PART, np.uint8)
        try:
            self._file = open(path, "rb", buffering=0, opener=_open_at_once)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"there is no such file{_older_checkpoints(path, '; ')}", path
            ) from error
        try:
            version, header = self._read_header()
            try:
                own = self._parse(header)
                start = LENGTH_BYTES + len(header)
                extents = list(self._extents(own, start)) if version > 1 else []
            except _WRONG as error:
                raise ValueError(
                    f"{path} is not a checkpoint of hpcstrat, though it starts like one: {error!r}"
                ) from error
            for extent in extents:
                self._check(*extent)
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

    def _read(self, place: Interval) -> Iterator[Bytes]:
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

    def _read_header(self) -> tuple[int, bytes]:
        """The version and the header, after a check of the head, the length and a checksum.

        A right checksum means that the file is as some program wrote it, but not that hpcstrat
        did: `_parse` still checks every number before it is used.
        """
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it is not a regular file"
            )
        start, older = self._file.read(LENGTH_BYTES + 256), ". Before it "
        head = HEAD_PATTERN.match(start, LENGTH_BYTES)
        if head is None:
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it does not start like one"
                f"{_older_checkpoints(self.path, older)}"
            )
        # Before the checksum, which a newer format may compute in another way.
        version, nbytes = int(head["version"]), int(head["nbytes"])
        if not 1 <= version <= VERSION:
            raise ValueError(
                f"{self.path} has format {version}, but this version of hpcstrat reads formats 1 "
                f"to {VERSION}; restore it with the version that wrote it"
            )
        if nbytes != status.st_size:
            what = "is cut off" if status.st_size < nbytes else "has data after its end"
            raise ValueError(
                f"{self.path} {what}: it has {status.st_size} bytes and should have {nbytes}"
                f"{_older_checkpoints(self.path, older)}"
            )
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        is_possible = length <= min(nbytes - LENGTH_BYTES, LARGEST_HEADER)
        # The length is a part of what is summed: with a wrong one, the sum is wrong as well.
        end = LENGTH_BYTES + length if version > 1 and is_possible else nbytes
        crc = zlib.crc32(start[: head.start("crc")] + b"00000000" + start[head.end("crc") : end])
        for part in self._read(Interval(len(start), max(end, len(start)))):
            crc = zlib.crc32(part.data, crc)
        self._require(" in its header" if version > 1 else "", crc, int(head["crc"], 16))
        if not is_possible:
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: its header would have {length} bytes"
            )
        header = Interval(LENGTH_BYTES, LENGTH_BYTES + length)
        return version, b"".join(part.tobytes() for part in self._read(header))

    def _parse(self, header: bytes) -> dict[str, Any]:
        """Sets the attributes; returns what the header says about the file itself."""
        described = _parse_json(header)
        own = described.pop("__metadata__")
        self.step = step_of(own)
        others = _parse_json(own["dtypes"])
        self.metadata = _parse_json(own["objects"])
        if not isinstance(self.metadata, dict):
            raise ValueError("its metadata have no names")
        end = start = LENGTH_BYTES + len(header)
        for name, fields in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
            shape = tuple(fields["shape"])
            if not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name} has shape {shape}")
            if name in others:
                entry = Entry(str(others[name]), shape[-1], shape[:-1])
            else:
                entry = Entry(_DTYPES[fields["dtype"]], _SIZES[fields["dtype"]], shape)
            place = Interval(end, end + entry.nbytes)
            if fields["data_offsets"] != list(place.shift(-start)):
                raise ValueError(f"{name} is not where it should be")
            self.entries[name], self._places[name], end = entry, place, place.stop
        if end != os.fstat(self._file.fileno()).st_size:
            raise ValueError(f"its arrays end at byte {end}")
        return own

    def _extents(self, own: Mapping[str, str], start: int) -> Iterator[tuple[str, Interval, int]]:
        """Each extent of the arrays, which start at byte `start`: array, place, checksum."""
        stops, digits, count = iter(_parse_json(own["extents"])), own["checksums"], 0
        for name, place in self._places.items():
            end = place.start
            while end < place.stop:
                extent = Interval(end, start + next(stops, -1))
                if not extent or extent.stop > place.stop:
                    raise ValueError(f"its extents do not fit {name}")
                yield name, extent, int(digits[8 * count : 8 * count + 8], 16)
                end, count = extent.stop, count + 1
        if len(digits) != 8 * count or next(stops, None) is not None:
            raise ValueError("it has more extents than its arrays")

    def _check(self, name: str, extent: Interval, expected: int) -> None:
        """Compares the checksum of an extent."""
        found = 0
        for part in self._read(extent):
            found = checksum(part, found)
        what = f" in {name}, bytes {extent.start} to {extent.stop} of the file"
        self._require(what, found, expected)

    def _require(self, what: str, found: int, expected: int) -> None:
        if found != expected:
            raise ValueError(
                f"{self.path} is damaged{what}: its checksum is {found:08x} and "
                f"should be {expected:08x}{_older_checkpoints(self.path, '. Before it ')}"
            )


def notes_in(path: str) -> dict[str, Any]:
    """What a file says about itself, unchecked; nothing if it is not a checkpoint."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            own = _parse_json(file.read(min(length, LARGEST_HEADER)))["__metadata__"]
            step_of(own)
            return dict(own)
    except (OSError, *_WRONG):
        return {}


def step_of(notes: Mapping[str, str]) -> int | None:
    """The step after which a file was made, if its notes say so.

    Raises:
        ValueError: it is not a number.
    """
    if "step" not in notes:
        return None
    # At most 18 digits: the launcher's memory has 64 bits for the step.
    if not re.fullmatch("[0-9]{1,18}", notes["step"]):
        raise ValueError(f"its step is {reprlib.repr(notes['step'])}")
    return int(notes["step"])


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


def _older_checkpoints(path: str, start: str) -> str:
    """The end of a message: the older checkpoints that exist, after `start`."""
    path = follow_link(path)
    names = ", ".join(f"{path}.{number}" for number in find_numbers(path))
    return f"{start}there is {names}" if names else ""
