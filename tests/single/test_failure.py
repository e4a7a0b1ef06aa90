"""Parts of a rank's end that need no other rank."""

import concurrent.futures
import socket
import subprocess
import sys
import types

import pytest
from internals import failure


@pytest.mark.parametrize("status", [None, 0, 3, "why", (1, 2)])
def test_what_sys_exit_raises(status):
    """The same as Python's own, in other threads too."""
    leave = failure._Leave(sys.exit)
    raised = []
    for call in (sys.exit, leave):
        with pytest.raises(SystemExit) as caught:
            call(status)
        raised.append((caught.value.code, caught.value.args, str(caught.value)))
    assert raised[0] == raised[1]
    assert (leave.__name__, repr(leave)) == (sys.exit.__name__, repr(sys.exit))  # pyright: ignore[reportAttributeAccessIssue]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        error = threads.submit(leave, status).exception()
    assert type(error) is SystemExit and (error.code, error.args) == raised[0][:2]


PROGRAM = """
import atexit, sys
from hpcstrat._process import failure

failure._end_after_exit = lambda status: print("ends with", status)
leave = failure._Leave(sys.exit)
atexit.register(print, "registered before")
try:
    leave(5)
except SystemExit as error:
    print("caught", error.code)
leave({})
"""


@pytest.mark.parametrize(
    "status, ends", [("3", "ends with 3\n"), ("'why'", "ends with why\n"), ("0", ""), ("", "")]
)
def test_only_the_exit_that_ends_the_program_is_told(status, ends):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(status)], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == f"caught 5\n{ends}registered before\n"
    assert ended.returncode == {"3": 3, "'why'": 1}.get(status, 0)
    assert ended.stderr == ("why\n" if "why" in status else "")


def test_mpi_has_not_started_while_it_is_imported(monkeypatch):
    spec = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(__spec__=spec))
    assert failure._started_mpi() is None


def test_the_launcher_is_asked_for_the_end(monkeypatch):
    """In the words of PMI, version 1."""
    monkeypatch.setattr(failure, "_PMI_SECONDS", 0.1)
    rank, launcher = socket.socketpair()
    with rank, launcher:
        launcher.send(b"cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1\n")
        failure._abort_pmi(rank.fileno(), 3)
        assert launcher.recv(1 << 10).decode().splitlines() == [
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=abort exitcode=3",
        ]
