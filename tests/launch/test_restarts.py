"""`hpcstrat run --restarts`: whatever dies, the job continues, and its end is unchanged."""

import re
import signal
import statistics
import textwrap

import numpy as np
import pytest

# Trains in a way that any lost or repeated element, order, slot or step changes the result.
TRAIN = """
    import os, signal, sys, time, warnings
    import numpy as np
    import hpcstrat as hs

    warnings.filterwarnings("ignore", "iterating over .* have no elements")  # of short batches, meant
    folder, moment, epochs = sys.argv[1], sys.argv[2], int(sys.argv[3])
    random = np.random.default_rng(0)
    x, y = random.standard_normal((50, 6)), random.standard_normal((50, 2))
    start = hs.on_lead(lambda: len(os.listdir(folder)))
    hs.on_lead(lambda: open(f"{folder}/start{start}", "w").close())

    def load(x, y):
        if moment in ("loading", "start"):  # kills in the start may come late, and the job must not have ended by then
            time.sleep(0.01)
        return x, y

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w, b = hs.Variable(np.zeros((6, 2))), hs.Variable(np.zeros(2))
        more = hs.Variable(np.zeros(1 << 20 if moment == "saves" else 1))
        epoch = hs.Variable(0, dtype=np.int64)
        loss = hs.metrics.Mean()
        optimizer = hs.optimizers.Adam(hs.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9), global_clipnorm=0.5)
    dataset = hs.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=5).map(load).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)
    checkpoint = hs.checkpoint.Checkpoint(
        model={"w": w, "b": b, "more": more}, optimizer=optimizer, epoch=epoch, loss=loss, batches=batches
    )
    every, snapshot_every = (3, 1) if moment == "saves" else (40, 2)

    def train_step(batch):
        x, y = batch
        error = x @ w + b - y
        loss.update_state(error**2)
        optimizer.apply_gradients([(x.T @ error, w), (error.sum(axis=0), b)])

    def train(after=lambda step: None):
        with hs.checkpoint.CheckpointManager(
            checkpoint, f"{folder}.checkpoint", every=every, snapshot_every=snapshot_every
        ) as manager:
            source = manager.restore_or_initialize()
            print("from", {None: "nothing", "the snapshot in memory": "memory"}.get(source, "disk"), manager.steps)
            while int(epoch) < epochs:
                for batch in batches:
                    strategy.run(train_step, args=(batch,))
                    print("step", manager.steps + 1, time.monotonic())
                    after(manager.steps + 1)
                    manager.step()
                epoch.assign_add(1)
        state = [w.numpy(), b.numpy(), np.float64(loss.result()), np.float64(manager.steps)]
        print("end", *(part.tobytes().hex() for part in state))
"""

# Starts a job and kills ranks of it at random moments; prints how long each restart takes and how
# many steps are lost.
KILL = """
    import contextlib, os, random, signal, subprocess, sys, threading, time

    program, moment, kills, seed = sys.argv[1], sys.argv[3], int(sys.argv[5]), int(sys.argv[6])
    random.seed(seed)
    words = ["run", "--restarts", str(2 * kills), "-n", "4", program, *sys.argv[2:5]]
    command = [sys.executable, "-m", "hpcstrat", *words]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []  # (when it came, its words)

    def read():
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append((time.monotonic(), line.split()))

    reader = threading.Thread(target=read)
    reader.start()

    def ranks():
        found = {}
        for process in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{process}/environ", "rb") as file:
                    variables = dict(one.split(b"=", 1) for one in file.read().split(b"\\0") if b"=" in one)
                with open(f"/proc/{process}/cmdline", "rb") as file:
                    words = file.read().split(b"\\0")
                rank = variables.get(b"PMI_RANK", variables.get(b"OMPI_COMM_WORLD_RANK"))
                is_python = program.encode() in words and words[0].endswith(b"python")
                if rank and is_python and b"_HPCSTRAT_JOB" in variables:
                    found[int(rank)] = int(process)
        return found

    def first(word, start=0):
        # The index of the first line from `start` on that begins with this word, or None.
        return next((i for i, (_, words) in enumerate(list(lines)) if i >= start and words[:1] == [word]), None)

    def wait_for(condition):
        deadline = time.monotonic() + 300
        while not condition():
            if time.monotonic() > deadline or job.poll() is not None:
                print("gave up", job.poll(), flush=True)
                os._exit(9)
            time.sleep(0.002)

    begun = 0  # the line with which the start under way began
    for number in range(kills):
        if moment == "start":
            wait_for(lambda: len(ranks()) == 4)
            time.sleep(random.random())
        else:
            steps = random.randrange(2, 9)
            wait_for(lambda: len([words for _, words in lines[begun:] if words[:1] == ["step"]]) >= steps)
            time.sleep(random.random() * 0.02)
        there = ranks()
        victims = random.sample(sorted(there), min(2 if moment == "two" else 1, len(there)))
        known, killed = len(lines), time.monotonic()
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(there[rank], signal.SIGKILL)
        wait_for(lambda: (new := first("from", known)) is not None and first("step", new) is not None)
        begun = first("from", known)
        resumed, last = int(lines[begun][1][2]), 0
        for _, words in lines[:begun]:
            last = int(words[1]) if words[:1] == ["step"] else last
        seconds = float(lines[first("step", begun)][1][2]) - killed
        # In one piece, because the other thread prints as well.
        words = map(str, ["killed", *victims, "went on after", seconds, "lost", last - resumed])
        sys.stdout.write(" ".join(words) + "\\n")
        sys.stdout.flush()
        if moment == "start" and number + 1 < kills:
            os.kill(random.choice(list(ranks().values())), signal.SIGKILL)  # for the next start
    status = job.wait()
    reader.join()
    sys.exit(status)
"""


def last_line(output):
    return output.splitlines()[-1]


def folder_of(tmp_path, name="starts"):
    folder = tmp_path / name
    folder.mkdir()
    return folder


def starts(output):
    """For each start, the place and the step that it resumed from."""
    return [
        (place, int(step))
        for place, step in re.findall(r"^from (\w+) (\d+)$", output, re.MULTILINE)
    ]


@pytest.fixture
def restarting(launch, tmp_path):
    """Runs a program with `--restarts`."""

    def run(program, *options, moment="none", epochs=3, **more):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        folder = folder_of(tmp_path)
        words = ["run", *map(str, options), path, folder, moment, epochs]
        return launch(RUN, None, *map(str, words), **more)

    return run


def undisturbed(launch, tmp_path, ranks, moment="none", epochs=3):
    result = launch(
        TRAIN + "    train()\n", ranks, folder_of(tmp_path, "undisturbed"), moment, str(epochs)
    )
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    return last_line(result.stdout)


RUN = """
    import os, sys
    os.execv(sys.executable, [sys.executable, "-m", "hpcstrat", *sys.argv[1:]])
"""


# What ends rank 1: after which steps, how, the message, and the step of the newest snapshot.
ENDS = {
    "SIGKILL": (
        3,
        "os.kill(os.getpid(), signal.SIGKILL)",
        r"(rank 1|a rank) died after step 3 of SIGKILL",
        2,
    ),
    "SIGSEGV": (
        6,
        "os.kill(os.getpid(), signal.SIGSEGV)",
        r"(rank 1|a rank) died after step 6 of SIGSEGV",
        6,
    ),
    # Some launchers turn os._exit into their own kill of the others.
    "exit": (
        9,
        "os._exit(5)",
        r"the ranks ended after step 9 with status 5|(rank 1|a rank) died after step 9 of SIGKILL",
        8,
    ),
    "stall": (12, "time.sleep(1000)", r"the ranks ended after step 12 with status \d+", 12),
}


@pytest.mark.parametrize(
    ("ranks", "ends"),
    [
        pytest.param(2, ["SIGKILL"], id="a kill"),
        pytest.param(3, list(ENDS), id="one after the other", marks=pytest.mark.slow),
    ],
)
def test_a_job_goes_on_whatever_ends_a_rank(launch, restarting, tmp_path, ranks, ends):
    program = (
        TRAIN
        + f"""
    ends = {[ENDS[end][:2] for end in ends]}

    def after(step):
        if hs.rank() == 1 and start < len(ends) and step == ends[start][0] + 1:
            exec(ends[start][1])

    train(after)
    """
    )
    # Only a stall may reach its limit: seconds by which ranks of a busy machine may be apart too.
    seconds = {"HPCSTRAT_TIMEOUT_SECONDS": "6"} if "stall" in ends else {}
    result = restarting(program, "--restarts", 4, "-n", ranks, env=seconds)
    assert (result.status, result.leftovers) == (0, [])
    # A snapshot every second step, and each rank dies before the step is counted.
    snapshots = [ENDS[end][3] for end in ends]
    assert starts(result.stdout) == [("nothing", 0), *(("memory", step) for step in snapshots)]
    assert last_line(result.stdout) == undisturbed(launch, tmp_path, ranks)
    # Open MPI does not always end the previous line. Deaths may be noticed together.
    said = re.findall(r"hpcstrat run: (.*)$", result.stderr, re.MULTILINE)
    assert len(said) == len(ends)
    for number, (line, end, step) in enumerate(zip(said, ends, snapshots, strict=True), start=1):
        rest = f"; restart {number} of 4, on {ranks} ranks; the newest snapshot is of step {step}"
        assert re.fullmatch(f"({ENDS[end][2]}){rest}", line)


@pytest.mark.slow
def test_a_program_that_fails_by_itself_ends(restarting):
    """The second time at the same step; an exception that comes once is survived."""
    program = (
        TRAIN
        + """
    def after(step):
        if start == 0 and step == 3 and hs.rank() == 1:
            raise OSError("the network is away for a moment")
        if step == 6:
            raise ValueError("of the program")

    train(after)
    """
    )
    result = restarting(program, "--restarts", 9, "-n", 2)
    assert (result.status, result.leftovers) == (1, [])
    assert starts(result.stdout) == [("nothing", 0), ("memory", 2), ("memory", 4)]
    assert result.stderr.count("ValueError: of the program, at program.py:") == 2
    assert (
        "no restart: it has failed in the same way at the same step before; first, rank 1 failed"
        in result.stderr
    )


@pytest.mark.slow
def test_a_start_that_meets_what_is_not_free_yet_is_tried_again(launch, restarting, tmp_path):
    program = (
        TRAIN
        + """
    if start == 1:
        raise OSError("the GPU is not free yet")

    def after(step):
        if start == 0 and step == 5 and hs.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(after)
    """
    )
    result = restarting(program, "--restarts", 3, "-n", 2)
    assert (result.status, result.leftovers) == (0, [])
    assert starts(result.stdout) == [("nothing", 0), ("memory", 4)]
    assert "OSError: the GPU is not free yet, at program.py:" in result.stderr
    assert "restart 2 of 3 in 2 s, on 2 ranks; the newest snapshot is of step 4" in result.stderr
    assert last_line(result.stdout) == undisturbed(launch, tmp_path, 2)


@pytest.mark.slow
def test_fewer_ranks_go_on_where_all_cannot(launch, restarting, tmp_path):
    program = (
        TRAIN
        + """
    if start and hs.size() == 3 and hs.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)

    def after(step):
        if start == 0 and step == 5 and hs.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    train(after)
    print("ranks", hs.size())
    """
    )
    result = restarting(program, "--restarts", 3, "--min-ranks", 2, "-n", 3)
    assert (result.status, result.leftovers) == (0, [])
    assert starts(result.stdout) == [("nothing", 0), ("memory", 4)]
    *_, end, ranks = result.stdout.splitlines()
    assert ranks == "ranks 2"
    found, expected = (
        [np.frombuffer(bytes.fromhex(word)) for word in line.split()[1:]]
        for line in (end, undisturbed(launch, tmp_path, 3))
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [("SIGINT", None), ("SIGTERM", None), ("SIGUSR1", 75)])
def test_a_signal_to_the_launcher_is_no_failure(restarting, number, status):
    program = (
        TRAIN
        + f"""
    def after(step):
        if step == 5 and hs.rank() == 0:
            with open("/proc/" + os.environ["_HPCSTRAT_JOB"].split(":")[0] + "/stat"):
                os.kill(int(os.environ["_HPCSTRAT_JOB"].split(":")[0]), signal.{number})
        time.sleep(0.3 if step > 4 else 0)

    train(after)
    """
    )
    result = restarting(program, "--restarts", 9, "-n", 2)
    assert result.leftovers == []
    (line,) = re.findall(r"hpcstrat run: .*restart.*", result.stderr)
    reason = (
        "the ranks were asked to end, and have saved"
        if status
        else f"the launcher was sent {number}"
    )
    assert line.endswith(f"; no restart: {reason}")
    assert result.status == status or (status is None and result.status != 0)
    assert len(starts(result.stdout)) == 1


def test_nothing_is_left_of_a_killed_launcher(restarting):
    program = (
        TRAIN
        + """
    def after(step):
        if step == 5 and hs.rank() == 0:
            os.kill(int(os.environ["_HPCSTRAT_JOB"].split(":")[0]), signal.SIGKILL)
        time.sleep(0.1)

    train(after)
    """
    )
    result = restarting(program, "--restarts", 9, "-n", 2, epochs=1000)
    assert (result.status, result.leftovers) == (-signal.SIGKILL, [])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["updates", "saves", "loading", "start", "two"])
@pytest.mark.timeout(900)
def test_ten_kills_at_random_moments(launch, tmp_path, moment):
    """At five kinds of moments: fifty restarts in all."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(TRAIN + "    train()\n"))
    # As many as the job needs to run for long enough, even if the kills come late.
    kills, epochs = 10, 40
    arguments = [program, folder_of(tmp_path), moment, epochs, kills, sum(map(ord, moment))]
    result = launch(KILL, None, *map(str, arguments), timeout=800)
    assert (result.status, result.leftovers) == (0, [])
    assert last_line(result.stdout) == undisturbed(launch, tmp_path, 4, moment, epochs)
    found = re.findall(
        r"^killed [\d ]*went on after ([\d.]+) lost (-?\d+)$", result.stdout, re.MULTILINE
    )
    assert len(found) == kills
    seconds, lost = zip(*((float(one), int(other)) for one, other in found), strict=True)
    print(
        f"{moment}: it goes on after {statistics.median(seconds):.1f} s (median), "
        f"{max(seconds):.1f} s at most; {statistics.median(lost):g} steps are lost (median), "
        f"{max(lost)} at most"
    )
    assert max(lost) <= 2 * 2 + 1  # two snapshots back, if the kill came in the middle of one
