"""Standard output reads as one program's."""

import sys
import textwrap

import pytest
from slow import slow_but

PROGRAM = """
    import sys, threading
    from hpcstrat import _output
    _output.install()
    print("first")
    from hpcstrat import _world
    world = _world.start()
    inside = False
    main = threading.current_thread()
    _output.replica_context = lambda: inside if threading.current_thread() is main else None
    print("cross-replica", "context")
    inside = True
    print(f"replica {world.rank}")
    thread = threading.Thread(target=print, args=(f"thread {world.rank}",))
    thread.start(); thread.join()
    inside = False
    thread = threading.Thread(target=print, args=("outer thread",))
    thread.start(); thread.join()
    sys.stdout.writelines(["a\\n", "b\\n"])
    sys.stdout.buffer.write(b"bytes\\n")
    print("an error", file=sys.stderr)
    inside = True
    print(f"error of replica {world.rank}", file=sys.stderr)
"""
ONCE = ["first", "cross-replica context", "outer thread", "a", "b", "bytes"]


@pytest.mark.parametrize("ranks", [None, 1, 2, 3])
def test_what_shows(launch, ranks):
    result = launch(PROGRAM, ranks)
    count = ranks or 1
    assert result.status == 0
    inside = [f"{word} {rank}" for word in ("replica", "thread") for rank in range(count)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE + inside)
    assert [line for line in result.stdout.splitlines() if line in ONCE] == ONCE
    assert result.stderr.splitlines().count("an error") == 1
    assert result.stderr.count("error of replica") == count


def test_all(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "all"})
    inside = [f"{word} {rank}" for word in ("replica", "thread") for rank in range(3)]
    assert sorted(result.stdout.splitlines()) == sorted(ONCE * 3 + inside)


def test_lead(launch):
    result = launch(PROGRAM, 3, env={"HPCSTRAT_OUTPUT": "lead"})
    assert sorted(result.stdout.splitlines()) == sorted([*ONCE, "replica 0", "thread 0"])


def test_another_value_is_an_error(launch):
    result = launch(PROGRAM, 2, env={"HPCSTRAT_OUTPUT": "rank0"})
    assert result.status != 0
    assert "ValueError: HPCSTRAT_OUTPUT='rank0' is not allowed" in result.stderr


ERRORS = """
    import logging, os, sys, warnings
    import hpcstrat as hs
    from tqdm import tqdm

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print("printed", file=sys.stderr)
    warnings.warn("warned")
    logging.info("noted")
    for _ in tqdm(range(3), desc="bar"): pass
    hs.barrier()
"""
ONCE_AS_ERRORS = ["printed", "warned", "noted"]


def counts(stderr):
    return [stderr.count(word + "\n") for word in ONCE_AS_ERRORS] + [stderr.count("bar: 100%")]


def test_errors_read_as_one_programs(launch):
    result = launch(ERRORS, 3)
    assert result.status == 0
    assert counts(result.stderr) == [1, 1, 1, 1]
    result = launch(ERRORS, 3, env={"HPCSTRAT_STDERR": "all"})
    assert counts(result.stderr) == [3, 3, 3, 3]
    result = launch(ERRORS, 2, env={"HPCSTRAT_STDERR": "lead"})
    assert result.status != 0
    assert "ValueError: HPCSTRAT_STDERR='lead' is not allowed" in result.stderr


ENDS = {
    "exception": "raise ValueError('the cause')",
    "thread": "import threading, time; threading.Thread(target=lambda: 1 / 0).start(); time.sleep(50)",
    "exit": "sys.exit(3)",
    "text": "sys.exit('the cause')",
    "raised": "raise SystemExit(3)",
    "raised text": "raise SystemExit('the cause')",
    "os._exit": "os._exit(3)",
}


@pytest.mark.parametrize("end", slow_but(["text", "raised"], [*ENDS]))
@pytest.mark.parametrize("begins", ["", "hs.barrier()"], ids=["early", "connected"])
def test_what_explains_a_failure_is_shown(launch, begins, end):
    """What was hidden before, and what is written then."""
    if not begins and end in ("raised", "raised text", "os._exit") and not launch.open_mpi:
        pytest.skip("MPICH's launcher ignores how a process ends that has not started MPI, and rank 0 waits")
    if not begins and end == "thread":
        pytest.skip("before the ranks are connected, a thread's error ends nothing")
    program = f"""
    import os, sys, warnings
    import hpcstrat as hs

    {begins}
    if hs.rank() == 1:
        print("look here", file=sys.stderr)
        {ENDS[end]}
    hs.barrier()
    """
    result = launch(program, 2, timeout=60)
    assert result.status != 0
    assert result.stderr.count("look here\n") == 1
    assert ("the cause" in result.stderr) == ("the cause" in ENDS[end])
    assert ("ZeroDivisionError" in result.stderr) == (end == "thread")
    assert result.leftovers == []


def test_an_error_of_all_ranks_is_said_once(launch):
    result = launch("import argparse, hpcstrat\nargparse.ArgumentParser().parse_args(['--wrong'])", 3)
    assert result.status != 0
    count = result.stderr.count("unrecognized arguments: --wrong")
    # Before MPI has started, Open MPI's launcher ends the ranks when it notices that one has left.
    assert count == 1 or (launch.open_mpi and count > 1)


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
    words = ["ZeroDivisionError: division by zero", "ERROR:root:logged", "of C", "most recent call first", "hidden"]
    assert [result.stderr.count(word) for word in words] == [2, 2, 2, 2, 1]


def test_lines_arrive_whole(launch):
    if "Open MPI) 4" in launch.version:
        pytest.skip("mpirun of Open MPI 4 cuts what comes at once every 4 KiB, lines or not")
    program = """
    from hpcstrat import _output
    _output.install()
    from hpcstrat import _world
    world = _world.start()
    _output.replica_context = lambda: True
    for number in range(300):
        print("rank", world.rank, "line", number, "x" * 100)
    """
    result = launch(program, 4)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert len(lines) == 1200
    assert {tuple(line[:3]) for line in lines} == {("rank", str(rank), "line") for rank in range(4)}
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


@pytest.mark.parametrize("streams", [*([one] for one in CLOSED), ["stderr=closed", "stdout=closed", "stdin=closed"]])
def test_streams_that_the_program_has_closed(launch, streams):
    result = launch(SUM, 2, *streams)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [(launch.folder / f"total_{rank}").read_text() for rank in range(2)] == ["3", "3"]


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_from_the_begin(launch, closed):
    """As daemons have them. What a rank says then goes to the other stream, or nowhere."""
    program = launch.folder / "sum.py"
    program.write_text(textwrap.dedent(SUM))
    start = launch.folder / "start"
    start.write_text(f"import os\nos.execv('/bin/sh', ['sh', '-c', 'exec {sys.executable} sum.py {closed}'])")
    result = launch(start, 2)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert [(launch.folder / f"total_{rank}").read_text() for rank in range(2)] == ["3", "3"]
    program.write_text("import hpcstrat as hs\nif hs.rank(): raise ValueError('the cause')\nhs.barrier()")
    result = launch(start, 2)
    assert result.status != 0 and result.leftovers == []
    assert ("[rank 1] ValueError: the cause" in result.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("seconds", ["1e10", "1e300", "inf"])
def test_time_outs_of_any_size(launch, seconds):
    result = launch(SUM, 2, env={"HPCSTRAT_TIMEOUT_SECONDS": seconds, "HPCSTRAT_STALL_SECONDS": seconds})
    assert (result.status, result.stderr) == (0, "")


def test_the_users_own_timer_of_tracebacks_stays(launch):
    program = """
    import faulthandler, time
    import hpcstrat as hs

    faulthandler.dump_traceback_later(3, exit=True)
    hs.barrier()
    with hs.extend_timeout(100):
        time.sleep(100)
    """
    result = launch(program, 2, timeout=60)
    assert result.status != 0
    assert "Timeout (0:00:03)!" in result.stderr
