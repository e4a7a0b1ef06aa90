"""Copying many GPU arrays into one flat buffer, by one kernel for each dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat import _gpu
from hpcstrat._communicators.packing import Layout

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


def pack(form: Layout, arrays: Sequence[Any], message: Any) -> None:
    """Copies CuPy arrays into a flat one of bytes, on the current stream; the host does not wait.

    Six copies one by one take the host longer than the communication that they prepare.

    Args:
        form: where each goes.
        arrays: of the shapes and dtypes of `form`, in any layout.
        message: at least `form.nbytes` bytes, C-contiguous, on the same GPU.
    """
    ascontiguous = _gpu.load_cupy("packing").ascontiguousarray
    for group in form.groups:
        item = group.dtype.itemsize
        members = [i for i in group.members if arrays[i].size]
        for first in range(0, len(members), ENTRIES):
            some = members[first : first + ENTRIES]
            sources = [ascontiguous(arrays[i]) for i in some]  # which keeps what is made here until the launch
            begin = form.starts[some[0]]
            table = np.zeros((), _TABLE)
            table["source"][: len(some)] = [source.data.ptr for source in sources]
            table["start"][: len(some)] = [(form.starts[i] - begin) // item for i in some]
            table["size"][: len(some)] = [source.size for source in sources]
            table["count"] = len(some)
            words = (form.starts[some[-1]] - begin) // item + sources[-1].size
            grid = min(-(-words // _BLOCK), _LARGEST_GRID)
            _kernel(item)((grid,), (_BLOCK,), (table, message[begin : begin + words * item]))


@functools.cache
def _kernel(itemsize: int) -> Any:
    code = _CODE.replace("WORD", _WORDS[itemsize]).replace("ENTRIES", str(ENTRIES))
    return _gpu.load_cupy("packing").RawKernel(code, "pack")
