"""Copying many GPU arrays into one flat buffer, by one kernel for each dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.packing import Group, Layout

ENTRIES = 128
"""Arrays that one launch copies. The table of them is passed by value, and a kernel's arguments have 4 KiB."""

_TABLE = np.dtype([*((name, np.uint64, ENTRIES) for name in ("source", "start", "size")), ("count", np.int64)])
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long", 16: "ulonglong2"}
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


def pack(form: Layout, group: Group, arrays: Sequence[Any], message: Any) -> None:
    """Copies CuPy arrays into a flat one of bytes, on the current stream; the host does not wait.

    Six copies one by one take the host longer than the communication that they prepare.

    Args:
        form: where each goes.
        group: which of its groups is to be copied.
        arrays: of the shapes and dtypes of `form`, in any layout; those of other groups are not looked at.
        message: at least `form.nbytes` bytes, C-contiguous, on the same GPU.
    """
    ascontiguous = _gpu.load_cupy("packing").ascontiguousarray
    for launch in _launches(form, group):
        sources = [
            array if array.flags.c_contiguous else ascontiguous(array)  # kept until the launch
            for array in [arrays[i] for i in launch.members]
        ]
        table = launch.table.copy()
        table["source"][: len(sources)] = [source.data.ptr for source in sources]
        target = message[launch.start : launch.stop]
        _kernel(group.dtype.itemsize)((launch.grid,), (_BLOCK,), (table, target))


class _Launch(NamedTuple):
    """What one launch does, but for the addresses.

    Attributes:
        members: the indices of the arrays that it copies.
        table: its argument.
        start, stop: the bytes of the message that it writes.
        grid: blocks of threads.
    """

    members: list[int]
    table: np.ndarray[Any, Any]
    start: int
    stop: int
    grid: int


@functools.lru_cache(maxsize=1024)
def _launches(form: Layout, group: Group) -> list[_Launch]:
    item = group.dtype.itemsize
    members = [i for i in group.members if form.sizes[i]]
    launches = []
    for first in range(0, len(members), ENTRIES):
        some = members[first : first + ENTRIES]
        start = form.starts[some[0]]
        stop = form.starts[some[-1]] + form.sizes[some[-1]] * item
        table = np.zeros((), _TABLE)
        table["start"][: len(some)] = [(form.starts[i] - start) // item for i in some]
        table["size"][: len(some)] = [form.sizes[i] for i in some]
        table["count"] = len(some)
        grid = min(-(-(stop - start) // (item * _BLOCK)), _LARGEST_GRID)
        launches.append(_Launch(some, table, start, stop, max(grid, 1)))
    return launches


@functools.cache
def _kernel(itemsize: int) -> Any:
    code = _CODE.replace("WORD", _WORDS[itemsize]).replace("ENTRIES", str(ENTRIES))
    return _gpu.load_cupy("packing").RawKernel(code, "pack")
