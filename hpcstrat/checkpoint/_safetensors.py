r"""The format of a checkpoint, a safetensors file, and how its bytes are made.

It holds text and numbers, so reading it cannot run code as unpickling can. Any safetensors reader
opens it. We write it ourselves because the safetensors package needs all arrays in memory at once,
and has no checksum. The bytes, in order:

    8 bytes           N, the length of the header, little-endian
    N bytes           the header: JSON, padded with spaces so that N is a multiple of 8
    all other bytes   the arrays, without gaps, in this machine's byte order; those with the largest
                      elements first, so each starts at a multiple of its element size, up to 8

The header, here with line breaks:

    {"__metadata__": {                      its values are strings, as safetensors requires
       "hpcstrat": "1",                     the version of our format
       "bytes": "00000000000000012345",     the size of the whole file, in 20 digits
       "crc32": "0123abcd",                 of the whole file, with these 8 digits as zeros
       "dtypes": "{\"z\":\"complex64\"}",   JSON: the dtypes for which we use no safetensors name
       "objects": "{\"optimizer\":...}",    JSON: each object's kind and counts; not plain variables
       "step": "1000"},                     the step after which it was made; missing if unknown
     "model/w": {                           each array, in the order of the data
       "data_offsets": [0, 4096],           its start and end, from the end of the header
       "dtype": "F32", "shape": [32, 32]},
     ...}

An array that is named in `dtypes` is stored as `U8`, with a last axis for the bytes of an element.
The head, up to `crc32`, has a fixed layout: a reader checks size and checksum before it parses any
JSON. In a snapshot `crc32` stays 0; `_snapshot` keeps another checksum outside the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hpcstrat._core.types import Bytes
from hpcstrat.checkpoint._pieces import Piece, places_of

VERSION = 1
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors readers
# Of fixed length, so that the checksum can be filled in at the end without moving anything.
_HEAD = '{{"__metadata__":{{"hpcstrat":"{version}","bytes":"{nbytes:020}","crc32":"{checksum:08x}"'
HEAD_PATTERN = re.compile(
    rb'\{"__metadata__":\{"hpcstrat":"(?P<version>\d{1,9})",'
    rb'"bytes":"(?P<nbytes>\d{20})","crc32":"(?P<checksum>[0-9a-f]{8})"'
)
# The dtype names of safetensors. Other dtypes are stored as bytes; so is complex64, whose name
# older readers refuse.
DTYPE_NAMES = {
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
        step: the step of the program after which it is made; `None` if unknown.

    Attributes:
        header: the bytes before the arrays.
        nbytes: the size of the whole.

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
        nbytes = sizes(entries)
        self._names = list(nbytes)
        self._parts = parts
        self.header: bytes = _header(entries, metadata, step)
        self.nbytes: int = len(self.header) + sum(nbytes.values())

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
        """Writes the checksum to a file that holds everything else."""
        # Arrays are read only once, while they are written, so the checksum is known only now.
        os.pwrite(file, b"%08x" % checksum, self.header.index(b'"crc32":"') + len(b'"crc32":"'))


def sizes(entries: Mapping[str, Entry]) -> dict[str, int]:
    """Bytes of each array, in the order of the file."""
    # Large elements first: every array is aligned to its element size, and readers can map it.
    names = sorted(entries, key=lambda name: (-entries[name].itemsize, name))
    return {name: entries[name].nbytes for name in names}


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, Any], step: int | None) -> bytes:
    """The length of the header and the header itself, with a checksum of 0."""
    described, others, nbytes = {}, {}, sizes(entries)
    for name, place in places_of(nbytes).items():
        dtype, itemsize, shape = entries[name]
        if dtype not in DTYPE_NAMES:
            others[name] = dtype
            shape = (*shape, itemsize)
        described[name] = {
            "dtype": DTYPE_NAMES.get(dtype, "U8"),
            "shape": shape,
            "data_offsets": place,
        }
    own = f'"dtypes":{json.dumps(_json(others))},"objects":{json.dumps(_json(metadata))}'
    if step is not None:
        own += f',"step":"{step}"'
    body = "".join(f",{_json(name)}:{_json(entry)}" for name, entry in described.items())
    rest = f",{own}}}{body}}}".encode()
    length = len(_HEAD.format(version=VERSION, nbytes=0, checksum=0)) + len(rest)
    # The arrays start after the header, at a multiple of 8 bytes, for readers that map the file.
    padding = -length % 8
    length += padding
    if length > LARGEST_HEADER:
        raise ValueError(
            f"Checkpoint.save: the names and shapes of {len(entries)} arrays make a header of "
            f"{length} bytes, and the format allows {LARGEST_HEADER}; make several checkpoints"
        )
    whole = LENGTH_BYTES + length + sum(nbytes.values())
    head = _HEAD.format(version=VERSION, nbytes=whole, checksum=0).encode()
    return length.to_bytes(LENGTH_BYTES, "little") + head + rest + b" " * padding


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
