"""A file with a checkpoint: it is checked as a whole, and read part by part.

`_safetensors` describes the format.
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
from hpcstrat.checkpoint._safetensors import (
    DTYPE_NAMES,
    HEAD_PATTERN,
    LARGEST_HEADER,
    LENGTH_BYTES,
    VERSION,
    Entry,
)

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SIZES = {
    name: 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    for dtype, name in DTYPE_NAMES.items()
}


class CheckpointFile:
    """A whole and undamaged checkpoint, open for reading.

    Args:
        path: the file.
        work: called repeatedly while the file is read, to show progress.
        checked: the checkpoint is only this many bytes, the first of the file, and is known to be
            undamaged; by default it is the whole file, and its checksum is compared.

    Attributes:
        entries: the arrays, by name.
        metadata: what was written in addition to the arrays.
        step: the step of the program after which it was made; `None` if unknown.

    Raises:
        FileNotFoundError: there is no such file; the message names older files.
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
            self._file = open(path, "rb", buffering=0, opener=_open_at_once)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"there is no such file{_older_checkpoints(path, '; ')}", path
            ) from error
        try:
            header = self._read_header()
            try:
                self._parse(header)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(
                    f"{path} is not a checkpoint of hpcstrat, though it starts like one: {error!r}"
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
        for place in Interval(0, nbytes).split(PART):
            part = self._buffer[: place.size]
            read = 0
            while read < part.size:
                count = self._file.readinto(part[read:].data)
                if not count:
                    raise OSError(errno.EIO, "the file became shorter while it was read", self.path)
                read += count
            self._work()
            yield part

    def _read_header(self) -> bytes:
        """The header, after a check of the whole file.

        A right checksum means that the file is as some program wrote it, but not that hpcstrat
        did: `_parse` still checks every number before it is used.
        """
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it is not a regular file"
            )
        actual = self._size()
        start = self._file.read(LENGTH_BYTES + 256)
        head = HEAD_PATTERN.match(start, LENGTH_BYTES)
        if head is None:
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: it does not start like one"
                f"{_older_checkpoints(self.path, '. Before it ')}"
            )
        # Before the checksum, which a newer format may compute in another way.
        if int(head["version"]) != VERSION:
            raise ValueError(
                f"{self.path} has format {int(head['version'])}, but this version of hpcstrat "
                f"reads format {VERSION}; restore it with the version that wrote it"
            )
        length, nbytes = int.from_bytes(start[:LENGTH_BYTES], "little"), int(head["nbytes"])
        if nbytes != actual:
            what = "is cut off" if actual < nbytes else "has data after its end"
            raise ValueError(
                f"{self.path} {what}: it has {actual} bytes and should have {nbytes}"
                f"{_older_checkpoints(self.path, '. Before it ')}"
            )
        if self._checked is None:
            self._check(head, start)
        if length > min(actual - LENGTH_BYTES, LARGEST_HEADER):
            raise ValueError(
                f"{self.path} is not a checkpoint of hpcstrat: its header would have {length} bytes"
            )
        self._file.seek(LENGTH_BYTES)
        return b"".join(part.tobytes() for part in self._read(length))

    def _check(self, head: re.Match[bytes], start: bytes) -> None:
        """Compares the file's checksum; `start` has been read already."""
        checksum = zlib.crc32(
            start[: head.start("checksum")] + b"00000000" + start[head.end("checksum") :]
        )
        for part in self._read(self._size() - len(start)):
            checksum = zlib.crc32(part.data, checksum)
        if checksum != int(head["checksum"], 16):
            raise ValueError(
                f"{self.path} is damaged: its checksum is {checksum:08x} and should be "
                f"{head['checksum'].decode()}{_older_checkpoints(self.path, '. Before it ')}"
            )

    def _size(self) -> int:
        """Bytes of the checkpoint."""
        return os.fstat(self._file.fileno()).st_size if self._checked is None else self._checked

    def _parse(self, header: bytes) -> None:
        described = _parse_json(header)
        own = described.pop("__metadata__")
        self.step = _step_in(own)
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
            if fields["data_offsets"] != [end - start, end - start + entry.nbytes]:
                raise ValueError(f"{name} is not where it should be")
            self.entries[name] = entry
            self._starts[name] = end
            end += entry.nbytes
        if end != self._size():
            raise ValueError(f"its arrays end at byte {end}")


def step_in(path: str) -> int | None:
    """The step after which a file was made, if it says so; its contents are not checked."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            return _step_in(_parse_json(file.read(min(length, LARGEST_HEADER)))["__metadata__"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _open_at_once(path: str, flags: int) -> int:
    # A FIFO must not wait for a writer: it is refused, because it is not a checkpoint.
    return os.open(path, flags | os.O_NONBLOCK)


def _step_in(own: Mapping[str, str]) -> int | None:
    if "step" not in own:
        return None
    # At most 18 digits: the launcher's memory has 64 bits for the step.
    if not re.fullmatch("[0-9]{1,18}", own["step"]):
        raise ValueError(f"its step is {reprlib.repr(own['step'])}")
    return int(own["step"])


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
