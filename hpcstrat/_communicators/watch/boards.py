"""How the ranks' notes get from one to another, and how it does on one host: by shared memory."""

from __future__ import annotations

import abc
import contextlib
import os
import select
import struct
import zlib
from collections.abc import Sequence
from typing import Any, final

from hpcstrat._communicators.watch.notes import Note

SLOT = 2048
"""Bytes of a rank's note in shared memory."""

_HEAD = struct.Struct("<II")  # length and checksum: a reader may come while the writer writes


class Board(abc.ABC):
    """Where each rank leaves its note.

    Attributes:
        judges_everywhere: whether every rank sees all notes; else rank 0 alone does.
    """

    judges_everywhere: bool = True

    @abc.abstractmethod
    def swap(self, note: Note) -> list[Note | None] | None:
        """Leaves this rank's note; returns all ranks' last ones, or `None` where this rank is not told."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier where a rank has died."""

    @property
    @abc.abstractmethod
    def dead(self) -> list[int]:
        """Ranks whose processes are known to be no more."""

    def silent_since(self) -> float | None:
        """When rank 0 was last heard of, by `time.monotonic`, where it alone judges and this is another rank."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""


@final
class SharedBoard(Board):
    """A slot of shared memory for each rank of one host.

    Args:
        rank: this process's.
        slots: `SLOT` bytes a rank, shape `(size, SLOT)`, zeros at first, shared by the ranks.
        processes: the process id of each rank, 0 for those whose end this process cannot see.
    """

    def __init__(self, rank: int, slots: Any, processes: Sequence[int]) -> None:
        self._rank = rank
        self._slots = [memoryview(slot) for slot in slots]
        self._notes: list[Note | None] = [None] * len(self._slots)
        self._poll = select.poll()
        self._files: dict[int, int] = {}  # of the processes that can be watched -> rank
        self.dead_ranks: list[int] = []
        for other, process in enumerate(processes):
            if other != rank and process:
                with contextlib.suppress(OSError, AttributeError):  # then it is the launcher's to notice
                    self._files[os.pidfd_open(process)] = other
        for file in self._files:
            self._poll.register(file, select.POLLIN)

    def swap(self, note: Note) -> list[Note | None]:
        message = note.pack()
        slot = self._slots[self._rank]
        slot[_HEAD.size : _HEAD.size + len(message)] = message
        slot[: _HEAD.size] = _HEAD.pack(len(message), zlib.crc32(message))
        for rank, slot in enumerate(self._slots):
            length, checksum = _HEAD.unpack_from(slot)
            message = bytes(slot[_HEAD.size : _HEAD.size + min(length, SLOT - _HEAD.size)])
            if message and zlib.crc32(message) == checksum:
                self._notes[rank] = Note.unpack(message)
        return self._notes

    def wait(self, seconds: float) -> None:
        for file, _ in self._poll.poll(1000 * seconds):
            self.dead_ranks.append(self._files.pop(file))
            self._poll.unregister(file)
            os.close(file)

    @property
    def dead(self) -> list[int]:
        return self.dead_ranks

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[0])


def share_board(comm: Any, slots: Any) -> SharedBoard:
    """The board of ranks on one host. Collective.

    Args:
        comm: their MPI communicator.
        slots: see `SharedBoard`.
    """
    everyones = comm.allgather((os.getpid(), _process_namespace()))
    own = everyones[comm.rank][1]
    return SharedBoard(comm.rank, slots, [process if space == own else 0 for process, space in everyones])


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"of process {os.getpid()}"
