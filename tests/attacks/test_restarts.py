"""Attacks on `hpcstrat run --restarts`: whatever kills ranks, the job continues without losses."""

import random

import pytest
from slow import slow_but
from training import training, weight


def restarting(cell, program, ranks=2):
    cell.write(program)
    return cell("hpcstrat", "run", "-n", ranks, "--restarts", 5, "program.py")


def went_on(ended, ranks=2):
    """Whether it restarted once, and came to the right end."""
    said = [line for line in ended.said if "restart" in line]
    assert ended.status == 0 and ended.stdout.splitlines()[-1] == f"weight {weight(ranks)}"
    assert len(said) == 1 and said[0].endswith("; restart 1 of 5")


SIGNALS = ["SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"]


@pytest.mark.parametrize("name", slow_but(["SIGABRT", "SIGBUS"], SIGNALS))
def test_a_rank_that_dies_of_a_signal(cell, name):
    attack = f"if start == 0 and step == 13 and rank == last: os.kill(os.getpid(), signal.{name})"
    went_on(restarting(cell, training(attack)))


@pytest.mark.parametrize("status", slow_but([0, 75], [0, 1, 2, 15, 75, 143]))
@pytest.mark.parametrize("rank", [0, pytest.param("last", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_the_others(cell, status, rank):
    """Also with the status of a success, and with that of a preemption."""
    attack = f"if start == 0 and step == 13 and rank == {rank}: os._exit({status})"
    went_on(restarting(cell, training(attack)))


def test_an_exception(cell):
    attack = "if start == 0 and step == 13 and rank == last: raise ValueError('this once')"
    ended = restarting(cell, training(attack))
    went_on(ended)
    assert "ValueError: this once" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("names", [["SIGKILL", "SIGSEGV"], ["SIGABRT"]], ids=["killed", "aborted"])
def test_a_rain_of_signals(cell, ranks, names):
    """At random moments, also while MPI starts."""
    moments = random.Random(ranks)
    cell.write(training(step_seconds=0.2))
    words = ["hpcstrat", "run", "-n", ranks, "--restarts", 50, "program.py"]
    attacked = cell.start(*words)
    for kill in range(8):
        victim = attacked.rank(moments.randrange(ranks))
        attacked.pause(moments.uniform(0.0, 0.8))
        attacked.signal(victim, moments.choice(names))
        if kill < 7:
            attacked.wait_for_death(victim)
    ended = attacked.end(seconds=120)
    assert ended.status == 0 and ended.stdout.splitlines()[-1] == f"weight {weight(ranks)}"
