"""The launcher is killed, so it can end no rank: each ends by itself."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os, sys, time
import hpcstrat as hs

hs.barrier()
with open(f"started_{hs.rank()}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, f"started_{hs.rank()}")
while True:
    if sys.argv[1] == "call":
        hs.barrier()
    time.sleep(0.01)
"""
SECONDS = 60  # for the start, and again for the end, on a machine that does other work too


def field(process, name):
    """A field of what the system tells of a process."""
    found = re.search(rf"^{name}:\s*(\w+)", pathlib.Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found
    return found[1]


def lives(process):
    try:
        return field(process, "State") not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("does", ["call", "compute"])
@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["direct", "in a shell"])
def test_ranks_end_with_their_launcher(launch, tmp_path, ranks, does, wrapper):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [*launch.mpirun, "-n", str(ranks), *wrapper, sys.executable, str(program), does]
    with open(tmp_path / "stderr", "w") as stderr:
        mpirun = subprocess.Popen(command, cwd=tmp_path, stdout=stderr, stderr=stderr, start_new_session=True)
    processes = []
    try:
        wait_for(lambda: all((tmp_path / f"started_{rank}").exists() for rank in range(ranks)))
        processes = [int((tmp_path / f"started_{rank}").read_text()) for rank in range(ranks)]
        launchers = [int(field(processes[0], "PPid"))]  # MPICH's proxy; Open MPI's mpirun itself, on one host
        if wrapper:
            launchers = [int(field(launchers[0], "PPid"))]
        for process in {*launchers, mpirun.pid}:
            os.kill(process, signal.SIGKILL)
        mpirun.wait()
        wait_for(lambda: not any(map(lives, processes)))
    finally:
        for process in filter(lives, [mpirun.pid, *processes]):
            os.kill(process, signal.SIGKILL)
        mpirun.wait()
