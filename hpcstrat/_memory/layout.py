"""Many arrays in one flat message: grouped by dtype, back to back; on a GPU copied by one kernel for each dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Bytes

ALIGNMENT = 16
"""Bytes to whose multiples groups and sections begin, so that any dtype is aligned in them."""


class DtypeGroup(NamedTuple):
    """All elements of one dtype in a message.

    Attributes:
        dtype: their dtype.
        start: the byte where they begin.
        elements: how many they are.
        members: the indices of the arrays that they are of.
    """

    dtype: np.dtype[Any]
    start: int
    elements: int
    members: tuple[int, ...]

    def of(self, message: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These elements of a message, a flat view."""
        return _view(message, (self.elements,), self.dtype, self.start)

    def within(self, window: slice) -> slice:
        """Those of these elements that have a byte in a range of the message's bytes."""
        begin, end = window.start - self.start, window.stop - self.start
        item = self.dtype.itemsize
        return slice(max(0, begin // item), min(self.elements, max(0, -(-end // item))))


class Layout:
    """Where each of some arrays lies in a message.

    Equal arguments give the same object: use `layout_of`.

    Args:
        shapes: of the arrays.
        dtypes: likewise.
        alignment: bytes to whose multiples each starts. Groups start at multiples of 16, or of this
            if it is more.

    Attributes:
        nbytes: bytes of the message.
        groups: the message by dtype, in order of first appearance.
        starts: for each array, the byte where it begins.
        sizes: for each array, its number of elements.
    """

    def __init__(
        self,
        shapes: tuple[tuple[int, ...], ...],
        dtypes: tuple[np.dtype[Any], ...],
        alignment: int = 1,
    ) -> None:
        self._entries: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = [
            (0, (), np.dtype(bool))
        ] * len(shapes)
        self.sizes: list[int] = [math.prod(shape) for shape in shapes]
        self.groups: list[DtypeGroup] = []
        end = 0
        # By dtype, so that everything of one dtype is reduced by one call, however many arrays
        # there are.
        for dtype in dict.fromkeys(dtypes):
            start = end = _up(end, max(alignment, ALIGNMENT))
            members = tuple([i for i, other in enumerate(dtypes) if other == dtype])
            for i in members:
                begin = _up(end, alignment)
                end = begin + self.sizes[i] * dtype.itemsize
                self._entries[i] = (begin, shapes[i], dtype)
            self.groups.append(DtypeGroup(dtype, start, (end - start) // dtype.itemsize, members))
        self.nbytes = end
        self.starts: list[int] = [entry[0] for entry in self._entries]

    def views(self, message: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The arrays of a message of bytes, as views of it."""
        return [_view(message, shape, dtype, start) for start, shape, dtype in self._entries]

    def write(self, message: np.ndarray[Any, Any], arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Copies the arrays into a message."""
        for view, array in zip(self.views(message), arrays, strict=True):
            view[...] = array


@functools.lru_cache(maxsize=1024)
def layout_of(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype[Any], ...], alignment: int = 1
) -> Layout:
    """The layout of arrays of these shapes and dtypes, each at a multiple of `alignment` bytes."""
    return Layout(shapes, dtypes, alignment)


def _view(message: Any, shape: tuple[int, ...], dtype: np.dtype[Any], start: int) -> Any:
    """An array that lies in a message of bytes, from byte `start` on."""
    if (
        type(message) is np.ndarray
    ):  # in one call, at a third of the cost of slicing, viewing and reshaping
        return np.ndarray(shape, dtype, message, start)  # pyright: ignore[reportArgumentType]
    return message[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


# Passed by value, the table needs no memory on the GPU that would have to live until the kernel has
# run.
ENTRIES = 128
"""Arrays that one launch copies.

The table of them is passed by value, and a kernel's arguments have 4 KiB.
"""

_WORDS_OF_TABLE = 3 * ENTRIES + 1
_TABLE = np.dtype(
    (np.void, 8 * _WORDS_OF_TABLE)
)  # without fields, of which NumPy tells CuPy at length, each time
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

struct Table { const WORD* source[ENTRIES]; size start[ENTRIES]; size length[ENTRIES]; long long count; };

extern "C" __global__ void pack(const Table table, WORD* __restrict__ out)
{
    const int last = (int)table.count - 1;
    const size words = table.start[last] + table.length[last];
    for (size k = (size)blockIdx.x * blockDim.x + threadIdx.x; k < words; k += (size)gridDim.x * blockDim.x) {
        int low = 0, high = last;
        while (low < high) {  // the last array that starts at word k or before
            const int middle = (low + high + 1) / 2;
            if (table.start[middle] <= k) low = middle; else high = middle - 1;
        }
        if (k - table.start[low] < table.length[low])  // else it is between two arrays
            out[k] = table.source[low][k - table.start[low]];
    }
}
"""


class PackKernel:
    """Copies CuPy arrays of a group of a layout into a message, on the current stream; the host does not wait.

    Six copies one by one take the host longer than the communication that they prepare. It is made
    once for many copies of arrays of the same shapes.

    Args:
        layout: where each array goes.
        group: which of the layout's groups is copied.
        message: at least `layout.nbytes` bytes, C-contiguous, on the arrays' GPU.
    """

    def __init__(self, layout: Layout, group: DtypeGroup, message: Any) -> None:
        self._ascontiguous = gpu.load_cupy("packing").ascontiguousarray
        self._kernel = _kernel(group.dtype.itemsize)
        self._launches: list[tuple[_Launch, np.ndarray[Any, Any], np.ndarray[Any, Any], Any]] = []
        for launch in _launches(layout, group):
            words = launch.words.copy()
            self._launches.append(
                (launch, words, words.view(_TABLE).reshape(()), message[launch.start : launch.stop])
            )

    def __call__(self, arrays: Sequence[Any]) -> None:
        """Copies these, of the shapes and dtypes of the layout, in any order in memory; those of others are ignored."""
        # Only the addresses change from step to step: they are written into a table that is already
        # there.
        for launch, words, table, target in self._launches:
            sources = [
                array
                if array.flags.c_contiguous
                else self._ascontiguous(array)  # kept until the launch
                for array in [arrays[i] for i in launch.members]
            ]
            words[: len(sources)] = [source.data.ptr for source in sources]
            self._kernel(launch.grid, (_BLOCK,), (table, target))


class _Launch(NamedTuple):
    """What one launch does, but for the addresses.

    Attributes:
        members: the indices of the arrays that it copies.
        words: its argument, in words of 8 bytes, of which the addresses are the first.
        start, stop: the bytes of the message that it writes.
        grid: blocks of threads.
    """

    members: list[int]
    words: np.ndarray[Any, Any]
    start: int
    stop: int
    grid: tuple[int]


@functools.lru_cache(maxsize=1024)
def _launches(layout: Layout, group: DtypeGroup) -> list[_Launch]:
    item = group.dtype.itemsize
    members = [i for i in group.members if layout.sizes[i]]
    launches = []
    for first in range(0, len(members), ENTRIES):
        some = members[first : first + ENTRIES]
        start = layout.starts[some[0]]
        stop = layout.starts[some[-1]] + layout.sizes[some[-1]] * item
        words = np.zeros(_WORDS_OF_TABLE, np.uint64)
        words[ENTRIES : ENTRIES + len(some)] = [(layout.starts[i] - start) // item for i in some]
        words[2 * ENTRIES : 2 * ENTRIES + len(some)] = [layout.sizes[i] for i in some]
        words[-1] = len(some)
        # Enough threads for a word each, up to a limit beyond which more blocks would only wait
        # their turn.
        grid = min(-(-(stop - start) // (item * _BLOCK)), _LARGEST_GRID)
        launches.append(_Launch(some, words, start, stop, (max(grid, 1),)))
    return launches


@functools.cache
def _kernel(itemsize: int) -> Any:
    code = _CODE.replace("WORD", _WORDS[itemsize]).replace("ENTRIES", str(ENTRIES))
    return gpu.load_cupy("packing").RawKernel(code, "pack")


class Sections(NamedTuple):
    """A section for, or of, each rank, all in one buffer, from which MPI sends and to which it receives.

    Attributes:
        memory: the buffer, in bytes.
        sizes: bytes of each rank's section.
        starts: where each begins.
    """

    memory: Bytes
    sizes: Sequence[int]
    starts: Sequence[int]

    def of(self, rank: int) -> Bytes:
        """The section of a rank."""
        return self.memory[self.starts[rank] : self.starts[rank] + self.sizes[rank]]

    def all(self) -> list[Bytes]:
        """Every rank's, in rank order."""
        return [self.of(rank) for rank in range(len(self.sizes))]

    def for_mpi(self) -> tuple[Bytes, tuple[Sequence[int], Sequence[int]]]:
        """The buffer as mpi4py takes it."""
        return self.memory, (self.sizes, self.starts)


def layout_of_sections(sizes: Sequence[int]) -> Layout:
    """The layout of a message of sections of these sizes, in bytes."""
    return layout_of(
        tuple([(size,) for size in sizes]), (np.dtype(np.uint8),) * len(sizes), ALIGNMENT
    )


def sections_in(memory: Bytes, sizes: Sequence[int]) -> Sections:
    """Sections of these sizes, in bytes, in the first bytes of a buffer."""
    return Sections(memory, sizes, layout_of_sections(sizes).starts)
