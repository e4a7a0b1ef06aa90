"""Standard output reads as one program's, and what explains a failure is shown."""

import re
import sys

import pytest
from job import version

slow = pytest.mark.slow
ONCE = ["first", "cross-replica context"]
ONCE += [*(f"thread {k} {200 * 'y'}" for k in range(9)), "a", "b", "bytes"]
ERRORS_ONCE = ["an error", "warned\n", "noted", "bar: 100%"]
ERRORS_OF_EACH = ["error of replica", "ZeroDivisionError: division by zero", "logged", "of C"]
ERRORS_OF_EACH += ["Current thread"]


@pytest.mark.parametrize(
    "ranks, env",
    [
        (2, {}),
        pytest.param(None, {}, marks=slow),
        pytest.param(3, {"HPCSTRAT_OUTPUT": "all", "HPCSTRAT_STDERR": "all"}, marks=slow),
        pytest.param(3, {"HPCSTRAT_OUTPUT": "lead"}, marks=slow),
    ],
    ids=str,
)
def test_what_shows_once_and_what_of_each_rank(launch, ranks, env):
    """All lines arrive whole."""
    result = launch("printing.py", ranks, env=env)
    assert result.status == 0
    count = ranks or 1
    shown = env.get("HPCSTRAT_OUTPUT")
    inside = [
        line
        for rank in range(1 if shown == "lead" else count)
        for line in [f"replica {rank}", *(f"rank {rank} line {k} {100 * 'x'}" for k in range(300))]
    ]
    lines = result.out.splitlines()
    if "Open MPI) 4" not in version():  # whose mpirun cuts what comes at once every 4 KiB
        assert sorted(lines) == sorted(ONCE * (count if shown == "all" else 1) + inside)
    if shown != "all":
        assert [line for line in lines if line in ONCE] == ONCE
    # A line's end may come after another rank's line; the warning shows its own line, too.
    found = [result.err.count(word) for word in ERRORS_ONCE]
    assert found == [count if "HPCSTRAT_STDERR" in env else 1] * len(ERRORS_ONCE)
    of_replicas, *others = [result.err.count(word) for word in ERRORS_OF_EACH]
    assert of_replicas == (1 if shown == "lead" else count) and set(others) == {count}
    for rank in range(count):
        assert f"OSError: disk {rank} is full\n" in result.err


FAILURES = {
    "exception": "raise ValueError('the cause')",
    "thread": "import threading, time; threading.Thread(target=lambda: 1 / 0).start(); time.sleep(50)",
    "text": "sys.exit('the cause')",
    "os._exit": "os._exit(3)",
}


# Before the ranks are connected, a thread's error ends nothing, and MPICH's launcher ignores how a
# process ends that has not started MPI.
@pytest.mark.parametrize(
    "moment, end",
    [
        pytest.param("early", "exception", marks=slow),
        ("connected", "text"),
        pytest.param("connected", "thread", marks=slow),
        pytest.param("connected", "os._exit", marks=slow),
    ],
)
def test_what_explains_a_failure_is_shown(launch, moment, end):
    """What was hidden before, and what is written then."""
    program = f"""
    import os, sys, warnings
    import hpcstrat as hs

    {"hs.barrier()" if moment == "connected" else ""}
    if hs.rank() == 1:
        print("look here", file=sys.stderr)
        {FAILURES[end]}
    hs.barrier()
    """
    result = launch(program, 2)
    assert result.status != 0 and result.leftovers == []
    assert result.err.count("look here\n") == (end != "os._exit")  # of which Python tells nothing
    assert ("the cause" in result.err) == ("the cause" in FAILURES[end])
    assert ("ZeroDivisionError" in result.err) == (end == "thread")


def test_an_error_of_all_ranks_is_said_once(launch):
    # Open MPI's launcher kills all when it sees that one has left; MPICH's waits for all.
    program = f"""
    import argparse, time
    from hpcstrat._process import failure, launchers

    failure._LEAD_DELAY = {10 if launch.open_mpi else 0.3}  # long enough on a busy machine
    if launchers.find().rank == 0:
        time.sleep(0.2)
    argparse.ArgumentParser().parse_args(["--wrong"])
    """
    result = launch(program, 2)
    assert result.status != 0
    assert result.err.count("unrecognized arguments: --wrong") == 1


SUM = """
    import sys
    for name, how in [word.split("=") for word in sys.argv[1:]]:
        if how == "none":
            setattr(sys, name, None)
        else:
            getattr(sys, name).close()
    import hpcstrat as hs
    strategy = hs.MirroredStrategy()
    total = strategy.reduce("SUM", strategy.run(lambda: hs.rank() + 1), axis=None)
    with open(f"total_{hs.rank()}", "w") as file:
        file.write(str(total))
"""


def computed(launch, result):
    totals = [(launch.folder / f"total_{rank}").read_text() for rank in range(2)]
    return (result.status, result.err, result.leftovers, totals) == (0, "", [], ["3", "3"])


@slow
@pytest.mark.parametrize(
    "streams, seconds",
    [("stderr=closed stdout=closed stdin=closed", "1e300"), ("stderr=none stdout=none", "inf")],
)
def test_streams_that_the_program_has_closed(launch, streams, seconds):
    """With a time-out of any size."""
    env = {"HPCSTRAT_TIMEOUT_SECONDS": seconds, "HPCSTRAT_STALL_SECONDS": seconds}
    assert computed(launch, launch(SUM, 2, *streams.split(), env=env))


def with_streams(launch, program, how):
    """Runs it on ranks that a shell starts like this."""
    (launch.folder / "program.py").write_text(re.sub("^    ", "", program, flags=re.MULTILINE))
    shell = ["sh", "-c", f"exec {sys.executable} program.py {how}"]
    return launch([*launch.mpirun, "-n", 2, *shell])


def test_streams_that_are_closed_from_the_begin(launch):
    """As daemons have them."""
    assert computed(launch, with_streams(launch, SUM, "<&- >&- 2>&-"))


@pytest.mark.parametrize("closed", ["2>&-", pytest.param("<&- >&- 2>&-", marks=slow)])
def test_an_error_where_streams_are_closed_from_the_begin(launch, closed):
    """What a rank says then goes to the other stream, or nowhere."""
    program = "import hpcstrat as hs\nif hs.rank(): raise ValueError('the cause')\nhs.barrier()"
    result = with_streams(launch, program, closed)
    assert result.status != 0 and result.leftovers == []
    assert ("[rank 1] ValueError: the cause" in result.out) == (closed == "2>&-")


@slow
def test_the_users_own_timer_of_tracebacks_stays(launch):
    program = """
    import faulthandler, time
    import hpcstrat as hs

    faulthandler.dump_traceback_later(1, exit=True)
    hs.barrier()
    with hs.extend_timeout(100):
        time.sleep(100)
    """
    result = launch(program, 2, timeout=60)
    assert result.status != 0
    assert "Timeout (0:00:01)!" in result.err


# Starts a job whose standard error is a terminal, and prints what a bar shows there.
ON_A_TERMINAL = """
    import os, pty, subprocess, sys
    reader, writer = pty.openpty()
    job = subprocess.Popen(sys.argv[1:], stderr=writer)
    os.close(writer)
    shown = b""
    while True:
        try: piece = os.read(reader, 4096)
        except OSError: break  # which is how a terminal ends
        if not piece: break
        shown += piece
    print(job.wait(), b"3/3" in shown)
"""
BAR = "import hpcstrat as hs\nfor _ in hs.progress(range(3)): pass\n"


def test_a_progress_bar_shows_where_mpirun_is_on_a_terminal(launch):
    bar = launch.folder / "bar.py"
    bar.write_text(BAR)
    result = launch(ON_A_TERMINAL, None, *launch.mpirun, "-n", "2", sys.executable, bar)
    assert (result.status, result.out, result.err) == (0, "0 True\n", "")
    result = launch(bar, 2)
    assert (result.status, result.out) == (0, "")
    assert re.fullmatch(r" *0%\|.*\| 0/3 \[.*\]\n100%\|.*\| 3/3 \[.*\]\n", result.err)
