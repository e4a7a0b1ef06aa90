"""What each rank tells rank 0, twice a second, over one connection; and what rank 0 answers.

    rank 1, 2, ... N-1  -- a line of JSON, its RankStatus -->  rank 0, which sees all
                        <------ rank 0's own RankStatus -----

On one host the connections are Unix sockets, on several TCP. They never wait. A process that ends
closes its connection, so the other side sees its death.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import select
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from hpcstrat._watchdog.addresses import addresses

_CONNECT_SECONDS = 10.0  # that rank 0 is tried, and that it waits for ranks that have reached it
_LOOK_SECONDS = 0.001  # between two looks at who has connected
_STRANGERS = 64  # connections that may be waiting to be accepted, or to say who they are
_LONGEST = 400  # characters of a text in a status
_ROOM = 1 << 16  # bytes of a line that is not whole yet: no status is as long
_SPARE_FILES = 256  # that the program may open beside the connections

SILENT_SECONDS = 2.0
"""Seconds without a new status after which a rank's watchdog counts as not running."""

Address: TypeAlias = "tuple[str, int] | str"
"""Of TCP, or the name of a Unix socket."""


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
        """The status as a line; of long texts the start of the call and the end of the path."""
        short = self._replace(call=self.call[:_LONGEST], location=self.location[-_LONGEST:])
        return json.dumps(short).encode() + b"\n"

    @property
    def call_in_words(self) -> str:
        """Its call, for reports."""
        return f"call {self.number}, {self.call}" if self.call else "no call"

    @property
    def words(self) -> str:
        """Its call and its place, for reports."""
        return f"{self.call_in_words}, at {self.location}"

    @classmethod
    def unpack(cls, line: bytes) -> RankStatus:
        """The status in this line, which `pack` made."""
        return cls(*json.loads(line))


UNKNOWN = RankStatus(-1, "", "", False, 0, 0.0, False, process=0, beat=-1)
"""Stands for the status of a rank that has not sent one yet."""


class Link:
    """One side of a connection, over which lines travel.

    Attributes:
        is_closed: whether the other side has closed it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:  # a status must not wait until the last has arrived
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received = self._unsent = b""
        self.is_closed: bool = False

    def send(self, line: bytes) -> None:
        """Sends a line, or drops it while the end of another one is still on its way."""
        self._unsent = self._unsent or line
        # Without a signal: the program may have set SIGPIPE to its default, which ends a process.
        with contextlib.suppress(OSError):  # full for now, or closed, which `receive` finds
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            self._unsent = self._unsent[sent:]

    def receive(self) -> list[bytes]:
        """The lines that have come. Who sends too much without a line's end is cut off."""
        try:
            part = self._socket.recv(_ROOM)
            self.is_closed |= not part
        except BlockingIOError:
            return []
        except OSError:
            self.is_closed, part = True, b""
        *lines, self._received = (self._received + part).split(b"\n")
        self.is_closed |= len(self._received) >= _ROOM
        return lines

    def fileno(self) -> int:
        """For `select.poll`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes it, which the other side sees."""
        self._socket.close()


def _wait(links: Iterable[Link], seconds: float) -> None:
    """Returns after these seconds, or earlier if the other side of one closes it."""
    poll = select.poll()
    for link in links:
        if not link.is_closed:
            poll.register(link, select.POLLRDHUP)
    poll.poll(1000 * seconds)


@final
class RootChannel:
    """Rank 0's.

    Args:
        size: the number of ranks.

    Attributes:
        statuses: each rank's last status.
    """

    def __init__(self, size: int) -> None:
        self.statuses: list[RankStatus] = [UNKNOWN] * size
        self._links: dict[int, Link] = {}
        os.register_at_fork(after_in_child=self.close)

    def add(self, rank: int, link: Link) -> None:
        """Adds a rank's connection."""
        self._links[rank] = link

    @property
    def is_complete(self) -> bool:
        """Whether all ranks are connected."""
        return len(self._links) == len(self.statuses) - 1

    def exchange(self, status: RankStatus) -> None:
        """Tells all ranks this rank's status, and takes theirs."""
        self.statuses[0], line = status, status.pack()
        for rank, link in self._links.items():
            for received in link.receive():
                self.statuses[rank] = RankStatus.unpack(received)
            link.send(line)

    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier if a rank dies."""
        _wait(self._links.values(), seconds)

    @property
    def dead(self) -> list[int]:
        """Ranks whose processes have ended."""
        return [rank for rank, link in self._links.items() if link.is_closed]

    def close(self) -> None:
        """Closes all connections."""
        for link in self._links.values():
            link.close()


@final
class MemberChannel:
    """That of any other rank.

    Args:
        link: the connection to rank 0.

    Attributes:
        root: rank 0's last status.
        root_silence: seconds for which this rank has waited in one call, or been at its end,
            without a word of rank 0.
    """

    def __init__(self, link: Link) -> None:
        self.root: RankStatus = UNKNOWN
        self.root_silence: float = 0.0
        self._link = link
        # Else a child would keep the connection open when its parent dies.
        os.register_at_fork(after_in_child=link.close)
        self._looked = time.monotonic()
        self._number = -1  # of this rank's call

    def exchange(self, status: RankStatus) -> None:
        """Tells rank 0 this rank's status, and takes its own."""
        self._link.send(status.pack())
        now = time.monotonic()
        lines = self._link.receive()
        if lines:
            self.root = RankStatus.unpack(lines[-1])
        # A rank 0 that takes part in calls is well, even if its watchdog comes to nothing.
        if lines or status.number != self._number or not (status.waits or status.gone):
            self.root_silence, self._number = 0.0, status.number
        else:
            # A longer pause is this rank's: it was suspended, perhaps with rank 0.
            self.root_silence += min(now - self._looked, SILENT_SECONDS)
        self._looked = now

    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier if rank 0 dies."""
        _wait([self._link], seconds)

    @property
    def root_is_dead(self) -> bool:
        """Whether rank 0's process has ended, or cannot be reached any more."""
        return self._link.is_closed

    def close(self) -> None:
        """Closes the connection."""
        self._link.close()


# ---- how the ranks connect


@final
class Listener:
    """Where ranks connect to rank 0. Strangers that find it keep none out.

    Args:
        size: the number of ranks.
        is_one_host: whether they are on one host.

    Attributes:
        addresses: where ranks reach it.
        token: what ranks say first, and strangers do not know.
    """

    def __init__(self, size: int, is_one_host: bool) -> None:
        self.token: str = secrets.token_hex(16)
        backlog = size + _STRANGERS
        if is_one_host:
            name = f"\0hpcstrat-{secrets.token_hex(16)}"  # abstract: no file stays
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(name)
            self._socket.listen(backlog)
            self.addresses: Sequence[Address] = [name]
        else:
            self._socket = socket.create_server(("", 0), backlog=backlog)
            self.addresses = addresses(self._socket.getsockname()[1])
        self._socket.setblocking(False)
        self._size = size
        self._strangers: list[Link] = []  # who have not said yet which rank they are
        os.register_at_fork(after_in_child=self.close)

    def admit_to(self, channel: RootChannel) -> None:
        """Takes the ranks that have connected."""
        for _ in range(self._size + _STRANGERS):
            try:
                self._strangers.append(Link(self._socket.accept()[0]))
            except OSError:  # none is there, or has gone already
                break
        waiting: list[Link] = []
        for link in self._strangers:
            lines = link.receive()
            rank = self._rank_in(lines[0]) if lines else None
            if rank is not None:
                channel.add(rank, link)
            elif lines or link.is_closed:
                link.close()
            else:
                waiting.append(link)
        for link in waiting[:-_STRANGERS]:  # a rank says who it is at once
            link.close()
        self._strangers = waiting[-_STRANGERS:]

    def _rank_in(self, hello: bytes) -> int | None:
        token, _, rank = hello.partition(b" ")
        is_ours = secrets.compare_digest(token, self.token.encode())
        return int(rank) if is_ours else None

    def close(self) -> None:
        for link in self._strangers:
            link.close()
        self._socket.close()


def connect(comm: Any, is_one_host: bool) -> RootChannel | MemberChannel | None:
    """This rank's channel; `None` on all ranks if one cannot reach rank 0. Collective.

    Args:
        comm: the MPI communicator of all ranks.
        is_one_host: whether they are on one host.
    """
    from mpi4py import MPI

    failed = np.zeros(1, np.int64)
    if comm.rank == 0:
        _allow_files(comm.size)
        channel: RootChannel | MemberChannel | None = _admit_all(comm, is_one_host, failed)
        is_complete = comm.bcast(channel is not None)
    else:
        token, found = comm.bcast(None)
        channel = reach(found, f"{token} {comm.rank}\n".encode())
        failed[0] = channel is None
        comm.Iallreduce(MPI.IN_PLACE, failed).Wait()
        is_complete = comm.bcast(None)
    if channel is not None and not is_complete:
        channel.close()
        return None
    return channel


def _admit_all(comm: Any, is_one_host: bool, failed: Any) -> RootChannel | None:
    """Rank 0's channel once all ranks have connected."""
    from mpi4py import MPI

    listener, channel = Listener(comm.size, is_one_host), RootChannel(comm.size)
    comm.bcast((listener.token, listener.addresses))
    all_have_tried = comm.Iallreduce(MPI.IN_PLACE, failed)
    end = float("inf")
    while not channel.is_complete and time.monotonic() < end:
        listener.admit_to(channel)
        if end == float("inf") and all_have_tried.Test():
            # What is still on its way gets some seconds, unless a rank knows that it failed.
            end = time.monotonic() + (0 if failed[0] else _CONNECT_SECONDS)
        time.sleep(_LOOK_SECONDS)
    all_have_tried.Wait()
    listener.close()
    if not channel.is_complete:
        channel.close()
        return None
    return channel


def reach(found: Sequence[Address], hello: bytes) -> MemberChannel | None:
    """The channel to rank 0 by the first address that works from here; they share ten seconds."""
    for address in found:
        try:
            if isinstance(address, str):
                connected = socket.socket(socket.AF_UNIX)
                connected.connect(address)  # waits for room, which rank 0 makes
            else:
                connected = socket.create_connection(address, _CONNECT_SECONDS / len(found))
            connected.sendall(hello)
            return MemberChannel(Link(connected))
        except OSError:
            continue
    return None


def _allow_files(size: int) -> None:
    """Raises the soft limit of open files, as far as the hard one lets it, for this many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = size + _SPARE_FILES + _STRANGERS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
