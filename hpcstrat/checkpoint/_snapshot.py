"""Snapshots: checkpoints in memory of the job's launcher, which survive the death of the ranks."""

from __future__ import annotations

import os
import struct
import zlib
from typing import NamedTuple

import numpy as np

from hpcstrat._core.types import Bytes
from hpcstrat._memory.intervals import Interval, round_up
from hpcstrat._memory.segment import Segment, reservable
from hpcstrat._process.job_files import GENERATIONS, JobMemory
from hpcstrat.checkpoint._safetensors import Contents

_ROW_BYTES = 1 << 13
_PIECE = 1 << 20  # bytes that are copied and summed at once, so that they are summed in the cache
# sequence, step, bytes, checksum of these bytes, checksum of the manager's path
_RECORD = struct.Struct("<QqQII")
_RECORD_CHECK = struct.Struct("<I")


class SnapshotChecksum:
    """A checksum of a snapshot, several times as fast as a CRC of all its bytes.

    A piece is rows of 1,024 words of 64 bits; the checksum is the CRC-32 of the sums of each
    piece's columns. So it detects flipped bits, pieces that are partly or wholly old, and pieces
    that are swapped.
    """

    def __init__(self) -> None:
        self.value: int = 0

    def add(self, piece: Bytes) -> None:
        """Adds a piece that consists of whole rows."""
        words = piece.view(np.uint64).reshape(-1, _ROW_BYTES // 8)
        self.value = zlib.crc32(words.sum(axis=0).data, self.value)


class Snapshot(NamedTuple):
    """A whole snapshot.

    Attributes:
        generation: the index of its file.
        path: the file's path.
        step: the step after which it was made.
        nbytes: its size: the first bytes of the file.
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
        """The record; `None` if there is none, or only a part."""
        fields = packed[: _RECORD.size]
        (check,) = _RECORD_CHECK.unpack_from(packed, _RECORD.size)
        record = cls(*_RECORD.unpack(fields))
        return record if record.sequence and check == zlib.crc32(fields) else None


class SnapshotMemory:
    """Two generations of snapshots.

    The file of the newer snapshot is never written to, so a kill leaves one snapshot whole.

    Args:
        memory: the launcher's memory.
        path: the path of the checkpoint that the snapshots belong to.
    """

    def __init__(self, memory: JobMemory, path: str) -> None:
        self._memory = memory
        self._key = zlib.crc32(os.path.abspath(path).encode())
        self._segments = [_segment(file) for file in memory.files]
        self._newest = max(
            range(len(self._segments)), key=lambda i: (self._record(i) or _NONE).sequence
        )

    def write(self, contents: Contents, step: int) -> None:
        """Writes a snapshot in place of the older snapshot.

        Raises:
            MemoryError: there is not enough memory for it. The newer snapshot is whole.
        """
        newest = self._record(self._newest)
        generation = self._newest if newest is None else (self._newest + 1) % len(self._segments)
        segment = self._segments[generation]
        self._memory.write_record(generation, b"")
        committed = _count_committed(self._memory.files[generation])
        segment.commit(committed, _whole_rows(contents.nbytes))
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
        """The newest whole snapshot, which the next `write` does not overwrite."""
        records = [
            (record, i)
            for i in range(len(self._segments))
            if (record := self._record(i)) is not None
        ]
        for record, i in sorted(records, reverse=True):
            if record.key == self._key and self._is_whole(i, record):
                self._newest = i
                return Snapshot(i, self._memory.files[i], record.step, record.nbytes)
        return None

    def _record(self, generation: int) -> _Record | None:
        return _Record.unpack(self._memory.record(generation))

    def _is_whole(self, generation: int, record: _Record) -> bool:
        segment, checksum = self._segments[generation], SnapshotChecksum()
        stop = _whole_rows(record.nbytes)
        # Reading memory that is not committed would end the process.
        if stop > _count_committed(self._memory.files[generation]):
            return False
        for piece in Interval(0, stop).split(_PIECE):
            checksum.add(segment.array[piece.slice])
        return checksum.value == record.checksum


_NONE = _Record(0, 0, 0, 0, 0)


def newest_step(memory: JobMemory) -> int | None:
    """The step of the newest snapshot, which is not checked; `None` if there is none."""
    records = [
        record
        for i in range(GENERATIONS)
        if (record := _Record.unpack(memory.record(i))) is not None
    ]
    return max(records).step if records else None


def _segment(path: str) -> Segment:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return Segment(file, *reservable(os.fstat(file).st_size, 4))


def _count_committed(path: str) -> int:
    """The number of a file's bytes that have memory, from its start."""
    return os.stat(path).st_blocks * 512


def _whole_rows(nbytes: int) -> int:
    return round_up(nbytes, _ROW_BYTES)
