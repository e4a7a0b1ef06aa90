"""Python objects as messages. Arrays in them travel as they are and are never copied into a pickle."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

import numpy as np

_COUNT = struct.Struct("<q")


class Message:
    """An object in the form in which it travels: counts, the pickle, then the buffers of its arrays.

    Attributes:
        nbytes: bytes of the whole.
    """

    def __init__(self, obj: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
        body = file.getvalue()
        parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        counts = struct.pack(f"<{len(parts) + 1}q", len(parts), *(part.nbytes for part in parts))
        self._parts = [memoryview(counts), *parts]
        self.nbytes = sum(part.nbytes for part in self._parts)

    def write(self, target: np.ndarray[Any, Any]) -> None:
        """Copies the message to the first bytes of `target`."""
        start = 0
        for part in self._parts:
            target[start : start + part.nbytes] = np.frombuffer(part, np.uint8)
            start += part.nbytes


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        """As NumPy has it, but a read-only array is not read-only where it arrives."""
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.copy("K").__reduce_ex__(5)
        return NotImplemented


def load(message: np.ndarray[Any, Any]) -> Any:
    """The object of a message. Its arrays are fresh and may be written."""
    data = memoryview(message)  # pyright: ignore[reportArgumentType]
    (count,) = _COUNT.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}q", data, _COUNT.size)
    start = _COUNT.size * (count + 1)
    parts: list[Any] = []
    for size in sizes:
        parts.append(bytearray(data[start : start + size]))
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])
