"""How the ranks' notes get from host to host: by TCP, and not by MPI, which the main thread may be inside."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, final

from hpcstrat._communicators.watch.boards import Board
from hpcstrat._communicators.watch.notes import Note

_PREFIX = struct.Struct("<I")
_BEAT = b"b"  # of rank 0: it is alive, and watches
_CONNECT_SECONDS = 10.0
_STRANGERS = 64  # connections of others that wait to be accepted
_LOOK_SECONDS = 0.2  # after which it may be found that the time is over


@final
class TcpBoard(Board):
    """Every rank sends its notes to rank 0, which judges, and says so. When it ends, its connections close.

    Args:
        rank: this process's.
        size: how many ranks there are.
        sockets: on rank 0 each other rank's, by its rank; on the others rank 0's, as that of 0.
    """

    judges_everywhere = False

    def __init__(self, rank: int, size: int, sockets: dict[int, socket.socket]) -> None:
        self._rank = rank
        self._sockets = dict(sockets)
        self._notes: list[Note | None] = [None] * size
        self._received: dict[int, bytes] = dict.fromkeys(sockets, b"")
        self._dead: list[int] = []
        self._heard = time.monotonic()
        self._poll = select.poll()
        self._ranks = {one.fileno(): other for other, one in sockets.items()}
        for other in sockets.values():
            other.setblocking(False)
            self._poll.register(other, select.POLLIN)

    def swap(self, note: Note) -> list[Note | None] | None:
        if self._rank == 0:
            self._notes[0] = note
            for one in self._sockets.values():
                with contextlib.suppress(OSError):
                    one.sendall(_BEAT)
            return self._notes
        message = note.pack()
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
            self._notes[other] = Note.unpack(waiting[_PREFIX.size : _PREFIX.size + length])
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


def connect_by_tcp(comm: Any) -> TcpBoard | None:
    """The board of ranks on several hosts, or `None` on all of them where some cannot reach rank 0. Collective.

    Args:
        comm: their MPI communicator.
    """
    token = secrets.token_bytes(16)
    if comm.rank == 0:
        listener = socket.create_server(("", 0), backlog=comm.size + _STRANGERS)
        token, addresses = comm.bcast((token, _addresses(listener.getsockname()[1])))
        accepted: dict[int, socket.socket] = {}
        is_over = threading.Event()
        thread = threading.Thread(target=_accept, args=(listener, token, comm.size, accepted, is_over), daemon=True)
        thread.start()
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
        return TcpBoard(comm.rank, comm.size, sockets)
    for one in sockets.values():
        one.close()
    return None


def _addresses(port: int) -> list[tuple[str, int]]:
    """Where other hosts may reach this one."""
    name = socket.gethostname()
    found = [name]
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)]
    return [(one, port) for one in dict.fromkeys([*found, socket.getfqdn(name)])]


def _reach(addresses: Sequence[tuple[str, int]], token: bytes, rank: int) -> socket.socket | None:
    for address in addresses:
        try:
            one = socket.create_connection(address, _CONNECT_SECONDS / len(addresses))
            one.sendall(token + _PREFIX.pack(rank))
            return one
        except OSError:
            continue
    return None


def _accept(
    listener: socket.socket, token: bytes, size: int, accepted: dict[int, socket.socket], is_over: threading.Event
) -> None:
    """Waits for all other ranks. Whatever else connects meanwhile, and is silent, resets or talks, keeps nobody."""
    length = len(token) + _PREFIX.size
    listener.setblocking(False)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    hellos: dict[int, tuple[socket.socket, bytes]] = {}  # by file: connections that have not said yet who they are
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
