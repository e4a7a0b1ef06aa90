"""The network between two hosts: links that are slow or cut, and a host that is lost."""

import os
import pathlib
import re
import shutil
import sys

import pytest
from trained import last_line, weight

pytestmark = pytest.mark.slow
EMULATED = pathlib.Path(__file__).parents[2] / "benchmarks" / "emulated_hosts.py"
PROGRAM = pathlib.Path(__file__).with_name("programs") / "training.py"
PLUG = "ip -n hpcstrat-switch link set port1"  # the second host's cable, at the switch
KILL = "kill -9 $(ip netns pids 10.77.0.2)"
LARGE = ["--sizes", 200_000, 3, 100_001]
LIMITS = {"HPCSTRAT_STALL_SECONDS": 2, "HPCSTRAT_TIMEOUT_SECONDS": 5}
PATIENT = {"HPCSTRAT_STALL_SECONDS": 30, "HPCSTRAT_TIMEOUT_SECONDS": 60}


def in_step(number, commands):
    """A statement of the last rank that starts a shell, which outlives the program."""
    start = f"import subprocess; subprocess.Popen({commands!r}, shell=True, start_new_session=True)"
    return ["--attack", f"if step == {number} and rank == last: {start}"]


@pytest.fixture
def on_two_hosts(launch):
    """Runs the training on two hosts: network namespaces of the job, linked by a switch."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("it takes root and iproute2")

    def run(*options, ranks=2, gbit=1.0, env=None):
        hosts = [sys.executable, EMULATED, "--hosts", 2, "--ranks", ranks, "--gbit", gbit]
        words = [sys.executable, PROGRAM, "--strategy", "MultiWorkerMirroredStrategy", *options]
        before = "mount -t tmpfs tmpfs /run"
        result = launch([*hosts, *words], namespaces=True, before=before, env=env)
        assert result.leftovers == []
        return result

    return run


def came_to_its_end(result, ranks):
    assert (result.status, last_line(result)) == (0, weight(ranks))
    assert "hpcstrat" not in result.err


def test_a_slow_link(on_two_hosts):
    came_to_its_end(on_two_hosts(ranks=3, gbit=0.0005), ranks=3)
    came_to_its_end(on_two_hosts(*LARGE, "--path", "large", gbit=0.1, env=PATIENT), ranks=2)


@pytest.mark.parametrize(
    "commands, options",
    [(f"{PLUG} down", []), (f"{PLUG} down; {KILL}", LARGE)],
    ids=["link", "host"],
)
def test_a_link_or_host_that_is_lost(on_two_hosts, commands, options):
    """The report names the ranks of the missing host, and the call of the others."""
    result = on_two_hosts(*in_step(13, commands), *options, ranks=3, env=LIMITS)
    assert result.status != 0 and result.out == "" and "Traceback" not in result.err
    report, *_, end = re.findall(r"^.*hpcstrat: .*", result.err, re.MULTILINE)
    assert "waiting for each other for 2 s" in report and "the job ends: " in end
    assert re.search(r"rank 0.*: waiting in call \d+, .+ at \S*training\.py:\d+", result.err)
    assert re.search(r"rank 2: not answering for \d+ s", result.err)


def test_a_link_that_is_cut_for_some_seconds(on_two_hosts):
    """For longer than until the report; it does no harm."""
    env = LIMITS | {"HPCSTRAT_TIMEOUT_SECONDS": 60}
    cut = in_step(13, f"{PLUG} down; sleep 4; {PLUG} up")
    result = on_two_hosts(*cut, *LARGE, env=env)
    assert (result.status, last_line(result)) == (0, weight(2))
