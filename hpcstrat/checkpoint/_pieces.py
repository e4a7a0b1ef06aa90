"""Pieces of a file: the bytes that each rank writes, and how their checksums are combined."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_POLYNOMIAL = 0xEDB88320  # of CRC-32, its lowest power in the highest bit
_ONE = 1 << 31


class Piece(NamedTuple):
    """Bytes of a file.

    Attributes:
        start: their place in the file.
        data: the bytes.
    """

    start: int
    data: memoryview


class Extent(NamedTuple):
    """Bytes of an array, from `start` to `stop`."""

    name: str
    start: int
    stop: int


def share_of(
    rank: int,
    size: int,
    root: int,
    nbytes: Mapping[str, int],
    cuts: Mapping[str, Sequence[int]],
    of_root: Collection[str],
) -> Iterator[Extent]:
    """The bytes that a rank writes, in the order of `nbytes`; the ranks write each byte once.

    Args:
        rank: the rank.
        size: the number of ranks.
        root: the rank that alone has some arrays.
        nbytes: the size of each array.
        cuts: for arrays that are split over the ranks: where each rank's part starts, and where the
            last part ends.
        of_root: arrays that only the root has. Every rank has all others.
    """
    # Equal parts of all bytes, not of each array: few and large writes for any number of arrays.
    common = sum(
        count for name, count in nbytes.items() if name not in cuts and name not in of_root
    )
    first, last, before = common * rank // size, common * (rank + 1) // size, 0
    for name, count in nbytes.items():
        if name in cuts:
            start, stop = cuts[name][rank : rank + 2]
        elif name in of_root:
            start, stop = 0, count * (rank == root)
        else:
            start, stop = (min(max(end - before, 0), count) for end in (first, last))
            before += count
        if start < stop:
            yield Extent(name, start, stop)


def write_pieces(file: int, pieces: Iterable[Piece], nbytes: int) -> int:
    """Writes pieces of a file, in the file's order; returns their part of its CRC-32.

    The `^` of the parts of all ranks, which together write the whole file, is its checksum.

    Args:
        file: its descriptor.
        pieces: each is read once, before the next.
        nbytes: the size of the whole file.

    Raises:
        OSError: the file system's error.
    """
    checksum = end = 0
    for start, data in pieces:
        checksum = zlib.crc32(data, _append_zeros(checksum, start - end))
        end = start + len(data)
        at = start
        while data:  # a write may take less than it was given
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written
        # The disk starts now, during the work on the next piece, not when everything is written.
        # (These pages are not read soon; Linux starts to write them, whatever the name says.)
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, start, end - start, os.POSIX_FADV_DONTNEED)
    return _append_zeros(checksum, nbytes - end)


def _append_zeros(checksum: int, nbytes: int) -> int:
    """The CRC-32 after `nbytes` zero bytes are appended.

    As in zlib's `crc32_combine`: a CRC is a remainder of polynomials over GF(2), and each appended
    byte multiplies it by x**8.
    """
    return _product(checksum, _power(nbytes)) if checksum and nbytes else checksum


@functools.lru_cache(1 << 10)
def _power(nbytes: int) -> int:
    """The remainder of x**(8 * nbytes)."""
    power, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        nbytes >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The remainder of the product of two polynomials."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
