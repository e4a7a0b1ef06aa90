"""Pieces of a file: the bytes that each rank writes, and how their checksums are combined."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hpcstrat._memory.intervals import Interval

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


def places_of(nbytes: Mapping[str, int], start: int = 0) -> dict[str, Interval]:
    """The places of arrays that follow each other without gaps, from `start` on."""
    ends = itertools.accumulate(nbytes.values(), initial=start)
    places = itertools.starmap(Interval, itertools.pairwise(ends))
    return dict(zip(nbytes, places, strict=True))


def share_of(
    rank: int, size: int, nbytes: Mapping[str, int], own: Mapping[str, Interval]
) -> dict[str, Interval]:
    """The bytes of each array that a rank writes, without arrays of which it writes none.

    Args:
        rank: the rank.
        size: the number of ranks.
        nbytes: the size of each array, in the order of the file and of the result.
        own: for each array that not every rank has as a whole: the bytes that this rank has, and so
            writes; together the ranks have each byte once.
    """
    # Equal parts of all bytes, not of each array: few and large writes for any number of arrays.
    common = {name: count for name, count in nbytes.items() if name not in own}
    part = Interval(0, sum(common.values())).of_rank(rank, size)
    shares = {name: (part & at).shift(-at.start) for name, at in places_of(common).items()}
    shares |= own
    return {name: shares[name] for name in nbytes if shares[name]}


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
