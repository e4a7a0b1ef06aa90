"""Snapshots: checkpoints in the memory of the job's launcher, which outlive the ranks."""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._memory.segment import Segment, reservable
from hpcstrat._process.job_files import GENERATIONS, JobMemory
from hpcstrat.checkpoint._safetensors import Contents

_ROW_BYTES = 1 << 13
_PIECE = 1 << 20  # bytes that are copied and summed at once, so that they are summed in the cache
_RECORD = struct.Struct(
    "<QqQII"
)  # sequence, step, bytes, checksum of these, that of the manager's path
_RECORD_CHECK = struct.Struct("<I")


class SnapshotChecksum:
    """A checksum of a snapshot, several times as fast as a CRC of all its bytes.

    It is the CRC-32 of sums: of each piece the sums of its columns, where a piece is rows of 1,024
    words of 64 bits.
    So it sees flipped bits, and pieces that are old, in part or as a whole, or in another's place.
    """

    def __init__(self) -> None:
        self.value: int = 0

    def add(self, piece: Bytes) -> None:
        """Adds a piece, of whole rows."""
        words = piece.view(np.uint64).reshape(-1, _ROW_BYTES // 8)
        self.value = zlib.crc32(words.sum(axis=0).data, self.value)


class Snapshot(NamedTuple):
    """A whole snapshot.

    Attributes:
        generation: the file that it is in.
        path: of this file.
        step: after which it was made.
        nbytes: how many of the file's bytes it is.
    """

    generation: int
    path: str
    step: int
    nbytes: int


class _Record(NamedTuple):
    sequence: int
    step: int
    nbytes: int
    checksum: int
    key: int

    def pack(self) -> bytes:
        fields = _RECORD.pack(*self)
        return fields + _RECORD_CHECK.pack(zlib.crc32(fields))

    @classmethod
    def unpack(cls, packed: bytes) -> _Record | None:
        """The record, or `None` where there is none, or a part of one."""
        fields = packed[: _RECORD.size]
        (check,) = _RECORD_CHECK.unpack_from(packed, _RECORD.size)
        record = cls(*_RECORD.unpack(fields))
        return record if record.sequence and check == zlib.crc32(fields) else None


class SnapshotMemory:
    """Two generations of snapshots.

    The newer one's file is never written to, so that a kill leaves one whole.

    Args:
        memory: the launcher's.
        path: of the checkpoint that the snapshots belong to.
    """

    def __init__(self, memory: JobMemory, path: str) -> None:
        self._memory = memory
        self._key = zlib.crc32(os.path.abspath(path).encode())
        self._segments = [_segment(file) for file in memory.files]
        self._newest = max(
            range(len(self._segments)), key=lambda one: (self._record(one) or _NONE).sequence
        )

    def write(self, contents: Contents, step: int) -> None:
        """Writes a snapshot in place of the older one.

        Raises:
            MemoryError: there is not enough memory for it. The newer one is whole.
        """
        newest = self._record(self._newest)
        generation = self._newest if newest is None else (self._newest + 1) % len(self._segments)
        segment = self._segments[generation]
        self._memory.write_record(generation, b"")
        segment.commit(_committed(self._memory.files[generation]), _whole_rows(contents.nbytes))
        checksum, written, array = SnapshotChecksum(), 0, segment.array
        for view in contents.views():
            data = np.frombuffer(view, np.uint8)
            while data.size:
                stop = min(written + data.size, (written // _PIECE + 1) * _PIECE)
                array[written:stop] = data[: stop - written]
                data, written = data[stop - written :], stop
                if written % _PIECE == 0:
                    checksum.add(array[written - _PIECE : written])
        array[written : _whole_rows(written)] = 0
        if written % _PIECE:
            checksum.add(array[written // _PIECE * _PIECE : _whole_rows(written)])
        sequence = 0 if newest is None else newest.sequence
        record = _Record(sequence + 1, step, contents.nbytes, checksum.value, self._key)
        self._memory.write_record(generation, record.pack())
        self._newest = generation

    def newest(self) -> Snapshot | None:
        """The newest whole snapshot, which `write` spares from now on."""
        records = [
            (record, one)
            for one in range(len(self._segments))
            if (record := self._record(one)) is not None
        ]
        for record, one in sorted(records, reverse=True):
            if record.key == self._key and self._is_whole(one, record):
                self._newest = one
                return Snapshot(one, self._memory.files[one], record.step, record.nbytes)
        return None

    def _record(self, generation: int) -> _Record | None:
        return _Record.unpack(self._memory.record(generation))

    def _is_whole(self, generation: int, record: _Record) -> bool:
        segment, checksum = self._segments[generation], SnapshotChecksum()
        stop = _whole_rows(record.nbytes)
        if stop > _committed(self._memory.files[generation]):  # reading there would end the process
            return False
        for start in range(0, stop, _PIECE):
            checksum.add(segment.array[start : min(start + _PIECE, stop)])
        return checksum.value == record.checksum


_NONE = _Record(0, 0, 0, 0, 0)


def newest_step(memory: JobMemory) -> int | None:
    """The step of the newest snapshot, which is not looked at; `None` where there is none."""
    records = [
        record
        for one in range(GENERATIONS)
        if (record := _Record.unpack(memory.record(one))) is not None
    ]
    return max(records).step if records else None


def _segment(path: str) -> Segment:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return Segment(file, *reservable(os.fstat(file).st_size, 4))


def _committed(path: str) -> int:
    """Bytes of a file that have memory, from its beginning."""
    return os.stat(path).st_blocks * 512


def _whole_rows(nbytes: int) -> int:
    return -(-nbytes // _ROW_BYTES) * _ROW_BYTES
