"""How ranks of several hosts exchange their statuses: inside each host, then by TCP to rank 0.

A rank of each host, its first one that answers, sends rank 0 a frame at every beat:

    what rank 0 decides by       for all ranks of the host at once, of a fixed size
    where the ranks are          what has changed: ranks that are at the same place together, and as
                                 many places as fit; the others follow at the next beats

So a beat costs rank 0 a frame from each host, and all hosts' places have a limited size.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from hpcstrat._watchdog.channels import (
    CONNECT_SECONDS,
    Connection,
    Listener,
    RankStatus,
    SharedMemoryChannel,
    StatusChannel,
    reach,
    share_memory_channel,
)

_BYTES = 1 << 15  # of places that rank 0 gets at a beat from all hosts, besides one from each
_LOOK_SECONDS = 0.2  # between two checks whether the time is over
_STAND_IN_SECONDS = 1.0  # without a new status: then the next rank of the host tells rank 0

# Ranks of one host are bits of an integer, from the first one up.
_Bits = int
# Where a rank is: number, call and location of its status.
_Place = tuple[int, str, str]


class _Head(NamedTuple):
    """What rank 0 must know of a host at every beat.

    Attributes:
        beat: the ranks that have published a new status.
        wait: those that wait for others.
        gone: those that leave the program properly.
        dead: those whose processes have ended.
        progress: a number that changes if any of them makes progress.
        extra_seconds: how much longer than usual any of them asks the others to wait.
    """

    beat: _Bits
    wait: _Bits
    gone: _Bits
    dead: _Bits
    progress: int
    extra_seconds: float


class _HostsChannel(StatusChannel):
    """What rank 0's channel and the others' have in common."""

    every_rank_sees_all = False

    def __init__(self, host: SharedMemoryChannel) -> None:
        self._host = host
        self._poll = select.epoll()
        self._poll.register(host, select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        # Not only until something comes: statuses and answers to them would go back and forth.
        end, left, has_news = time.monotonic() + seconds, seconds, False
        while left >= 0 and not has_news:
            for file, _ in self._poll.poll(left):
                if file == self._host.fileno():
                    self._host.wait(0)
                    has_news = True
                else:
                    has_news |= self._receive(file)
            left = end - time.monotonic()

    @abc.abstractmethod
    def _receive(self, file: int) -> bool:
        """Takes what has come; returns whether it tells of a death."""

    def close(self) -> None:
        self._host.close()
        self._poll.close()


@final
class RootChannel(_HostsChannel):
    """Rank 0's: it sees all statuses, and answers that it watches.

    Args:
        host: the channel of its own host.
        listener: where one rank of each other host connects, and later another in its place.
        hosts: the ranks of each host, rank 0's first.
        processes: each rank's process id.
    """

    def __init__(
        self,
        host: SharedMemoryChannel,
        listener: Listener,
        hosts: Sequence[Sequence[int]],
        processes: Sequence[int],
    ) -> None:
        super().__init__(host)
        self._listener = listener
        self._hosts = hosts
        self._host_of = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
        self._processes = processes
        self._statuses: list[RankStatus | None] = [None] * len(processes)
        self._connections: dict[int, tuple[int, Connection]] = {}  # by file: the rank that sends
        self._dead: set[int] = set()  # whose connections have closed
        self._said_dead: dict[int, Sequence[int]] = {}  # by host: what another rank of it said last
        self._poll.register(listener, select.EPOLLIN)

    @property
    def is_complete(self) -> bool:
        """Whether a rank of each other host is connected."""
        return len(self._connected_hosts()) == len(self._hosts) - 1

    def _connected_hosts(self) -> set[int]:
        return {self._host_of[rank] for rank, _ in self._connections.values()}

    def publish(self, status: RankStatus) -> list[RankStatus | None]:
        for rank, own in zip(self._hosts[0], self._host.publish(status), strict=True):
            self._statuses[rank] = own
        for _, connection in self._connections.values():
            connection.send(b"")
        return self._statuses

    def _receive(self, file: int) -> bool:
        if file == self._listener.fileno():
            for rank, connection in self._listener.accept().items():
                self._connections[connection.fileno()] = rank, connection
                self._poll.register(connection, select.EPOLLIN)
            return False
        rank, connection = self._connections[file]
        frames = connection.receive()
        host = self._host_of[rank]
        if frames is not None:
            return any([self._read(host, frame) for frame in frames])
        del self._connections[file]
        self._poll.unregister(connection)
        connection.close()
        self._dead.add(rank)
        status = self._statuses[rank]
        # Until another rank of the host connects and knows better. One that left in order has told
        # before what the others did.
        if not (status and status.gone) and host not in self._connected_hosts():
            self._said_dead[host] = self._hosts[host]
        return True

    def _read(self, host: int, frame: bytes) -> bool:
        first, *lines = frame.split(b"\n")
        head = _Head(*json.loads(first))
        places: dict[int, _Place] = {}
        for line in lines:
            bits, number, call, location = json.loads(line)
            places |= dict.fromkeys(_indices(bits), (number, call, location))
        for index, rank in enumerate(self._hosts[host]):
            old = self._statuses[rank]
            place = places.get(index) or (old and _place_of(old))
            if place is not None:
                self._statuses[rank] = RankStatus(
                    *place,
                    bool(head.wait >> index & 1),
                    head.progress,
                    head.extra_seconds,
                    bool(head.gone >> index & 1),
                    self._processes[rank],
                    (old.beat if old else 0) + (head.beat >> index & 1),
                )
        dead = [self._hosts[host][index] for index in _indices(head.dead)]
        has_news = dead != self._said_dead.get(host, [])
        self._said_dead[host] = dead
        return has_news

    @property
    def dead(self) -> list[int]:
        own = [self._hosts[0][index] for index in self._host.dead]
        return sorted(self._dead.union(own, *self._said_dead.values()))

    def close(self) -> None:
        super().close()
        self._listener.close()
        for _, connection in self._connections.values():
            connection.close()
        self._connections = {}


@final
class MemberChannel(_HostsChannel):
    """That of any other rank.

    The first rank of its host that answers tells rank 0 of all. The next one takes over if it does
    not, so that a rank which is stopped does not hide the others.

    Args:
        host: the channel of its host.
        ranks: those of its host.
        index: its own index among them.
        hosts: the number of hosts.
        reach_root: connects to rank 0; `None` on its own host.
    """

    def __init__(
        self,
        host: SharedMemoryChannel,
        ranks: Sequence[int],
        index: int,
        hosts: int,
        reach_root: Callable[[], Connection | None] | None,
    ) -> None:
        super().__init__(host)
        self._ranks = ranks
        self._index = index
        self._bytes = _BYTES // hosts
        self._reach_root = reach_root
        self._connection: Connection | None = None
        self._connecting = threading.Thread()
        self._root_is_gone = False
        self._looked = self._heard_root = time.monotonic()
        # Of each rank of this host: its last beat, when it came, and where rank 0 was told it is.
        self._beats = [-1] * len(ranks)
        self._heard = [self._looked] * len(ranks)
        # The one that was told longest ago comes first.
        self._told: dict[int, _Place | None] = dict.fromkeys(range(len(ranks)))
        self._statuses: list[RankStatus | None] = [None] * len(ranks)

    def connect(self) -> bool:
        """Connects to rank 0, which takes up to ten seconds; returns whether it has."""
        connection = self._reach_root() if self._reach_root else None
        if connection is not None:
            self._heard_root = time.monotonic()
            self._connection = connection
            self._poll.register(connection, select.EPOLLIN)
        return connection is not None

    def publish(self, status: RankStatus) -> None:
        now = time.monotonic()
        self._statuses = self._host.publish(status)
        if now - self._looked >= _STAND_IN_SECONDS:
            # This rank was suspended, perhaps with others. Another may have told rank 0 more since.
            self._heard = [now] * len(self._ranks)
            self._told = dict.fromkeys(self._told)
        self._looked = now
        new: _Bits = 0
        for index, other in enumerate(self._statuses):
            if other is not None and other.beat != self._beats[index]:
                self._beats[index], self._heard[index] = other.beat, now
                new |= 1 << index
        if self._reach_root is None:
            self._heard_root = self._heard[0]
        elif any(
            index not in self._host.dead and now - self._heard[index] < _STAND_IN_SECONDS
            for index in range(self._index)
        ):
            self._heard_root = now  # by that rank
            self._told = dict.fromkeys(self._told)
        elif self._connection is not None:
            self._tell(self._connection, new)
        elif not self._connecting.is_alive():
            # Meanwhile this rank must go on, or the next one would take over from it.
            self._connecting = threading.Thread(
                target=self.connect, name="hpcstrat-connect", daemon=True
            )
            self._connecting.start()

    def _tell(self, connection: Connection, new: _Bits) -> None:
        statuses = [status for status in self._statuses if status is not None]
        head = _Head(
            new,
            _bits(index for index, status in enumerate(self._statuses) if status and status.waits),
            _bits(index for index, status in enumerate(self._statuses) if status and status.gone),
            _bits(self._host.dead),
            sum(status.number + status.progress for status in statuses),
            max(status.extra_seconds for status in statuses),
        )
        changed: dict[_Place, list[int]] = {}
        for index, last in self._told.items():
            status = self._statuses[index]
            if status is not None and (place := _place_of(status)) != last:
                changed.setdefault(place, []).append(index)
        lines, told, left = [json.dumps(head).encode()], dict[int, _Place](), self._bytes
        for place, indices in changed.items():
            line = json.dumps([_bits(indices), *place], ensure_ascii=False).encode()
            left -= len(line)
            if left < 0 and told:
                break
            lines.append(line)
            told |= dict.fromkeys(indices, place)
        if connection.send(b"\n".join(lines)):
            for index, place in told.items():
                del self._told[index]
                self._told[index] = place

    def _receive(self, file: int) -> bool:
        assert self._connection is not None and self._connection.fileno() == file
        if self._connection.receive() is not None:
            self._heard_root = time.monotonic()
            return False
        self._root_is_gone = True
        self._poll.unregister(self._connection)
        return True

    @property
    def dead(self) -> list[int]:
        ended = [
            self._ranks[index]
            for index in self._host.dead
            if not ((status := self._statuses[index]) and status.gone)
        ]
        return [0, *ended] if self._root_is_gone else ended

    def silent_since(self) -> float:
        return self._heard_root

    def close(self) -> None:
        super().close()
        if self._connection is not None:
            self._connection.close()


def connect_hosts(comm: Any, host_comm: Any, hosts: Sequence[int]) -> StatusChannel | None:
    """The channel of ranks on several hosts; `None` on all if some cannot reach rank 0. Collective.

    Args:
        comm: their MPI communicator.
        host_comm: that of this host's ranks.
        hosts: the index of each rank's host.
    """
    host = share_memory_channel(host_comm)
    ranks_of: dict[int, list[int]] = {}
    for rank, index in enumerate(hosts):
        ranks_of.setdefault(index, []).append(rank)
    # Not MPI, whose calls the watchdog's thread must not make.
    processes = comm.gather(os.getpid())
    if comm.rank == 0:
        listener = Listener(len(ranks_of))
        comm.bcast((listener.token, listener.addresses))
        root = RootChannel(host, listener, list(ranks_of.values()), processes)
        channel: RootChannel | MemberChannel = root
        _accept_hosts(root, comm)
        is_complete = comm.bcast(root.is_complete)
    else:
        token, addresses = comm.bcast(None)
        ranks = ranks_of[hosts[comm.rank]]
        reach_root = functools.partial(reach, addresses, token, comm.rank)
        is_remote = hosts[comm.rank] != hosts[0]
        channel = member = MemberChannel(
            host, ranks, host_comm.rank, len(ranks_of), reach_root if is_remote else None
        )
        comm.allreduce(int(is_remote and host_comm.rank == 0 and not member.connect()))
        is_complete = comm.bcast(None)
    if is_complete:
        return channel
    channel.close()
    return None


def _accept_hosts(root: RootChannel, comm: Any) -> None:
    """Accepts a rank of each other host, while all of them try to connect. Collective."""
    is_over = threading.Event()

    def accept() -> None:
        while not (root.is_complete or is_over.is_set()):
            root.wait(_LOOK_SECONDS)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    # After this call all have tried. What is still on its way gets some seconds, unless a rank
    # already knows that it failed.
    failed = comm.allreduce(0)
    thread.join(0.0 if failed else CONNECT_SECONDS)
    is_over.set()
    thread.join()


def _place_of(status: RankStatus) -> _Place:
    return status.number, status.call, status.location


def _bits(indices: Any) -> _Bits:
    return sum(1 << index for index in indices)


def _indices(bits: _Bits) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
