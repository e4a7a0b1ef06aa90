"""Attacks on `hpcstrat run`: signals, what a rank leaves behind, and arguments."""

import random
import signal

import pytest
from training import training, weight

SAYS = "import sys; print(sys.argv[1:])"
CONNECTED = """
    import os, pathlib, signal, time
    import hpcstrat as hs

    hs.barrier()
    def note(number, frame):
        os.write(1, f"rank {hs.rank()} got {number}\\n".encode())
        pathlib.Path(f"noted-{hs.rank()}").touch()

    signal.signal(signal.SIGUSR1, note)
    pathlib.Path(f"ready-{hs.rank()}").touch()
    while not all(pathlib.Path(f"noted-{rank}").exists() for rank in range(hs.size())):
        time.sleep(0.01)
    hs.barrier()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_ends_ranks_in_the_middle_of_a_line(cell, name):
    cell.write("""
        import os, pathlib, time
        os.write(1, 4_000_000 * b"x")
        pathlib.Path("ready").touch()
        time.sleep(1000)
    """)
    attacked = cell.start("hpcstrat", "run", "-n", "1", "--restarts", "3", "program.py")
    attacked.wait_for("ready")
    attacked.signal(attacked.launcher(), name)
    ended = attacked.end()
    assert ended.status != 0 and ended.stdout.startswith("xxx") and "restart" not in ended.stderr


def test_a_users_signal_reaches_the_ranks(cell):
    cell.write(CONNECTED)
    attacked = cell.start("hpcstrat", "run", "-n", "2", "program.py")
    for rank in range(2):
        attacked.wait_for(f"ready-{rank}")
    attacked.signal(attacked.launcher(), "SIGUSR1")
    ended = attacked.end()
    number = signal.SIGUSR1.value
    assert (ended.status, sorted(ended.stdout.splitlines())) == (
        0,
        [f"rank {rank} got {number}" for rank in range(2)],
    )


WORDS = [
    ["data", ":", "touch", "injected"],
    [":"],
    ["a b", "", ":", "$HOME", "'", "\n", "--", "-genv", ":"],
]


@pytest.mark.parametrize("words", WORDS, ids=["another program", "alone", "odd words"])
def test_arguments_reach_the_program_and_nothing_else(cell, words):
    cell.write(SAYS)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py", *words)
    assert (ended.status, ended.stdout) == (0, 2 * f"{words}\n")
    assert not (cell.folder / "injected").exists()


CRAFTED = {
    "quotes": (["-n", "2", "--mpiexec", "mpirun 'x"], {}, "No closing quotation"),
    "no program": (["-n", "2", "--mpiexec", " "], {}, "--mpiexec"),
    "ranks": (["-n", 5000 * "9"], {}, "argument -n"),
    "restarts": (["-n", "2", "--restarts", "-1"], {}, "argument --restarts"),
}


@pytest.mark.parametrize("options, env, name", CRAFTED.values(), ids=CRAFTED)
def test_what_is_crafted_is_named_in_a_line(cell, options, env, name):
    cell.write(SAYS)
    ended = cell("hpcstrat", "run", *options, "program.py", **env)
    assert (ended.status, ended.stdout) == (2, "")
    *usage, line = ended.stderr.splitlines()
    assert (
        name in line
        and "hpcstrat run: " in line
        and len(line) < 200
        and "Traceback" not in "".join(usage)
    )


@pytest.mark.parametrize("options", [[], ["--restarts", "3"]], ids=" ".join)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(5)]
)
def test_nothing_is_left_of_a_launcher_that_is_killed_at_any_moment(cell, options, seed):
    cell.write(training(step_seconds=0.05))
    words = ["hpcstrat", "run", "-n", "3", *options, "program.py"]
    # What MPICH's start makes has no other owner when all are killed in its midst.
    attacked = cell.start(*words, leaves=["/dev/shm/mpich_shm_"])
    attacked.pause(random.Random(seed).uniform(0.05, 2.0))
    attacked.signal(attacked.launcher(), "SIGKILL")
    assert attacked.end().status == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(5)]
)
def test_ctrl_c_ends_all_ranks_at_any_moment(cell, seed):
    """Also in the first tenths of a second, in which Python and MPI are loaded."""
    cell.write(training(step_seconds=0.05))
    attacked = cell.start("hpcstrat", "run", "-n", "2", "program.py")
    process = attacked.launcher()
    attacked.pause(random.Random(seed).uniform(0.4, 1.5))
    attacked.signal(process, "SIGINT")
    ended = attacked.end()
    assert ended.status != 0 and "weight" not in ended.stdout


def test_without_an_attack_the_training_ends(cell):
    cell.write(training())
    ended = cell("hpcstrat", "run", "-n", "3", "program.py")
    assert (ended.status, ended.stdout, ended.stderr) == (0, f"weight {weight(3)}\n", "")
