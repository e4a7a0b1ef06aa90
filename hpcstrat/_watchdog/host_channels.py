"""How ranks of several hosts exchange their statuses: inside each host, then by TCP to rank 0."""

from __future__ import annotations

import functools
import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from hpcstrat._watchdog.channels import UNKNOWN, Place, RankStatus, StatusChannel, share_slots
from hpcstrat._watchdog.tcp import CONNECT_SECONDS, Connection, Listener, reach

_BYTES = 1 << 15  # of places that rank 0 gets at a beat from all hosts, besides one from each
_LOOK_SECONDS = 0.05  # between two checks whether all have tried to connect
_STAND_IN_SECONDS = 1.0  # without a new status: then the next rank of the host tells rank 0

_Bits = int  # a set of a host's ranks: bit i for the rank of index i


class HostFrame(NamedTuple):
    """What the leader of a host sends rank 0 at every beat, for all ranks of its host.

    The places of all hosts have a limited size at a beat. The rest has a fixed size, and is up to
    date whatever has changed: rank 0 decides by it.

    Attributes:
        beat: the ranks that have published a new status.
        wait: those that wait for others.
        gone: those that leave the program properly.
        dead: those whose processes have ended.
        progress: a number that changes if any of them makes progress.
        extra_seconds: how much longer than usual any of them asks the others to wait.
        places: where ranks are that were elsewhere when rank 0 was last told: those at one place
            together. What does not fit follows at the next beats.
    """

    beat: _Bits
    wait: _Bits
    gone: _Bits
    dead: _Bits
    progress: int
    extra_seconds: float
    places: Sequence[tuple[_Bits, Place]]

    def pack(self) -> bytes:
        """The frame as bytes."""
        return json.dumps(self, ensure_ascii=False).encode()

    @classmethod
    def unpack(cls, frame: bytes) -> HostFrame:
        """The frame in these bytes, which `pack` made."""
        return cls(*json.loads(frame))


@final
class RootChannel(StatusChannel):
    """Rank 0's: it sees all statuses, and answers that it watches.

    Args:
        slots: those of its own host, see `StatusChannel`.
        processes: the same.
        listener: where one rank of each other host connects, and later another in its place.
        hosts: the ranks of each host, rank 0's first.
        process_ids: of all ranks, as reports show them.
    """

    every_rank_sees_all = False

    def __init__(
        self,
        slots: Any,
        processes: Sequence[int],
        listener: Listener,
        hosts: Sequence[Sequence[int]],
        process_ids: Sequence[int],
    ) -> None:
        super().__init__(0, slots, processes)
        self._listener = listener
        self._hosts = hosts
        self._host_of = {rank: index for index, ranks in enumerate(hosts) for rank in ranks}
        self._process_ids = process_ids
        self._by_rank = [UNKNOWN] * len(process_ids)
        self._connections: dict[int, tuple[int, Connection]] = {}  # by file: the rank that sends
        self._lost: set[int] = set()  # ranks whose connections have closed
        self._said_dead: dict[int, Sequence[int]] = {}  # by host: what another rank of it said last
        self._poll.register(listener, select.EPOLLIN)

    @property
    def is_complete(self) -> bool:
        """Whether a rank of each other host is connected."""
        return len(self._connected_hosts()) == len(self._hosts) - 1

    def _connected_hosts(self) -> set[int]:
        return {self._host_of[rank] for rank, _ in self._connections.values()}

    def publish(self, status: RankStatus) -> list[RankStatus]:
        for rank, own in zip(self._hosts[0], self._share(status), strict=True):
            self._by_rank[rank] = own
        for _, connection in self._connections.values():
            connection.send(b"")
        return self._by_rank

    def _receive(self, file: int) -> bool:
        if file == self._listener.fileno():
            for rank, connection in self._listener.accept().items():
                self._connections[connection.fileno()] = rank, connection
                self._poll.register(connection, select.EPOLLIN)
            return False
        if file not in self._connections:
            return super()._receive(file)
        rank, connection = self._connections[file]
        frames = connection.receive()
        host = self._host_of[rank]
        if frames is not None:
            return any([self._read(host, HostFrame.unpack(frame)) for frame in frames])
        del self._connections[file]
        self._poll.unregister(connection)
        connection.close()
        self._lost.add(rank)
        # Until another rank of the host connects and knows better. One that left in order has told
        # before what the others did.
        if not self._by_rank[rank].gone and host not in self._connected_hosts():
            self._said_dead[host] = self._hosts[host]
        return True

    def _read(self, host: int, frame: HostFrame) -> bool:
        """Notes what a host's leader says; returns whether it tells of a death."""
        places = {index: place for bits, place in frame.places for index in _indices(bits)}
        for index, rank in enumerate(self._hosts[host]):
            old = self._by_rank[rank]
            if index in places or old is not UNKNOWN:
                self._by_rank[rank] = RankStatus(
                    *places.get(index, old.place),
                    waits=bool(frame.wait >> index & 1),
                    progress=frame.progress,
                    extra_seconds=frame.extra_seconds,
                    gone=bool(frame.gone >> index & 1),
                    process=self._process_ids[rank],
                    beat=old.beat + (frame.beat >> index & 1),
                )
        dead = [self._hosts[host][index] for index in _indices(frame.dead)]
        has_news = dead != self._said_dead.get(host, [])
        self._said_dead[host] = dead
        return has_news

    @property
    def dead(self) -> list[int]:
        own = [self._hosts[0][index] for index in self._dead]
        return sorted(self._lost.union(own, *self._said_dead.values()))

    def close(self) -> None:
        super().close()
        self._listener.close()
        for _, connection in self._connections.values():
            connection.close()
        self._connections = {}


@final
class MemberChannel(StatusChannel):
    """That of any other rank. It has one of these roles, which it finds anew at each beat.

        role       when                                   what it does
        ---------  -------------------------------------  ------------------------------------------
        neighbour  rank 0 is on its host                  looks whether rank 0's status changes
        led        a rank before it on its host answers   nothing: that rank hears from rank 0
        leader     none does, and it is connected         sends a `HostFrame`, and hears from rank 0
        successor  none does, and it is not connected     has a thread connect it to rank 0

    So a rank that is stopped does not hide the others of its host.

    Args:
        index: this rank's index among those of its host.
        slots: those of its host, see `StatusChannel`.
        processes: the same.
        ranks: those of its host.
        hosts: the number of hosts.
        reach_root: connects to rank 0; `None` on its own host.
    """

    every_rank_sees_all = False

    def __init__(
        self,
        index: int,
        slots: Any,
        processes: Sequence[int],
        ranks: Sequence[int],
        hosts: int,
        reach_root: Callable[[], Connection | None] | None,
    ) -> None:
        super().__init__(index, slots, processes)
        self._ranks = ranks
        self._bytes = _BYTES // hosts
        self._reach_root = reach_root
        self._connection: Connection | None = None
        self._connecting = threading.Thread()
        self._root_is_gone = False
        self._looked = time.monotonic()
        # Of each rank of this host: when its last new status came.
        self._heard = [self._looked] * len(ranks)
        # And where rank 0 was told it is; the rank that was told longest ago comes first.
        self._told = dict.fromkeys(range(len(ranks)), UNKNOWN.place)

    def connect(self) -> bool:
        """Connects to rank 0, which takes up to ten seconds; returns whether it has."""
        connection = self._reach_root() if self._reach_root else None
        if connection is not None:
            self.root_silence = 0.0
            self._connection = connection
            self._poll.register(connection, select.EPOLLIN)
        return connection is not None

    def publish(self, status: RankStatus) -> None:
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        before = list(self._statuses)
        both = zip(before, self._share(status), strict=True)
        new = [index for index, (old, latest) in enumerate(both) if latest != old]
        for index in new:
            self._heard[index] = now
        if passed < _STAND_IN_SECONDS:
            self.root_silence += passed
        else:
            # This rank was suspended, perhaps with others and with rank 0. Another may have told
            # rank 0 more since.
            self._heard = [now] * len(self._ranks)
            self._told = dict.fromkeys(self._told, UNKNOWN.place)
        if self._reach_root is None:
            if 0 in new:
                self.root_silence = 0.0
        elif self._is_led(now):
            self.root_silence = 0.0
            self._told = dict.fromkeys(self._told, UNKNOWN.place)
        elif self._connection is not None:
            self._tell(self._connection, new)
        elif not self._connecting.is_alive():
            # Meanwhile this rank must go on, or the next one would take over from it.
            self._connecting = threading.Thread(
                target=self.connect, name="hpcstrat-connect", daemon=True
            )
            self._connecting.start()

    def _is_led(self, now: float) -> bool:
        """Whether a rank before this one on its host answers."""
        return any(
            index not in self._dead and now - self._heard[index] < _STAND_IN_SECONDS
            for index in range(self._index)
        )

    def _tell(self, connection: Connection, new: Iterable[int]) -> None:
        changed: dict[Place, list[int]] = {}
        for index, last in self._told.items():
            place = self._statuses[index].place
            if place != last:
                changed.setdefault(place, []).append(index)
        places: list[tuple[_Bits, Place]] = []
        told, left = dict[int, Place](), self._bytes
        for place, indices in changed.items():
            entry = _bits(indices), place
            left -= len(json.dumps(entry, ensure_ascii=False).encode())
            if left < 0 and told:
                break
            places.append(entry)
            told |= dict.fromkeys(indices, place)
        frame = HostFrame(
            beat=_bits(new),
            wait=_bits(index for index, status in enumerate(self._statuses) if status.waits),
            gone=_bits(index for index, status in enumerate(self._statuses) if status.gone),
            dead=_bits(self._dead),
            progress=sum(status.number + status.progress for status in self._statuses),
            extra_seconds=max(status.extra_seconds for status in self._statuses),
            places=places,
        )
        if connection.send(frame.pack()):
            for index, place in told.items():
                del self._told[index]
                self._told[index] = place

    def _receive(self, file: int) -> bool:
        if self._connection is None or file != self._connection.fileno():
            return super()._receive(file)
        if self._connection.receive() is not None:
            self.root_silence = 0.0
            return False
        self._root_is_gone = True
        self._poll.unregister(self._connection)
        return True

    @property
    def dead(self) -> list[int]:
        ended = [self._ranks[index] for index in self._dead if not self._statuses[index].gone]
        return [0, *ended] if self._root_is_gone else ended

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
    from mpi4py import MPI

    slots, processes = share_slots(host_comm)
    ranks_of: dict[int, list[int]] = {}
    for rank, index in enumerate(hosts):
        ranks_of.setdefault(index, []).append(rank)
    # Not MPI, whose calls the watchdog's thread must not make.
    process_ids = comm.gather(os.getpid())
    failed = np.zeros(1, np.int64)  # of the first ranks of all hosts
    if comm.rank == 0:
        listener = Listener(len(ranks_of))
        comm.bcast((listener.token, listener.addresses))
        channel: RootChannel | MemberChannel = RootChannel(
            slots, processes, listener, list(ranks_of.values()), process_ids
        )
        all_have_tried = comm.Iallreduce(MPI.IN_PLACE, failed)
        while not all_have_tried.Test():
            channel.wait(_LOOK_SECONDS)
        # What is still on its way gets some seconds, unless a rank already knows that it failed.
        end = time.monotonic() + (0 if failed[0] else CONNECT_SECONDS)
        while not channel.is_complete and time.monotonic() < end:
            channel.wait(_LOOK_SECONDS)
        is_complete = comm.bcast(channel.is_complete)
    else:
        token, addresses = comm.bcast(None)
        is_remote = hosts[comm.rank] != hosts[0]
        channel = MemberChannel(
            host_comm.rank,
            slots,
            processes,
            ranks_of[hosts[comm.rank]],
            len(ranks_of),
            functools.partial(reach, addresses, token, comm.rank) if is_remote else None,
        )
        failed[0] = is_remote and host_comm.rank == 0 and not channel.connect()
        comm.Iallreduce(MPI.IN_PLACE, failed).Wait()
        is_complete = comm.bcast(None)
    if is_complete:
        return channel
    channel.close()
    return None


def _bits(indices: Iterable[int]) -> _Bits:
    return sum(1 << index for index in indices)


def _indices(bits: _Bits) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
