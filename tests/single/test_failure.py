"""Parts of a rank's end that need no other rank."""

import socket
import sys
import types

from internals import failure, pmi


def test_mpi_has_not_started_while_it_is_imported(monkeypatch):
    spec = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(__spec__=spec))
    assert failure._started_mpi() is None


def test_the_launcher_is_asked_for_the_end(monkeypatch):
    """In the words of PMI, version 1."""
    monkeypatch.setattr(pmi, "_LAUNCHER_SECONDS", 0.1)
    rank, launcher = socket.socketpair()
    with rank, launcher:
        launcher.send(b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n")
        monkeypatch.setenv(pmi.VARIABLE, str(rank.fileno()))
        pmi.abort(3)
        assert launcher.recv(1 << 10).decode().splitlines() == [
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=abort exitcode=3",
        ]
