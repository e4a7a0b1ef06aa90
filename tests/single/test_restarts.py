"""How the launcher restarts ranks: with a starter that only reports how they ended."""

import errno
import os
import re
import subprocess
import sys
import threading
import time

import pytest
from checkpoint_files import Contents
from internals import (
    Policy,
    SnapshotMemory,
    State,
    guard,
    job_files,
    policy,
    restarts,
)

KILLED, SEGFAULT = 9, 139
SECONDS = 60  # until a wait counts as a failure


@pytest.fixture(autouse=True)
def no_segments_of_others(monkeypatch, tmp_path):
    """Keeps restarts, which unlink unused files, away from the files of concurrent tests."""
    monkeypatch.setattr(guard, "FOLDER", os.fspath(tmp_path))


@pytest.fixture
def pauses(monkeypatch):
    """The lengths of the pauses before restarts in seconds, which are skipped."""
    found = []
    monkeypatch.setattr(restarts, "_pause", lambda starter, seconds: found.append(seconds))
    return found


class Starter:
    """Plays back one start after another.

    Args:
        starts: per start a function that writes the ranks' notes to the job's memory, and the
            exit status.
    """

    def __init__(self, *starts):
        self.signal = 0
        self.starts = list(starts)
        self.ranks = []

    def start(self, ranks, environment):
        memory = job_files.find(environment)
        assert memory is not None and memory.steps()[1] == 0
        self.ranks.append(ranks)
        note, status = self.starts.pop(0)
        note(memory)
        return status


def steps(first, last):
    """The ranks do these steps."""

    def note(memory):
        for number in range(first, last + 1):
            memory.note_step(number)

    return note


def failing(text, first=1, last=0, rank=0, state=State.FAILED):
    """The ranks do these steps, and one fails."""

    def note(memory):
        steps(first, last)(memory)
        memory.note(rank, state, text)

    return note


def run(starter, ranks=4, restarts_=3, min_ranks=None):
    status = restarts.run(starter, Policy(ranks, restarts_, min_ranks or ranks))
    assert not starter.starts
    return status


NOTHING = steps(1, 0)


def test_what_ends_well_is_not_restarted(capfd):
    assert run(Starter((steps(1, 5), 0))) == 0
    assert capfd.readouterr().err == ""


def test_ranks_of_other_hosts_that_were_asked_to_end_are_known_by_their_status(capfd):
    assert run(Starter((steps(1, 5), 75))) == 75
    assert capfd.readouterr().err.endswith(
        "no restart: the ranks were asked to end, and have saved\n"
    )


ASKED = {
    "interrupted": (
        "KeyboardInterrupt, at x.py:3 in f",
        State.INTERRUPTED,
        "a rank was interrupted",
    ),
    "preempted": ("", State.PREEMPTED, "the ranks were asked to end, and have saved"),
}


@pytest.mark.parametrize("text, state, reason", ASKED.values(), ids=ASKED)
def test_a_rank_that_was_asked_to_end_is_not_restarted(capfd, text, state, reason):
    assert run(Starter((failing(text, 1, 5, state=state), 85))) == 85
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"; no restart: {reason}")


@pytest.mark.parametrize("status", [KILLED, 1])
def test_a_launcher_that_was_signalled_starts_nothing(capfd, status):
    starter = Starter((steps(1, 5), status))
    starter.signal = 15
    assert run(starter) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("; no restart: the launcher was sent SIGTERM")


def connected(*left):
    """Two ranks are connected, and these leave properly."""

    def note(memory):
        steps(1, 5)(memory)
        for rank in range(2):
            memory.note(rank, State.STARTED)
            memory.note(rank, State.CONNECTED)
        for rank in left:
            memory.note(rank, State.LEFT)

    return note


def test_a_rank_that_leaves_the_others_is_a_failure_whatever_the_status(capfd):
    assert run(Starter((connected(0), 0), (connected(0, 1), 0))) == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(
        "left after step 5 without the others, as by os._exit; restart 1 of 3, on 4 ranks"
    )
    assert run(Starter((connected(), 0)), restarts_=0) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("left after step 5 without the others, as by os._exit; the status is 1")


def test_a_dead_rank_is_restarted(capfd):
    assert run(Starter((steps(1, 5), KILLED), (NOTHING, SEGFAULT), (steps(4, 9), 0))) == 0
    assert capfd.readouterr().err.splitlines() == [
        "hpcstrat run: a rank died after step 5 of SIGKILL; restart 1 of 3, on 4 ranks",
        "hpcstrat run: a rank died after step 5 of SIGSEGV; restart 2 of 3, on 4 ranks",
    ]


def test_it_is_restarted_so_often_at_most(capfd):
    assert run(Starter(*[(steps(n, n), KILLED) for n in range(1, 5)])) == KILLED
    assert capfd.readouterr().err.splitlines()[-1] == (
        "hpcstrat run: a rank died after step 4 of SIGKILL; no restart: it has been restarted 3 "
        "times (--restarts); first, a rank died after step 1 of SIGKILL"
    )


def test_the_same_exception_at_the_same_step_ends_it(capfd):
    fails = failing("ValueError: 3, at x.py:7 in step", 1, 5, rank=2)
    again = failing("ValueError: 3, at x.py:7 in step", 5, 5, rank=1)
    assert run(Starter((fails, 1), (steps(4, 5), KILLED), (again, 1))) == 1
    assert capfd.readouterr().err.splitlines() == [
        "hpcstrat run: rank 2 failed after step 5 with ValueError: 3, at x.py:7 in step; restart 1 "
        "of 3, on 4 ranks",
        "hpcstrat run: a rank died after step 5 of SIGKILL; restart 2 of 3, on 4 ranks",
        "hpcstrat run: rank 1 failed after step 5 with ValueError: 3, at x.py:7 in step; no "
        "restart: it has failed in the same way at the same step before; first, rank 2 failed "
        "after step 5 with ValueError: 3, at x.py:7 in step",
    ]


FAILS = failing(
    "OutOfMemoryError: the driver still takes a killed context down, at x.py:1 in <module>"
)


@pytest.mark.parametrize("note", [FAILS, NOTHING], ids=["an exception", "a status"])
def test_a_start_that_fails_after_others_did_steps_is_tried_again_after_a_pause(
    capfd, pauses, note
):
    assert (
        run(
            Starter((steps(1, 5), KILLED), (note, 1), (note, 1), (note, 1), (steps(6, 9), 0)),
            restarts_=9,
        )
        == 0
    )
    assert pauses == [0, 2, 4, 8]
    said = re.findall(r"restart .*", capfd.readouterr().err)
    assert said == [
        "restart 1 of 9, on 4 ranks",
        "restart 2 of 9 in 2 s, on 4 ranks",
        "restart 3 of 9 in 4 s, on 4 ranks",
        "restart 4 of 9 in 8 s, on 4 ranks",
    ]


@pytest.mark.parametrize("note", [FAILS, NOTHING], ids=["an exception", "a status"])
def test_it_ends_when_the_pauses_are_used_up(capfd, pauses, note):
    assert run(Starter((steps(1, 5), KILLED), *[(note, 1)] * 4), restarts_=9) == 1
    assert pauses == [0, 2, 4, 8]
    end = "no restart: it has ended 4 times in a row before it had done a step; first, a rank died after step 5"
    assert end in capfd.readouterr().err


def test_a_signal_in_a_pause_ends_it(capfd, monkeypatch):
    monkeypatch.setattr(policy, "_PAUSES_SECONDS", (0, 10 * SECONDS))
    starter = Starter((steps(1, 5), KILLED), (FAILS, 1))
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(starter, "signal", 15))
    assert run(starter) == 1
    *_, pause, end = capfd.readouterr().err.splitlines()
    assert (
        "restart 2 of 3 in 600 s" in pause
        and "no restart: the launcher was sent SIGTERM; first, " in end
    )


def test_fewer_ranks_are_tried_after_all(capfd, pauses):
    starter = Starter(
        *[(NOTHING, KILLED)] * 5, (steps(1, 2), KILLED), (NOTHING, 3), (steps(3, 3), 0)
    )
    assert run(starter, ranks=4, restarts_=9, min_ranks=2) == 0
    assert starter.ranks == [4, 4, 3, 2, 2, 2, 4, 3]
    assert "restart 3 of 9, on 2 ranks" in capfd.readouterr().err


def test_the_newest_snapshot_is_told(capfd):
    def note(memory):
        for step in (3, 4, 5):
            snapshots = SnapshotMemory(memory, "here")
            contents = Contents({}, {}, None, {"step": str(step), **snapshots.notes()})
            with snapshots.replacing(contents.header.nbytes) as file:
                contents.write_to(file.fileno(), snapshots)

    assert run(Starter((note, KILLED), (NOTHING, 0))) == 0
    assert capfd.readouterr().err.endswith("; the newest snapshot is of step 5\n")


def test_what_the_ranks_leave_is_ended(monkeypatch):
    """A process that ignores SIGTERM, and one that died."""
    monkeypatch.setattr(restarts, "_GRACE_SECONDS", 0.1)
    left = []

    class Leaves(Starter):
        def start(self, ranks, environment):
            if not left:
                ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
                left.append(
                    subprocess.Popen(
                        [sys.executable, "-c", ignore], env={**os.environ, **environment}
                    )
                )
            else:
                assert left[0].wait(SECONDS) == -KILLED
            return super().start(ranks, environment)

    assert run(Leaves((NOTHING, KILLED), (NOTHING, 0))) == 0


def test_what_is_on_its_way_out_is_waited_for(monkeypatch):
    """A process that has freed its variables but has not closed its files yet."""
    monkeypatch.setattr(restarts, "_GRACE_SECONDS", SECONDS)
    with subprocess.Popen(["sleep", "600"]) as process:
        looks = 0

        def processes_of(memory):
            nonlocal looks
            looks += 1
            if looks == 3:
                process.kill()
            return [process.pid] * (looks == 1)

        monkeypatch.setattr(restarts, "processes_of", processes_of)
        starter = Starter((NOTHING, KILLED), (lambda memory: process.wait(0), 0))
        try:
            assert run(starter) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("error", [None, errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_restarts_where_processes_cannot_be_watched(monkeypatch, capfd, error):
    """`None`: Python lacks the function, and a container may forbid it; a failure of it is said."""

    def fail(process):
        raise OSError(error, "no pidfd")

    def note(memory):
        memory.note(0, State.STARTED)
        time.sleep(0.1)  # the watch finds it

    if error is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", fail)
    starter = Starter((note, KILLED), (note, 0))
    assert run(starter) == 0
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert ("who dies first is not seen: [Errno" in said) == (error == errno.EMFILE)


def test_the_rank_that_dies_first_is_named(capfd, monkeypatch):
    """Rank 1, which dies when the watch has seen all ranks; the others end after another look."""
    program = """if True:
    import os, sys
    from hpcstrat._process import job_files
    rank = int(sys.argv[1])
    memory = job_files.find()
    memory.note(rank, job_files.State.STARTED)
    sys.stdin.read()
    if rank == 1:
        os._exit(9)
    if rank == 2:
        memory.note(rank, job_files.State.FAILED, "ConnectionError: rank 1 is gone")
    """
    seen, alive = threading.Semaphore(0), threading.Semaphore(0)

    def counted(function, calls):
        def call(*arguments):
            found = function(*arguments)
            calls.release()
            return found

        return call

    monkeypatch.setattr(os, "pidfd_open", counted(os.pidfd_open, seen))
    monkeypatch.setattr(restarts, "_has_closed_files", counted(restarts._has_closed_files, alive))

    class Starts(Starter):
        def start(self, ranks, environment):
            if len(self.starts) == 2:
                variables = {**os.environ, **environment}
                first, second, third = children = [
                    subprocess.Popen(
                        [sys.executable, "-c", program, f"{rank}"],
                        stdin=subprocess.PIPE,
                        env=variables,
                    )
                    for rank in range(3)
                ]
                assert all(seen.acquire(timeout=SECONDS) for _ in children)
                second.communicate()
                assert all(alive.acquire(timeout=SECONDS) for _ in (first, third))
                for child in children:
                    child.communicate()
            return self.starts.pop(0)[1]

    assert run(Starts((NOTHING, KILLED), (NOTHING, 0)), ranks=3) == 0
    assert "rank 1 died after step 0 of SIGKILL" in capfd.readouterr().err
