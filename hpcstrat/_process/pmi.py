"""The connection to a launcher that speaks PMI, as MPICH's does."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Mapping
from typing import Any

VARIABLE = "PMI_FD"
"""The variable with the number of its descriptor; not in a job of Open MPI."""

_LAUNCHER_SECONDS = 3.0  # that the launcher gets for an answer
_RANK_SECONDS = 10.0  # and another rank of the host


def abort(status: int) -> None:
    """Asks the launcher to end all ranks, before MPI has started: in the words of MPI itself."""
    with contextlib.suppress(KeyError, OSError, ValueError):  # there is no such launcher
        connection = int(os.environ[VARIABLE])
        os.write(connection, b"cmd=init pmi_version=1 pmi_subversion=1\n")
        if select.select([connection], [], [], _LAUNCHER_SECONDS)[0]:
            os.read(connection, 1 << 10)
        os.write(connection, f"cmd=abort exitcode={status}\n".encode())
        select.select([connection], [], [], _LAUNCHER_SECONDS)  # it kills this process, too


def share(host_comm: Any) -> dict[int, int]:
    """Gives this rank's connection to the next rank of the host as well.

    Collective, over the ranks of a host. Only while a watchdog ends the job when a rank dies.

    When the launcher sees a connection end without a word, it kills the other ranks, and takes the
    status of the rank that left for that of the job: after `os._exit(0)`, a success.

    Returns:
        The descriptor and the inode of another rank's connection, for `release`; none where ranks
        do not share them.
    """
    own = os.environ.get(VARIABLE, "")
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as to_next,
    ):
        name = f"\0hpcstrat-{secrets.token_hex(16)}"  # without a file
        listener.bind(name)
        listener.listen()
        names = host_comm.allgather(name if own else "")  # now all listen
        if len(names) == 1 or "" in names:
            return {}
        # Ranks may fail to reach each other, as in containers of their own: then it is as before.
        with contextlib.suppress(OSError):
            for connection in (listener, to_next):
                connection.settimeout(_RANK_SECONDS)
            to_next.connect(names[(host_comm.rank + 1) % len(names)])
            socket.send_fds(to_next, [b"."], [int(own)])
            with contextlib.closing(listener.accept()[0]) as from_previous:
                from_previous.settimeout(_RANK_SECONDS)
                held = socket.recv_fds(from_previous, 1, 1)[1]
                for descriptor in held:
                    os.set_inheritable(descriptor, False)
                return {descriptor: os.fstat(descriptor).st_ino for descriptor in held}
    return {}


def release(held: Mapping[int, int]) -> None:
    """Closes what `share` has returned: the launcher notices the end of that rank from now on."""
    for descriptor, inode in held.items():
        with contextlib.suppress(OSError):  # the program has closed all that is open
            if os.fstat(descriptor).st_ino == inode:
                os.close(descriptor)
