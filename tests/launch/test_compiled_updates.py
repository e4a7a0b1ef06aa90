"""Large updates as C loops: who compiles, what stays behind, compilers that fail, hang or lie."""

import os
import random
import shutil

import pytest

slow = pytest.mark.slow
CC = shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")
PROGRAM = """
import sys
import numpy as np
import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy() if sys.argv[1:] else hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.linspace(-1, 1, 200_000, dtype=np.float32))
    optimizer = hs.optimizers.Adam(0.5)
for step in range(3):
    gradient = np.linspace(hs.rank(), 1 + step, w.size, dtype=np.float32)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
hs.on_lead(lambda: print(hash(w.numpy().tobytes())))
"""


def compiler(folder, *lines):
    """A compiler that runs these lines of a shell first; each start of it is noted."""
    path = folder / "compiler"
    begin, end = f"#!/bin/sh\necho started >>{folder}/noted", f'exec {CC} "$@"\n'
    path.write_text("\n".join([begin, *lines, end]))
    path.chmod(0o755)
    (folder / "temporary").mkdir(exist_ok=True)
    found = {"CC": os.fspath(path), "TMPDIR": os.fspath(folder / "temporary")}
    return found | {"HPCSTRAT_COMPILE": "1", "PYTHONHASHSEED": "1"}


def starts(folder):
    noted = folder / "noted"
    return noted.read_text().count("started\n") if noted.exists() else 0


@pytest.mark.parametrize(
    "ranks, hosts", [(2, 1), *(pytest.param(*c, marks=slow) for c in [(None, 1), (4, 3)])]
)
def test_one_rank_compiles_for_its_host(launch, tmp_path, ranks, hosts):
    """Unless that is forbidden: NumPy returns the same bits, and no compiler is started."""
    if hosts > 1 and launch.open_mpi:
        pytest.skip("only MPICH can pose as several hosts")
    env = compiler(tmp_path) | {"MPIR_CVAR_NUM_CLIQUES": hosts}
    several = ["hosts"] * (hosts > 1)
    forbidden = launch(PROGRAM, ranks, *several, env=env | {"HPCSTRAT_COMPILE": "0"})
    assert forbidden.out and forbidden.err == "" and starts(tmp_path) == 0
    compiled = launch(PROGRAM, ranks, *several, env=env)
    assert (compiled.out, compiled.err, starts(tmp_path)) == (forbidden.out, "", hosts)
    assert os.listdir(env["TMPDIR"]) == []


FAILING: dict[str, tuple[list[str], str]] = {
    "no compiler": ([], "there is no /nonexistent"),
    "a compiler that fails": (["echo no such flag >&2", "exit 1"], "status 1: no such flag"),
    "a compiler that does nothing": (["exit 0"], "No such file"),
    "a compiler that writes something else": (
        ['while [ "$1" != -o ]; do shift; done', 'echo x >"$2"', "exit 0"],
        "OSError",
    ),
    "a compiler of another function": (
        [f"""exec sed 's/void update/void updated/' | exec {CC} "$@"; exit"""],
        "undefined symbol: update",
    ),
    "a compiler that takes no number for infinite": (
        [f'exec {CC} "$@" -ffast-math'],
        "computes other values than NumPy",
    ),
    "a compiler of other numbers": (
        [f"""sed 's/first.i. + second.i./first[i] - second[i]/' | {CC} "$@"; exit"""],
        "its loop for adam computes other values than NumPy",
    ),
}


@pytest.mark.parametrize(
    "failing",
    [
        pytest.param(name, marks=[slow] * (name != "a compiler of other numbers"))
        for name in FAILING
    ],
)
def test_without_a_loop_the_job_goes_on_after_one_line(launch, tmp_path, failing):
    lines, said = FAILING[failing]
    env = compiler(tmp_path, *lines) | ({} if lines else {"CC": "/nonexistent"})
    expected = launch(PROGRAM, 2, env=env | {"HPCSTRAT_COMPILE": "0"}).out
    result = launch(PROGRAM, 2, env=env)
    assert (result.status, result.out) == (0, expected)
    (line,) = result.err.splitlines()
    assert "hpcstrat: NumPy makes the updates" in line and said in line
    assert starts(tmp_path) == bool(lines) and os.listdir(env["TMPDIR"]) == []


READ_ONLY = """
    for at in "$PWD" /tmp /var/tmp; do
        mount --bind "$at" "$at"
        mount -o remount,bind,ro "$at"
    done
    cd "$PWD"
"""
MOUNTS = {
    "executes nothing": "mount -t tmpfs -o noexec tmpfs $TMPDIR",
    "read only, as all others": READ_ONLY,
}


@slow
@pytest.mark.parametrize("folder", MOUNTS)
def test_a_temporary_folder_that_holds_no_library_costs_one_line(launch, folder):
    wrap = ["unshare", "--mount", "sh", "-ec", f'{MOUNTS[folder]}\nexec "$@"', "sh"]
    result = launch(PROGRAM, 2, namespaces=True, wrap=wrap)
    assert result.status == 0 and result.leftovers == []
    (line,) = result.err.splitlines()
    assert "hpcstrat: NumPy makes the updates" in line


@slow
def test_a_temporary_folder_that_is_none_is_not_used(launch):
    """Python's `tempfile` takes another."""
    result = launch(PROGRAM, 2, namespaces=True, env={"TMPDIR": "/nonexistent"})
    assert (result.status, result.err) == (0, "") and result.out


@slow
def test_a_compiler_that_hangs_costs_its_limit_once(launch, tmp_path):
    """Not once per rank, which would exceed the others' time-out; its children end with it."""
    env = compiler(tmp_path, "sleep 1000 & sleep 1000")
    env |= {"HPCSTRAT_STALL_SECONDS": "20", "HPCSTRAT_TIMEOUT_SECONDS": "30"}
    result = launch(PROGRAM, 4, env=env)
    assert result.status == 0 and result.out and len(result.err.splitlines()) == 1
    assert (starts(tmp_path), result.leftovers) == (1, [])


@slow
@pytest.mark.parametrize("victim, seconds", [("launcher", 1000), (0, 0.5), (1, 1000)], ids=str)
def test_a_job_that_is_killed_while_it_compiles_leaves_nothing_running(
    launch, tmp_path, victim, seconds
):
    env = compiler(tmp_path, f"touch {tmp_path}/compiles", f"sleep {seconds}")
    del env["TMPDIR"]
    leaves = [str(tmp_path / "tmp" / "hpcstrat-")]  # whose owner has been killed
    job = launch.start(PROGRAM, 2, launcher="run", namespaces=True, leaves=leaves, env=env)
    killed = job.launcher() if victim == "launcher" else job.rank(victim)
    job.wait_for("compiles")
    job.pause(random.Random(str(victim)).uniform(0.0, 0.8))
    job.signal(killed, "SIGKILL")
    assert job.end().leftovers == []
    env = compiler(tmp_path)
    del env["TMPDIR"]
    result = launch(PROGRAM, 2, namespaces=True, leaves=leaves, env=env)
    assert (result.status, result.err, result.leftovers) == (0, "", []) and result.out
