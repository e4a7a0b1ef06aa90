"""Keeps a rank's connection to MPICH's launcher open while another rank of its host lives."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

_VARIABLE = "PMI_FD"  # the number of the descriptor; Open MPI has none
_SECONDS = 10.0  # for two processes of a host to meet


def share(host_comm: Any) -> None:
    """Gives this rank's connection to the next rank of the host as well.

    Collective, over the ranks of a host. Only where a watchdog ends the job when a rank dies.

    When the launcher sees a connection end without a word, it kills the other ranks, and takes the
    status of the rank that left for that of the job: after `os._exit(0)`, a success.
    """
    own = _descriptor()
    # The name of a socket in memory, which is gone with it.
    names = host_comm.allgather(own and f"\0hpcstrat-{secrets.token_hex(8)}")
    if own is None or None in names or len(names) == 1:
        return
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as to_next:
        listener.bind(names[host_comm.rank])
        listener.listen()
        listener.settimeout(_SECONDS)
        host_comm.Barrier()
        # Ranks in network namespaces of their own do not meet; the status is then the launcher's.
        with contextlib.suppress(OSError):
            to_next.connect(names[(host_comm.rank + 1) % len(names)])
            socket.send_fds(to_next, [b"."], [own])
            with listener.accept()[0] as from_previous:
                for held in socket.recv_fds(from_previous, 1, 1)[1]:
                    os.set_inheritable(held, False)


def _descriptor() -> int | None:
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[_VARIABLE])
        os.fstat(descriptor)
        return descriptor
    return None
