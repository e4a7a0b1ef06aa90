"""Blocks: the memory of variables and of optimizers' slots, and who they are on all ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core import gpu
from hpcstrat._core.types import Array, Bytes
from hpcstrat._memory.intervals import ByteRange


class VariableId(NamedTuple):
    """A variable in the signature of a call; see `Block`."""

    name: str
    number: int
    storage: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Block:
    """The memory of one variable, or of one slot of an optimizer.

    Args:
        part: its bytes, flat.
        memory: their addresses; see `slabs`.
        owner: the memory that they are in, which is freed after its last block and view.
        shape: of the array.
        dtype: of the array.

    Attributes:
        array: the data; only storage writes it.
        view: the same data for readers; read-only if the array library can mark it so.
        memory: as above.
        number: creation index in its storage, from 1; equal on all ranks, as are the next two.
        storage: creation index of its storage, from 1.
        name: of the variable, in quotes, or of an optimizer's slot.
        copy: the block that `view` is from, where a rank reads a copy on its GPU; else `None`.
        checksum: of `array` after the last change that the storage knows of, where it checks;
            else `None`.
        interrupted_by: the call that an exception interrupted while it changed `array`, which is
            then deleted; else empty.
    """

    __slots__ = (
        "__weakref__",
        "array",
        "checksum",
        "copy",
        "interrupted_by",
        "memory",
        "name",
        "number",
        "owner",
        "storage",
        "view",
    )

    def __init__(
        self,
        part: Array,
        memory: ByteRange,
        owner: object,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        # A program must not write to a variable behind the library's back. On the host NumPy
        # forbids it; CuPy has no such flag. So there are two arrays over the same bytes: storage
        # writes through one, and programs get the other.
        readable = part if gpu.is_on_gpu(part) else read_only(part)
        self.array: Array = part.view(dtype).reshape(shape)
        self.view: Array = readable.view(dtype).reshape(shape)
        self.memory: ByteRange = memory
        self.owner: object = owner
        self.number: int = 0
        self.storage: int = 0
        self.name: str = ""
        self.copy: Block | None = None
        self.checksum: int | None = None
        self.interrupted_by: str = ""

    def identity(self) -> VariableId:
        """What must be equal on all ranks for this to be the same variable."""
        return VariableId(self.name, self.number, self.storage, self.array.dtype, self.array.shape)

    # The attributes are deleted rather than set to None, so that every read raises and no reader
    # has to check a flag.
    def mark_interrupted(self, call: str) -> None:
        """Forbids reading the elements, which an exception in `call` left changed in part."""
        if not self.interrupted_by:
            self.interrupted_by = call
            del self.array, self.view

    def __getattr__(self, name: str) -> Any:
        # Called only for a missing attribute, so normal reads cost nothing.
        if name in ("array", "view") and self.interrupted_by:
            raise RuntimeError(
                f"Variable: an exception interrupted {self.interrupted_by}, which was changing it, "
                "so its value may be partly old and partly new; make it again, and restore a "
                "checkpoint. To save when a signal comes, use checkpoint.CheckpointManager"
            )
        raise AttributeError(f"a block has no {name}")


def read_only(part: Bytes) -> Bytes:
    """An array over the same bytes that NumPy lets no program make writable again."""
    # Over a read-only buffer: `setflags(write=True)` could undo a flag.
    return np.asarray(part.data.toreadonly())


def size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    # In 64 bits, whatever NumPy's default integer is.
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
