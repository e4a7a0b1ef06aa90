"""What a rank tells the others about itself, twice a second; on one host, through shared memory."""

from __future__ import annotations

import abc
import contextlib
import json
import mmap
import os
import select
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, final

from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.segment import make_shared_segment

SLOT = 2048
"""Bytes of a rank's status in shared memory."""

_HEAD = struct.Struct("<II")  # length and checksum: a reader may come while the writer writes
_LONGEST = (400, 150, 40, 0)  # characters of a text in a status: the first that fits

LIMIT = 2000
"""The most bytes of a packed status."""


class RankStatus(NamedTuple):
    """One rank at one moment.

    Attributes:
        number: the number of its current or last collective call.
        call: this call in words.
        location: file and line of the program that it is at.
        waits: whether it is inside a collective call.
        progress: a number that changes while the library does long work of its own.
        extra_seconds: how much longer than usual it asks the others to wait.
        gone: whether it leaves the program properly.
        process: its process id.
        beat: a number that changes with every status.
    """

    number: int
    call: str
    location: str
    waits: bool
    progress: int
    extra_seconds: float
    gone: bool
    process: int
    beat: int = 0

    def pack(self) -> bytes:
        """The status as at most `LIMIT` bytes; long texts are cut."""
        message = b""
        # A slot has a fixed size. The end of a path and the start of a call say most, so these stay
        # when a text is cut.
        for longest in _LONGEST:
            short = self._replace(
                call=self.call[:longest],
                location=self.location[max(len(self.location) - longest, 0) :],
            )
            message = json.dumps(short, ensure_ascii=False).encode(errors="replace")
            if len(message) <= LIMIT:
                break
        return message

    @classmethod
    def unpack(cls, message: bytes) -> RankStatus:
        """The status in these bytes, which `pack` made.

        Raises:
            ValueError: they are something else.
        """
        fields = json.loads(message)
        if not isinstance(fields, list) or len(fields) != len(cls._fields):
            raise ValueError(f"{message!r} is not a status")
        return cls(*fields)


class StatusChannel(abc.ABC):
    """Where each rank publishes its status.

    Attributes:
        every_rank_sees_all: whether every rank sees all statuses; else rank 0 alone does.
    """

    every_rank_sees_all: bool = True

    @abc.abstractmethod
    def publish(self, status: RankStatus) -> list[RankStatus | None] | None:
        """Publishes this rank's status; returns each rank's last one, or `None` if unknown here."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier if a rank dies."""

    @property
    @abc.abstractmethod
    def dead(self) -> list[int]:
        """Ranks whose processes are known to have ended."""

    def silent_since(self) -> float | None:
        """When rank 0 was last heard from, by `time.monotonic`; `None` where that is no concern."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Releases its files and sockets."""


@final
class SharedMemoryChannel(StatusChannel):
    """A slot of shared memory for each rank of one host.

    Args:
        rank: this process's.
        slots: `SLOT` bytes per rank, shape `(size, SLOT)`, zeros at first, shared by the ranks.
        processes: the process id of each rank, 0 for those whose end this process cannot see.
    """

    def __init__(self, rank: int, slots: Any, processes: Sequence[int]) -> None:
        self._rank = rank
        self._slots = [memoryview(slot) for slot in slots]
        self._statuses: list[RankStatus | None] = [None] * len(self._slots)
        self._poll = select.epoll()
        self._files: dict[int, int] = {}  # of the processes that can be watched -> rank
        self.dead_ranks: list[int] = []
        for other, process in enumerate(processes):
            if other != rank and process:
                # Where there is no pidfd, the launcher notices the death of a rank.
                with contextlib.suppress(OSError, AttributeError):
                    # A pidfd turns readable when its process ends, so a death needs no polling, and
                    # a process id that is used again is not mistaken for the old process.
                    self._files[os.pidfd_open(process)] = other
        for file in self._files:
            self._poll.register(file, select.EPOLLIN)

    def publish(self, status: RankStatus) -> list[RankStatus | None]:
        message = status.pack()
        slot = self._slots[self._rank]
        slot[_HEAD.size : _HEAD.size + len(message)] = message
        slot[: _HEAD.size] = _HEAD.pack(len(message), zlib.crc32(message))
        for rank, slot in enumerate(self._slots):
            length, checksum = _HEAD.unpack_from(slot)
            message = bytes(slot[_HEAD.size : _HEAD.size + min(length, SLOT - _HEAD.size)])
            if message and zlib.crc32(message) == checksum:
                self._statuses[rank] = RankStatus.unpack(message)
        return self._statuses

    def fileno(self) -> int:
        """For `select`: readable if a rank has died since the last `wait`."""
        return self._poll.fileno()

    def wait(self, seconds: float) -> None:
        for file, _ in self._poll.poll(seconds):
            self.dead_ranks.append(self._files.pop(file))
            self._poll.unregister(file)
            os.close(file)

    @property
    def dead(self) -> list[int]:
        return self.dead_ranks

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[0])
        self._poll.close()


def share_memory_channel(comm: Any) -> SharedMemoryChannel:
    """The channel of ranks on one host. Collective.

    Args:
        comm: their MPI communicator.
    """
    nbytes = round_up(comm.size * SLOT, mmap.PAGESIZE)
    segment = make_shared_segment(comm, nbytes, least=nbytes)
    if comm.rank == 0:
        segment.commit(0, nbytes)
    comm.Barrier()  # no rank may touch pages before they exist
    slots = segment.array[: comm.size * SLOT].reshape(comm.size, SLOT)
    by_rank = comm.allgather((os.getpid(), _process_namespace()))
    own = by_rank[comm.rank][1]
    # In another namespace the same number is another process.
    return SharedMemoryChannel(
        comm.rank, slots, [process if space == own else 0 for process, space in by_rank]
    )


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"of process {os.getpid()}"
