"""Attacks on `hpcstrat run --restarts`: the job continues without losses, or says why not."""

import random

import pytest
from training import training, weight


def restarting(cell, program, ranks=2, **options):
    cell.write(program)
    return cell("hpcstrat", "run", "-n", ranks, "--restarts", 5, "program.py", **options)


def went_on(ended, ranks=2, restarts=1):
    """Whether it restarted this many times, each time with a line, and came to the right end."""
    said = [line for line in ended.said if "restart" in line]
    assert ended.status == 0 and ended.stdout.splitlines()[-1] == f"weight {weight(ranks)}"
    assert len(said) == restarts and all(
        f"restart {n} of" in line for n, line in enumerate(said, start=1)
    )
    return said


SIGNALS = ["SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("SIGABRT", "SIGBUS")))
        for name in SIGNALS
    ],
)
def test_a_rank_that_dies_of_a_signal(cell, name):
    """MPICH's status has the bits of all ranks: ABRT and the KILL of the other look like TERM."""
    attack = f"if start == 0 and step == 13 and rank == last: os.kill(os.getpid(), signal.{name})"
    (line,) = went_on(restarting(cell, training(attack)))
    assert "after step 12 " in line and line.endswith("the newest snapshot is of step 12")


@pytest.mark.parametrize(
    "status", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2, 15, 75, 143))]
)
def test_a_rank_that_leaves_the_others(cell, status):
    attack = f"if start == 0 and step == 13 and rank == last: os._exit({status})"
    (line,) = went_on(restarting(cell, training(attack)))
    assert "after step 12 " in line


def test_an_exception_whose_name_is_that_of_a_preemption(cell):
    define = "class preempted_node(Exception): pass"
    attack = "if start == 0 and step == 13 and rank == last: raise preempted_node('gone')"
    (line,) = went_on(restarting(cell, training(attack, before=define)))
    assert "failed after step 12 with " in line and "preempted_node: gone, at program.py:" in line


def test_a_harmless_signal_takes_no_restart_away(cell):
    handler = "signal.signal(signal.SIGUSR1, lambda number, frame: print('status', flush=True))"
    attack = "if start == 0 and step == 13 and rank == last: os.kill(os.getpid(), signal.SIGKILL)"
    # After the manager's own handlers.
    text = training(attack, step_seconds=0.05).replace(
        "    while manager", f"    {handler}\n    while manager"
    )
    cell.write(text)
    attacked = cell.start("hpcstrat", "run", "-n", 2, "--restarts", 5, "program.py")
    attacked.wait_for("step-4")
    attacked.signal(attacked.launcher(), "SIGUSR1")
    went_on(attacked.end())


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_launcher_that_is_asked_to_end_says_so(cell, name):
    cell.write(training(step_seconds=0.05))
    attacked = cell.start("hpcstrat", "run", "-n", 2, "--restarts", 5, "program.py")
    attacked.wait_for("step-4")
    attacked.signal(attacked.launcher(), name)
    ended = attacked.end()
    assert ended.status != 0 and ended.said[-1].endswith(
        f"no restart: the launcher was sent {name}"
    )


@pytest.mark.parametrize("prefix", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_dead_rank_has_started_is_not_waited_for(cell, prefix):
    attack = """if start == 0 and step == 13 and rank == last:
            subprocess.Popen(["sleep", "1000"], start_new_session=True)
            os.kill(os.getpid(), signal.SIGKILL)"""
    cell.write(training(attack))
    options = ["--prefix"] * prefix
    ended = cell("hpcstrat", "run", "-n", 2, "--restarts", 5, *options, "program.py")
    assert (
        ended.status == 0
        and f"weight {weight(2)}" in ended.stdout
        and "restart 1 of 5" in ended.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("names", [["SIGKILL", "SIGSEGV"], ["SIGABRT"]], ids=["killed", "aborted"])
def test_a_rain_of_signals(cell, ranks, names):
    """At random moments, also while MPI starts."""
    moments = random.Random(ranks)
    cell.write(training(step_seconds=0.2))
    attacked = cell.start("hpcstrat", "run", "-n", ranks, "--restarts", 50, "program.py")
    for kill in range(8):
        victim = attacked.rank(moments.randrange(ranks))
        attacked.pause(moments.uniform(0.0, 0.8))
        attacked.signal(victim, moments.choice(names))
        if kill < 7:
            attacked.wait_for_death(victim)
    ended = attacked.end(seconds=120)
    assert ended.status == 0 and ended.stdout.splitlines()[-1] == f"weight {weight(ranks)}"
