"""The scripts in `slurm/`, run by the Slurm that `tests/try-locally` starts on this machine."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest

# One machine is one cluster at a time.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]
ROOT = pathlib.Path(__file__).parents[2]
SLURM = ROOT / "slurm"
TRY_LOCALLY = ROOT / "tests" / "try-locally"
PROGRAMS = ["slurm/start-ranks", "tests/try-locally"]
SECONDS = 90  # the time limit of a job
NOT_THE_USERS = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "HYDI_",
    "MPI_LOCAL",
    "SLURM_",
    "SBATCH_",
    "PYTEST_",
    "LAUNCH",
)

# Prints where each rank is.
WHERE = """
    import os, sys
    import hpcstrat as hs

    hs.barrier()
    word = hs.broadcast_object(f"of rank {hs.rank()}")
    assert hs.any_rank(hs.rank() == hs.size() - 1)
    line = f"rank {hs.rank()} of {hs.size()} on {os.environ['SLURMD_NODENAME']}, {word}, {sys.argv[1:]}\\n"
    os.write(1, line.encode())  # in one piece
"""
# The example, whose first start waits at its 50th step until every rank has the signal.
RESUME = """
    import os, runpy, signal, time
    import hpcstrat as hs

    step, received = hs.checkpoint.CheckpointManager.step, []

    def wait_and_step(manager):
        if manager.steps == 0:
            handle = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *given: (received.append(given), handle(*given)))
        if manager.steps == 49 and "SLURM_RESTART_COUNT" not in os.environ:
            print("waits")
            while not received:
                time.sleep(0.01)
        step(manager)

    hs.checkpoint.CheckpointManager.step = wait_and_step
    runpy.run_path("examples/resume.py", run_name="__main__")
"""
# On its first start the ranks of the second node die.
DIES = """
    import os, signal, sys
    import hpcstrat as hs

    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        step = hs.Variable(0)
    checkpoint = hs.checkpoint.Checkpoint(step=step)
    path = sys.argv[-1]
    if os.path.exists(path):
        checkpoint.restore(path)
    begin = int(step.numpy())
    os.write(1, f"rank {hs.rank()} of {hs.size()} on {os.environ['SLURMD_NODENAME']} begins at {begin}\\n".encode())
    while int(step.numpy()) < 8:
        step.assign_add(1)
        checkpoint.save(path)
        if begin == 0 and int(step.numpy()) == 5 and os.environ["SLURMD_NODENAME"] == "n2":
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"ends at {int(step.numpy())}")
"""
# Prints where each rank is; then one of the fifth node dies.
DIES_ON_N5 = """
    import os, signal
    import hpcstrat as hs
    from hpcstrat._process import worlds

    strategy = hs.MultiWorkerMirroredStrategy()
    node, world = os.environ["SLURMD_NODENAME"], worlds.start()
    sizes = [world.hosts.count(host) for host in sorted(set(world.hosts))]
    line = f"rank {hs.rank()} on {node}, rank {world.local_rank} of host {world.hosts[hs.rank()]} of {sizes}\\n"
    os.write(1, line.encode())  # in one piece
    for step in range(20):
        hs.any_rank(False)
        if step == 10 and hs.rank() == 17:
            os.kill(os.getpid(), signal.SIGKILL)
    print("ends")
"""
# Cannot handle a signal.
BEGINS = """
    import os, time

    if "SLURM_RESTART_COUNT" in os.environ:
        print("began again")
    else:
        print("waits", flush=True)
        time.sleep(1000)
"""


def environment(**changes):
    """The environment of a user's shell without a GPU, with these changes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_THE_USERS)}
    ours = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMPI_MCA_mpi_yield_when_idle": "1",  # as `try-locally` sets it
        "PYTHON": sys.executable,
    }
    return kept | ours | changes


class LocalSlurm:
    """`tests/try-locally` while its command runs.

    Attributes:
        process: the program's.
        stdout: what the command prints, a file to read from.
        temporary: its temporary folder.
    """

    def __init__(self, *arguments):
        self.temporary = pathlib.Path(tempfile.mkdtemp())
        self._stderr = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [TRY_LOCALLY, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment(TMPDIR=str(self.temporary)),
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def first_line(self):
        """The first line that the command prints. Skips the test if Slurm is not installed."""
        line = self.stdout.readline().strip()
        if not line:
            status = self.process.wait()
            self._stderr.seek(0)
            message = self._stderr.read()
            if status == 3 and os.environ.get("HPCSTRAT_TEST_SLURM") != "1":
                pytest.skip(message.strip())
            pytest.fail(f"tests/try-locally ended with status {status}\n{message}")
        return line

    def end(self, *signals):
        """Sends the signals, waits for the end, and returns the exit status and what is left."""
        for one in signals:
            self.process.send_signal(one)
            time.sleep(0.2)
        stdout, _ = self.process.communicate(timeout=SECONDS)
        self._stderr.seek(0)
        print(stdout, self._stderr.read(), sep="\n")  # pytest shows it if the test fails
        return self.process.returncode, [*os.listdir(self.temporary), *self._processes()]

    def _processes(self):
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    texts = [
                        pathlib.Path(f"/proc/{name}/{file}").read_bytes()
                        for file in ("environ", "cmdline")
                    ]
                    if any(os.fsencode(self.temporary) in text for text in texts):
                        found.append(int(name))
        return found

    def close(self):
        self.process.kill()
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.communicate()
        self._stderr.close()
        subprocess.run(["rm", "-rf", self.temporary], check=True)


@pytest.fixture
def try_locally():
    """Starts `tests/try-locally` with arguments."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            slurm = LocalSlurm(*arguments)
            stack.callback(slurm.close)
            return slurm

        yield start


class Job:
    """A job that was submitted; `log` is what it has printed so far."""

    def __init__(self, number, path, env):
        self.number = number
        self._path = path
        self._env = env

    @property
    def log(self):
        return self._path.read_text(errors="replace") if self._path.exists() else ""

    @property
    def lines(self):
        """The lines of the log; a progress bar's end at a carriage return."""
        return re.split(r"[\r\n]+", self.log.strip())

    def wait_for(self, text):
        """Waits until the log has the text."""
        self._wait(lambda: text in self.log, f"print {text!r}")

    def end(self, seconds=SECONDS):
        """Waits for the job's end: its state, its exit status and the number of its restarts."""
        self._wait(self._has_ended, "end", seconds)
        facts = self._ask("scontrol", "show", "job", str(self.number))
        print(self.log)  # pytest shows it if the test fails
        found = re.search(r"JobState=(\w+).* Restarts=(\d+).* ExitCode=(\d+)", facts, re.DOTALL)
        assert found is not None, facts
        return found[1], int(found[3]), int(found[2])

    def _has_ended(self):
        try:
            return not self._ask("squeue", "--noheader", f"--jobs={self.number}")
        except subprocess.CalledProcessError:  # it gives up where the machine is too busy
            return False

    def signal(self, *options):
        self._ask("scancel", *options, str(self.number))

    def _ask(self, *command):
        return subprocess.run(
            command, env=self._env, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def _wait(self, holds, what, seconds=SECONDS):
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                pytest.fail(f"job {self.number} did not {what} within {seconds} s\n{self.log}")
            time.sleep(0.1)


class Cluster:
    """A Slurm of two nodes, or eight.

    Attributes:
        folder: jobs are submitted from it; it has the folders of the checkout.
        open_mpi: whether the MPI is Open MPI.
    """

    def __init__(self, configuration, folder, open_mpi):
        self.folder = folder
        self._configuration = configuration
        self.open_mpi = open_mpi
        for name in ("slurm", "launch", "examples"):
            (folder / name).symlink_to(ROOT / name)

    def submit(self, script, *arguments, options=(), program=None, **env):
        """Submits slurm/SCRIPT.sbatch with these arguments; `program` is the source for PROGRAM."""
        env = environment(SLURM_CONF=self._configuration, **env)
        if self.open_mpi and env.get("LAUNCH") == "srun":
            self._skip_without_pmix(env)
        log = self.folder / "log" / str(len(list(self.folder.glob("log/*"))))
        log.parent.mkdir(exist_ok=True)
        log.touch()
        if program is not None:
            path = log.with_suffix(".py")
            path.write_text(textwrap.dedent(program))
            env["PROGRAM"] = str(path)
        command = [
            "sbatch",
            "--parsable",
            f"--output={log}",
            *options,
            f"slurm/{script}.sbatch",
            *arguments,
        ]
        result = subprocess.run(
            command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
        return Job(int(result.stdout), log, env)

    def _skip_without_pmix(self, env):
        result = subprocess.run(
            ["srun", "--mpi=pmix", "hostname"], env=env, capture_output=True, text=True
        )
        if result.returncode != 0:
            pytest.skip(
                "Open MPI under srun wants a Slurm that can load PMIx; with Debian's, libpmix-dev "
                "is missing"
            )
        if result.stdout.strip() not in [f"n{node}" for node in range(1, 9)]:
            pytest.skip(
                "Open MPI under srun wants nodes with host names of their own, which root alone "
                "can make"
            )


@contextlib.contextmanager
def running(nodes):
    """A block in which a Slurm of some nodes runs; gives its configuration file."""
    options = ["-N", str(nodes), "--cpus", "32", "--gpus", "4"]
    slurm = LocalSlurm(*options, "sh", "-c", "echo $SLURM_CONF; exec sleep 3000")
    try:
        yield slurm.first_line()
        assert slurm.end(signal.SIGTERM) == (143, [])
    finally:
        slurm.close()


@pytest.fixture(scope="module")
def configuration():
    """The configuration file of a Slurm that runs for all tests of this file."""
    with running(2) as configuration:
        yield configuration


@pytest.fixture
def cluster(launch, configuration, tmp_path):
    return Cluster(configuration, tmp_path, launch.open_mpi)


@pytest.fixture
def cluster_of_eight(launch, tmp_path):
    with running(8) as configuration:
        yield Cluster(configuration, tmp_path, launch.open_mpi)


launches = pytest.mark.parametrize("launcher", ["srun", "mpirun"])


# ---- the scripts


@launches
@pytest.mark.parametrize("script", ["cpu", "one_node"])
def test_one_node(cluster, script, launcher):
    job = cluster.submit(script, ARGUMENTS="--epochs 3", LAUNCH=launcher)
    assert job.end() == ("COMPLETED", 0, 0)
    assert job.log.startswith(launcher)
    assert learns(job) >= 0.85


def test_as_it_stands(cluster, launch):
    job = cluster.submit("cpu")
    assert job.end() == ("COMPLETED", 0, 0)
    assert re.match(
        r"mpirun |srun .*--mpi=pmix " if launch.open_mpi else "srun .*--mpi=pmi2 ", job.log
    )
    assert learns(job) >= 0.95


def skip_what_start_ranks_avoids(launcher):
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=True
    ).stdout
    if launcher == "srun" and "Open MPI" not in version:
        pytest.skip(
            "MPICH 5 under srun on several nodes now and then fails as it starts; start-ranks "
            "takes mpirun"
        )


@pytest.mark.parametrize("launcher", ["", "srun", "mpirun"])
def test_two_nodes_learn(cluster, launcher):
    skip_what_start_ranks_avoids(launcher)
    job = cluster.submit(
        "many_nodes", "--epochs", "3", options=["--ntasks-per-node=2"], LAUNCH=launcher
    )
    assert job.end() == ("COMPLETED", 0, 0)
    assert learns(job, replicas=4) >= 0.85


def learns(job, replicas=4):
    """The accuracy that examples/train.py reaches."""
    for word in ("Warning", "Error", "Traceback"):
        assert word not in job.log
    assert any(line.endswith(f"replicas: {replicas}") for line in job.lines)
    (accuracy,) = (
        float(line.split()[-1]) for line in job.lines if line.startswith("test accuracy: ")
    )
    return accuracy


@launches
@pytest.mark.parametrize("gpus", [[], ["--gpus-per-node=4", "--gpu-bind=none"]], ids=["cpu", "gpu"])
def test_two_nodes(cluster, launcher, gpus):
    skip_what_start_ranks_avoids(launcher)
    env = {"ARGUMENTS": " --first  1 ", "LAUNCH": launcher, "HPCSTRAT_OUTPUT": "all"}
    job = cluster.submit("many_nodes", "--last=2 words", options=gpus, program=WHERE, **env)
    assert job.end() == ("COMPLETED", 0, 0)
    arguments = ["--first", "1", "--last=2 words"]
    assert sorted(line for line in job.lines if line.startswith("rank ")) == [
        f"rank {rank} of 8 on n{1 + rank // 4}, of rank 0, {arguments}" for rank in range(8)
    ]


# ---- eight nodes of four tasks, which share this machine's cores


LONG = 600  # the time limit of a job of 32 ranks


def submit_to_eight_nodes(cluster, *arguments, attempts=3, **options):
    """Submits many_nodes.sbatch and waits for its end; once more if MPI did not start."""
    launcher = "srun" if cluster.open_mpi else "mpirun"
    job = cluster.submit(
        "many_nodes", *arguments, options=["--nodes=8"], LAUNCH=launcher, **options
    )
    outcome = job.end(LONG)
    # Open MPI 5 over TCP: a rank gets a message while it is still in MPI_Init
    # (open-mpi/ompi#12495).
    if attempts > 1 and "mca_pml_ob1_recv_frag_callback_match" in job.log:
        return submit_to_eight_nodes(cluster, *arguments, attempts=attempts - 1, **options)
    assert job.log.startswith(launcher)
    return job, outcome


@pytest.mark.timeout(3 * LONG)
def test_eight_nodes_learn(cluster_of_eight):
    # The last of the batches, too, has elements for all ranks.
    job, outcome = submit_to_eight_nodes(cluster_of_eight, "--epochs", "4", "--batch-size", "96")
    assert outcome == ("COMPLETED", 0, 0)
    assert learns(job, replicas=32) >= 0.9
    assert [line.split(":")[0] for line in job.lines if line.startswith("epoch ")] == [
        f"epoch {epoch:2}" for epoch in range(1, 5)
    ]


@pytest.mark.timeout(3 * LONG)
def test_a_rank_of_eight_nodes_dies(cluster_of_eight):
    job, outcome = submit_to_eight_nodes(
        cluster_of_eight, program=DIES_ON_N5, HPCSTRAT_OUTPUT="all"
    )
    assert outcome[0] == "FAILED" and outcome[1] != 0
    starts = [line for line in job.lines if line.startswith("rank ")]
    assert sorted(starts) == sorted(
        f"rank {rank} on n{1 + rank // 4}, rank {rank % 4} of host {rank // 4} of {[4] * 8}"
        for rank in range(32)
    )
    assert "ends" not in job.lines
    # The launcher may end the others before hpcstrat can report; srun may name some of them with it.
    by_hpcstrat = r"rank 17 \(process \d+\) exited without shutting down"
    by_launcher = "n5: tasks? (17|16-)" if cluster_of_eight.open_mpi else "RUNNING AT n5"
    report = f"{by_launcher}|{by_hpcstrat}"
    assert re.search(report, job.log)


@launches
@pytest.mark.timeout(300)
def test_ranks_that_die_start_again_in_the_job(cluster, launcher):
    skip_what_start_ranks_avoids(launcher)
    options = ["--nodes=2", "--ntasks-per-node=2"]
    job = cluster.submit("resilient", options=options, program=DIES, LAUNCH=launcher)
    assert job.end() == ("COMPLETED", 0, 0)
    starts = [line for line in job.lines if " begins at " in line]
    assert sorted(starts[:4]) == [
        f"rank {rank} of 4 on n{1 + rank // 2} begins at 0" for rank in range(4)
    ]
    assert sorted(starts[4:]) == [
        f"rank {rank} of 4 on n{1 + rank // 2} begins at 5" for rank in range(4)
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


@pytest.mark.timeout(300)
def test_preemption(cluster):
    """A signal to the script alone, as before the time is up, and to the job, as at its end."""
    ranks = ["--ntasks-per-node=2"]
    undisturbed = cluster.submit("preemptible", options=ranks)
    assert undisturbed.end() == ("COMPLETED", 0, 0)
    assert (cluster.folder / f"slurm-{undisturbed.number}.checkpoint").exists()
    signals = {"srun": ["--batch", "--signal=USR1"], "mpirun": ["--full", "--signal=TERM"]}
    jobs = {}
    for launcher in signals:
        with contextlib.suppress(pytest.skip.Exception):
            jobs[launcher] = cluster.submit(
                "preemptible", options=ranks, program=RESUME, LAUNCH=launcher
            )
    for launcher, job in jobs.items():
        job.wait_for("waits")
        job.signal(*signals[launcher])
    for launcher, job in jobs.items():
        assert job.end() == ("COMPLETED", 0, 1)
        (step,) = (
            int(line.split()[-1])
            for line in job.lines
            if line.startswith("continues in epoch 2, after step ")
        )
        # At a TERM, Open MPI's mpirun usually ends the job before it is saved; then there is the
        # file of the last epoch.
        assert step == 50 or (step == 29 and launcher == "mpirun" and cluster.open_mpi)
        assert job.lines[-20:] == undisturbed.lines[-20:]
        assert job.log.count("epoch 20: loss ") == 1


@pytest.mark.timeout(300)
def test_a_signal_before_it_can_be_noted(cluster):
    jobs = []
    for launcher in ("srun", "mpirun"):
        with contextlib.suppress(pytest.skip.Exception):
            jobs.append(
                cluster.submit(
                    "preemptible", program=BEGINS, LAUNCH=launcher, options=["--ntasks-per-node=1"]
                )
            )
    for job in jobs:
        job.wait_for("waits")
        job.signal("--batch", "--signal=USR1")
    for job in jobs:
        assert job.end() == ("COMPLETED", 0, 1)
        assert job.lines[-1] == "began again"


# ---- start-ranks and try-locally


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program):
    result = subprocess.run([ROOT / program, "--help"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: {program} ")
    assert max(len(line) for line in result.stdout.splitlines()) <= 120


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("slurm/start-ranks", "usage: "),
        ("slurm/start-ranks --nonsense", "usage: "),
        ("slurm/start-ranks true", "this is not a Slurm job"),
        ("tests/try-locally", "usage: "),
        ("tests/try-locally --nonsense", "usage: "),
        ("tests/try-locally -N two true", "-N wants a number, not 'two'"),
        ("tests/try-locally --cpus", "--cpus wants a number, not ''"),
        ("tests/try-locally -N 0 true", "at least one node"),
    ],
)
def test_wrong_use(command, message):
    name, *arguments = command.split()
    result = subprocess.run(
        [ROOT / name, *arguments], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert result.returncode == 2
    assert message in result.stderr


def test_without_slurm(tmp_path):
    result = subprocess.run(
        ["/bin/bash", TRY_LOCALLY, "true"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert result.returncode == 3
    assert re.fullmatch(
        r"tests/try-locally: there is no \w+ here; `apt-get install slurm-wlm munge` .*\n",
        result.stderr,
    )


def test_the_status_is_the_commands_and_nothing_stays(try_locally):
    command = "sbatch --quiet --output=/dev/null --wrap='sleep 1000'; srun -N 2 true && echo ran; sleep 1000 & exit 7"
    slurm = try_locally("-N", "2", "sh", "-c", command)
    assert slurm.first_line() == "ran"
    assert slurm.end() == (7, [])


@pytest.mark.parametrize(
    ("command", "signals", "status"),
    [
        ("echo up; exec sleep 1000", [signal.SIGTERM], 143),
        ("trap 'exit 5' TERM; echo up; while :; do sleep 0.1; done", [signal.SIGTERM], 5),
        ("trap '' HUP TERM; echo up; exec sleep 1000", [signal.SIGHUP, signal.SIGTERM], 137),
    ],
    ids=["that ends it", "that it handles", "two that it ignores"],
)
def test_a_signal_takes_it_down(try_locally, command, signals, status):
    slurm = try_locally("sh", "-c", command)
    assert slurm.first_line() == "up"
    assert slurm.end(*signals) == (status, [])
