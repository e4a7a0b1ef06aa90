"""`hpcstrat run`: starts ranks as their own mpiexec does; arguments, signals, what it leaves."""

import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from processes import parent

slow = pytest.mark.slow
RUN = [sys.executable, "-m", "hpcstrat", "run"]
RANKS = """
    import os, sys
    import hpcstrat as hs

    hs.barrier()
    os.write(1, f"{hs.rank()} of {hs.size()} {sys.argv[1:]}\\n".encode())
"""

# ---- one start


@pytest.mark.parametrize(
    "ranks, option",
    [(2, ""), *(pytest.param(*case, marks=slow) for case in [(1, "-c"), (3, "-m")])],
)
def test_ranks_and_their_arguments(launch, ranks, option):
    """They reach the program as they are, and nothing else."""
    (launch.folder / "program.py").write_text(textwrap.dedent(RANKS))
    program = {"": ["program.py"], "-m": ["-m", "program"], "-c": ["-c", textwrap.dedent(RANKS)]}
    words = ["-n", "3", ":", "touch", "x", "a b", "", "--restarts", "$HOME", "'", "\n", "--", ":"]
    result = launch([*RUN, "-n", ranks, *program[option], *words])
    lines = [f"{rank} of {ranks} {words}" for rank in range(ranks)]
    assert (result.status, sorted(result.out.splitlines()), result.err) == (0, lines, "")
    assert not (launch.folder / "x").exists()


def test_the_status_is_the_ranks(launch):
    """Whatever signals this process inherits as ignored."""
    wrap = ["sh", "-c", 'trap "" CHLD HUP INT QUIT; exec "$0" "$@"']
    result = launch("import sys; print('said'); sys.exit(7)", 1, launcher="run", wrap=wrap)
    assert result.status == 7 and "said\n" in result.out


def test_no_two_launchers(launch):
    result = launch([*RUN, "-n", 2, "x.py"], env={"TORCHELASTIC_RUN_ID": "none"})
    assert (result.status, result.out) == (2, "")
    assert "a launcher has started this process" in result.err


WRONG = [
    (["true"], "the following arguments are required: -n"),
    (["-n", "2"], "the following arguments are required: PROGRAM"),
    (["-n", "0", "true"], "argument -n: '0' is not a number from 1 up"),
    (["-n", 5000 * "9", "true"], "argument -n"),
    (["-n", "1", "--restarts", "-1", "true"], "argument --restarts: '-1' is not a number"),
    (["-n", "1", "--mpiexec", "no-such-mpiexec", "x"], "no-such-mpiexec is no known mpiexec"),
    (["-n", "1", "--mpiexec", "a 'b", "x"], "No closing quotation"),
    (["-n", "1", "--mpiexec", " ", "x"], "--mpiexec"),
]


@slow
def test_wrong_use_is_named_in_a_line(launch):
    for words, said in WRONG:
        result = launch([*RUN, *words])
        assert (result.status, result.out) == (2, "") and "Traceback" not in result.err
        line = result.err.splitlines()[-1]
        assert said in line and "hpcstrat run: " in line and len(line) < 200


def test_without_an_mpi_library(launch):
    result = launch([*RUN, "-n", 1, "x"], env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert (result.status, result.out) == (2, "") and "`pip install '.[mpich]'`" in result.err


def test_the_entry_point():
    script = pathlib.Path(sys.prefix, "bin/hpcstrat")
    if not script.exists():
        pytest.skip("hpcstrat is not installed in this environment")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"hpcstrat \d+\.\d+\.\d+\n", result.stdout)


@pytest.mark.parametrize("allowed, failing", [(1, 2), (3, 1)])
def test_as_many_restarts_as_needed_and_allowed(launch, allowed, failing):
    program = f"""
        import pathlib, sys
        number = len(list(pathlib.Path().glob("start-*")))
        pathlib.Path(f"start-{{number}}").touch()
        sys.exit(9 * (number < {failing}))
    """
    result = launch(program, 1, launcher="run", options=["--restarts", allowed])
    assert (result.status, len(result.restarts)) == (9 if failing > allowed else 0, 1)
    assert len(list(launch.folder.glob("start-*"))) == 2


# ---- signals


def ready(launch, *words, **options):
    """Two ranks that say that they are ready."""
    job = launch.start("signalled.py", 2, *words, launcher="run", **options)
    job.wait_for("ready-0", "ready-1")
    return job


@pytest.mark.parametrize(
    "name", ["SIGTERM", *(pytest.param(f"SIG{n}", marks=slow) for n in ("USR1", "USR2", "INT"))]
)
def test_signals_reach_the_ranks_and_are_no_reason_to_restart(launch, name):
    job = ready(launch, 75, options=["--restarts", 3])
    job.signal(job.launcher(), name)
    result = job.end()
    if name in (("SIGTERM", "SIGINT") if launch.open_mpi else ("SIGUSR2",)):
        assert result.status != 0  # this MPI's mpiexec ends at it, in place of passing it on
    else:
        got = sorted(re.findall("^rank.*", result.out, re.MULTILINE))
        assert got == [f"rank {rank} got {signal.Signals[name].value}" for rank in range(2)]
        assert result.status == 75
    assert (result.restarts, result.leftovers) == ([], [])


def test_ctrl_c_at_a_terminal_reaches_the_ranks_once(launch):
    keyboard, terminal = os.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(*sys.argv[1:2], sys.argv[1:])"
    options = {"stdin": terminal, "wrap": [sys.executable, "-c", take]}
    job = ready(launch, 3, options=["--restarts", 3], **options)
    os.write(keyboard, b"\x03")
    result = job.end()
    os.close(keyboard)
    os.close(terminal)
    assert result.status == (1 if launch.open_mpi else 3)
    assert (result.restarts, result.leftovers) == ([], [])
    assert result.out.count(" got 2\n") == (0 if launch.open_mpi else 2)


def test_a_signal_that_ends_mpiexec_is_the_status(launch):
    job = ready(launch, "number")
    start = job.launcher()
    (mpiexec,) = [process for process in job.processes() if parent(process) == start]
    job.signal(mpiexec, "SIGKILL")
    # Under Open MPI ranks stay that have not started the library, as these.
    assert job.end().status == 128 + signal.SIGKILL


@slow
@pytest.mark.parametrize("mpi", [["mpi"], []], ids=["with MPI", "without"])
def test_when_the_launcher_is_killed_the_ranks_end(launch, mpi):
    job = ready(launch, "number", *mpi, options=["--restarts", 3])
    job.signal(job.launcher(), "SIGKILL")
    result = job.end()
    assert (result.status, result.leftovers) == (128 + signal.SIGKILL, [])


@slow
def test_a_signal_ends_ranks_in_the_middle_of_a_line(launch):
    program = """
        import os, pathlib, time
        os.write(1, 4_000_000 * b"x")
        pathlib.Path("ready").touch()
        time.sleep(1000)
    """
    job = launch.start(program, 1, launcher="run", options=["--restarts", 3], namespaces=True)
    job.wait_for("ready")
    job.signal(job.launcher(), "SIGHUP")
    result = job.end()
    assert result.status != 0 and result.out.startswith("xxx")
    assert (result.restarts, result.leftovers) == ([], [])


@slow
@pytest.mark.parametrize("options", [[], ["--restarts", 3]], ids=["alone", "with restarts"])
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_is_left_of_a_launcher_that_is_killed_at_any_moment(launch, options, seed):
    words = ["training.py", 3, "--step-seconds", 0.05]
    # What MPICH's start makes has no other owner when all are killed in its midst.
    leaves = ["/dev/shm/mpich_shm_"]
    job = launch.start(*words, launcher="run", options=options, namespaces=True, leaves=leaves)
    process = job.launcher()
    job.pause(random.Random(seed).uniform(0.05, 2.0))
    job.signal(process, "SIGKILL")
    result = job.end()
    assert (result.status, result.leftovers) == (128 + signal.SIGKILL, [])
