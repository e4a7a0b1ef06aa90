"""`hpcstrat run --restarts`: whatever kills a rank, and when, the job continues to the same end."""

import re
import statistics
import uuid
from pathlib import Path
from random import Random

import pytest

# Trains in a way that any lost or repeated element, order, slot or step changes the result. The
# plan names a rank for each start, and when and how it dies.
TRAIN = """
    import glob, os, signal, sys, threading, time

    path, every, size, kills = sys.argv[1], *map(int, sys.argv[2:5])
    rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

    def note(*words):  # in one piece, whatever kills this process next
        os.write(log, (" ".join(map(str, [*words, time.monotonic()])) + "\\n").encode())

    log = os.open("log", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    plan = [words.split() for words in sys.argv[5:]]

    def count_deaths():
        with open("log") as file:
            return sum(line.startswith("death") for line in file)

    steps_done = threading.Semaphore(0)  # of this start

    def die(how, steps, seconds):
        for _ in range(steps):
            steps_done.acquire(timeout=2)
        time.sleep(seconds)
        note("death", rank, how)
        if how == "exit":
            os._exit(0)
        while True:  # MPICH ignores USR1 until its default action is restored below
            os.kill(os.getpid(), getattr(signal, how))
            time.sleep(0.01)

    if (number := count_deaths()) < kills:
        victim, how, steps, seconds = plan[number]
        if int(victim) == rank:
            arguments = (how, int(steps), float(seconds))
            threading.Thread(target=die, args=arguments, daemon=True).start()

    import numpy as np
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w, b = hs.Variable(np.zeros((6, 2))), hs.Variable(np.zeros(2))
        more, epoch = hs.Variable(np.zeros(size)), hs.Variable(0, dtype=np.int64)
        loss = hs.metrics.Mean()
        rate = hs.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
        optimizer = hs.optimizers.Adam(rate, global_clipnorm=0.5)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((48, 6)), random.standard_normal((48, 2))
    dataset = hs.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=5).batch(12)
    batches = strategy.experimental_distribute_dataset(dataset)
    checkpoint = hs.checkpoint.Checkpoint(
        model=[w, b, more], optimizer=optimizer, epoch=epoch, loss=loss, batches=batches
    )

    def train_step(batch):
        x, y = batch
        error = x @ w + b - y
        loss.update_state(error**2)
        optimizer.apply_gradients([(x.T @ error, w), (error.sum(axis=0), b)])

    with hs.checkpoint.CheckpointManager(checkpoint, path, every=every) as manager:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        manager.restore_or_initialize()
        if hs.is_lead():
            note("from", manager.steps)
        while epoch.numpy() < 20:
            for batch in batches:
                while manager.steps == 79 and count_deaths() < kills:
                    time.sleep(0.01)  # before the last step the plan is fulfilled
                strategy.run(train_step, args=(batch,))
                manager.step()
                if hs.is_lead():
                    note("step", manager.steps, len(glob.glob(path + ".partial-*")))
                steps_done.release()
            epoch.assign_add(1)
    print("end", *(v.numpy().tobytes().hex() for v in (w, b)), loss.result(), manager.steps)
"""

# The job, as docs/resilience.md has it.
JOB = """
    import os, sys

    path, *words = sys.argv[1:]
    script = 'trap \\'rm -f "$0"*\\' EXIT; "$@"'
    os.execvp("sh", ["sh", "-c", script, path, sys.executable, "-m", "hpcstrat", "run", *words])
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("if True:\n" + TRAIN)
    return path


def undisturbed(launch, program, ranks, every, size):
    result = launch(program, ranks, program.with_name("saved"), str(every), str(size), "0")
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    (program.parent / "log").unlink()
    return last_line(result)


def last_line(result):
    return result.stdout.splitlines()[-1]


def draw(random, ranks, how, early):
    """A victim, and when it dies: at the start of the program, or after some steps."""
    steps, seconds = (
        (0, random.random() * 0.6) if early else (random.randint(1, 4), random.random() * 0.03)
    )
    return f"{random.randrange(ranks)} {how} {steps} {seconds}"


KILLS = {
    # The steps between saves, the size of another variable, and the number of kills.
    "of 2 ranks": (2, 10, 1, 10),
    "of 3 ranks, in saves": (3, 1, 1 << 18, 10),
    "of 4 ranks": (4, 3, 1 << 12, 10),
}


@pytest.mark.parametrize(
    ("ranks", "every", "size", "kills"),
    [
        pytest.param(2, 2, 1 << 12, 4, id="of each kind"),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in KILLS.items()),
    ],
)
@pytest.mark.timeout(600)
def test_a_job_survives_kills_at_random_moments(launch, program, ranks, every, size, kills):
    random = Random(ranks)
    kinds = ["SIGKILL", "SIGABRT", "SIGUSR1", "exit"]
    # A rank that leaves with status 0 before it has started MPI is missed after a time-out only.
    plan = [
        draw(random, ranks, how, early=how != "exit" and random.random() < 0.3)
        for how in (kinds * kills)[:kills]
    ]
    expected = undisturbed(launch, program, ranks, every, size)
    path = Path(f"/dev/shm/{uuid.uuid4().hex}.checkpoint")
    words = [path, "-n", ranks, "--restarts", kills, program, path, every, size, kills, *plan]
    result = launch(JOB, None, *map(str, words), timeout=500)
    assert (result.status, result.leftovers) == (0, [])
    assert last_line(result) == expected
    assert list(path.parent.glob(f"{path.name}*")) == []

    deaths, seconds, last, died = [], [], 0, None
    for line in (program.parent / "log").read_text().splitlines():
        event, *words, when = line.split()
        if event == "death":
            deaths.append(words[1])
            died = float(when)
        elif event == "from":
            # What was saved at the end of a step is there, and at most one more save.
            assert last - last % every <= int(words[0]) <= last - last % every + every
            last = int(words[0])
        else:
            last = int(words[0])
            # What a kill left of a save is gone after the next.
            assert last % every or words[1] == "0"
            if died is not None:
                seconds.append(float(when) - died)
                died = None
    assert deaths == (kinds * kills)[:kills]
    restarts = re.findall(r"^hpcstrat run: .*; restart (\d+) of", result.stderr, re.MULTILINE)
    assert restarts == [str(number) for number in range(1, len(restarts) + 1)]
    assert 0 < len(restarts) <= kills
    print(
        f"from a death to the next step: {statistics.median(seconds):.2f} s, {max(seconds):.2f} s at most"
    )
