"""How ranks exchange their statuses: through shared memory on one host, by TCP between hosts."""

from __future__ import annotations

import abc
import contextlib
import fcntl
import os
import secrets
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any, final

from hpcstrat._calls.status import RankStatus

SLOT = 2048
"""Bytes of a rank's status in shared memory."""

_SIOCGIFADDR = 0x8915  # Linux's: the address of a network interface

_HEAD = struct.Struct("<II")  # length and checksum: a reader may come while the writer writes


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
        """When rank 0 was last heard from, by `time.monotonic`.

        `None` on rank 0, and where every rank sees all statuses.
        """
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
        self._poll = select.poll()
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
            self._poll.register(file, select.POLLIN)

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


def share_memory_channel(comm: Any, slots: Any) -> SharedMemoryChannel:
    """The channel of ranks on one host. Collective.

    Args:
        comm: their MPI communicator.
        slots: see `SharedMemoryChannel`.
    """
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


_PREFIX = struct.Struct("<I")
_BEAT = b"b"  # of rank 0: it is alive, and watches
_CONNECT_SECONDS = 10.0
_STRANGERS = 64  # connections of other programs that may wait to be accepted
_LOOK_SECONDS = 0.2  # between two checks whether the time is over


@final
class TcpChannel(StatusChannel):
    """Every rank sends its statuses to rank 0, which answers that it watches.

    If a rank ends, its connection closes.

    Args:
        rank: this process's.
        size: the number of ranks.
        sockets: by rank: on rank 0 that of each other rank, on the others that of rank 0.
    """

    every_rank_sees_all = False

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._statuses: list[RankStatus | None] = [None] * size
        self._received: dict[int, bytes] = dict.fromkeys(sockets, b"")
        self._unsent = b""  # the rest of a frame whose start is on its way to rank 0
        self._dead: list[int] = []
        self._heard = time.monotonic()
        self._poll = select.poll()
        self._ranks = {connection.fileno(): other for other, connection in sockets.items()}
        for connection in sockets.values():
            # The watchdog must not wait for a slow peer: it has the others to look at.
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)

    def publish(self, status: RankStatus) -> list[RankStatus | None] | None:
        if self._rank == 0:
            self._statuses[0] = status
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.send(_BEAT)
            return self._statuses
        message = status.pack()
        if 0 in self._sockets:
            self._send(_PREFIX.pack(len(message)) + message)
        return None

    def wait(self, seconds: float) -> None:
        for file, _ in self._poll.poll(1000 * seconds):
            other = self._ranks[file]
            try:
                received = self._sockets[other].recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                received = b""
            if received:
                self._heard = time.monotonic()
                if self._rank == 0:
                    self._read(other, received)
            else:
                self._dead.append(other)
                self._poll.unregister(file)
                self._sockets.pop(other).close()

    def _send(self, frame: bytes) -> None:
        """Sends a frame, and before it the rest of the last one that was sent in part.

        A frame of which nothing fits now is dropped: the next one says all that it would have. One
        whose start has left must be completed, or rank 0 would take its rest for the next frame.
        """
        if self._unsent:
            self._unsent = self._unsent[self._send_part(self._unsent) :]
        if not self._unsent and (sent := self._send_part(frame)):
            self._unsent = frame[sent:]

    def _send_part(self, data: bytes) -> int:
        """Sends what the socket takes without waiting; returns the number of bytes."""
        try:
            return self._sockets[0].send(data)
        except OSError:  # full for now, or closed, which `wait` finds
            return 0

    def _read(self, other: int, received: bytes) -> None:
        waiting = self._received[other] + received
        while len(waiting) >= _PREFIX.size:
            (length,) = _PREFIX.unpack_from(waiting)
            if len(waiting) < _PREFIX.size + length:
                break
            self._statuses[other] = RankStatus.unpack(waiting[_PREFIX.size : _PREFIX.size + length])
            waiting = waiting[_PREFIX.size + length :]
        self._received[other] = waiting

    def silent_since(self) -> float | None:
        return None if self._rank == 0 else self._heard

    @property
    def dead(self) -> list[int]:
        return self._dead

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets = {}


def connect_by_tcp(comm: Any) -> TcpChannel | None:
    """The channel of ranks on several hosts; `None` on all if some cannot reach rank 0. Collective.

    Args:
        comm: their MPI communicator.
    """
    # Not MPI, whose calls the watchdog's thread must not make. The token keeps strangers out who
    # find the port.
    token = secrets.token_bytes(16)
    if comm.rank == 0:
        listener = socket.create_server(("", 0), backlog=comm.size + _STRANGERS)
        token, addresses = comm.bcast((token, _addresses(listener.getsockname()[1])))
        accepted: dict[int, socket.socket] = {}
        is_over = threading.Event()
        thread = threading.Thread(
            target=_accept, args=(listener, token, comm.size, accepted, is_over), daemon=True
        )
        thread.start()
        # Here all ranks have tried. What is still on its way gets some seconds, unless a rank
        # already knows that it failed.
        are_connected = comm.allgather(True)
        thread.join(_CONNECT_SECONDS if all(are_connected) else 0.0)
        is_over.set()
        thread.join()
        listener.close()
        is_complete = comm.bcast(len(accepted) == comm.size - 1)
        sockets = accepted
    else:
        token, addresses = comm.bcast(None)
        own = _reach(addresses, token, comm.rank)
        comm.allgather(own is not None)
        is_complete = comm.bcast(None)
        sockets = {} if own is None else {0: own}
    if is_complete:
        return TcpChannel(comm.rank, comm.size, sockets)
    for connection in sockets.values():
        connection.close()
    return None


def _addresses(port: int) -> list[tuple[str, int]]:
    """Where other hosts may reach this one."""
    name = socket.gethostname()
    names = [name]
    with contextlib.suppress(OSError):
        names += [
            str(entry[4][0])
            for entry in socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
        ]
    # Other hosts may not know its name, or it means 127.0.1.1 on the host itself, as on Debian.
    names += [socket.getfqdn(name), *_addresses_of_links()]
    return [(address, port) for address in dict.fromkeys(names)]


def _addresses_of_links() -> list[str]:
    """The IPv4 address of each network link of this host except the loopback."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(
                    any_socket.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode())
                )
                addresses.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in addresses if not address.startswith("127.")]


def _reach(addresses: Sequence[tuple[str, int]], token: bytes, rank: int) -> socket.socket | None:
    for address in addresses:
        try:
            # Some names of rank 0's host may not work from here, so all are tried; they share the
            # time.
            connection = socket.create_connection(address, _CONNECT_SECONDS / len(addresses))
            connection.sendall(token + _PREFIX.pack(rank))
            return connection
        except OSError:
            continue
    return None


def _accept(
    listener: socket.socket,
    token: bytes,
    size: int,
    accepted: dict[int, socket.socket],
    is_over: threading.Event,
) -> None:
    """Waits for all other ranks. Strangers that connect meanwhile do not delay them."""
    length = len(token) + _PREFIX.size
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    # By file: connections that have not said yet which rank they are, and what they have said.
    hellos: dict[int, tuple[socket.socket, bytes]] = {}
    while len(accepted) < size - 1 and not is_over.is_set():
        for file, _ in poll.poll(1000 * _LOOK_SECONDS):
            if file == listener.fileno():
                with contextlib.suppress(OSError):  # it has gone already
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    hellos[connection.fileno()] = connection, b""
                    poll.register(connection, select.POLLIN)
                continue
            connection, hello = hellos.pop(file)
            part = _receive(connection, length - len(hello))
            hello += part
            if part and len(hello) < length:
                hellos[file] = connection, hello
                continue
            poll.unregister(file)
            if len(hello) == length and hello.startswith(token):
                accepted[_PREFIX.unpack_from(hello, len(token))[0]] = connection
            else:
                connection.close()
    for connection, _ in hellos.values():
        connection.close()


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    try:
        return connection.recv(nbytes)
    except OSError:
        return b""
