"""`hpcstrat run --restarts`: whatever kills a rank, and when, the job goes on to the same end."""

import re
import uuid
from pathlib import Path
from random import Random

import pytest
from processes import runs
from trained import last_line, weight

pytestmark = pytest.mark.slow
KINDS = ["SIGKILL", "exit", "SIGABRT", "SIGUSR1"]
# The job, as docs/resilience.md has it.
JOB = 'path=$1; shift; trap \'rm -f "$path"*\' EXIT; "$@"'


def draw(random, ranks, how):
    """A victim, and when it dies: at the start of the program, or after some steps."""
    # A rank that leaves with status 0 before it has started MPI is missed after a time-out only.
    if how != "exit" and random.random() < 0.3:
        return f"{random.randrange(ranks)} {how} 0 {random.random() * 0.6}"
    return f"{random.randrange(ranks)} {how} {random.randint(1, 4)} {random.random() * 0.03}"


@pytest.mark.parametrize(
    ("ranks", "every", "size", "kills"),
    [
        pytest.param(2, 2, 1 << 12, 4, id="of each kind"),
        pytest.param(3, 1, 1 << 18, 10, id="in saves"),
    ],
)
@pytest.mark.timeout(600)
def test_a_job_survives_kills_at_random_moments(launch, ranks, every, size, kills):
    random = Random(ranks)
    kinds = (KINDS * kills)[:kills]
    options = ["--every", every, "--sizes", size]
    undisturbed = launch("training.py", ranks, *options, "--path", "undisturbed")
    assert (undisturbed.status, undisturbed.err, undisturbed.leftovers) == (0, "", [])
    for path in [launch.folder / "log", *launch.folder.glob("st*-*")]:
        path.unlink()

    path = Path(f"/dev/shm/{uuid.uuid4().hex}.checkpoint")
    result = launch(
        "training.py",
        ranks,
        *options,
        *("--path", path, "--deaths", *(draw(random, ranks, how) for how in kinds)),
        launcher="run",
        options=["--restarts", kills],
        wrap=["sh", "-c", JOB, "sh", str(path)],
        timeout=500,
    )
    assert (result.status, result.leftovers) == (0, [])
    assert result.out.splitlines()[-2:] == undisturbed.out.splitlines()
    assert last_line(result) == weight(ranks)
    assert list(path.parent.glob(f"{path.name}*")) == []

    deaths, last = [], 0
    for line in (launch.folder / "log").read_text().splitlines():
        event, *words = line.split()
        if event == "death":
            deaths.append(words[1])
        elif event == "from":
            # What was saved at the end of a step is there, and at most one more save.
            assert last - last % every <= int(words[0]) <= last - last % every + every
            last = int(words[0])
        else:
            last = int(words[0])
            # What a kill left of a save is gone after the next.
            assert last % every or words[1] == "0"
    assert deaths == kinds
    numbers = [int(re.findall(r"restart (\d+) of", line)[0]) for line in result.restarts]
    assert numbers == list(range(1, len(numbers) + 1)) and 0 < len(numbers) <= kills
    assert all(re.search(r" ended with status [1-9]\d*; ", line) for line in result.restarts)


def went_on(launch, attack, *options, ranks=2, momentum=0.0):
    """Runs a job of which a rank ends in step 13 of its first start."""
    statement = f"if start == 0 and step == 13 and {attack}"
    arguments = ["--attack", statement, *options]
    result = launch("training.py", ranks, *arguments, launcher="run", options=["--restarts", 5])
    assert (result.status, result.leftovers) == (0, [])
    assert last_line(result) == weight(ranks, momentum)
    assert len(result.restarts) == 1 and result.restarts[0].endswith("; restart 1 of 5")
    return result


@pytest.mark.parametrize("ranks", [1, 3])
def test_slots_of_a_rank_that_dies_are_found_again(launch, ranks):
    kill = "rank == last: os.kill(os.getpid(), signal.SIGKILL)"
    sizes = [*range(4), 100_003, *(k % 7 for k in range(211))]
    options = ["--strategy", "MirroredStrategy", "--momentum", 0.5, "--sizes", *sizes]
    went_on(launch, kill, *options, ranks=ranks, momentum=0.5)


@pytest.mark.parametrize(
    "attack, said",
    [
        ("rank == last: raise ValueError('this once')", "ValueError: this once"),
        ("rank == last: os.kill(os.getpid(), signal.SIGSEGV)", "Fatal Python error"),
        ("rank == last: os._exit(0)", ""),
        ("rank == last: os._exit(143)", ""),
        ("rank == 0: os._exit(0)", ""),
        ("rank == 0: os._exit(75)", ""),
    ],
)
def test_a_rank_that_dies_or_leaves_the_others(launch, attack, said):
    """Also with the status of a success, and with that of a preemption."""
    assert said in went_on(launch, attack).err


def test_a_rain_of_signals(launch):
    """At random moments, also while MPI starts."""
    random = Random(3)
    words = ["training.py", 3, "--step-seconds", 0.2]
    job = launch.start(*words, launcher="run", options=["--restarts", 50], namespaces=True)
    for kill in range(8):
        victim = job.rank(random.randrange(3))
        job.pause(random.uniform(0.0, 0.8))
        job.signal(victim, random.choice(["SIGKILL", "SIGSEGV", "SIGABRT"]))
        if kill < 7:
            job.wait_until(lambda victim=victim: not runs(victim), "its end")
    result = job.end(timeout=120)
    assert (result.status, result.leftovers) == (0, []) and last_line(result) == weight(3)
