"""`hpcstrat run --restarts`: whatever kills a rank, and when, the job goes on to the same end."""

import re
import uuid
from pathlib import Path
from random import Random

import pytest
from trained import last_line, weight

MIRRORED, CENTRAL = "MirroredStrategy", "CentralStorageStrategy"
SIZES = [*range(4), 100_003, *(k % 7 for k in range(211))]
ODD = ["--momentum", 0.5, "--sizes", *SIZES]
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
        pytest.param(2, 2, 1 << 12, 2, id="of two kinds"),
        pytest.param(2, 2, 1 << 12, 8, id="of each kind", marks=pytest.mark.slow),
        pytest.param(3, 1, 1 << 18, 10, id="in saves", marks=pytest.mark.slow),
        pytest.param(4, 3, 1 << 12, 10, id="of 4 ranks", marks=pytest.mark.slow),
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


@pytest.mark.slow
def test_an_exception(launch):
    result = went_on(launch, "rank == last: raise ValueError('this once')")
    assert "ValueError: this once" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [
        *(
            f"rank == last: os.kill(os.getpid(), signal.{n})"
            for n in ("SIGSEGV", "SIGBUS", "SIGFPE")
        ),
        *(f"rank == last: os._exit({status})" for status in (0, 1, 15, 75, 143)),
        "rank == 0: os._exit(0)",
        "rank == 0: os._exit(75)",
    ],
)
def test_a_rank_that_dies_of_a_signal_or_leaves_the_others(launch, attack):
    """Also with the status of a success, and with that of a preemption."""
    went_on(launch, attack)


KILL = "rank == last: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_slots_of_a_rank_that_dies_are_found_again(launch, ranks):
    went_on(launch, KILL, "--strategy", MIRRORED, *ODD, ranks=ranks, momentum=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, then, strategies",
    [(4, 2, (MIRRORED, CENTRAL)), (2, 3, (CENTRAL, MIRRORED))],
    ids=["4 ranks, then 2", "2 ranks, then 3"],
)
def test_another_number_of_ranks_goes_on_with_a_dead_jobs_slots(launch, first, then, strategies):
    """From its last file, which is of step 24."""
    attack = f"if step == 26 and {KILL}"
    words = ["--strategy", strategies[0], *ODD, "--attack", attack]
    assert launch("training.py", first, *words).status != 0
    result = launch("training.py", then, "--strategy", strategies[1], *ODD)
    assert result.status == 0 and last_line(result) == weight(then, 0.5, before=24 * [first])


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, names",
    [(2, ["SIGKILL", "SIGSEGV"]), (3, ["SIGABRT"]), (4, ["SIGKILL", "SIGSEGV"])],
    ids=["2 killed", "3 aborted", "4 killed"],
)
def test_a_rain_of_signals(launch, ranks, names):
    """At random moments, also while MPI starts."""
    moments = Random(ranks)
    job = launch.start(
        "training.py",
        ranks,
        "--step-seconds",
        0.2,
        launcher="run",
        options=["--restarts", 50],
        namespaces=True,
    )
    for kill in range(8):
        victim = job.rank(moments.randrange(ranks))
        job.pause(moments.uniform(0.0, 0.8))
        job.signal(victim, moments.choice(names))
        if kill < 7:
            job.wait_for_death(victim)
    result = job.end(timeout=120)
    assert (result.status, result.leftovers) == (0, []) and last_line(result) == weight(ranks)
