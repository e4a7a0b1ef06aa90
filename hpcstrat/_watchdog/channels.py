"""What a rank tells the others, and how: in memory that a host's ranks share, by TCP to rank 0.

Each rank publishes its `RankStatus` at every beat, twice a second:

    host 0                                        host 1
    rank 0         rank 1         rank 2          rank 3         rank 4         rank 5
      |              |              |               |              |              |
    [ RankStatus  |  RankStatus  |  RankStatus ]  [ RankStatus  |  RankStatus  |  RankStatus ]
      |              shared memory                  |              shared memory
      | RootChannel                                 | MemberChannel, as the leader of its host
      | <-------------- TCP: a HostFrame ---------- |
      | --------------- TCP: an empty frame ------> |

On one host this is the memory alone, a `StatusChannel`, and every rank sees all statuses. On
several, rank 0 alone sees all; what the ranks of the other hosts do is in `host_channels.py`, and
how their frames travel in `tcp.py`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from hpcstrat._memory.intervals import round_up
from hpcstrat._memory.segment import make_shared_segment

SLOT = 2048
"""Bytes of a rank's status in shared memory."""

_HEAD = struct.Struct("<II")  # length and checksum: a reader may come while the writer writes
_LONGEST = (400, 150, 40, 0)  # characters of a text in a status: the first that fits

LIMIT = 2000
"""The most bytes of a packed status."""


Place: TypeAlias = tuple[int, str, str]
"""The number, the call and the location of a status."""


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

    @property
    def place(self) -> Place:
        """Where it is: what its line in a report shows."""
        return self.number, self.call, self.location

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


UNKNOWN = RankStatus(-1, "", "", False, 0, 0.0, False, process=0, beat=-1)
"""Stands for the status of a rank that has not published one yet."""


class StatusChannel:
    """Where the ranks of one host publish their statuses: a slot of shared memory for each.

    On several hosts the ranks have one of its subclasses in `host_channels.py`.

    Args:
        index: this rank's index among those of its host.
        slots: `SLOT` bytes per rank, shape `(ranks, SLOT)`, zeros at first, shared by the ranks.
        processes: the process id of each rank, 0 for those whose end this process cannot see.

    Attributes:
        every_rank_sees_all: whether every rank sees all statuses; else rank 0 alone does.
        root_silence: seconds for which rank 0 has not been heard, while this rank ran; 0 on ranks
            that see all statuses.
    """

    every_rank_sees_all: bool = True

    def __init__(self, index: int, slots: Any, processes: Sequence[int]) -> None:
        self.root_silence: float = 0.0
        self._index = index
        self._slots = [memoryview(slot) for slot in slots]
        self._statuses = [UNKNOWN] * len(self._slots)  # the last one of each rank of this host
        self._poll = select.epoll()  # of these files, and of a subclass's sockets
        self._files: dict[int, int] = {}  # of the processes that can be watched -> index
        self._dead: list[int] = []  # their indices
        for other, process in enumerate(processes):
            if other != index and process:
                # Where there is no pidfd, the launcher notices the death of a rank.
                with contextlib.suppress(OSError, AttributeError):
                    # A pidfd turns readable when its process ends, so a death needs no polling, and
                    # a process id that is used again is not mistaken for the old process.
                    self._files[os.pidfd_open(process)] = other
        for file in self._files:
            self._poll.register(file, select.EPOLLIN)

    def publish(self, status: RankStatus) -> list[RankStatus] | None:
        """Publishes this rank's status; returns each rank's last one if this rank sees them all."""
        return self._share(status)

    def _share(self, status: RankStatus) -> list[RankStatus]:
        """Writes this rank's slot; returns the last statuses of its host's ranks."""
        message = status.pack()
        slot = self._slots[self._index]
        slot[_HEAD.size : _HEAD.size + len(message)] = message
        slot[: _HEAD.size] = _HEAD.pack(len(message), zlib.crc32(message))
        for index, slot in enumerate(self._slots):
            length, checksum = _HEAD.unpack_from(slot)
            message = bytes(slot[_HEAD.size : _HEAD.size + min(length, SLOT - _HEAD.size)])
            if message and zlib.crc32(message) == checksum:
                self._statuses[index] = RankStatus.unpack(message)
        return self._statuses

    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier if a rank dies."""
        # Not only until something comes: statuses and answers to them would go back and forth.
        end, left, has_news = time.monotonic() + seconds, seconds, False
        while left >= 0 and not has_news:
            for file, _ in self._poll.poll(left):
                has_news |= self._receive(file)
            left = end - time.monotonic()

    def _receive(self, file: int) -> bool:
        """Takes what has come; returns whether it tells of a death."""
        self._dead.append(self._files.pop(file))
        self._poll.unregister(file)
        os.close(file)
        return True

    @property
    def dead(self) -> list[int]:
        """Ranks whose processes are known to have ended."""
        return self._dead

    def close(self) -> None:
        """Releases its files and sockets."""
        while self._files:
            os.close(self._files.popitem()[0])
        self._poll.close()


def share_slots(comm: Any) -> tuple[Any, list[int]]:
    """The `slots` and `processes` of a `StatusChannel`. Collective.

    Args:
        comm: the MPI communicator of the ranks of one host.
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
    return slots, [process if space == own else 0 for process, space in by_rank]


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"of process {os.getpid()}"
