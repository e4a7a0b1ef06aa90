"""Which bytes of a segment are in use: next fit, neighbours back to back."""

from __future__ import annotations

import bisect


class Heap:
    """Hands out ranges of bytes. The same calls in the same order give the same ranges, so ranks need not tell.

    A range follows the one before it where there is room, and holes are filled when the end is reached: what is made
    together lies in a row, and is updated as one, whatever was freed before.

    Args:
        start: the first byte to hand out.
        stop: the byte after the last one.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._free: list[tuple[int, int]] = [(start, stop)]
        self._last = start  # where the range that was handed out last ends

    def allocate(self, nbytes: int, alignment: int) -> int:
        """The first byte of a free range of this size.

        Raises:
            MemoryError: there is none.
        """
        first = bisect.bisect(self._free, (self._last, 0))
        if first and self._free[first - 1][1] > self._last:  # that range was freed
            first -= 1
        for i in (*range(first, len(self._free)), *range(first)):
            start, stop = self._free[i]
            begin = -(-start // alignment) * alignment
            if begin + nbytes <= stop:
                rest = [(start, begin), (begin + nbytes, stop)]
                self._free[i : i + 1] = [(a, b) for a, b in rest if a < b]
                self._last = begin + nbytes
                return begin
        raise MemoryError(
            f"no {nbytes:,} bytes in a row are left of the memory that was reserved for variables; "
            "make them smaller, or start fewer ranks on a host"
        )

    def free(self, start: int, nbytes: int) -> tuple[int, int]:
        """Takes a range back; returns the whole free range that it is now part of."""
        stop = start + nbytes
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        if start < stop:
            self._free.insert(i, (start, stop))
        return start, stop
