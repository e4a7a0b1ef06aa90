"""Keeps a rank's connection to MPICH's launcher open while another rank of its host lives."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

_VARIABLE = "PMI_FD"  # with the number of the descriptor; not in a job of Open MPI
_SECONDS = 10.0  # that another rank of the host gets for an answer


def share(host_comm: Any) -> None:
    """Gives this rank's connection to the next rank of the host as well.

    Collective, over the ranks of a host. Only where a watchdog ends the job when a rank dies.

    When the launcher sees a connection end without a word, it kills the other ranks, and takes the
    status of the rank that left for that of the job: after `os._exit(0)`, a success.
    """
    own = os.environ.get(_VARIABLE, "")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as to_next,
    ):
        name = f"\0hpcstrat-{secrets.token_hex(16)}"  # without a file
        listener.bind(name)
        listener.listen()
        names = host_comm.allgather(name if own else "")  # now all listen
        if len(names) == 1 or "" in names:
            return
        # Ranks may fail to reach each other, as in containers of their own: then it is as before.
        with contextlib.suppress(OSError, ValueError):
            for connection in (listener, to_next):
                connection.settimeout(_SECONDS)
            to_next.connect(names[(host_comm.rank + 1) % len(names)])
            socket.send_fds(to_next, [b"."], [int(own)])
            with contextlib.closing(listener.accept()[0]) as from_previous:
                from_previous.settimeout(_SECONDS)
                _, (held,), *_ = socket.recv_fds(from_previous, 1, 1)
                os.set_inheritable(held, False)
