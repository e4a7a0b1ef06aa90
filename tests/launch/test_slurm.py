"""The scripts in `slurm/`, run by the Slurm that `tests/try-locally` starts on this machine."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from job import Job, is_open_mpi, parent

# One machine is one cluster at a time.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
TRY_LOCALLY = ROOT / "tests" / "try-locally"
SECONDS = 90  # the time limit of a job
NOT_THE_USERS = "OMPI_ PMI_ PMIX_ PRTE_ HYDI_ MPI_LOCAL SLURM_ SBATCH_ PYTEST_ LAUNCH".split()


def environment(**changes):
    """The environment of a user's shell without a GPU, with these changes."""
    left_out = tuple(NOT_THE_USERS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    as_try_locally = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return kept | as_try_locally | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable} | changes


def run(*command, folder=None, **env):
    env = env or environment()
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


class LocalSlurm:
    """`tests/try-locally` while its command runs, whose first line is `line`."""

    def __init__(self, folder, *arguments):
        self._temporary = tempfile.mkdtemp()  # whose name is short enough for sockets
        env = environment(TMPDIR=self._temporary)
        gone = dict.fromkeys(name for name in os.environ if name not in env)
        self._job = job = Job([TRY_LOCALLY, *arguments], folder=folder, env=gone | env).start()
        while "\n" not in job.out:
            if not job.processes():
                result = job.end()
                shutil.rmtree(self._temporary)
                if result.status == 3 and os.environ.get("HPCSTRAT_TEST_SLURM") != "1":
                    pytest.skip(result.err.strip())
                assert result.out, f"tests/try-locally ended with status {result.status}"
            job.pause(0.1)
        self.line = job.out.splitlines()[0]

    def end(self, *names):
        """Sends the signals, waits for the end, and returns the exit status and what is left."""
        try:
            for name in names:
                for process in self._job.processes():
                    if parent(process) == os.getpid():
                        self._job.signal(process, name)
                self._job.pause(0.2)
            result = self._job.end(SECONDS)
            return result.status, [*os.listdir(self._temporary), *result.leftovers]
        finally:
            self._job.kill()
            shutil.rmtree(self._temporary, ignore_errors=True)


class SlurmJob:
    """A job that was submitted; `log` is what it has printed so far."""

    def __init__(self, number, path, env):
        self.number = number
        self._path = path
        self._env = env

    @property
    def log(self):
        return self._path.read_text(errors="replace")

    @property
    def lines(self):
        """The lines of the log; a progress bar's end at a carriage return."""
        return re.split(r"[\r\n]+", self.log.strip())

    def wait(self, holds):
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < deadline, f"job {self.number} takes too long\n{self.log}"
            time.sleep(0.1)

    def end(self):
        """Waits for the job's end: its state, its exit status and the number of its restarts."""
        self.wait(self._has_ended)
        facts = self._ask("scontrol", "show", "job", str(self.number)).stdout
        print(self.log)  # pytest shows it if the test fails
        found = re.search(r"JobState=(\w+).* Restarts=(\d+).* ExitCode=(\d+)", facts, re.DOTALL)
        assert found is not None, facts
        return found[1], int(found[3]), int(found[2])

    def _has_ended(self):
        result = self._ask("squeue", "--noheader", f"--jobs={self.number}")
        return result.returncode == 0 and not result.stdout  # it fails if the machine is too busy

    def signal(self, *options):
        assert self._ask("scancel", *options, str(self.number)).returncode == 0

    def _ask(self, *command):
        return run(*command, **self._env)


class Cluster:
    """A Slurm of two nodes; jobs are submitted from a folder that has those of the checkout."""

    def __init__(self, configuration, folder):
        self.folder = folder
        self._configuration = configuration
        self.open_mpi = is_open_mpi()
        (folder / "log").mkdir()
        for name in ("slurm", "launch", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def submit(self, script, *arguments, options=(), program=None, **env):
        """Submits slurm/SCRIPT.sbatch with these arguments; `program` is a file or the source for PROGRAM."""
        env = environment(SLURM_CONF=self._configuration, **env)
        if env.get("LAUNCH") == "srun":
            self._skip_what_cannot_run(script, env)
        log = self.folder / "log" / str(len(list(self.folder.glob("log/*"))))
        log.touch()
        if program is not None:
            path = HERE / "programs" / program
            if not program.endswith(".py"):
                path = self.folder / f"{log.name}.py"
                path.write_text(textwrap.dedent(program))
            env["PROGRAM"] = str(path)
        words = ["--parsable", f"--output={log}", *options, f"slurm/{script}.sbatch", *arguments]
        result = run("sbatch", *words, folder=self.folder, **env)
        assert result.returncode == 0, result.stderr
        return SlurmJob(int(result.stdout), log, env)

    def _skip_what_cannot_run(self, script, env):
        if not self.open_mpi and script in ("many_nodes", "resilient"):
            pytest.skip(
                "MPICH 5 under srun fails now and then on several nodes; start-ranks takes mpirun"
            )
        if self.open_mpi and not re.fullmatch(
            r"n\d\n", run("srun", "--mpi=pmix", "hostname", **env).stdout
        ):
            pytest.skip(
                "Open MPI under srun wants a Slurm that can load PMIx (with Debian's, libpmix-dev), "
                "and nodes with host names of their own, which root alone can make"
            )


@pytest.fixture(scope="module")
def configuration(tmp_path_factory):
    """The configuration file of a Slurm of two nodes that runs for all tests of this file."""
    options = ["-N", 2, "--cpus", 32, "--gpus", 4]
    words = "sh", "-c", "echo $SLURM_CONF; exec sleep 3000"
    slurm = LocalSlurm(tmp_path_factory.mktemp("slurm"), *options, *words)
    yield slurm.line
    assert slurm.end("SIGTERM") == (143, [])


@pytest.fixture
def cluster(configuration, tmp_path):
    return Cluster(configuration, tmp_path)


launches = pytest.mark.parametrize("launcher", ["srun", "mpirun"])


# ---- the scripts


def learns(job):
    """The accuracy that examples/train.py reaches on four replicas."""
    assert job.end() == ("COMPLETED", 0, 0)
    for word in ("Warning", "Error", "Traceback"):
        assert word not in job.log
    assert any(line.endswith("replicas: 4") for line in job.lines)
    (accuracy,) = (line for line in job.lines if line.startswith("test accuracy: "))
    return float(accuracy.split()[-1])


@launches
@pytest.mark.parametrize("script", ["cpu", "one_node"])
def test_one_node(cluster, script, launcher):
    job = cluster.submit(script, ARGUMENTS="--epochs 3", LAUNCH=launcher)
    assert learns(job) >= 0.85 and job.log.startswith(launcher)


def test_as_it_stands(cluster):
    job = cluster.submit("cpu")
    assert learns(job) >= 0.95
    started = r"mpirun |srun .*--mpi=pmix " if cluster.open_mpi else "srun .*--mpi=pmi2 "
    assert re.match(started, job.log)
    job = cluster.submit("many_nodes", "--epochs", "3", options=["--ntasks-per-node=2"])
    assert learns(job) >= 0.85


@launches
def test_two_nodes(cluster, launcher):
    env = {"ARGUMENTS": " --first  1 ", "LAUNCH": launcher, "HPCSTRAT_OUTPUT": "all"}
    for gpus in [], ["--gpus-per-node=4", "--gpu-bind=none"]:
        job = cluster.submit(
            "many_nodes", "--last=2 words", options=gpus, program="slurm_where.py", **env
        )
        assert job.end() == ("COMPLETED", 0, 0)
        arguments = ["--first", "1", "--last=2 words"]
        assert sorted(line for line in job.lines if line.startswith("rank ")) == [
            f"rank {rank} of 8 on n{1 + rank // 4}, of rank 0, {arguments}" for rank in range(8)
        ]


@launches
@pytest.mark.timeout(300)
def test_ranks_that_die_start_again_in_the_job(cluster, launcher):
    options = ["--nodes=2", "--ntasks-per-node=2"]
    job = cluster.submit("resilient", options=options, program="slurm_dies.py", LAUNCH=launcher)
    assert job.end() == ("COMPLETED", 0, 0)
    starts = [line for line in job.lines if " begins at " in line]
    for begin, lines in (0, starts[:4]), (5, starts[4:]):
        assert sorted(lines) == [
            f"rank {rank} of 4 on n{1 + rank // 2} begins at {begin}" for rank in range(4)
        ]
    assert "; restart 1 of 3" in job.log and job.log.count("ends at 8") == 1


def test_where_there_is_no_such_type_it_is_mpirun(cluster):
    job = cluster.submit("cpu", program="print('runs')", SLURM_MPI_TYPE="nonsense")
    assert job.end() == ("COMPLETED", 0, 0)
    assert job.log.startswith("mpirun ")


@pytest.mark.parametrize("script", ["cpu", "preemptible"])
def test_an_error_is_the_jobs(cluster, script):
    job = cluster.submit(script, program="raise SystemExit(3)", options=["--ntasks-per-node=1"])
    assert job.end() == ("FAILED", 3, 0)


def submit_to_both(cluster, **options):
    """A preemptible job for each launcher that can run here."""
    jobs = {}
    for launcher in ("srun", "mpirun"):
        with contextlib.suppress(pytest.skip.Exception):
            jobs[launcher] = cluster.submit("preemptible", LAUNCH=launcher, **options)
    for job in jobs.values():
        job.wait(lambda job=job: "waits" in job.log)
    return jobs


@pytest.mark.timeout(300)
def test_preemption(cluster):
    """A signal to the script alone, as before the time is up, and to the job, as at its end."""
    ranks = ["--ntasks-per-node=2"]
    undisturbed = cluster.submit("preemptible", options=ranks)
    assert undisturbed.end() == ("COMPLETED", 0, 0)
    assert (cluster.folder / f"slurm-{undisturbed.number}.checkpoint").exists()
    signals = {"srun": ["--batch", "--signal=USR1"], "mpirun": ["--full", "--signal=TERM"]}
    jobs = submit_to_both(cluster, options=ranks, program="slurm_resume.py")
    for launcher, job in jobs.items():
        job.signal(*signals[launcher])
    for launcher, job in jobs.items():
        assert job.end() == ("COMPLETED", 0, 1)
        continues = "continues in epoch 2, after step "
        (step,) = (int(line.split()[-1]) for line in job.lines if line.startswith(continues))
        # At a TERM, Open MPI's mpirun usually ends the job before it is saved; then there is the
        # file of the last epoch.
        assert step == 50 or (step == 29 and launcher == "mpirun" and cluster.open_mpi)
        assert job.lines[-20:] == undisturbed.lines[-20:]
        assert job.log.count("epoch 20: loss ") == 1


@pytest.mark.timeout(300)
def test_a_signal_before_it_can_be_noted(cluster):
    program = """
        import os, time

        if "SLURM_RESTART_COUNT" in os.environ:
            print("began again")
        else:
            print("waits", flush=True)
            time.sleep(1000)
    """
    jobs = submit_to_both(cluster, options=["--ntasks-per-node=1"], program=program).values()
    for job in jobs:
        job.signal("--batch", "--signal=USR1")
    for job in jobs:
        assert job.end() == ("COMPLETED", 0, 1)
        assert job.lines[-1] == "began again"


# ---- start-ranks and try-locally


def test_help_and_wrong_use():
    for command, status, message in (
        ("slurm/start-ranks --help", 0, "usage: slurm/start-ranks "),
        ("slurm/start-ranks", 2, "usage: "),
        ("slurm/start-ranks --nonsense", 2, "usage: "),
        ("slurm/start-ranks true", 2, "this is not a Slurm job"),
        ("tests/try-locally --help", 0, "usage: tests/try-locally "),
        ("tests/try-locally", 2, "usage: "),
        ("tests/try-locally --nonsense", 2, "usage: "),
        ("tests/try-locally -N two true", 2, "-N wants a number, not 'two'"),
        ("tests/try-locally --cpus", 2, "--cpus wants a number, not ''"),
        ("tests/try-locally -N 0 true", 2, "at least one node"),
    ):
        name, *arguments = command.split()
        result = run(ROOT / name, *arguments)
        assert result.returncode == status, command
        assert message in (result.stderr if status else result.stdout), command


def test_without_slurm(tmp_path):
    result = run("/bin/bash", TRY_LOCALLY, "true", PATH=str(tmp_path))
    assert result.returncode == 3
    assert re.search(r"there is no \w+ here; `apt-get install slurm-wlm munge`", result.stderr)


def test_the_status_is_the_commands_and_nothing_stays(tmp_path):
    command = "sbatch --quiet --output=/dev/null --wrap='sleep 1000'; srun -N 2 true && echo ran; sleep 1000 & exit 7"
    slurm = LocalSlurm(tmp_path, "-N", "2", "sh", "-c", command)
    assert (slurm.end(), slurm.line) == ((7, []), "ran")


@pytest.mark.parametrize(
    ("command", "signals", "status"),
    [
        ("echo up; exec sleep 1000", ["SIGTERM"], 143),
        ("trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done", ["SIGTERM"], 5),
        ("trap '' HUP TERM; echo up; exec sleep 1000", ["SIGHUP", "SIGTERM"], 137),
    ],
    ids=["that ends it", "that it handles", "two that it ignores"],
)
def test_a_signal_takes_it_down(tmp_path, command, signals, status):
    slurm = LocalSlurm(tmp_path, "sh", "-c", command)
    assert (slurm.end(*signals), slurm.line) == ((status, []), "up")
