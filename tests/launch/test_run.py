"""`hpcstrat run`: starts ranks through mpiexec, and behaves as plain mpirun does."""

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
RANKS = """
    import os, sys
    import hpcstrat as hs

    hs.barrier()
    os.write(1, f"{hs.rank()} of {hs.size()} {os.environ.get('OMP_NUM_THREADS')} {sys.argv[1:]}\\n".encode())
"""
WAITS = """
    import os, signal, sys, time

    def end(number, frame):
        sys.exit(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)
    os.write(1, b"ready\\n")
    time.sleep(1000)
"""
SIGNALLED = """
    import os, pathlib, signal, sys, time

    def end(number, frame):
        pathlib.Path(f"signalled.{os.getpid()}").touch()
        # Where a rank ends with an error, Open MPI kills the other, whether its signal was handled or not.
        while len(list(pathlib.Path().glob("signalled.*"))) < 2:
            time.sleep(0.01)
        sys.exit(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end)
    os.write(1, b"ready\\n")
    time.sleep(1000)
"""
MARK = "RUN_BY_TEST"


class Run:
    """Runs `hpcstrat run` as a user does at the shell."""

    def __init__(self, folder, open_mpi):
        self.folder = folder
        self.open_mpi = open_mpi
        names = (
            "OMPI_",
            "PMI_",
            "PMIX_",
            "PRTE_",
            "HYDI_",
            "MPI_LOCAL",
            "SLURM_",
            "OMP_NUM",
            "OPENBLAS",
            "MKL_",
            "BLIS_",
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(names)}
        self.env |= {"CUDA_VISIBLE_DEVICES": "", MARK: str(folder)}

    def write(self, text):
        (self.folder / "program.py").write_text(textwrap.dedent(text))

    def start(self, *words, stdin=subprocess.DEVNULL, **env):
        return subprocess.Popen(
            [sys.executable, "-m", "hpcstrat", "run", *words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.env | env,
            start_new_session=True,
        )

    def __call__(self, *words, text=None, **env):
        """The exit status, and what was printed; `text` is standard input."""
        process = self.start(
            *words, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE, **env
        )
        stdout, stderr = process.communicate(text, timeout=90)
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


@pytest.fixture
def run(launch, tmp_path):
    run = Run(tmp_path, launch.open_mpi)
    yield run
    for process in run.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("program", slow_but(["-m program"], ["program.py", "-m program"]))
def test_ranks(run, program):
    run.write(RANKS)
    status, stdout, stderr = run("-n", "2", *program.split(), "-n", "3", "--bind")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    lines = [f"{rank} of 2 {threads} ['-n', '3', '--bind']" for rank in range(2)]
    assert (status, sorted(stdout.splitlines()), stderr) == (0, lines, "")


@pytest.mark.parametrize("name", slow_but(["-"], ["-", "-c"]))
def test_a_program_that_is_no_file(run, name):
    """All of it at each start, with `sys.argv` as Python has it; no temporary files are left."""
    code = textwrap.dedent("""
        import os, pathlib, sys, mine
        if not os.path.exists("again"):
            pathlib.Path("again").touch()
            os.kill(os.getpid(), 9)
        import hpcstrat as hs
        hs.barrier()
        os.write(1, f'{hs.rank()} of {hs.size()} {sys.argv}\\n'.encode())
    """)
    (run.folder / "mine.py").touch()
    (run.folder / "tmp").mkdir()
    words = ["-"] if name == "-" else ["-c", code]
    program = {"text": code} if name == "-" else {}
    options = ("-n", "2", "--restarts", "1", "--prefix")
    status, stdout, stderr = run(
        *options, *words, "-n", "a b", TMPDIR=str(run.folder / "tmp"), **program
    )
    lines = [f"[rank {rank}] {rank} of 2 {[name, '-n', 'a b']}" for rank in range(2)]
    assert (status, sorted(stdout.splitlines()[-2:])) == (0, lines)
    assert "restart 1 of 1, on 2 ranks" in stderr
    assert not list(run.folder.glob("tmp/hpcstrat-*.py"))


def test_a_program_from_input_has_no_command_line(run):
    status, stdout, stderr = run("-n", "2", "--dry-run", "-", text="print(1)")
    assert (status, stdout) == (2, "") and "--dry-run prints a command line to use later" in stderr


@pytest.mark.slow
def test_bound_and_with_the_users_number_of_threads(run):
    run.write(RANKS)
    status, stdout, stderr = run("-n", "2", "--bind", "program.py", OMP_NUM_THREADS="3")
    assert (status, sorted(stdout.splitlines())) == (0, [f"{rank} of 2 3 []" for rank in range(2)])
    assert "bind-gpu: no GPU here; the ranks share the cores of the host" in stderr


def test_the_default_is_a_rank_for_each_core(run):
    status, stdout, stderr = run("--dry-run", "true")
    match = re.fullmatch(r"hpcstrat run: -n (\d+), one rank for each core of this host\n", stderr)
    assert status == 0 and match is not None
    assert 1 <= int(match[1]) <= len(os.sched_getaffinity(0))
    assert f" -n {match[1]} " in stdout and stdout.endswith(" true\n")


def test_a_program_that_is_not_pythons_and_its_status(run):
    status, stdout, _ = run("-n", "1", "sh", "-c", "echo said; exit 7")
    assert (status, stdout) == (7, "said\n")


@pytest.mark.slow
def test_a_modules_error_ends_all_ranks(run):
    run.write("import hpcstrat as hs\nif hs.rank(): raise ValueError('the cause')\nhs.barrier()")
    status, _, stderr = run("-n", "2", "-m", "program")
    assert status != 0
    assert "[rank 1] ValueError: the cause" in stderr


TWO_RANKS = """
    import os, sys
    import hpcstrat as hs

    print("once")
    print("an error", file=sys.stderr)
    strategy = hs.MirroredStrategy()
    strategy.run(lambda: print("replica", hs.rank()))
    os.write(2, f"C's {hs.rank()}\\n".encode())
    hs.barrier()  # the error of one ends the other, wherever that is
    if hs.rank() and sys.argv[1:]: raise ValueError("the cause")
    hs.barrier()
"""


def test_the_files_of_the_ranks_and_the_marks(run):
    run.write(TWO_RANKS)
    (run.folder / "logs").mkdir()
    (run.folder / "logs/rank-0.log").write_text("of a job before\n")  # the files start anew
    status, stdout, stderr = run("-n", "2", "--tee", "logs", "--prefix", "program.py")
    assert status == 0
    assert sorted(stdout.splitlines()) == [
        "[rank 0] once",
        "[rank 0] replica 0",
        "[rank 1] replica 1",
    ]
    assert sorted(stderr.splitlines()) == ["[rank 0] C's 0", "[rank 0] an error", "[rank 1] C's 1"]
    for rank in range(2):
        lines = (run.folder / f"logs/rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"C's {rank}", "an error", "once", f"replica {rank}"]


@pytest.mark.slow
def test_the_files_of_ranks_that_fail(run):
    run.write(TWO_RANKS)
    status, _, stderr = run("-n", "2", "--tee", "logs", "program.py", "fail")
    assert status != 0 and "[rank 1] ValueError: the cause" in stderr
    # The process that copies outlives the job for a moment.
    wait_for(lambda: "replica 0\n" in (run.folder / "logs/rank-0.log").read_text())
    wait_for(
        lambda: "[rank 1] ValueError: the cause\n" in (run.folder / "logs/rank-1.log").read_text()
    )


@pytest.mark.parametrize("name", slow_but(["SIGUSR1"], ["SIGUSR1", "SIGTERM", "SIGINT"]))
def test_signals_reach_the_ranks(run, name):
    number = signal.Signals[name]
    run.write(SIGNALLED)
    process = run.start("-n", "2", "program.py")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    process.communicate(timeout=60)
    if run.open_mpi and number != signal.SIGUSR1:
        assert process.returncode != 0  # its mpirun ends the job itself
    else:
        assert (process.returncode, len(list(run.folder.glob("signalled.*")))) == (number, 2)
    wait_for(lambda: not run.processes())


def parent(process):
    return int(pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_signal_that_ends_mpiexec_is_the_status(run):
    run.write(WAITS)
    process = run.start("-n", "2", "program.py")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    (mpiexec,) = [one for one in run.processes() if parent(one) == process.pid]
    os.kill(mpiexec, signal.SIGKILL)
    # Under Open MPI ranks stay that have not started the library, as these.
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("option", slow_but(["--prefix"], ["--prefix", "--bind"]))
def test_when_the_launcher_is_killed_the_ranks_end(run, option):
    run.write(WAITS)  # ranks that have not started MPI and handle TERM
    process = run.start("-n", "2", option, "program.py")
    assert process.stdout is not None
    assert [process.stdout.readline()[-6:] for _ in range(2)] == ["ready\n"] * 2
    process.kill()
    process.communicate(timeout=60)  # until no process is left to write
    wait_for(lambda: not run.processes())


LAUNCHERS = {
    "MPICH": (
        {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"},
        "mpirun of MPICH",
        "mpirun -n 2 python program.py x",
    ),
    "Open MPI": (
        {"OMPI_COMM_WORLD_SIZE": "4"},
        "mpirun of Open MPI",
        "mpirun -n 4 python program.py x",
    ),
    "Slurm": (
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"},
        "srun",
        "srun -n 4 python program.py x",
    ),
    "torchrun": (
        {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"},
        "torchrun",
        "hpcstrat run -n 2 program.py x",
    ),
}


@pytest.mark.parametrize("launcher", slow_but(["torchrun"], LAUNCHERS))
def test_below_another_launcher(run, launcher):
    env, name, command = LAUNCHERS[launcher]
    expected = f"hpcstrat run: {name} has started this process already; start the ranks with one launcher: `{command}`\n"
    assert run("program.py", "x", **env) == (2, "", expected)


def test_below_mpirun_it_is_said_once(run, launch):
    # The others wait for Open MPI's mpirun to end them; MPICH's waits for them, at full speed.
    seconds = 10.0 if launch.open_mpi else 0.0
    run.write(
        f"""
        from hpcstrat import __main__
        from hpcstrat._tools.launch import command

        command._HEAD_START_S = {seconds}
        __main__.main()
        """
    )
    command = [*launch.mpirun, "-n", "2", sys.executable, "program.py", "run", "program.py"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=run.env, cwd=run.folder, timeout=60
    )
    assert result.returncode == 2
    assert result.stderr.count("has started this process already") == 1


SLURM_JOB = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "5"}


def test_in_a_slurm_job_it_takes_the_jobs_tasks(run):
    run.write("")
    status, stdout, stderr = run("--dry-run", "program.py", **SLURM_JOB)
    assert (status, stderr) == (0, "")
    assert re.fullmatch(r"SLURM_NTASKS=5 MPIRUN=\S+ bash \S+/start-ranks \S+ program.py\n", stdout)


@pytest.mark.slow
def test_in_a_slurm_job_with_another_number_or_none(run):
    run.write("")
    status, stdout, _ = run("--dry-run", "-n", "2", "program.py", **SLURM_JOB)
    assert status == 0 and stdout.startswith("SLURM_NTASKS=2 ")
    status, _, stderr = run("program.py", SLURM_JOB_ID="3")
    assert status == 2 and "this Slurm job has no number of tasks" in stderr


@pytest.mark.slow
def test_wrong_use(run):
    for words, text in [
        (["missing.py"], "there is no file 'missing.py'"),
        (["-n", "0", "true"], "argument -n: '0' is not a number from 1 to 9,999,999"),
        (["--nccl", "libnccl.so.2", "true"], "--nccl goes with --share-gpu"),
        (
            ["--mpiexec", "no-such-mpiexec", "-n", "1", "true"],
            "--mpiexec: there is no program 'no-such-mpiexec'",
        ),
        ([], "the following arguments are required: PROGRAM"),
    ]:
        status, stdout, stderr = run(*words)
        assert (status, stdout) == (2, "")
        assert text in stderr


def test_the_entry_point():
    script = SCRIPTS / "hpcstrat"
    if not script.exists():
        pytest.skip("hpcstrat is not installed in this environment")
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"hpcstrat \d+\.\d+\.\d+\n", result.stdout)
