"""One kernel per dtype copies CuPy arrays into a message, and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array
from hpcstrat._memory.intervals import divide_up
from hpcstrat._memory.layout import DtypeGroup, Layout

# The table of arrays is passed by value, so it needs no memory on the GPU that would have to live
# until the kernel has run. A kernel's arguments are limited to 4 KiB.
ENTRIES = 120
"""Arrays that one launch copies at most."""

_WORDS_OF_TABLE = 4 * ENTRIES + 1
# Without fields, which NumPy would describe to CuPy at each launch.
_TABLE = np.dtype((np.void, 8 * _WORDS_OF_TABLE))
_WORDS = {
    1: "unsigned char",
    2: "unsigned short",
    4: "unsigned int",
    8: "unsigned long long",
}
_BLOCK = 256
_LARGEST_GRID = 4096

_CODE = """
typedef unsigned long long size;

struct Table {
    const WORD* source[ENTRIES];
    WORD* target[ENTRIES];
    size length[ENTRIES];
    size start[ENTRIES];  // the sum of the lengths before
    long long count;
};

extern "C" __global__ void copy_arrays(const Table table)
{
    const int last = (int)table.count - 1;
    const size words = table.start[last] + table.length[last];
    const size stride = (size)gridDim.x * blockDim.x;
    for (size k = (size)blockIdx.x * blockDim.x + threadIdx.x; k < words; k += stride) {
        int low = 0, high = last;
        while (low < high) {  // the last array that starts at word k or before
            const int middle = (low + high + 1) / 2;
            if (table.start[middle] <= k) low = middle; else high = middle - 1;
        }
        table.target[low][k - table.start[low]] = table.source[low][k - table.start[low]];
    }
}
"""


class PackKernel:
    """Copies CuPy arrays of one dtype into a message and back, on the current stream.

    Six separate copies take the host longer than the communication that follows. A `PackKernel` is
    made once, for many copies of arrays of the same shapes, by one thread at a time.

    Args:
        layout: of the message.
        group: the group of the layout that is copied.
    """

    def __init__(self, layout: Layout, group: DtypeGroup) -> None:
        self._ascontiguous = gpu.load_cupy("packing").ascontiguousarray
        # A complex number is aligned as its two reals are.
        word = group.dtype.alignment
        self._kernel = _kernel(word)
        # Of each launch: the arrays that it copies, their first bytes in the message, the addresses
        # in its argument, that argument in the form in which it is passed, and the blocks.
        self._launches: list[tuple[list[int], Array, Array, Array, Array, tuple[int]]] = []
        members = [i for i in group.members if layout.sizes[i]]
        for first in range(0, len(members), ENTRIES):
            batch = members[first : first + ENTRIES]
            words = np.zeros(_WORDS_OF_TABLE, np.uint64)
            sources, targets, lengths, starts = words[:-1].reshape(4, ENTRIES)[:, : len(batch)]
            lengths[:] = [layout.sizes[i] * group.dtype.itemsize // word for i in batch]
            starts[1:] = np.cumsum(lengths)[:-1]
            words[-1] = len(batch)
            # One thread per word, up to a limit beyond which more blocks would only queue.
            grid = min(divide_up(int(lengths.sum()), _BLOCK), _LARGEST_GRID)
            offsets = np.array([layout.starts[i] for i in batch], np.uint64)
            table = words.view(_TABLE).reshape(())
            self._launches.append((batch, offsets, sources, targets, table, (grid,)))

    def __call__(self, arrays: Sequence[Any], message: Any) -> None:
        """Copies the group's members among `arrays`, which are all arrays of the layout.

        Args:
            arrays: on one GPU.
            message: at least the layout's `nbytes` bytes, C-contiguous, on the same GPU.
        """
        # Only the addresses change from step to step; they are written into an existing table.
        for members, offsets, sources, targets, table, grid in self._launches:
            copies, addresses = [], []
            for i in members:
                array = arrays[i]
                if not array.flags.c_contiguous:
                    array = self._ascontiguous(array)
                    copies.append(array)  # they live until the launch
                addresses.append(array.data.ptr)
            sources[:] = addresses
            np.add(offsets, message.data.ptr, out=targets)
            self._kernel(grid, (_BLOCK,), (table,))

    def unpack(self, message: Any, arrays: Sequence[Any]) -> None:
        """Copies the group's members from the message to `arrays`, which are C-contiguous."""
        for members, offsets, sources, targets, table, grid in self._launches:
            np.add(offsets, message.data.ptr, out=sources)
            targets[:] = [arrays[i].data.ptr for i in members]
            self._kernel(grid, (_BLOCK,), (table,))


def packings_of(layout: Layout) -> list[PackKernel]:
    """What copies arrays into messages of a layout: one kernel per group."""
    return [PackKernel(layout, group) for group in layout.groups]


@functools.cache
def _kernel(word: int) -> Any:
    code = _CODE.replace("WORD", _WORDS[word]).replace("ENTRIES", str(ENTRIES))
    return gpu.load_cupy("packing").RawKernel(code, "copy_arrays")
