"""`hpcstrat run`: starts ranks as their own mpiexec does, and again while they fail."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from slow import slow_but

SCRIPTS = pathlib.Path(sys.prefix, "bin")
MARK = "RUN_BY_TEST"
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_", "TORCHELASTIC_")
RANKS = """
    import os, sys
    import hpcstrat as hs

    hs.barrier()
    os.write(1, f"{hs.rank()} of {hs.size()} {sys.argv[1:]}\\n".encode())
"""
# Ranks that wait, and end when both have got a signal.
WAITS = """
    import os, pathlib, signal, sys, time

    def end(number, frame):
        pathlib.Path(f"signalled.{os.getpid()}").touch()
        # Where a rank ends with an error, Open MPI kills the other, whether its signal was handled or not.
        while len(list(pathlib.Path().glob("signalled.*"))) < 2:
            time.sleep(0.01)
        sys.exit(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, end)
    os.write(1, b"ready\\n")
    time.sleep(1000)
"""
# Each rank notes its starts; the last of them ends the job in the first two.
FAILS_TWICE = """
    import os, pathlib, signal, time
    import hpcstrat as hs

    starts = pathlib.Path(f"starts-{hs.rank()}")
    count = len(starts.read_text()) if starts.exists() else 0
    starts.write_text((count + 1) * "x")
    hs.barrier()
    if count < 2 and hs.rank() == hs.size() - 1:
        HOW
    hs.barrier()
    print("done")
"""


class Run:
    """Runs `hpcstrat run` as a user does at the shell."""

    def __init__(self, folder, open_mpi):
        self.folder = folder
        self.open_mpi = open_mpi
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
        }
        self.env |= {"CUDA_VISIBLE_DEVICES": "", MARK: str(folder)}

    def write(self, text):
        (self.folder / "program.py").write_text(textwrap.dedent(text))

    def start(self, *words, before=(), stdin=subprocess.DEVNULL, **env):
        return subprocess.Popen(
            [*before, sys.executable, "-m", "hpcstrat", "run", *words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.env | env,
            start_new_session=True,
        )

    def start_ready(self, *words, **options):
        """Two ranks that say that they are ready."""
        process = self.start("-n", "2", *words, "program.py", **options)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        return process

    def __call__(self, *words, **options):
        """The exit status, and what was printed."""
        process = self.start(*words, **options)
        stdout, stderr = process.communicate(timeout=90)
        print(stdout, stderr, sep="\n")
        return process.returncode, stdout, stderr

    def processes(self):
        """The job's running processes."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    stat = pathlib.Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                    environ = pathlib.Path(f"/proc/{name}/environ").read_bytes()
                    if stat[0] != "Z" and f"{MARK}={self.folder}".encode() in environ:
                        found.append(int(name))
        return found


def wait_for(condition):
    deadline = time.monotonic() + 60  # on a machine that does other work too
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def restarts(stderr):
    return re.findall(r"hpcstrat run: .*", stderr)


@pytest.fixture
def run(launch, tmp_path):
    run = Run(tmp_path, launch.open_mpi)
    yield run
    for process in run.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


# ---- one start


@pytest.mark.parametrize("option", slow_but(["", "-c"], ["", "-m", "-c"]))
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_and_their_arguments(run, ranks, option):
    run.write(RANKS)
    program = {"": ["program.py"], "-m": ["-m", "program"], "-c": ["-c", textwrap.dedent(RANKS)]}
    words = ["-n", "3", ":", "touch", "x", "a b", "", "--restarts"]
    status, stdout, stderr = run("-n", str(ranks), *program[option], *words)
    lines = [f"{rank} of {ranks} {words}" for rank in range(ranks)]
    assert (status, sorted(stdout.splitlines()), stderr) == (0, lines, "")
    assert not (run.folder / "x").exists()


@pytest.mark.parametrize("ignored", slow_but(["CHLD"], ["CHLD", "HUP INT QUIT"]))
def test_the_status_is_the_ranks(run, ignored):
    """Whatever signals this process inherits as ignored."""
    run.write("import sys; print('said'); sys.exit(7)")
    before = ["sh", "-c", f'trap "" {ignored}; exec "$0" "$@"']
    status, stdout, _ = run("-n", "1", "program.py", before=before)
    assert status == 7 and "said\n" in stdout


def test_an_error_ends_all_ranks(run):
    run.write("import hpcstrat as hs\nif hs.rank(): raise ValueError('the cause')\nhs.barrier()")
    status, _, stderr = run("-n", "2", "program.py")
    assert status != 0
    assert "[rank 1] ValueError: the cause" in stderr


def test_options_of_mpiexec(run):
    run.write(RANKS)
    option = "--output tag" if run.open_mpi else "-prepend-rank"
    status, stdout, _ = run("-n", "2", "--mpiexec", f"mpiexec {option}", "program.py")
    mark = r"\[1,{0}\]<stdout>: " if run.open_mpi else r"\[{0}\] "
    lines = sorted(stdout.splitlines())
    assert status == 0 and len(lines) == 2
    for rank, line in enumerate(lines):
        assert re.fullmatch(rf"{mark.format(rank)}{rank} of 2 \[\]", line)


def test_no_two_launchers(run, launch):
    run.write(RANKS)
    words = [sys.executable, "-m", "hpcstrat", "run", "-n", "2", "program.py"]
    by_mpirun = subprocess.run(
        [*launch.mpirun, "-n", "2", *words],
        capture_output=True,
        text=True,
        env=run.env,
        cwd=run.folder,
        timeout=60,
    )
    assert by_mpirun.returncode == 2 and " of 2 " not in by_mpirun.stdout
    assert "a launcher has started this process" in by_mpirun.stderr
    for env in (
        {"TORCHELASTIC_RUN_ID": "none"},
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
    ):
        status, stdout, stderr = run(*words[4:], **env)
        assert (status, stdout) == (2, "") and "a launcher has started this process" in stderr


OTHER = {True: "HYDRA build details:\n    Version: 5.0.0", False: "mpiexec (Open MPI) 5.0.8"}


@pytest.mark.parametrize("named", [False, True], ids=["on the PATH", "named"])
def test_the_mpiexec_of_another_mpi(run, named):
    """It is passed over if another fits, and refused where it is named."""
    (run.folder / "other").mkdir()
    other = run.folder / "other/mpiexec"
    other.write_text(f"#!/bin/sh\necho '{OTHER[run.open_mpi]}'\n")
    other.chmod(0o755)
    run.write(RANKS)
    option = ["--mpiexec", f"{other} -x"] if named else []
    path = f"{other.parent}:{run.env['PATH']}"
    status, stdout, stderr = run("-n", "2", *option, "program.py", PATH=path)
    if not named:
        assert (status, len(stdout.splitlines()), stderr) == (0, 2, "")
        return
    own, foreign = ("Open MPI", "MPICH") if run.open_mpi else ("MPICH", "Open MPI")
    assert (status, stdout) == (2, "")
    assert re.search(rf"mpi4py loads {own} [\d.]+, but {other} -x is that of {foreign}\. ", stderr)


@pytest.mark.slow
def test_wrong_use(run):
    for words, text in [
        (["true"], "the following arguments are required: -n"),
        (["-n", "2"], "the following arguments are required: PROGRAM"),
        (["-n", "0", "true"], "argument -n: '0' is not a number from 1 up"),
        (["-n", "1", "--restarts", "-1", "true"], "argument --restarts: '-1' is not a number"),
        (["-n", "1", "--mpiexec", "no-such-mpiexec", "x"], "no-such-mpiexec is no known mpiexec"),
        (["-n", "1", "--mpiexec", "a 'b", "x"], "hpcstrat run: No closing quotation"),
    ]:
        status, stdout, stderr = run(*words)
        assert (status, stdout) == (2, "")
        assert text in stderr


def test_without_an_mpi_library(run):
    status, stdout, stderr = run("-n", "1", "x", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert (status, stdout) == (2, "") and "`pip install '.[mpich]'`" in stderr


def test_the_entry_point():
    script = SCRIPTS / "hpcstrat"
    if not script.exists():
        pytest.skip("hpcstrat is not installed in this environment")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"hpcstrat \d+\.\d+\.\d+\n", result.stdout)


# ---- signals


def is_ended_by(run, name):
    """Whether this MPI's mpiexec ends at the signal itself, in place of passing it on."""
    return name in (("SIGTERM", "SIGINT") if run.open_mpi else ("SIGUSR2",))


@pytest.mark.parametrize(
    "name", slow_but(["SIGUSR1", "SIGTERM"], ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT"])
)
def test_signals_reach_the_ranks_and_are_no_reason_to_restart(run, name):
    run.write(WAITS.replace("sys.exit(number)", "sys.exit(75)"))
    process = run.start_ready("--restarts", "3")
    process.send_signal(signal.Signals[name])
    _, stderr = process.communicate(timeout=60)
    if is_ended_by(run, name):
        assert process.returncode != 0
    else:
        assert (process.returncode, len(list(run.folder.glob("signalled.*")))) == (75, 2)
    assert restarts(stderr) == []
    wait_for(lambda: not run.processes())


def test_ctrl_c_at_a_terminal_reaches_the_ranks_once(run):
    run.write("""
        import os, signal, sys, time

        def note(number, frame):
            os.write(1, b"noted\\n")

        signal.signal(signal.SIGINT, note)
        os.write(1, b"ready\\n")
        for _ in range(10):
            time.sleep(0.1)
        sys.exit(3)
    """)
    keyboard, terminal = os.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(*sys.argv[1:2], sys.argv[1:])"
    process = run.start_ready(
        "--restarts", "3", stdin=terminal, before=[sys.executable, "-c", take]
    )
    os.write(keyboard, b"\x03")
    stdout, stderr = process.communicate(timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == (1 if run.open_mpi else 3) and restarts(stderr) == []
    assert stdout.count("noted") == (0 if run.open_mpi else 2)
    wait_for(lambda: not run.processes())


def parent(process):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_signal_that_ends_mpiexec_is_the_status(run):
    run.write(WAITS)
    process = run.start_ready()
    (mpiexec,) = [one for one in run.processes() if parent(one) == process.pid]
    os.kill(mpiexec, signal.SIGKILL)
    # Under Open MPI ranks stay that have not started the library, as these.
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("connects", [False, True], ids=["without MPI", "with MPI"])
def test_when_the_launcher_is_killed_the_ranks_end(run, connects):
    line = "import hpcstrat as hs; hs.barrier()\n" if connects else ""
    run.write(line + textwrap.dedent(WAITS))
    process = run.start_ready("--restarts", "3")
    process.kill()
    process.communicate(timeout=60)  # until no process is left to write
    wait_for(lambda: not run.processes())


# ---- restarts

ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "an exception": "raise ValueError('the cause')",
    "saved": "raise SystemExit(75)",
}


@pytest.mark.parametrize("how", slow_but(["killed"], ENDS))
@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 3]))
def test_ranks_start_again_until_they_succeed(run, ranks, how):
    run.write(FAILS_TWICE.replace("HOW", ENDS[how]))
    status, stdout, stderr = run("-n", str(ranks), "--restarts", "3", "program.py")
    assert status == 0 and stdout.endswith("done\n")
    lines = restarts(stderr)
    assert len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(
            rf"hpcstrat run: the ranks ended with status [1-9]\d*; restart {number} of 3", line
        )
    for rank in range(ranks):
        assert (run.folder / f"starts-{rank}").read_text() == "xxx"


@pytest.mark.parametrize("allowed", [0, 1])
def test_no_more_often_than_allowed(run, allowed):
    run.write("import pathlib, sys; print('x', file=open('starts', 'a')); sys.exit(9)")
    status, _, stderr = run("-n", "1", "--restarts", str(allowed), "program.py")
    assert (status, len(restarts(stderr))) == (9, allowed)
    assert (run.folder / "starts").read_text() == (allowed + 1) * "x\n"
