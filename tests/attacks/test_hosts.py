"""Attacks on the network between two hosts: links that are slow or cut, and a host that is lost."""

import os
import pathlib
import random
import re
import shutil
from typing import Any

import pytest
from training import training, weight

EMULATED = pathlib.Path(__file__).parents[2] / "benchmarks" / "emulated_hosts.py"
STRATEGY = "MultiWorkerMirroredStrategy()"
PLUG = "ip -n hpcstrat-switch link set port1"  # the second host's cable, at the switch
KILL = "kill -9 $(ip netns pids 10.77.0.2)"
LARGE: dict[str, Any] = {"sizes": (200_000, 3, 100_001)}
LIMITS = {"HPCSTRAT_STALL_SECONDS": 2, "HPCSTRAT_TIMEOUT_SECONDS": 5}
PATIENT = {"HPCSTRAT_STALL_SECONDS": 30, "HPCSTRAT_TIMEOUT_SECONDS": 60}


def started(commands):
    """A statement that starts a shell, which outlives the program."""
    return f"subprocess.Popen({commands!r}, shell=True, start_new_session=True)"


def in_step_13(commands):
    return f"if step == 13 and rank == last: {started(commands)}"


@pytest.fixture
def on_two_hosts(cell):
    """Runs a program on two hosts: network namespaces of the cell, linked by a switch."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("it takes root and iproute2")

    def run(program, ranks=2, gbit=1.0, **options):
        cell.write(program)
        words = ["--hosts", 2, "--ranks", ranks, "--gbit", gbit, cell.python, "program.py"]
        return cell("python", EMULATED, *words, before="mount -t tmpfs tmpfs /run", **options)

    return run


def came_to_its_end(ended, ranks):
    assert (ended.status, ended.stdout, ended.said) == (0, f"weight {weight(ranks)}\n", [])


def ended_with_a_report(ended, silent):
    """The report names the ranks of the missing host, and the call of the others."""
    assert ended.status != 0 and ended.stdout == "" and "Traceback" not in ended.stderr
    report, end = (line for line in ended.said if "hpcstrat: " in line)
    assert "waiting for each other for 2 s" in report and "the job ends: " in end
    assert re.search(r"rank 0.*: waiting in call \d+, .+ at program\.py:\d+", ended.stderr)
    assert re.search(rf"{silent}: not answering for \d+ s", ended.stderr)


def test_a_slow_link(on_two_hosts):
    came_to_its_end(on_two_hosts(training(strategy=STRATEGY), ranks=3, gbit=0.0005), ranks=3)


@pytest.mark.slow
def test_a_slow_link_under_large_gradients(on_two_hosts):
    came_to_its_end(
        on_two_hosts(training(strategy=STRATEGY, **LARGE), gbit=0.1, **PATIENT), ranks=2
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("commands", [f"{PLUG} down", f"{PLUG} down; {KILL}"], ids=["link", "host"])
def test_a_link_or_host_that_is_lost(on_two_hosts, commands, options):
    ended = on_two_hosts(
        training(in_step_13(commands), strategy=STRATEGY, **options), ranks=3, **LIMITS
    )
    ended_with_a_report(ended, "rank 2")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, LARGE], ids=["small", "large"])
def test_a_link_that_is_cut_for_some_seconds(on_two_hosts, options):
    """For longer than until the report; it does no harm."""
    attack = in_step_13(f"{PLUG} down; sleep 4; {PLUG} up")
    ended = on_two_hosts(
        training(attack, strategy=STRATEGY, **options),
        HPCSTRAT_STALL_SECONDS=2,
        HPCSTRAT_TIMEOUT_SECONDS=60,
    )
    assert (ended.status, ended.stdout) == (0, f"weight {weight(2)}\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_link_that_fails_now_and_then(on_two_hosts, seed):
    """At random moments, but not while MPI starts: it gives up at once if a host is unreachable."""
    moments = random.Random(seed)
    times = [(moments.uniform(0.1, 1.0), moments.uniform(0.05, 0.8)) for _ in range(6)]
    commands = "; ".join(
        f"sleep {up:.2f}; {PLUG} down; sleep {down:.2f}; {PLUG} up" for up, down in times
    )
    attack = f"if step == 1 and rank == last: {started(commands)}"
    program = training(attack, step_seconds=0.05, strategy=STRATEGY)
    came_to_its_end(on_two_hosts(program, **PATIENT), ranks=2)
