"""What ranks exchange: the record that begins every call, the signature that must match, pickled objects."""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._memory.blocks import VariableId

RECORD = 256
"""Bytes of one rank's record."""

_COMMON = struct.Struct(
    "<qqq16s"
)  # number of the call, faults, status, digest of the signature: equal on all ranks
# The message's size comes last, so that one slice holds all that must be equal.
_WHOLE = struct.Struct("<qqq16sq")  # and the bytes of this rank's message
_SIZE = struct.Struct("<q")
COMMON = _COMMON.size
WHOLE = _WHOLE.size
# More than `WHOLE`, so that arrays in the payload are aligned.
HEADER = 64
PAYLOAD = RECORD - HEADER
"""Bytes of a message that travels in the record itself."""

OK, FAILED, LEAVING = 0, 1, 2
"""Status of a rank: it makes the call; it found an argument wrong; it leaves the program."""


class Listed(NamedTuple):
    """Values that must match, of which there may be very many."""

    items: tuple[str, ...]


class CallDescription(NamedTuple):
    """A call as messages show it.

    Attributes:
        call: the user's name of the method, with arguments.
        passed: the arrays, variables or objects that it is given.
        numbers: arguments that change from call to call.
    """

    call: str
    passed: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    def __str__(self) -> str:
        passed = f" of {', '.join(self.passed)}" if self.passed else ""
        numbers = f" with {', '.join(self.numbers)}" if self.numbers else ""
        return f"{self.call}{passed}{numbers}"


class CallSignature(NamedTuple):
    """What must be equal on all ranks for a collective to be the same one.

    Attributes:
        digest: 16 bytes, compared.
        call: the user's name of the method.
        must_match: what else is part of the digest, and so must be equal.
        numbers: further numeric arguments, part of the digest too.
        names: of the numbers.
    """

    digest: bytes
    call: str
    must_match: tuple[Any, ...] = ()
    numbers: tuple[float, ...] = ()
    names: tuple[str, ...] = ()

    def with_numbers(
        self, numbers: tuple[float, ...], names: tuple[str, ...] = ()
    ) -> CallSignature:
        """This signature with arguments that change from call to call, such as a learning rate."""
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        # Half of the digest stays, so that only the numbers are hashed at each step, and not the
        # names of all variables.
        digest = self.digest[:8] + hashlib.blake2b(packed, digest_size=8).digest()
        return self._replace(digest=digest, numbers=numbers, names=names)

    def words(self) -> CallDescription:
        """The signature in words, for messages."""
        arguments, passed = [], []
        for item in self.must_match:
            if isinstance(item, Listed):
                passed += item.items
            elif isinstance(item, VariableId) and self.call.endswith(f" of {item.name}"):
                return CallDescription(f"{self.call} ({_words_of(item)})")
            elif (described := _describe(item)) is not None:
                passed.append(described)
            elif item != "*":  # a nest that is one leaf
                arguments.append(str(item))
        call = self.call if passed and not arguments else f"{self.call}({', '.join(arguments)})"
        names = self.names or [""] * len(self.numbers)
        numbers = [
            f"{name}={n:g}" if name else f"{n:g}"
            for name, n in zip(names, self.numbers, strict=True)
        ]
        return CallDescription(call, tuple(passed), tuple(numbers))

    def __str__(self) -> str:
        return str(self.words())


def new_signature(call: str, *must_match: Any) -> CallSignature:
    """The signature of `call`, the user's name of a method, with these hashable values."""
    # As text, because Python's own hashes differ from process to process.
    text = f"{call}({', '.join(_show(item) for item in must_match)})"
    return CallSignature(hashlib.blake2b(text.encode(), digest_size=16).digest(), call, must_match)


# A loop makes the same calls with the same shapes at every step.
signature_of = functools.lru_cache(maxsize=8192)(new_signature)
"""`new_signature`, kept for the next call with the same values."""


def _describe(item: Any) -> str | None:
    """An array or a variable in words; `None` of any other value."""
    if isinstance(item, np.dtype):
        return item.name
    if isinstance(item, VariableId):
        return f"{item.name} ({item.dtype.name} of shape {item.shape}, variable {item.number} of storage {item.storage})"
    if (
        isinstance(item, tuple) and len(item) > 1 and isinstance(item[0], np.dtype)
    ):  # an array's, or a new variable's
        dtype, shape, *storage = item
        return f"{dtype.name} of shape {shape}{f' in storage {storage[0]}' if storage else ''}"
    return None


def _show(item: Any) -> str:
    if isinstance(item, np.dtype):
        return item.name
    if isinstance(item, Listed):
        # In quotes, so that one name with a comma in it does not look like two.
        return repr(item.items)
    if isinstance(item, tuple):
        return f"({', '.join(map(_show, item))}{',' * (len(item) == 1)})"
    return str(item)


def _words_of(variable: VariableId) -> str:
    _, number, storage, dtype, shape = variable
    return f"{dtype.name} of shape {shape}, variable {number} of storage {storage}"


def pack_record(number: int, faults: int, status: int, digest: bytes, nbytes: int) -> bytes:
    """The `WHOLE` bytes of a record before its message.

    The first `COMMON` are equal on all ranks if all is well.
    """
    return _WHOLE.pack(number, faults, status, digest, nbytes)


def message_sizes(posted: Sequence[Any]) -> list[int]:
    """Bytes of the messages that these records announce."""
    unpack = _SIZE.unpack_from
    return [unpack(record, COMMON)[0] for record in posted]


def read_record(record: Any) -> tuple[int, int, int, bytes]:
    """Number of the call, faults, status and digest of a record."""
    return _COMMON.unpack_from(record)


_COUNT = struct.Struct("<q")


class ObjectMessage:
    """A pickled object as a message: counts, the pickle, then the buffers of its arrays.

    Attributes:
        nbytes: bytes of the whole.
    """

    def __init__(self, obj: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        # Protocol 5 keeps arrays out of the pickle. They are copied once, into the message, and a
        # pickle of more than 2 GiB cannot travel.
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(obj)
        # Bytes, not the file's own buffer: Python 3.13 may collect a BytesIO before the memoryviews
        # of it.
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
        """NumPy's own, except that a read-only array arrives writable."""
        if type(obj) is np.ndarray and not obj.flags.writeable:
            return obj.copy("K").__reduce_ex__(5)
        return NotImplemented


def load_object(message: np.ndarray[Any, Any]) -> Any:
    """The object of a message. Its arrays are fresh and may be written."""
    data = memoryview(message)  # pyright: ignore[reportArgumentType]
    (count,) = _COUNT.unpack_from(data)
    sizes = struct.unpack_from(f"<{count}q", data, _COUNT.size)
    start = _COUNT.size * (count + 1)
    parts: list[Any] = []
    for size in sizes:
        # A copy, because the next call overwrites the message; a bytearray, because arrays over
        # bytes are read-only.
        parts.append(bytearray(data[start : start + size]))
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])
