"""Many arrays in one flat message, grouped by dtype; on a GPU one kernel per dtype copies them."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import Interval, divide_up, round_up

GROUP_ALIGNMENT = 16
"""Groups and sections start at multiples of this many bytes, so that any dtype is aligned."""


class DtypeGroup(NamedTuple):
    """All elements of one dtype in a message."""

    dtype: np.dtype[Any]
    start: int  # the byte at which they start
    elements: int  # how many there are, with the gaps between arrays
    members: tuple[int, ...]  # the indices of the arrays of this dtype

    def of(self, message: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These elements of a message, a flat view."""
        return _view(message, (self.elements,), self.dtype, self.start)

    def within(self, window: Interval) -> Interval:
        """The elements of this group that have a byte in an interval of the message's bytes."""
        start, stop = window.shift(-self.start)
        item = self.dtype.itemsize
        return Interval(0, self.elements) & Interval(start // item, divide_up(stop, item))


class Layout:
    """The place of each array in a message.

    Use `layout_of`, which returns the same object for equal arguments.

    Args:
        shapes: of the arrays.
        dtypes: of the arrays.
        alignment: each array starts at a multiple of this many bytes. Groups start at multiples of
            16, or of this if it is more.

    Attributes:
        nbytes: bytes of the message.
        groups: the message by dtype, in order of first appearance.
        starts: for each array, the byte at which it starts.
        sizes: for each array, its number of elements.
        alignment: as above.
    """

    def __init__(
        self,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[np.dtype[Any], ...],
        alignment: int = 1,
    ) -> None:
        self.starts: list[int] = [0] * len(shapes)
        self.sizes: list[int] = [math.prod(shape) for shape in shapes]
        self.groups: list[DtypeGroup] = []
        end = 0
        # Grouped by dtype, so that one call reduces all arrays of a dtype.
        for dtype in dict.fromkeys(dtypes):
            start = end = round_up(end, max(alignment, GROUP_ALIGNMENT))
            members = tuple([i for i, other in enumerate(dtypes) if other == dtype])
            for i in members:
                # A group ends where its last element does: arrays without elements are in no gap.
                self.starts[i] = round_up(end, alignment) if self.sizes[i] else end
                end = self.starts[i] + self.sizes[i] * dtype.itemsize
            self.groups.append(DtypeGroup(dtype, start, (end - start) // dtype.itemsize, members))
        self.nbytes = end
        self.alignment = alignment
        self._entries = [*zip(shapes, dtypes, self.starts, strict=True)]  # see `_view`

    def bytes_of(self, i: int) -> Interval:
        """The bytes of an array in a message."""
        _, dtype, start = self._entries[i]
        return Interval(0, self.sizes[i]).scale(dtype.itemsize).shift(start)

    def views(self, message: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The arrays of a message, as views of it."""
        return [_view(message, *entry) for entry in self._entries]

    def write(self, message: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Copies the arrays into a message."""
        for entry, array in zip(self._entries, arrays, strict=True):
            _view(message, *entry)[...] = array


@functools.lru_cache(maxsize=1024)
def layout_of(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], alignment: int = 1
) -> Layout:
    """The layout of arrays of these shapes and dtypes, each at a multiple of `alignment` bytes."""
    return Layout(shapes, dtypes, alignment)


def layout_of_arrays(arrays: Iterable[Array], alignment: int = 1) -> Layout:
    """The layout of arrays like these."""
    arrays = list(arrays)
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    return layout_of(tuple(shapes), tuple(dtypes), alignment)


def _view(message: Any, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Any:
    """An array in a message of bytes, from byte `start` on."""
    # One call, at a third of the cost of slicing, viewing and reshaping.
    if type(message) is np.ndarray:
        return np.ndarray(shape, dtype, message, start)  # pyright: ignore[reportArgumentType]
    return message[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


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
    16: "ulonglong2",
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
        self._kernel = _kernel(group.dtype.itemsize)
        # Of each launch: the arrays that it copies, their first bytes in the message, the addresses
        # in its argument, that argument in the form in which it is passed, and the blocks.
        self._launches: list[tuple[list[int], Array, Array, Array, Array, tuple[int]]] = []
        members = [i for i in group.members if layout.sizes[i]]
        for first in range(0, len(members), ENTRIES):
            batch = members[first : first + ENTRIES]
            words = np.zeros(_WORDS_OF_TABLE, np.uint64)
            sources, targets, lengths, starts = words[:-1].reshape(4, ENTRIES)[:, : len(batch)]
            lengths[:] = [layout.sizes[i] for i in batch]
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
def _kernel(itemsize: int) -> Any:
    code = _CODE.replace("WORD", _WORDS[itemsize]).replace("ENTRIES", str(ENTRIES))
    return gpu.load_cupy("packing").RawKernel(code, "copy_arrays")


def layout_of_sections(sizes: Sequence[int]) -> Layout:
    """The layout of a message that consists of sections of these sizes, in bytes."""
    return layout_of(
        tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), GROUP_ALIGNMENT
    )


def sections_in(memory: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Sections of these sizes, in bytes, at the start of a buffer."""
    return layout_of_sections(sizes).views(memory)
