"""Where the ranks of other hosts may reach this one by TCP."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # Linux's: the address of a network interface


def addresses(port: int) -> list[tuple[str, int]]:
    """Where other hosts may reach this one."""
    name = socket.gethostname()
    names = [name]
    with contextlib.suppress(OSError, UnicodeError):  # a name that is too long
        names += [
            str(entry[4][0])
            for entry in socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
        ]
    # Other hosts may not know its name, or it means 127.0.1.1 on the host itself, as on Debian.
    names += [socket.getfqdn(name), *_addresses_of_links()]
    return [(address, port) for address in dict.fromkeys(names)]


def _addresses_of_links() -> list[str]:
    """The IPv4 address of each network link of this host except the loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(
                    any_socket.fileno(), _SIOCGIFADDR, struct.pack("40s", name.encode())
                )
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]
