"""The programs for GPUs in `launch/`, without GPUs: shell scripts replace NVIDIA's own programs."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest
from slow import slow_but

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
PROGRAMS = ["share-gpu", "ci-multi-gpu"]
SECONDS = 60  # the time limit of a program
NOT_THE_USERS = (
    "OMPI_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "HYDI_",
    "MPI_LOCAL",
    "SLURM_",
    "CUDA_",
    "NCCL_",
    "LD_PRELOAD",
)
MARK = "LAUNCHED_BY_TEST"  # a variable that marks a test's processes

NO_GPU = "echo 'NVIDIA-SMI has failed'; exit 9"
# Records its commands. The daemon ends when it is told to quit; not when it is DEAF, or DUMB and
# never answers.
MPS_CONTROL = """
folder=$CUDA_MPS_PIPE_DIRECTORY
case ${1-} in
-d)
    echo "started in $folder" >>"$RECORD"
    [ -z "${CUDA_VISIBLE_DEVICES-}" ] || echo "sees $CUDA_VISIBLE_DEVICES" >>"$RECORD"
    [ -z "${BROKEN-}" ] || { echo "no device" >"$CUDA_MPS_LOG_DIRECTORY/control.log"; exit 1; }
    test -d "$CUDA_MPS_LOG_DIRECTORY"
    "$0" daemon >/dev/null 2>&1 &
    ;;
daemon)
    trap '' INT TERM HUP
    while [ -n "${DEAF-}" ] || [ ! -e "$folder/quit" ]; do sleep 0.01; done
    ;;
*)
    read -r word
    echo "$word" >>"$RECORD"
    [ -z "${DUMB-}" ] || exec sleep 1000
    touch "$folder/quit"
    ;;
esac
"""
WAITS = """
import time
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
ANSWERS = """
import signal, sys
signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("up", flush=True)
sys.exit(signal.sigwait(signals) + 40)
"""


class Bench:
    """A folder of stand-ins, which come first on PATH, and the programs that run with them.

    Attributes:
        folder: of this test.
        temporary: where the programs put their temporary files.
    """

    def __init__(self, folder):
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self._programs = folder / "bin"
        self._programs.mkdir()
        self._mark = uuid.uuid4().hex
        self._started = []

    def stand_in(self, name, text):
        path = self._programs / name
        path.write_text(f"#!/bin/sh\nset -eu\n{text}")
        path.chmod(0o755)

    def start(self, *command, env=None):
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(NOT_THE_USERS)
        }
        own = {
            "PATH": f"{self._programs}:{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "RECORD": str(self.folder / "record"),
            MARK: self._mark,
        }
        process = subprocess.Popen(
            [os.fspath(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=kept | own | (env or {}),
            cwd=self.folder,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process):
        stdout, stderr = process.communicate(timeout=SECONDS)
        print(stdout, stderr, sep="\n")  # pytest shows it if the test fails
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def run(self, *command, env=None):
        return self.finish(self.start(*command, env=env))

    def record(self):
        """What the stand-ins wrote, line by line."""
        path = self.folder / "record"
        return path.read_text().splitlines() if path.exists() else []

    def leftovers(self):
        """Temporary files, and processes that still exist after some seconds to end."""
        deadline = time.monotonic() + 20
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return [*os.listdir(self.temporary), *self._processes()]

    def kill(self):
        for process in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._started:
            process.communicate()

    def _processes(self):
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    if (
                        f"{MARK}={self._mark}".encode()
                        in pathlib.Path(f"/proc/{name}/environ").read_bytes()
                    ):
                        found.append(int(name))
        return found


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.kill()


# ---- all of them


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(bench, program):
    result = bench.run(LAUNCH / program, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: ")
    assert f"launch/{program} " in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 120


@pytest.mark.parametrize(
    "command",
    [
        *(
            ["share-gpu"],
            ["share-gpu", "--gpu", "true"],
            ["share-gpu", "--nccl"],
            ["share-gpu", "--nccl=nowhere", "true"],
        ),
        *(["ci-multi-gpu", "2"], ["ci-multi-gpu", "--ranks"], ["ci-multi-gpu", "--ranks="]),
        *(
            ["ci-multi-gpu", "--ranks", "1 x"],
            ["ci-multi-gpu", "--ranks=0"],
            ["ci-multi-gpu", "--nccl", "nowhere"],
        ),
    ],
    ids=" ".join,
)
def test_wrong_use(bench, command):
    bench.stand_in("nvidia-cuda-mps-control", MPS_CONTROL)
    result = bench.run(LAUNCH / command[0], *command[1:])
    assert (result.returncode, result.stdout) == (2, "")
    assert f"launch/{command[0]}" in result.stderr
    assert bench.record() == []


@pytest.mark.parametrize("program", PROGRAMS)
def test_shellcheck_finds_nothing(bench, program):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = bench.run("shellcheck", LAUNCH / program)
    assert (result.returncode, result.stdout) == (0, "")


# ---- share-gpu


def share(bench, *command, env=None):
    """Starts the command through share-gpu, with the stand-in for MPS."""
    bench.stand_in("nvidia-cuda-mps-control", MPS_CONTROL)
    return bench.start(LAUNCH / "share-gpu", *command, env=env)


def check_that_mps_ended(bench):
    """It was started once, in a private folder, and told to end, and nothing is left."""
    started, *told = bench.record()
    assert started.startswith(f"started in {bench.temporary}/")
    assert told == ["quit"]
    assert bench.leftovers() == []


@pytest.mark.parametrize("status", slow_but([3], [0, 3]))
def test_share_around_a_command(bench, status):
    result = bench.finish(
        share(bench, "sh", "-c", f'echo "ran in $CUDA_MPS_PIPE_DIRECTORY"; exit {status}')
    )
    assert (result.returncode, result.stderr) == (status, "")
    assert result.stdout.replace("ran", "started").splitlines() == bench.record()[:1]
    check_that_mps_ended(bench)


def test_share_with_a_command_that_is_not_there(bench):
    result = bench.finish(share(bench, "no-such-command"))
    assert result.returncode == 127
    check_that_mps_ended(bench)


def test_share_gives_the_command_its_input(bench):
    result = bench.finish(share(bench, "sh", "-c", f"echo text | {LAUNCH}/share-gpu cat"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "text\n", "")
    assert bench.leftovers() == []


@pytest.fixture(params=slow_but(["SIGINT", "SIGTERM"], ["SIGINT", "SIGTERM", "SIGHUP"]))
def number(request):
    """The number of a signal."""
    number = getattr(signal, request.param)
    if signal.getsignal(number) == signal.SIG_IGN:  # after nohup, or in the background of a script
        pytest.skip(
            f"the tests were started with {request.param} ignored, which no shell below can undo"
        )
    return number


def test_share_passes_signals_on(bench, number):
    process = share(bench, sys.executable, "-c", ANSWERS)
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert bench.finish(process).returncode == number + 40
    check_that_mps_ended(bench)


def test_share_around_a_command_that_a_signal_ends(bench, number):
    if number == signal.SIGINT and bench.run("env", "--default-signal=INT", "true").returncode:
        pytest.skip(
            "before version 8.31 of coreutils, a command that does not ask for SIGINT does not get "
            "it"
        )
    process = share(bench, "sh", "-c", f"{sys.executable} -c '{WAITS}'; true")
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    assert bench.finish(process).returncode == 128 + number
    check_that_mps_ended(bench)


def test_share_with_mpirun(launch, bench):
    program = 'echo "up $NCCL_MULTI_RANK_GPU_ENABLE"; exec sleep 1000'
    process = share(bench, *launch.mpirun, "-n", "2", "sh", "-c", program)
    assert [process.stdout.readline() for _ in range(2)] == ["up 1\n"] * 2
    process.send_signal(signal.SIGTERM)
    assert bench.finish(process).returncode != 0
    check_that_mps_ended(bench)


@pytest.mark.slow
@pytest.mark.parametrize("ailment", ["DEAF", "DUMB"])
def test_share_when_mps_does_not_obey(bench, ailment):
    result = bench.finish(share(bench, "sh", "-c", "exit 3", env={ailment: "1"}))
    assert result.returncode == 3
    assert re.fullmatch(
        r"launch/share-gpu: MPS \(process \d+\) did not end, and is killed\n", result.stderr
    )
    check_that_mps_ended(bench)


def test_share_when_mps_does_not_start(bench):
    result = bench.finish(share(bench, "touch", "started", env={"BROKEN": "1"}))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "launch/share-gpu: MPS did not start; its log:\nno device\n"
    assert not (bench.folder / "started").exists()
    assert bench.leftovers() == []


def test_share_without_mps(bench):
    if shutil.which(
        "nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:/usr/local/nvidia/bin:/usr/bin"
    ):
        pytest.skip("MPS is here")
    result = bench.run(LAUNCH / "share-gpu", "touch", "started")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("launch/share-gpu: there is no nvidia-cuda-mps-control in PATH")
    assert "install the driver's package of compute utilities" in result.stderr
    assert not (bench.folder / "started").exists()
    assert bench.leftovers() == []


def test_share_sets_variables(bench):
    names = ("CUDA_MPS_", "NCCL_", "LD_PRELOAD")
    result = bench.finish(share(bench, "env"))
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith(names))
    (folder,) = {
        os.path.dirname(line.partition("=")[2]) for line in lines if line.startswith("CUDA")
    }
    assert os.path.dirname(folder) == str(bench.temporary)
    assert lines == [
        f"CUDA_MPS_LOG_DIRECTORY={folder}/log",
        f"CUDA_MPS_PIPE_DIRECTORY={folder}/pipe",
        "NCCL_MAX_CTAS=8",
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
        "NCCL_NVLS_ENABLE=0",
    ]
    result = bench.finish(share(bench, "env", env={"NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "1"}))
    assert {"NCCL_MAX_CTAS=4", "NCCL_NVLS_ENABLE=1"} <= set(result.stdout.splitlines())
    assert result.stderr == ""


def test_share_of_some_gpus(bench):
    """The daemon numbers the GPUs anew; the ranks choose from these numbers.

    If they chose twice, 1 would not exist.
    """
    result = bench.finish(share(bench, "env", env={"CUDA_VISIBLE_DEVICES": "1"}))
    assert "CUDA_VISIBLE_DEVICES=1" in result.stdout.splitlines()
    check_that_mps_ended(bench)  # and saw nothing of the choice


def test_share_warns_of_what_nccl_may_hang_with(bench):
    result = bench.finish(share(bench, "true", env={"NCCL_MAX_CTAS": "32"}))
    assert (result.returncode, result.stderr.count("NCCL_MAX_CTAS=32")) == (0, 1)


@pytest.mark.parametrize("option", ["--nccl my/libnccl.so.2", "--nccl=my/libnccl.so.2"])
def test_share_preloads_nccl(bench, option):
    """The dynamic loader complains about a file that is not a library, and continues without it."""
    library = bench.folder / "my" / "libnccl.so.2"
    library.parent.mkdir()
    library.touch()
    result = bench.finish(share(bench, *option.split(), "env"))
    assert f"LD_PRELOAD={library.resolve()}" in result.stdout.splitlines()
    result = bench.finish(share(bench, *option.split(), "env", env={"LD_PRELOAD": str(library)}))
    assert f"LD_PRELOAD={library.resolve()}:{library}" in result.stdout.splitlines()


def test_nothing_is_left_of_a_share_gpu_that_was_killed(bench):
    process = share(bench, "sh", "-c", "echo up; exec sleep 1000")
    assert process.stdout.readline() == "up\n"
    process.kill()
    bench.finish(process)
    check_that_mps_ended(bench)


# ---- ci-multi-gpu

# They print what they are asked to run, and whether inside MPS, and run nothing. There is one GPU.
RECORDS = """
case "$*" in
--version) echo {name} ;;
*getDeviceCount*) echo 1 ;;
*cupy*) ;;
*) echo "${{CUDA_MPS_PIPE_DIRECTORY:+shared }}{name} $*" >>"$RECORD" ;;
esac
"""


@pytest.mark.parametrize("option", ["--ranks=2 4", "--all"])
def test_ci(bench, option):
    """The most telling tests come first; a run that shares the GPU has its own MPS only."""
    bench.stand_in("nvidia-smi", "exit 0")
    bench.stand_in("nvidia-cuda-mps-control", MPS_CONTROL)
    for name in "python", "mpirun":
        bench.stand_in(name, RECORDS.format(name=name))
    result = bench.run(
        LAUNCH / "ci-multi-gpu", option, env={"PYTHON": "python", "MPIRUN": "mpirun"}
    )
    assert (result.returncode, result.stderr) == (0, "")
    *_, last = result.stdout.splitlines()
    assert last == "===== all passed"
    found, depth = [], 0
    for line in bench.record():
        depth += line.startswith("started in ") - (line == "quit")
        assert depth in (0, 1)
        match = re.match(
            r"(shared )?(?:mpirun -n (\d) )?.*?(train|gpu_step|pytest.* -m (.*) (\w+)$)", line
        )
        if match is not None:
            assert (depth == 1) == (match[1] is not None)
            what = f"{match[5]}: {match[4]}" if match[5] else match[3]
            found.append((match[2], what, depth == 1))
    assert bench.leftovers() == []
    assert found[0] == ("1", "train", False)
    is_short = "gpu and not slow"
    if option != "--all":
        assert found[1:] == [
            ("2", "train", True),
            ("4", "train", True),
            ("2", f"parallel: {is_short}", True),
            ("4", f"parallel: {is_short} and core", True),
            ("4", "gpu_step", True),
            (None, f"launch: {is_short}", True),
        ]
    else:
        assert (None, "launch: gpu", True) in found
        assert (None, "launch: not gpu", False) in found


def test_ci_without_a_gpu(launch, bench):
    bench.stand_in("nvidia-smi", NO_GPU)
    result = bench.run(LAUNCH / "ci-multi-gpu", env={"MPIRUN": launch.mpirun[0]})
    assert result.returncode == 1
    assert result.stderr == "launch/ci-multi-gpu: no GPU here: nvidia-smi finds none\n"
    assert "tests" not in result.stdout
