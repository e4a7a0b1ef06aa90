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
    """Where each rank leaves its status.

    Attributes:
        every_rank_sees_all: whether every rank sees all statuses; else rank 0 alone does.
    """

    every_rank_sees_all: bool = True

    @abc.abstractmethod
    def publish(self, status: RankStatus) -> list[RankStatus | None] | None:
        """Leaves this rank's status; returns all ranks' last ones, or `None` where this rank is not told."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> None:
        """Returns after these seconds, or earlier if a rank dies."""

    @property
    @abc.abstractmethod
    def dead(self) -> list[int]:
        """Ranks whose processes are known to have ended."""

    def silent_since(self) -> float | None:
        """When rank 0 was last heard of, by `time.monotonic`; `None` on rank 0, or if every rank sees all."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Releases its files and sockets."""


@final
class SharedMemoryChannel(StatusChannel):
    """A slot of shared memory for each rank of one host.

    Args:
        rank: this process's.
        slots: `SLOT` bytes a rank, shape `(size, SLOT)`, zeros at first, shared by the ranks.
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
                with contextlib.suppress(
                    OSError, AttributeError
                ):  # then it is the launcher's to notice
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
_STRANGERS = 64  # connections of others that wait to be accepted
_LOOK_SECONDS = 0.2  # after which it may be found that the time is over


@final
class TcpChannel(StatusChannel):
    """Every rank sends its statuses to rank 0, which answers that it watches.

    If a rank ends, its connection closes.

    Args:
        rank: this process's.
        size: how many ranks there are.
        sockets: on rank 0 each other rank's, by its rank; on the others rank 0's, as that of 0.
    """

    every_rank_sees_all = False

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._statuses: list[RankStatus | None] = [None] * size
        self._received: dict[int, bytes] = dict.fromkeys(sockets, b"")
        self._dead: list[int] = []
        self._heard = time.monotonic()
        self._poll = select.poll()
        self._ranks = {one.fileno(): other for other, one in sockets.items()}
        for other in sockets.values():
            # The watchdog must not wait for a slow peer: it has the others to look at.
            other.setblocking(False)
            self._poll.register(other, select.POLLIN)

    def publish(self, status: RankStatus) -> list[RankStatus | None] | None:
        if self._rank == 0:
            self._statuses[0] = status
            for one in self._sockets.values():
                with contextlib.suppress(OSError):
                    one.sendall(_BEAT)
            return self._statuses
        message = status.pack()
        # A status that does not fit now is dropped: the next one, half a second later, says all
        # that it would have.
        if 0 in self._sockets:
            with contextlib.suppress(OSError):  # full for a moment, or closed, which `wait` finds
                self._sockets[0].sendall(_PREFIX.pack(len(message)) + message)
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
        for one in self._sockets.values():
            one.close()
        self._sockets = {}


def connect_by_tcp(comm: Any) -> TcpChannel | None:
    """The channel of ranks on several hosts, or `None` on all of them where some cannot reach rank 0. Collective.

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
        # Here all ranks have tried. What is still on its way gets some seconds, unless somebody
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
    for one in sockets.values():
        one.close()
    return None


def _addresses(port: int) -> list[tuple[str, int]]:
    """Where other hosts may reach this one."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [
            str(entry[4][0])
            for entry in socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
        ]
    # Its name may be nobody else's, or mean 127.0.1.1 on the host itself, as Debian has it.
    found += [socket.getfqdn(name), *_addresses_of_links()]
    return [(one, port) for one in dict.fromkeys(found)]


def _addresses_of_links() -> list[str]:
    """The IPv4 address of each network link of this host, but for the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(
                    any_socket.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode())
                )
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def _reach(addresses: Sequence[tuple[str, int]], token: bytes, rank: int) -> socket.socket | None:
    for address in addresses:
        try:
            # Not every name of rank 0's host need work from here, so several are tried; they share
            # the time.
            one = socket.create_connection(address, _CONNECT_SECONDS / len(addresses))
            one.sendall(token + _PREFIX.pack(rank))
            return one
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
    """Waits for all other ranks.

    Strangers that connect meanwhile, whatever they do, delay nobody.
    """
    length = len(token) + _PREFIX.size
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    hellos: dict[
        int, tuple[socket.socket, bytes]
    ] = {}  # by file: connections that have not said yet who they are
    while len(accepted) < size - 1 and not is_over.is_set():
        for file, _ in poll.poll(1000 * _LOOK_SECONDS):
            if file == listener.fileno():
                with contextlib.suppress(OSError):  # it has gone already
                    one, _ = listener.accept()
                    one.setblocking(False)
                    hellos[one.fileno()] = one, b""
                    poll.register(one, select.POLLIN)
                continue
            one, hello = hellos.pop(file)
            part = _receive(one, length - len(hello))
            hello += part
            if part and len(hello) < length:
                hellos[file] = one, hello
                continue
            poll.unregister(file)
            if len(hello) == length and hello.startswith(token):
                accepted[_PREFIX.unpack_from(hello, len(token))[0]] = one
            else:
                one.close()
    for one, _ in hellos.values():
        one.close()


def _receive(one: socket.socket, nbytes: int) -> bytes:
    try:
        return one.recv(nbytes)
    except OSError:
        return b""
