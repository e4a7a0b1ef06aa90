"""Standard output reads as one program's."""

import re
import sys
import textwrap

import pytest
from slow import slow_but

PROGRAM = """
    import sys, threading
    from hpcstrat._process import output
    print("first")
    from hpcstrat._process import worlds
    world = worlds.start()
    inside = False
    main = threading.current_thread()
    output._is_replica = lambda: inside and threading.current_thread() is main
    print("cross-replica", "context")
    inside = True
    print(f"replica {world.rank}")
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(); thread.join()
    inside = False
    sys.stdout.writelines(["a\\n", "b\\n"])
    sys.stdout.buffer.write(b"bytes\\n")
    print("an error", file=sys.stderr)
    inside = True
    print(f"error of replica {world.rank}", file=sys.stderr)
"""
ONCE = ["first", "cross-replica context", "thread", "a", "b", "bytes"]


@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 3]))
def test_what_shows(launch, ranks):
    result = launch(PROGRAM, ranks)
    count = ranks or 1
    assert result.status == 0
    inside = [f"replica {rank}" for rank in range(count)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE + inside)
    assert [line for line in result.stdout.splitlines() if line in ONCE] == ONCE
    assert result.stderr.count("an error") == 1  # whose line end may come after another rank's line
    assert result.stderr.count("error of replica") == count


@pytest.mark.slow
def test_all(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "all"})
    inside = [f"replica {rank}" for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE * 3 + inside)


@pytest.mark.slow
def test_lead(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "lead"})
    assert sorted(result.stdout.splitlines()) == sorted([*ONCE, "replica 0"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable, value", [("HPCSTRAT_OUTPUT", "rank0"), ("HPCSTRAT_STDERR", "lead")]
)
def test_another_value_is_an_error(launch, variable, value):
    result = launch(PROGRAM, 2, env={variable: value})
    assert result.status != 0
    assert f"ValueError: {variable}='{value}' is not allowed" in result.stderr


ERRORS = """
    import logging, os, sys, warnings
    import hpcstrat as hs
    from tqdm import tqdm

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print("printed", file=sys.stderr)
    warnings.warn("warned")
    logging.info("noted")
    # The interval is that of further states of the bar, which a slow machine would show.
    for _ in tqdm(range(3), desc="bar", mininterval=1000): pass
    hs.barrier()
"""


@pytest.mark.parametrize(
    "ranks, shown", slow_but([(2, "once")], [(2, "once"), (3, "once"), (3, "of all")])
)
def test_errors_read_as_one_programs(launch, ranks, shown):
    result = launch(ERRORS, ranks, env={"HPCSTRAT_STDERR": "all"} if shown == "of all" else {})
    assert result.status == 0
    # With "all" the ranks' writes may mix, so that a word's line end comes after another rank's word;
    # "warned" is in the line of the program too, which the warning shows.
    counts = [result.stderr.count(word) for word in ("printed", "warned\n", "noted", "bar: 100%")]
    assert counts == [ranks if shown == "of all" else 1] * 4


ENDS = {
    "exception": "raise ValueError('the cause')",
    "thread": "import threading, time; threading.Thread(target=lambda: 1 / 0).start(); time.sleep(50)",
    "exit": "sys.exit(3)",
    "text": "sys.exit('the cause')",
    "os._exit": "os._exit(3)",
}


# Before the ranks are connected, a thread's error ends nothing, and MPICH's launcher ignores how a
# process ends that has not started MPI.
@pytest.mark.parametrize(
    "moment, end",
    slow_but(
        [("early", "exception"), ("connected", "exit"), ("connected", "text")],
        [("early", "exception"), *(("connected", end) for end in ENDS)],
    ),
)
def test_what_explains_a_failure_is_shown(launch, moment, end):
    """What was hidden before, and what is written then."""
    program = f"""
    import os, sys, warnings
    import hpcstrat as hs

    {"hs.barrier()" if moment == "connected" else ""}
    if hs.rank() == 1:
        print("look here", file=sys.stderr)
        {ENDS[end]}
    hs.barrier()
    """
    result = launch(program, 2, timeout=60)
    assert result.status != 0
    assert result.stderr.count("look here\n") == (
        end != "os._exit"
    )  # of which Python tells nothing
    assert ("the cause" in result.stderr) == ("the cause" in ENDS[end])
    assert ("ZeroDivisionError" in result.stderr) == (end == "thread")
    assert result.leftovers == []


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
def test_what_python_ignores_is_shown(launch, ranks):
    program = """
    import hpcstrat as hs

    class File:
        def __del__(self):
            raise OSError(f"disk {hs.rank()} is full")

    hs.barrier()
    File()
    hs.barrier()
    """
    result = launch(program, ranks)
    assert result.status == 0
    for rank in range(ranks):
        assert f"[rank {rank}] OSError: disk {rank} is full\n" in result.stderr


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
def test_an_error_of_all_ranks_is_said_once(launch, ranks):
    # Open MPI's launcher kills all when it sees that one has left; MPICH's waits for all.
    program = f"""
    import argparse, time
    from hpcstrat._process import failure, launchers

    failure._LEAD_DELAY = {10 if launch.open_mpi else 0.3}  # long enough on a busy machine
    if launchers.find().rank == 0:
        time.sleep(0.2)
    argparse.ArgumentParser().parse_args(["--wrong"])
    """
    result = launch(program, ranks)
    assert result.status != 0
    assert result.stderr.count("unrecognized arguments: --wrong") == 1


def test_handled_and_logged_errors_and_those_of_c_are_shown(launch):
    program = """
    import faulthandler, logging, os, sys, traceback
    import hpcstrat as hs

    try:
        1 / 0
    except ZeroDivisionError:
        traceback.print_exc()
    logging.error("logged")
    logging.warning("hidden")
    os.write(2, b"of C\\n")
    faulthandler.dump_traceback()
    hs.barrier()
    """
    result = launch(program, 2)
    assert result.status == 0
    words = [
        "ZeroDivisionError: division by zero",
        "ERROR:root:logged",
        "of C",
        "most recent call first",
        "hidden",
    ]
    assert [result.stderr.count(word) for word in words] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("ranks", slow_but([2], [2, 4]))
def test_lines_arrive_whole(launch, ranks):
    if "Open MPI) 4" in launch.version:
        pytest.skip("mpirun of Open MPI 4 cuts what comes at once every 4 KiB, lines or not")
    program = """
    from hpcstrat._process import output
    from hpcstrat._process import worlds
    world = worlds.start()
    output._is_replica = lambda: True
    for number in range(300):
        print("rank", world.rank, "line", number, "x" * 100)
    """
    result = launch(program, ranks)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == ranks * 300
    assert {tuple(line[:3]) for line in lines} == {
        ("rank", str(rank), "line") for rank in range(ranks)
    }
    assert all(line[4:] == ["x" * 100] for line in lines)


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
CLOSED = ["stderr=none", "stderr=closed", "stdout=none", "stdout=closed", "stdin=closed"]
ALL_CLOSED = "stderr=closed stdout=closed stdin=closed"


@pytest.mark.parametrize("streams", slow_but([ALL_CLOSED], [*CLOSED, ALL_CLOSED]))
def test_streams_that_the_program_has_closed(launch, streams):
    result = launch(SUM, 2, *streams.split())
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [(launch.folder / f"total_{rank}").read_text() for rank in range(2)] == ["3", "3"]


CLOSED_FROM_THE_BEGIN = {"stderr": "2>&-", "stderr and stdout": ">&- 2>&-", "all": "<&- >&- 2>&-"}


def with_closed_streams(launch, source, closed):
    """The path of a program that starts this one with those streams closed."""
    (launch.folder / "closed.py").write_text(textwrap.dedent(source))
    closing = CLOSED_FROM_THE_BEGIN[closed]
    start = launch.folder / "start"
    start.write_text(
        f"import os\nos.execv('/bin/sh', ['sh', '-c', 'exec {sys.executable} closed.py {closing}'])"
    )
    return start


@pytest.mark.parametrize("closed", slow_but(["all"], CLOSED_FROM_THE_BEGIN))
def test_streams_that_are_closed_from_the_begin(launch, closed):
    """As daemons have them."""
    result = launch(with_closed_streams(launch, SUM, closed), 2)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [(launch.folder / f"total_{rank}").read_text() for rank in range(2)] == ["3", "3"]


@pytest.mark.parametrize("closed", slow_but(["stderr"], CLOSED_FROM_THE_BEGIN))
def test_an_error_where_streams_are_closed_from_the_begin(launch, closed):
    """What a rank says then goes to the other stream, or nowhere."""
    program = "import hpcstrat as hs\nif hs.rank(): raise ValueError('the cause')\nhs.barrier()"
    result = launch(with_closed_streams(launch, program, closed), 2)
    assert result.status != 0 and result.leftovers == []
    assert ("[rank 1] ValueError: the cause" in result.stdout) == (closed == "stderr")


@pytest.mark.parametrize("seconds", slow_but(["1e300"], ["1e10", "1e300", "inf"]))
def test_time_outs_of_any_size(launch, seconds):
    result = launch(
        SUM, 2, env={"HPCSTRAT_TIMEOUT_SECONDS": seconds, "HPCSTRAT_STALL_SECONDS": seconds}
    )
    assert (result.status, result.stderr) == (0, "")


@pytest.mark.slow
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
    assert "Timeout (0:00:01)!" in result.stderr


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
    assert (result.status, result.stdout, result.stderr) == (0, "0 True\n", "")
    result = launch(bar, 2)
    assert (result.status, result.stdout) == (0, "")
    assert re.fullmatch(r" *0%\|.*\| 0/3 \[.*\]\n100%\|.*\| 3/3 \[.*\]\n", result.stderr)
