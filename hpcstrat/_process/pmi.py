"""Keeps a rank's connection to MPICH's launcher open while another rank of its host lives."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

_VARIABLE = "PMI_FD"  # with the number of the descriptor; not in a job of Open MPI


def share(host_comm: Any) -> None:
    """Gives this rank's connection to the next rank of the host as well.

    Collective, over the ranks of a host. Only where a watchdog ends the job when a rank dies.

    When the launcher sees a connection end without a word, it kills the other ranks, and takes the
    status of the rank that left for that of the job: after `os._exit(0)`, a success.
    """
    own = os.environ.get(_VARIABLE, "")
    name = f"\0hpcstrat-{secrets.token_hex(8)}" if own else ""  # without a file
    names = host_comm.allgather(name)
    if len(names) == 1 or "" in names:
        return
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as to_next,
    ):
        listener.bind(name)
        listener.listen()
        host_comm.Barrier()
        to_next.connect(names[(host_comm.rank + 1) % len(names)])
        socket.send_fds(to_next, [b"."], [int(own)])
        with contextlib.closing(listener.accept()[0]) as from_previous:
            _, (held,), *_ = socket.recv_fds(from_previous, 1, 1)
            os.set_inheritable(held, False)
