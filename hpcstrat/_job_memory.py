"""What outlives the ranks of a job: memory of their launcher, by which it knows what to do when they have ended.

`hpcstrat run --restarts` makes it and passes its place on in a variable. It consists of files without names, so it goes
with the launcher, however that ends. Ranks on other hosts do without.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GENERATIONS = 2
"""Files for snapshots: while one is written, the other's is whole."""

PREEMPTED = "preempted"
"""Noted in place of an exception by a rank that exits because it was asked to."""

_VARIABLE = "_HPCSTRAT_JOB"
_NAME = "hpcstrat-job"
_TOKEN_BYTES = 16
_STEPS = struct.Struct("<qq")  # the number of the last step, and how many were done since the start
_STEPS_AT = 64
_RECORDS_AT = 256
RECORD_BYTES = 128
"""Bytes that describe the snapshot in a file."""
_RANKS_AT = 4096
_RANK = struct.Struct("<idI")  # process, when it failed, bytes of the text
_RANK_BYTES = 1024
_MOST_RANKS = 1 << 14  # of which the memory has pages for those only that there are


class Failure(NamedTuple):
    """An exception that ended the program on a rank.

    Attributes:
        rank: which.
        text: its type, message and place.
        time: when it was reported, by `time.monotonic`.
    """

    rank: int
    text: str
    time: float


class JobMemory:
    """A control block, and files for snapshots. Each part has one writer, and readers come when that has ended.

    Attributes:
        place: a word that names it to other processes of this host.
        files: paths of the files for snapshots.
    """

    def __init__(self, place: str) -> None:
        self.place: str = place
        process, *numbers, _ = place.split(":")
        control, *files = [f"/proc/{int(process)}/fd/{int(number)}" for number in numbers]
        self.files: tuple[str, ...] = tuple(files)
        file = os.open(control, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._control = mmap.mmap(file, _RANKS_AT + _MOST_RANKS * _RANK_BYTES)
        finally:
            os.close(file)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which ranks find it."""
        return {_VARIABLE: self.place}

    def close(self) -> None:
        """Gives up the files of `create`, in the process that called it."""
        self._control.close()
        for number in self.place.split(":")[1:-1]:
            os.close(int(number))

    # ---- what ranks write

    def note_rank(self, rank: int) -> None:
        """Notes that this process is this rank."""
        self._write_rank(rank, os.getpid(), 0.0, b"")

    def note_failure(self, rank: int, text: str) -> None:
        """Notes the exception that ends this rank."""
        encoded = text.encode(errors="replace")[: _RANK_BYTES - _RANK.size]
        self._write_rank(rank, os.getpid(), time.monotonic(), encoded)

    def note_step(self, number: int) -> None:
        """Notes that the program has done this step. One rank does."""
        _, done = self.steps()
        _STEPS.pack_into(self._control, _STEPS_AT, number, done + 1)

    def write_record(self, generation: int, record: bytes) -> None:
        """Describes the snapshot in a file; nothing for none."""
        at = _RECORDS_AT + generation * RECORD_BYTES
        self._control[at : at + RECORD_BYTES] = record.ljust(RECORD_BYTES, b"\0")

    # ---- what is read

    def record(self, generation: int) -> bytes:
        """What `write_record` wrote, followed by zeros."""
        at = _RECORDS_AT + generation * RECORD_BYTES
        return self._control[at : at + RECORD_BYTES]

    def steps(self) -> tuple[int, int]:
        """The number of the last step, and how many were done since the last start."""
        number, done = _STEPS.unpack_from(self._control, _STEPS_AT)
        return number, done

    def processes(self, ranks: int) -> dict[int, int]:
        """The process of each rank that runs on this host, and has imported the library."""
        found = {rank: self._read_rank(rank)[0] for rank in range(min(ranks, _MOST_RANKS))}
        return {rank: process for rank, process in found.items() if process}

    def first_failure(self, ranks: int) -> Failure | None:
        """The exception that was reported first, if any."""
        failures = []
        for rank in self.processes(ranks):
            _, when, text = self._read_rank(rank)
            if when:
                failures.append(Failure(rank, text.decode(errors="replace"), when))
        return min(failures, key=lambda failure: failure.time, default=None)

    def begin(self, ranks: int) -> None:
        """Forgets the ranks of the start before, and how many steps they did. The launcher does, before each start."""
        number, _ = self.steps()
        _STEPS.pack_into(self._control, _STEPS_AT, number, 0)
        for rank in range(min(ranks, _MOST_RANKS)):
            self._write_rank(rank, 0, 0.0, b"")

    def _write_rank(self, rank: int, process: int, when: float, text: bytes) -> None:
        if rank < _MOST_RANKS:
            at = _RANKS_AT + rank * _RANK_BYTES
            self._control[at + _RANK.size : at + _RANK.size + len(text)] = text
            _RANK.pack_into(self._control, at, process, when, len(text))

    def _read_rank(self, rank: int) -> tuple[int, float, bytes]:
        at = _RANKS_AT + rank * _RANK_BYTES
        process, when, length = _RANK.unpack_from(self._control, at)
        return process, when, self._control[at + _RANK.size : at + _RANK.size + length]


def create(nbytes: int) -> JobMemory:
    """New memory, which lives as long as this process.

    Args:
        nbytes: that a file for a snapshot can have at most; it takes what is written.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    files = [os.memfd_create(_NAME, os.MFD_CLOEXEC) for _ in range(1 + GENERATIONS)]
    os.ftruncate(files[0], _RANKS_AT + _MOST_RANKS * _RANK_BYTES)
    os.pwrite(files[0], token, 0)
    for file in files[1:]:
        os.ftruncate(file, nbytes)
    return JobMemory(":".join([str(os.getpid()), *map(str, files), token.hex()]))


def is_expected(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher keeps such memory, here or on another host."""
    return bool(environment.get(_VARIABLE))


def find(environment: Mapping[str, str] = os.environ) -> JobMemory | None:
    """The memory of the launcher that started this process; None where there is none, or it is on another host."""
    place = environment.get(_VARIABLE, "")
    # Files of our own, and not those of another process that has the same number on this host.
    with contextlib.suppress(OSError, ValueError):
        process, *numbers, token = place.split(":")
        if _are_ours(process, numbers, bytes.fromhex(token)):
            return JobMemory(place)
    return None


def _are_ours(process: str, numbers: Sequence[str], token: bytes) -> bool:
    paths = [f"/proc/{int(process)}/fd/{int(number)}" for number in numbers]
    # Before anything is opened: to open a FIFO, say, may wait or wake its writer.
    if len(paths) != 1 + GENERATIONS or not all(os.readlink(path).startswith(f"/memfd:{_NAME}") for path in paths):
        return False
    with open(paths[0], "rb", buffering=0) as control:
        return len(token) == _TOKEN_BYTES and control.read(_TOKEN_BYTES) == token
