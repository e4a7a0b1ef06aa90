"""What ranks exchange: records, which start each call, signatures, and pickled objects."""

from __future__ import annotations

import functools
import hashlib
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcstrat._core.call_name import current_call
from hpcstrat._core.types import Bytes
from hpcstrat._memory.blocks import VariableId

RECORD = 256
"""Bytes of one rank's record."""

# byte  0       8             16      24      40             48        64                        256
#       number, escaped_hash, status, digest, message bytes, (unused), payload: a short message
#       |---------- COMMON: RecordHead -----|
#       |---------- WHOLE ---------------------------------|
_COMMON = struct.Struct("<qqq16s")
_WHOLE = struct.Struct("<qqq16sq")
_SIZE = struct.Struct("<q")
COMMON = _COMMON.size
WHOLE = _WHOLE.size
HEADER = 64  # so that arrays in the payload are aligned
PAYLOAD = RECORD - HEADER
"""Messages of up to this many bytes travel in the record itself."""

OK, FAILED, LEAVING = 0, 1, 2
"""Status of a rank: it makes the call; it raised an error; it leaves the program."""


class RecordHead(NamedTuple):
    """What starts a record, and is equal on all ranks if all is well.

    Attributes:
        number: the number of the call.
        escaped_hash: see `CallState`.
        status: `OK`, `FAILED` or `LEAVING`.
        digest: that of the call's signature.
    """

    number: int
    escaped_hash: int
    status: int
    digest: bytes


class ManyValues(NamedTuple):
    """Values that must match: hashed instead of listed, because there may be thousands."""

    items: tuple[str, ...]


class CallDescription(NamedTuple):
    """A call as messages show it.

    Attributes:
        call: the user's name of the method, with arguments.
        passed: the arrays, variables or objects passed to it.
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
    """What must be equal on all ranks for them to be in the same collective call.

    Attributes:
        digest: 16 bytes, which are compared.
        call: the user's name of the method.
        must_match: what else is in the digest, and so must be equal.
        numbers: further numeric arguments, also in the digest.
        names: the names of the numbers.
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
        # Half of the digest stays, so that each step hashes the numbers and their names only, and
        # not the names of all variables.
        named = hashlib.blake2b(packed + _joined(names), digest_size=8)
        digest = self.digest[:8] + named.digest()
        return CallSignature(digest, self.call, self.must_match, numbers, names)

    def words(self) -> CallDescription:
        """The signature in words, for messages."""
        arguments, passed = [], []
        for item in self.must_match:
            if isinstance(item, ManyValues):
                passed += item.items
            elif isinstance(item, VariableId) and self.call.endswith(f" of {item.name}"):
                call = f"{self.call} ({_words_of(item)})"
                return CallDescription(call, numbers=tuple(arguments))
            elif (described := _describe(item)) is not None:
                passed.append(described)
            elif item != "*":  # a nest that is one leaf
                arguments.append(str(item))
        call = self.call if passed and not arguments else f"{self.call}({', '.join(arguments)})"
        names = self.names or [""] * len(self.numbers)
        numbers = [
            f"{name}={_in_digits(n)}" if name else _in_digits(n)
            for name, n in zip(names, self.numbers, strict=True)
        ]
        return CallDescription(call, tuple(passed), tuple(numbers))

    def __str__(self) -> str:
        return str(self.words())


def new_signature(call: str, *must_match: Any) -> CallSignature:
    """The signature of `call`, the user's name of a method, with these hashable values."""
    # As text, because Python's own hashes differ between processes.
    text = f"{call}({', '.join(_show(item) for item in must_match)})"
    encoded = text.encode(errors="surrogatepass")  # paths that are not UTF-8 have surrogates
    return CallSignature(hashlib.blake2b(encoded, digest_size=16).digest(), call, must_match)


# A loop makes the same calls with the same shapes at every step.
signature_of = functools.lru_cache(maxsize=8192)(new_signature)
"""`new_signature`, kept for the next call with the same values."""


@functools.lru_cache(64)
def _joined(names: Sequence[str]) -> bytes:
    return ",".join(names).encode()


def _in_digits(number: float) -> str:
    """Briefly, unless that would make it look like another number."""
    brief = f"{number:g}"
    return brief if float(brief) == number else repr(float(number))


def _describe(item: Any) -> str | None:
    """An array or a variable in words; `None` for any other value."""
    if isinstance(item, np.dtype):
        return item.name
    if isinstance(item, VariableId):
        return f"{item.name} ({_words_of(item)})"
    # An array's, or a new variable's.
    if isinstance(item, tuple) and len(item) > 1 and isinstance(item[0], np.dtype):
        dtype, shape, *storage = item
        return f"{dtype.name} of shape {shape}{f' in storage {storage[0]}' if storage else ''}"
    return None


def _show(item: Any) -> str:
    if isinstance(item, np.dtype):
        return item.name
    if isinstance(item, ManyValues):
        # In quotes, so that one name with a comma in it does not look like two.
        return repr(item.items)
    if isinstance(item, tuple):
        return f"({', '.join(map(_show, item))}{',' * (len(item) == 1)})"
    return str(item)


def _words_of(variable: VariableId) -> str:
    _, number, storage, dtype, shape = variable
    return f"{dtype.name} of shape {shape}, variable {number} of storage {storage}"


pack_record: Callable[[int, int, int, bytes, int], bytes] = _WHOLE.pack
"""Packs the first `WHOLE` bytes of a record: a `RecordHead`'s fields, and the message bytes."""


def message_sizes(posted: Sequence[Any]) -> list[int]:
    """Bytes of the messages that these records announce."""
    unpack = _SIZE.unpack_from
    return [unpack(record, COMMON)[0] for record in posted]


def read_record(record: Any) -> RecordHead:
    """The head of a record."""
    return RecordHead(*_COMMON.unpack_from(record))


def pickled(obj: Any) -> bytes:
    """A pickled object; see `load_object`.

    Raises:
        TypeError: it cannot be pickled.
        MemoryError: there is no memory for a copy of it.
    """
    try:
        return pickle.dumps(obj, 4)  # 5 would keep read-only arrays read-only
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f"{current_call()}: {obj!r} cannot travel between ranks: {error}; pass what can be "
            "pickled"
        ) from error


def pack_object(obj: Any) -> tuple[int, Callable[[Bytes], None]]:
    """The size of a message of an object, and a function that writes it; see `load_object`."""
    data = np.frombuffer(pickled(obj), np.uint8)

    def write(message: Bytes) -> None:
        message[: data.size] = data

    return data.size, write


def load_object(message: Bytes) -> Any:
    """The object in a message of `pack_object`, a copy. Arrays in it are writable."""
    return pickle.loads(memoryview(message))  # pyright: ignore[reportArgumentType]
