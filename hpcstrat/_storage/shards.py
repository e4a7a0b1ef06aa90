"""Shards: the parts of variables' elements that each rank updates, and whose slots it stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpcstrat._communicators.base import Communicator
from hpcstrat._core import gpu
from hpcstrat._core.call_name import call_named, current_call
from hpcstrat._core.types import Array
from hpcstrat._memory.blocks import Block, Cuts
from hpcstrat._memory.layout import layout_of
from hpcstrat._update.rows import row_view, update_rows
from hpcstrat._update.rule import UpdateRule

_UNIT = 256
"""Parts start at multiples of this many elements: on a GPU, at multiples of 256 bytes."""


def cuts_of(variables: Sequence[Block], size: int, alignment: int = 1) -> list[Cuts]:
    """Splits all elements of a dtype into equal parts; the last part takes the remainder.

    Args:
        variables: their blocks, in order of creation.
        size: the number of ranks.
        alignment: every variable starts at a multiple of this many bytes.
    """
    # All elements are split, not each variable: ranks have equal parts, whatever the variables'
    # sizes, and a part is one range of memory and of a message.
    shapes = tuple([v.array.shape for v in variables])
    dtypes = tuple([v.array.dtype for v in variables])
    layout = layout_of(shapes, dtypes, alignment)
    cuts: list[Cuts] = [()] * len(variables)
    for group in layout.groups:
        part = group.elements // size // _UNIT * _UNIT
        for i in group.members:
            first, count = (layout.starts[i] - group.start) // group.dtype.itemsize, layout.sizes[i]
            cuts[i] = (*[min(max(rank * part - first, 0), count) for rank in range(size)], count)
    return cuts


def part_of(block: Block, start: int, stop: int) -> Block:
    """Some elements of a variable as a flat block."""
    array, view = (whole.reshape(-1)[start:stop] for whole in (block.array, block.view))
    itemsize = array.dtype.itemsize
    part = Block(
        array, view, block.start + start * itemsize, block.start + stop * itemsize, block.number
    )
    part.name, part.storage = block.name, block.storage
    return part


def parts_of(variables: Sequence[Block], cuts: Sequence[Cuts], rank: int) -> list[Block]:
    """The elements of each variable that a rank updates."""
    return [part_of(v, *of[rank : rank + 2]) for v, of in zip(variables, cuts, strict=True)]


def update_rows_in_shards(
    communicator: Communicator,
    blocks: Sequence[Block],
    rows: Array,
    gradient: Array,
    rule: UpdateRule,
) -> None:
    """`update_rows` with split slots: each rank updates its elements and gets all new values.

    Collective.
    """
    variable, *slots = blocks
    cuts = slots[0].cuts
    assert cuts is not None
    xp = gpu.array_module(rows)
    columns = int(np.prod(gradient.shape[1:], dtype=np.int64))
    elements = (rows[:, np.newaxis] * columns + xp.arange(columns)).reshape(-1)
    # Sorted by rank, in the order in which the new values are gathered.
    owners = sum((elements >= cut).astype(np.int64) for cut in cuts[1:-1])
    order = xp.argsort(owners, kind="stable")
    elements, gradient = elements[order], gradient.reshape(-1)[order]
    start, stop = cuts[communicator.rank : communicator.rank + 2]
    own = xp.flatnonzero((elements >= start) & (elements < stop))
    part = part_of(variable, start, stop)
    update_rows((part, *slots), elements[own] - start, gradient[own], rule)
    with call_named(f"{current_call()}: new rows"):
        (new,) = communicator.all_gather([part.array[elements[own] - start]], 0)
    row_view(variable.array, 0)[elements] = new
