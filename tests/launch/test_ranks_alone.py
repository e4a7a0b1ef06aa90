"""The launcher is killed or stopped, so it can end no rank: each rank ends by itself."""

import contextlib
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from slow import slow_but

PROGRAM = """
import os, sys, threading, time
import hpcstrat as hs

hs.barrier()
with open(f"started_{hs.rank()}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, f"started_{hs.rank()}")
def print_on():
    while True:
        print(1000 * "x")

if sys.argv[1] == "print":
    threading.Thread(target=print_on, daemon=True).start()
    time.sleep(2)
    if hs.rank() == 0:
        hs.barrier()
while True:
    if sys.argv[1] == "call":
        hs.barrier()
    time.sleep(0.01)
"""
SECONDS = 60  # for the start, and again for the end, on a machine that does other work too


def field(process, name):
    """A field of the system's record of a process."""
    found = re.search(
        rf"^{name}:\s*(\w+)", pathlib.Path(f"/proc/{process}/status").read_text(), re.MULTILINE
    )
    assert found
    return found[1]


def lives(process):
    # ProcessLookupError: it ended between the open and the read.
    try:
        return field(process, "State") not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@contextlib.contextmanager
def ended_by_itself(mpirun, folder, ranks):
    """A block that the ranks' processes outlive, but not for long."""
    processes = []
    try:
        wait_for(lambda: all((folder / f"started_{rank}").exists() for rank in range(ranks)))
        processes = [int((folder / f"started_{rank}").read_text()) for rank in range(ranks)]
        yield processes
        wait_for(lambda: not any(map(lives, processes)))
    finally:
        for process in filter(lives, [mpirun.pid, *processes]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        mpirun.wait()


WRAPPERS = {"direct": [], "in a shell": ["sh", "-c", '"$@"; true', "sh"]}
QUICK = [("direct", "compute", 1), ("in a shell", "call", 2)]


@pytest.mark.parametrize(
    "start, does, ranks",
    slow_but(QUICK, [*itertools.product(WRAPPERS, ["call", "compute"], [1, 3]), QUICK[1]]),
)
def test_ranks_end_with_their_launcher(launch, tmp_path, start, does, ranks):
    wrapper = WRAPPERS[start]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*launch.mpirun, "-n", str(ranks), *wrapper, sys.executable, str(program), does]
    # Python's: an MPI that another test started here has put its own variables into C's.
    env = dict(os.environ)
    with open(tmp_path / "stderr", "w") as stderr:
        mpirun = subprocess.Popen(
            command, cwd=tmp_path, stdout=stderr, stderr=stderr, start_new_session=True, env=env
        )
    with ended_by_itself(mpirun, tmp_path, ranks) as processes:
        # MPICH's proxy; Open MPI's mpirun itself, on one host.
        launchers = [int(field(processes[0], "PPid"))]
        if wrapper:
            launchers = [int(field(launchers[0], "PPid"))]
        for process in {*launchers, mpirun.pid}:
            os.kill(process, signal.SIGKILL)
        mpirun.wait()


@pytest.mark.slow
def test_ranks_end_where_nobody_reads_what_they_print(launch, tmp_path):
    """Rank 1 does not come; the others' pipes are full, so the report cannot be printed."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    patience = {
        "HPCSTRAT_STALL_SECONDS": "1",
        "HPCSTRAT_TIMEOUT_SECONDS": "6",
        "HPCSTRAT_OUTPUT": "all",
    }
    mpirun = subprocess.Popen(
        [*launch.mpirun, "-n", "2", sys.executable, str(program), "print"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | patience,
    )
    with ended_by_itself(mpirun, tmp_path, 2):
        pass
    assert mpirun.stdout is not None
    mpirun.stdout.close()
