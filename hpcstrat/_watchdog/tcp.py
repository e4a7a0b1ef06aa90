"""TCP connections from other hosts to rank 0: they never wait, and frames arrive whole."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import final

_SIOCGIFADDR = 0x8915  # Linux's: the address of a network interface

_PREFIX = struct.Struct("<I")  # a frame's length; in a hello, the rank
_TOKEN_BYTES = 16
_HELLO_BYTES = _TOKEN_BYTES + _PREFIX.size
CONNECT_SECONDS = 10.0
_STRANGERS = 64  # connections of other programs that may wait to be accepted, or to say something


@final
class Connection:
    """One side of a connection.

    Args:
        connected: its socket.
    """

    def __init__(self, connected: socket.socket) -> None:
        # The watchdog must not wait for a slow peer: it has others to look at.
        connected.setblocking(False)
        self._socket = connected
        self._received = b""
        self._unsent = b""  # the rest of a frame whose start is on its way

    def fileno(self) -> int:
        """For `select`: readable if `receive` has something to return."""
        return self._socket.fileno()

    def send(self, frame: bytes) -> bool:
        """Sends a frame, or drops it if nothing of it fits now; returns whether it is on its way.

        A frame whose start has left must be completed, or the other side would take the next one
        for its rest.
        """
        self._unsent = self._unsent[self._send_part(self._unsent) :]
        if self._unsent:
            return False
        whole = _PREFIX.pack(len(frame)) + frame
        sent = self._send_part(whole)
        self._unsent = whole[sent:] if sent else b""
        return sent > 0

    def _send_part(self, data: bytes) -> int:
        """Sends what the socket takes without waiting; returns the number of bytes."""
        try:
            return self._socket.send(data) if data else 0
        except OSError:  # full for now, or closed, which `receive` finds
            return 0

    def receive(self) -> list[bytes] | None:
        """The frames that have come; `None` if the other side has closed the connection."""
        try:
            received = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        waiting, frames, start = self._received + received, [], 0
        while len(waiting) >= start + _PREFIX.size:
            (length,) = _PREFIX.unpack_from(waiting, start)
            if len(waiting) < start + _PREFIX.size + length:
                break
            start += _PREFIX.size
            frames.append(waiting[start : start + length])
            start += length
        self._received = waiting[start:]
        return frames

    def close(self) -> None:
        """Closes it, which the other side sees."""
        self._socket.close()


@final
class Listener:
    """Where ranks of other hosts connect to rank 0. Strangers that find the port keep none out.

    Args:
        count: how many ranks may connect at once.

    Attributes:
        token: what ranks say first, and strangers do not know.
        addresses: where other hosts may reach it.
    """

    def __init__(self, count: int) -> None:
        self.token: bytes = secrets.token_bytes(_TOKEN_BYTES)
        self._socket = socket.create_server(("", 0), backlog=count + _STRANGERS)
        self._socket.setblocking(False)
        self.addresses: list[tuple[str, int]] = _addresses(self._socket.getsockname()[1])
        # By file: connections that have not said yet which rank they are, and what they have said.
        self._hellos: dict[int, tuple[socket.socket, bytes]] = {}
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)

    def fileno(self) -> int:
        """For `select`: readable if `accept` has something to do."""
        return self._poll.fileno()

    def accept(self) -> dict[int, Connection]:
        """The ranks that have connected since the last call."""
        accepted = {}
        for file, _ in self._poll.poll(0):
            if file == self._socket.fileno():
                with contextlib.suppress(OSError):  # it has gone already
                    connected, _ = self._socket.accept()
                    connected.setblocking(False)
                    self._hellos[connected.fileno()] = connected, b""
                    self._poll.register(connected, select.EPOLLIN)
                if len(self._hellos) > _STRANGERS:
                    self._hellos.pop(next(iter(self._hellos)))[0].close()
            elif file in self._hellos:
                connected, hello = self._hellos.pop(file)
                part = _receive_part(connected, _HELLO_BYTES - len(hello))
                hello += part
                if part and len(hello) < _HELLO_BYTES:
                    self._hellos[file] = connected, hello
                    continue
                self._poll.unregister(connected)
                if len(hello) == _HELLO_BYTES and secrets.compare_digest(
                    hello[:_TOKEN_BYTES], self.token
                ):
                    (rank,) = _PREFIX.unpack_from(hello, _TOKEN_BYTES)
                    accepted[rank] = Connection(connected)
                else:
                    connected.close()
        return accepted

    def close(self) -> None:
        """Accepts no more."""
        for connected, _ in self._hellos.values():
            connected.close()
        self._hellos = {}
        self._socket.close()
        self._poll.close()


def _receive_part(connected: socket.socket, nbytes: int) -> bytes:
    try:
        return connected.recv(nbytes)
    except OSError:
        return b""


def reach(addresses: Sequence[tuple[str, int]], token: bytes, rank: int) -> Connection | None:
    """A connection to the `Listener` with these addresses and this token; `None` if there is none.

    Args:
        addresses: all are tried; they share ten seconds.
        token: the listener's.
        rank: this process's.
    """
    for address in addresses:  # some names of rank 0's host may not work from here
        try:
            connected = socket.create_connection(address, CONNECT_SECONDS / len(addresses))
            connected.sendall(token + _PREFIX.pack(rank))
            return Connection(connected)
        except OSError:
            continue
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
