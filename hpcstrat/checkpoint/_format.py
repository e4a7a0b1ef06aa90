r"""The format of a checkpoint, a safetensors file: its header, its checksums, and who writes what.

It holds text and numbers, so reading it cannot run code as unpickling can. Any safetensors reader
opens it. We write it ourselves because the safetensors package needs all arrays in memory at once,
and has no checksums. The bytes, in order:

    8 bytes           N, the length of the header, little-endian
    N bytes           the header: JSON, padded with spaces so that N is a multiple of 8
    all other bytes   the arrays, without gaps, in this machine's byte order; those with the largest
                      elements first, so each starts at a multiple of its element size, up to 8

The header, here with line breaks:

    {"__metadata__": {                      its values are strings, as safetensors requires
       "hpcstrat": "2",                     the version of our format
       "bytes": "00000000000000012345",     the size of the whole file, in 20 digits
       "crc32": "0123abcd",                 of the first 8 + N bytes, with these 8 digits as zeros
       "checksums": "89abcdef...",          8 digits for each extent: its `checksum`
       "extents": "[4096,...]",             JSON: where each extent ends, from the end of the header
       "dtypes": "{\"z\":\"complex64\"}",   JSON: the dtypes for which we use no safetensors name
       "objects": "{\"optimizer\":...}",    JSON: each object's kind and counts; not plain variables
       "step": "1000"},                     the step after which it was made; missing if unknown
     "model/w": {                           each array, in the order of the data
       "data_offsets": [0, 4096],           its start and end, from the end of the header
       "dtype": "F32", "shape": [32, 32]},
     ...}

An array that is named in `dtypes` is stored as `U8`, with a last axis for the bytes of an element.
An extent is the bytes of an array that one rank writes. Extents follow each other without gaps. The
head, up to `crc32`, has a fixed layout: a reader checks it before it parses any JSON. In version 1
there are no extents, and `crc32` is of the whole file.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval

VERSION = 2
LENGTH_BYTES = 8
LARGEST_HEADER = 100_000_000  # bytes, the limit of safetensors readers
# Of fixed length, so that checksums can be filled in at the end without moving anything.
_HEAD = '{{"__metadata__":{{"hpcstrat":"{version}","bytes":"{nbytes:020}","crc32":"{crc:08x}"'
HEAD_PATTERN = re.compile(
    rb'\{"__metadata__":\{"hpcstrat":"(?P<version>\d{1,9})",'
    rb'"bytes":"(?P<nbytes>\d{20})","crc32":"(?P<crc>[0-9a-f]{8})"'
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


class Extent(NamedTuple):
    """Bytes of an array that one rank writes.

    Attributes:
        rank: the rank.
        name: the array's name.
        own: the bytes, counted in the array.
        place: the same bytes, counted from the end of the header.
    """

    rank: int
    name: str
    own: Interval
    place: Interval


def places_of(entries: Mapping[str, Entry]) -> dict[str, Interval]:
    """The places of the arrays, which follow each other without gaps, in this order."""
    # Large elements first: every array is aligned to its element size, and readers can map it.
    names = sorted(entries, key=lambda name: (-entries[name].itemsize, name))
    ends = itertools.accumulate((entries[name].nbytes for name in names), initial=0)
    return dict(zip(names, itertools.starmap(Interval, itertools.pairwise(ends)), strict=True))


def extents_of(
    places: Mapping[str, Interval], ranks: int = 1, cuts: Mapping[str, Sequence[int]] | None = None
) -> Iterator[Extent]:
    """What each rank writes, in the order of the file.

    Args:
        places: the places of the arrays.
        ranks: the number of ranks.
        cuts: of each array that not every rank has whole: where the part of each rank starts, in
            bytes, and the last one ends. The others are shared equally.
    """
    cuts = cuts or {}
    # Equal parts of all bytes, not of each array: few and large writes for any number of arrays.
    total = sum(place.size for name, place in places.items() if name not in cuts)
    bounds = [total * rank // ranks for rank in range(ranks + 1)]
    shared = 0  # bytes before this array
    for name, place in places.items():
        if name in cuts:
            first, ends = 0, cuts[name]
        else:
            first = bisect.bisect_right(bounds, shared) - 1
            stop = bisect.bisect_left(bounds, shared + place.size) + 1
            ends = [min(max(end - shared, 0), place.size) for end in bounds[first:stop]]
            shared += place.size
        for rank, own in enumerate(itertools.starmap(Interval, itertools.pairwise(ends)), first):
            if own:
                yield Extent(rank, name, own, own.shift(place.start))


class Header:
    """The bytes before the arrays.

    Args:
        entries: the arrays, by name.
        metadata: JSON values without floats, by name.
        stops: where each extent ends, from the end of the header.
        notes: texts to save in addition, by name.

    Attributes:
        size: its bytes.
        nbytes: the size of the whole file.

    Raises:
        ValueError: there are too many arrays for the format.
    """

    def __init__(
        self,
        entries: Mapping[str, Entry],
        metadata: Mapping[str, Any],
        stops: Sequence[int],
        notes: Mapping[str, str],
    ) -> None:
        described, others, places = {}, {}, places_of(entries)
        for name, place in places.items():
            dtype, itemsize, shape = entries[name]
            if dtype not in DTYPE_NAMES:
                others[name] = dtype
                shape = (*shape, itemsize)
            described[name] = {
                "dtype": DTYPE_NAMES.get(dtype, "U8"),
                "shape": shape,
                "data_offsets": place,
            }
        own = {"extents": _json([*stops]), "dtypes": _json(others), "objects": _json(metadata)}
        own_text = json.dumps(own | dict(notes), separators=(",", ":"))[1:]
        body = "".join(f",{_json(name)}:{_json(entry)}" for name, entry in described.items())
        self._rest = f",{own_text}{body}}}".encode()
        self._count = len(stops)
        unpadded = len(self._bytes(0, 0, {}))
        # The arrays start at a multiple of 8 bytes, for readers that map the file.
        self._rest += b" " * (-unpadded % 8)
        self.size: int = LENGTH_BYTES + unpadded + -unpadded % 8
        self.nbytes: int = self.size + sum(place.size for place in places.values())
        if self.size > LARGEST_HEADER:
            raise ValueError(
                f"Checkpoint.save: the names and shapes of {len(entries)} arrays make a header of "
                f"{self.size} bytes, and the format allows {LARGEST_HEADER}; make several "
                "checkpoints"
            )

    def sealed(self, checksums: Mapping[int, int]) -> bytes:
        """Its bytes, with the checksum of each extent, by index."""
        length = (self.size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        crc = zlib.crc32(length + self._bytes(self.nbytes, 0, checksums))
        return length + self._bytes(self.nbytes, crc, checksums)

    def _bytes(self, nbytes: int, crc: int, checksums: Mapping[int, int]) -> bytes:
        head = _HEAD.format(version=VERSION, nbytes=nbytes, crc=crc)
        digits = "".join(f"{checksums.get(index, 0):08x}" for index in range(self._count))
        return f'{head},"checksums":"{digits}"'.encode() + self._rest


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
