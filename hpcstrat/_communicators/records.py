"""What every collective exchanges first: one small record a rank, and the signature in it that must agree."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

RECORD = 256
"""Bytes of one rank's record."""

_COMMON = struct.Struct("<qqq16s")  # number of the call, faults, status, digest of the signature: equal on all ranks
_WHOLE = struct.Struct("<qqq16sq")  # and the bytes of this rank's message
_SIZE = struct.Struct("<q")
COMMON = _COMMON.size
WHOLE = _WHOLE.size
HEADER = 64
PAYLOAD = RECORD - HEADER
"""Bytes of a message that travels in the record itself."""

OK, FAILED, LEAVING = 0, 1, 2
"""Status of a rank: it makes the call; it found an argument wrong; it leaves the program."""


class Signature(NamedTuple):
    """What must be equal on all ranks for a collective to be the same one.

    Attributes:
        digest: 16 bytes, compared.
        text: the same in words, for the message where they differ.
        numbers: further arguments, part of the digest.
    """

    digest: bytes
    text: str
    numbers: tuple[float, ...] = ()

    @property
    def call(self) -> str:
        """The user's name of the method."""
        return self.text.partition("(")[0]

    def with_numbers(self, numbers: tuple[float, ...]) -> Signature:
        """This signature with arguments that change from call to call, such as a learning rate."""
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        return Signature(self.digest[:8] + hashlib.blake2b(packed, digest_size=8).digest(), self.text, numbers)

    def __str__(self) -> str:
        return f"{self.text} with {self.numbers}" if self.numbers else self.text


@functools.lru_cache(maxsize=8192)
def signature(call: str, *facts: Any) -> Signature:
    """The signature of `call`, the user's name of a method, with these hashable facts."""
    text = f"{call}({', '.join(_show(fact) for fact in facts)})"
    return Signature(hashlib.blake2b(text.encode(), digest_size=16).digest(), text)


def _show(fact: Any) -> str:
    if isinstance(fact, np.dtype):
        return fact.name
    if isinstance(fact, tuple):
        return f"({', '.join(map(_show, fact))}{',' * (len(fact) == 1)})"
    return str(fact)


def pack(number: int, faults: int, status: int, digest: bytes, nbytes: int) -> bytes:
    """A record but for the message in it, `WHOLE` bytes. The first `COMMON` are equal on all ranks if all is well."""
    return _WHOLE.pack(number, faults, status, digest, nbytes)


def message_sizes(posted: Sequence[Any]) -> list[int]:
    """Bytes of the messages that these records announce."""
    unpack = _SIZE.unpack_from
    return [unpack(record, COMMON)[0] for record in posted]


def read(record: Any) -> tuple[int, int, int, bytes]:
    """Number of the call, faults, status and digest of a record."""
    return _COMMON.unpack_from(record)
