"""The programs for GPUs in `launch/`, without GPUs: shell scripts replace NVIDIA's own programs."""

import os
import pathlib
import re
import shutil
import signal
import sys

import pytest
from job import Job, mpirun, parent

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
WRONG = {
    "share-gpu": ["", "--gpu true", "--nccl", "--nccl=nowhere true"],
    "ci-multi-gpu": ["2", "--ranks", "--ranks=", "--ranks 1x", "--ranks=0", "--nccl nowhere"],
}

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
# Says by its status which signal has come.
ANSWERS = """
import signal, sys
signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("up", flush=True)
sys.exit(signal.sigwait(signals) + 40)
"""


class Bench:
    """A folder of stand-ins, which come first on PATH, and the programs that run with them."""

    def __init__(self, folder):
        self.folder = folder
        self.temporary = folder / "temporary"  # files of the programs
        self.temporary.mkdir()
        (folder / "bin").mkdir()
        self._started = []

    def stand_in(self, name, text):
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\nset -eu\n{text}")
        path.chmod(0o755)

    def start(self, *command, **env):
        gone = [name for name in os.environ if name.startswith(("CUDA_", "NCCL_", "LD_PRELOAD"))]
        own = {
            **dict.fromkeys([*gone, "CUDA_VISIBLE_DEVICES"]),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "TMPDIR": self.temporary,
            "RECORD": self.folder / "record",
        }
        typed = "its input\n"
        job = Job([*command], folder=self.folder, env=own | env, stdin=typed)  # pyright: ignore[reportArgumentType]
        self._started.append(job)
        return job.start()

    def run(self, *command, **env):
        return self.start(*command, **env).end()

    def share(self, *command, **env):
        """Starts the command through share-gpu, with the stand-in for MPS."""
        self.stand_in("nvidia-cuda-mps-control", MPS_CONTROL)
        return self.start(LAUNCH / "share-gpu", *command, **env)

    def record(self):
        """What the stand-ins wrote, line by line."""
        path = self.folder / "record"
        return path.read_text().splitlines() if path.exists() else []

    def check_that_nothing_is_left(self, result):
        assert result.leftovers == [] and os.listdir(self.temporary) == []

    def check_that_mps_ended(self, result):
        """It was started once, in a private folder, and told to end, and nothing is left."""
        started, *told = self.record()
        assert started.startswith(f"started in {self.temporary}/")
        assert told == ["quit"]
        self.check_that_nothing_is_left(result)

    def kill(self):
        for job in self._started:
            job.kill()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.kill()


def send(job, name):
    """Sends a signal to the program, once its command has printed `up`."""
    job.wait_until(lambda: "up" in job.out, "the command")
    (started,) = [process for process in job.processes() if parent(process) == os.getpid()]
    job.signal(started, name)


# ---- all of them


@pytest.mark.parametrize("program", WRONG)
def test_help_and_wrong_use(bench, program):
    result = bench.run(LAUNCH / program, "--help")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("usage: ") and f"launch/{program} " in result.out
    bench.stand_in("nvidia-cuda-mps-control", MPS_CONTROL)
    for words in WRONG[program]:
        result = bench.run(LAUNCH / program, *words.split())
        assert (result.status, result.out) == (2, ""), words
        assert f"launch/{program}" in result.err
    assert bench.record() == []


# ---- share-gpu


def test_share_around_a_command(bench):
    words = 'echo "started in $CUDA_MPS_PIPE_DIRECTORY"; cat; exit 3'
    result = bench.share("sh", "-c", words).end()
    assert (result.status, result.err) == (3, "")
    assert result.out.splitlines() == [*bench.record()[:1], "its input"]
    bench.check_that_mps_ended(result)
    assert bench.share("no-such-command").end().status == 127


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_share_passes_signals_on(bench, name):
    """To a command that answers by a status, and to one that it ends."""
    number = getattr(signal, name)
    if signal.getsignal(number) == signal.SIG_IGN:  # after nohup, or `&`
        pytest.skip(f"the tests were started with {name} ignored, for all shells below")
    job = bench.share(sys.executable, "-c", ANSWERS)
    send(job, name)
    result = job.end()
    assert result.status == number + 40
    bench.check_that_mps_ended(result)
    if name == "SIGTERM" or bench.run("env", "--default-signal=INT", "true").status == 0:
        job = bench.start(LAUNCH / "share-gpu", "sh", "-c", "echo up; sleep 1000; true")
        send(job, name)
        result = job.end()
        assert result.status == 128 + number
        bench.check_that_nothing_is_left(result)


def test_share_with_mpirun(launch, bench):
    program = 'echo "up $NCCL_MULTI_RANK_GPU_ENABLE"; exec sleep 1000'
    job = bench.share(*mpirun(), "-n", "2", "sh", "-c", program)
    job.wait_until(lambda: job.out == "up 1\n" * 2)
    send(job, "SIGTERM")
    result = job.end()
    assert result.status != 0
    bench.check_that_mps_ended(result)


@pytest.mark.slow
@pytest.mark.parametrize("ailment", ["DEAF", "DUMB"])
def test_share_when_mps_does_not_obey(bench, ailment):
    result = bench.share("sh", "-c", "exit 3", **{ailment: "1"}).end()
    assert result.status == 3
    said = r"launch/share-gpu: MPS \(process \d+\) did not end, and is killed\n"
    assert re.fullmatch(said, result.err)
    bench.check_that_mps_ended(result)


def test_without_mps_the_command_does_not_start(bench):
    broken = bench.share("touch", "started", BROKEN="1").end()
    assert "MPS did not start" in broken.err and "no device" in broken.err
    results = [broken]
    (bench.folder / "bin" / "nvidia-cuda-mps-control").unlink()
    path = f"{os.environ['PATH']}:/usr/local/nvidia/bin:/usr/bin"
    if not shutil.which("nvidia-cuda-mps-control", path=path):
        results.append(missing := bench.run(LAUNCH / "share-gpu", "touch", "started"))
        assert "there is no nvidia-cuda-mps-control in PATH" in missing.err
        assert "install the driver's package of compute utilities" in missing.err
    for result in results:
        assert (result.status, result.out) == (1, "")
        bench.check_that_nothing_is_left(result)
    assert not (bench.folder / "started").exists()


def test_share_sets_variables(bench):
    """The daemon numbers the GPUs anew, from which the ranks choose, so it sees no choice itself."""
    result = bench.share("env", CUDA_VISIBLE_DEVICES="1").end()
    names = ("CUDA_", "NCCL_", "LD_PRELOAD")
    lines = sorted(line for line in result.out.splitlines() if line.startswith(names))
    folder = bench.record()[0].removeprefix("started in ").removesuffix("/pipe")
    assert lines == [
        f"CUDA_MPS_LOG_DIRECTORY={folder}/log",
        f"CUDA_MPS_PIPE_DIRECTORY={folder}/pipe",
        "CUDA_VISIBLE_DEVICES=1",
        "NCCL_MAX_CTAS=8",
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
        "NCCL_NVLS_ENABLE=0",
    ]
    bench.check_that_mps_ended(result)
    users = {"NCCL_MAX_CTAS": "32", "NCCL_NVLS_ENABLE": "1"}
    result = bench.share("env", **users).end()
    assert {f"{name}={value}" for name, value in users.items()} <= set(result.out.splitlines())
    assert result.err.count("NCCL_MAX_CTAS=32 is kept; NCCL hangs") == 1


def test_share_preloads_nccl(bench):
    """The dynamic loader complains about a file that is not a library, and continues without it."""
    library = bench.folder / "my" / "libnccl.so.2"
    library.parent.mkdir()
    library.touch()
    result = bench.share("--nccl", "my/libnccl.so.2", "env").end()
    assert f"LD_PRELOAD={library.resolve()}" in result.out.splitlines()
    result = bench.share("--nccl=my/libnccl.so.2", "env", LD_PRELOAD=library).end()
    assert f"LD_PRELOAD={library.resolve()}:{library}" in result.out.splitlines()


def test_nothing_is_left_of_a_share_gpu_that_was_killed(bench):
    job = bench.share("sh", "-c", "echo up; exec sleep 1000")
    send(job, "SIGKILL")
    bench.check_that_mps_ended(job.end())


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
    result = bench.run(LAUNCH / "ci-multi-gpu", option, PYTHON="python", MPIRUN="mpirun")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "===== all passed"
    found, depth = [], 0
    for line in bench.record():
        depth += line.startswith("started in ") - (line == "quit")
        assert depth in (0, 1)
        words = r"(shared )?(?:mpirun -n (\d) )?.*?(train|gpu_step|pytest.* -m ((?:not )?gpu)\b.*\b(\w+)$)"
        if match := re.match(words, line):
            assert (depth == 1) == (match[1] is not None)
            what = f"{match[5]}: {match[4]}" if match[5] else match[3]
            found.append((match[2], what, depth == 1))
    bench.check_that_nothing_is_left(result)
    assert found[0] == ("1", "train", False)
    if option == "--all":
        assert {(None, "launch: gpu", True), (None, "launch: not gpu", False)} <= set(found)
    else:
        of_ranks = [("train", "24"), ("parallel: gpu", "24"), ("gpu_step", "4")]
        shared = [(ranks, what, True) for what, numbers in of_ranks for ranks in numbers]
        assert found[1:] == [*shared, (None, "launch: gpu", True)]
        runs = [line for line in bench.record() if "pytest" in line and "-m " in line]
        assert all("not slow" in line for line in runs)


def test_ci_without_a_gpu(launch, bench):
    bench.stand_in("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    result = bench.run(LAUNCH / "ci-multi-gpu", MPIRUN=mpirun()[0])
    assert result.status == 1
    assert result.err == "launch/ci-multi-gpu: no GPU here: nvidia-smi finds none\n"
    assert "tests" not in result.out
