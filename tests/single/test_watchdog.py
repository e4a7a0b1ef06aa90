"""What the watchdog concludes from the ranks' statuses, and what it says of this rank."""

import gc
import os
import re
import sys
import threading
import time
import types
from typing import Any

import pytest
from internals import channels, failure, reports, watchdog

UNKNOWN = channels.UNKNOWN


def status(number, waits, **others):
    fields = {"call": "Strategy.reduce(SUM)", "location": "train.py:7 in main", "progress": 0}
    fields |= {"extra_seconds": 0.0, "gone": False, "process": 4711} | others
    return channels.RankStatus(number=number, waits=waits, **fields)


def diagnoses(statuses, seconds, detector=None, dead=(), start=0.0):
    """The diagnoses in `seconds` seconds without a change: second -> diagnosis."""
    detector = detector or watchdog.StallDetector(60, 600)
    said = {}
    for tenth in range(int(10 * seconds) + 1):
        beats = [one if one.beat < 0 else one._replace(beat=10 * start + tenth) for one in statuses]
        diagnosis = detector.diagnose(beats, dead, start + tenth / 10)
        if diagnosis is not None:
            said[tenth / 10] = diagnosis
            if diagnosis.ends:
                break
    return said


IN_LOAD = {"call": "Strategy.run", "location": "train.py:9 in load"}
LATE = [status(8, True), status(7, False, **IN_LOAD), status(8, True)]
SHOWN = ": waiting in call 8, Strategy.reduce(SUM), at train.py:7 in main\n  rank "
ARRIVES = ": has not arrived; last in call 7, Strategy.run; now at train.py:9 in load"
LEFT, SILENT = status(9, False, gone=True), status(8, True, beat=-1)
FINISHED = [LEFT, LEFT._replace(beat=-1), LEFT]
STALL = {60: False, 600: True}
AT_ONCE = {watchdog.SETTLING_SECONDS: True}
# The ranks' statuses, the dead ranks, the seconds of reports and whether they end the job, and what
# the last of them says.
CASES = {
    "one does not come": (LATE, [], STALL, [f"\n  ranks 0, 2{SHOWN}1{ARRIVES}"]),
    "all compute": ([status(7, False)] * 2, [], {}, []),
    "nobody has begun": ([UNKNOWN, UNKNOWN], [], {}, []),
    "one is ahead and waits for nobody": ([status(7, False), status(6, False)], [], {}, []),
    "all wait in one call": (
        [status(7, True)] * 2,
        [],
        STALL,
        ["waiting for each other for 600 s"],
    ),
    "one extends the timeout": (
        [LATE[0], LATE[1]._replace(extra_seconds=1000.0)],
        *([], {1060: False, 1600: True}, ["HPCSTRAT_TIMEOUT_SECONDS"]),
    ),
    "a dead rank": (
        [status(8, True), status(7, False)],
        *(
            [1],
            AT_ONCE,
            ["rank 1 (process 4711) exited without", "\n  rank 1: last seen in call 7"],
        ),
    ),
    "nobody waits for the dead": ([status(8, False), status(7, False)], [1], AT_ONCE, []),
    "one does not answer": (
        [status(8, True), SILENT, status(7, False)],
        *([], STALL, ["\n  rank 1: not answering for 600 s", "C code", "; last in call 8"]),
    ),
    "what it was at may be over": ([SILENT, status(8, False)], [], {}, []),
    "another waits for it": ([SILENT, status(8, True)], [], STALL, []),
    "a process does not end": (
        FINISHED,
        *([2], STALL, ["\n  rank 0: has finished, but its process does not end; now at train.py"]),
    ),
    "those that have finished": (FINISHED, [2], STALL, ["\n  ranks 1, 2: has finished"]),
    "all have finished": ([one._replace(beat=0) for one in FINISHED], [], {}, []),
    "one that left may die": ([status(9, True), status(9, True, gone=True)], [1], STALL, []),
}


@pytest.mark.parametrize(("statuses", "dead", "seconds", "facts"), CASES.values(), ids=CASES)
def test_what_is_said_and_when(statuses, dead, seconds, facts):
    said = diagnoses(statuses, max([700, *seconds]), dead=dead)
    assert {second: one.ends for second, one in said.items()} == seconds
    assert all(fact in said[max(seconds)].text for fact in facts)


@pytest.mark.parametrize("change", ["number", "progress"])
def test_any_progress_begins_anew(change):
    detector = watchdog.StallDetector(60, 600)
    assert list(diagnoses(LATE, 599, detector)) == [60]
    later = LATE[1]._replace(**{change: getattr(LATE[1], change) + 1})
    assert list(diagnoses([LATE[0], later, LATE[2]], 599, detector, start=600.0)) == [60]


def test_waiting_begins_when_the_first_rank_waits():
    detector, computes = watchdog.StallDetector(60, 600), status(7, False)
    assert diagnoses([computes, computes], 1000, detector) == {}
    said = diagnoses([computes, status(7, True)], 700, detector, start=1000.0)
    assert "waiting for each other for 60 s" in said[60].text and "ends in 540 s" in said[60].text
    assert "waiting for each other for 600 s" in said[600].text


def test_while_the_job_is_suspended_no_time_counts():
    detector = watchdog.StallDetector(60, 600)
    assert list(diagnoses(LATE, 50, detector)) == []
    # But for two seconds of the pause, which may have been of a rank that holds the lock.
    assert list(diagnoses(LATE, 1000, detector, start=5000.0)) == [8, 548]


@pytest.mark.parametrize("pause", [0.5, 1.9, 2.0, 3.0, 30.0])
def test_pauses_hide_no_hang(pause):
    """Rank 0 holds the interpreter lock for a while, again and again."""
    detector, found, now = watchdog.StallDetector(60, 600), [], 0.0
    while not (found and found[-1].ends) and now < 20_000:
        beating = [one._replace(beat=int(10 * now)) for one in LATE]
        found += filter(None, [detector.diagnose(beating, [], now)])
        now += pause
    assert [diagnosis.ends for diagnosis in found] == [False, True]


# ---- a watchdog's thread


class Alone:
    """The channel of a rank that hears nothing; its `exchange` raises `trouble`."""

    def __init__(self, trouble=None, root=UNKNOWN, root_silence=0.0, is_dead=False):
        self.root, self.root_silence, self.root_is_dead = root, root_silence, is_dead
        self.trouble, self.exchanges, self.is_over = trouble, 0, False
        self.has_ended = threading.Event()

    def exchange(self, status):
        if self.is_over and threading.current_thread() is not threading.main_thread():
            self.has_ended.set()
            threading.Event().wait()  # a watchdog's thread never returns
        self.exchanges += 1
        if self.trouble is not None:
            raise self.trouble

    def wait(self, seconds):
        time.sleep(min(seconds, 0.01))


@pytest.fixture
def watch(monkeypatch):
    """Makes watchdogs on mocked channels; their threads end with the test.

    Before `monkeypatch` does, which gives them back what ends the job.
    """
    made = []

    waiting = types.SimpleNamespace(depth=0)
    calls: Any = types.SimpleNamespace(number=7, last_signature=None, thread=0, waiting=waiting)

    def make(channel):
        made.append(channel)
        return watchdog.Watchdog(1, calls, channel)

    yield make
    for channel in made:
        channel.is_over = True
    for channel in made:
        assert channel.has_ended.wait(60)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_the_watchs_own_errors_end_nothing(watch, monkeypatch):
    said, ended = [], []
    monkeypatch.setattr(reports, "say", said.append)
    monkeypatch.setattr(failure, "end_job", ended.append)
    monkeypatch.setenv("HPCSTRAT_STALL_SECONDS", "0.04")
    channel = Alone(OSError("Stale file"))
    one = watch(channel)
    wait_for(lambda: channel.exchanges >= 5)
    channel.trouble = None
    one.leave()
    assert ended == [] and len(said) == 1
    assert "the watchdog hit an internal error and continues: OSError: Stale file" in said[0]


WAITED = {"root": status(8, True), "root_silence": 1e9}
LEFT_ALONE = {"root": status(8, False, gone=True), "root_silence": 1e9}


@pytest.mark.parametrize(
    ("heard", "seconds", "facts"),
    [
        ({"is_dead": True}, "inf", "rank 0 exited without shutting down"),
        (
            WAITED,
            "0.04",
            r"rank 0 .* silent for \d+ s: .*call 8, Strategy.reduce.*SUM.*train.py:7 in main; this rank waits at ",
        ),
        (LEFT_ALONE, "0.04", "rank 0 has finished, and has waited"),
    ],
    ids=["dead", "silent", "finished"],
)
def test_a_rank_ends_the_job_without_rank_0(watch, monkeypatch, heard, seconds, facts):
    ended = []
    monkeypatch.setattr(failure, "end_job", lambda text, consequence: ended.append(text))
    monkeypatch.setattr(watchdog, "SETTLING_SECONDS", 0.01)
    monkeypatch.setenv("HPCSTRAT_TIMEOUT_SECONDS", seconds)
    monkeypatch.setenv("HPCSTRAT_STALL_SECONDS", "0.04")
    watch(Alone(**heard))
    wait_for(lambda: ended)
    assert re.search(facts, ended[0])


# ---- the line of the program that a rank is at


def elsewhere(function):
    """What a function returns in another thread, while this one waits here."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def place():
    """Where the main thread is, as another one sees it."""
    return watchdog.user_frame_of(threading.main_thread().ident or 0)


def test_the_place_is_a_line_of_the_program(monkeypatch, tmp_path):
    first = elsewhere.__code__.co_firstlineno
    shown = [f"{os.path.relpath(__file__)}:{first + i} in elsewhere" for i in (4, 5)]
    assert elsewhere(place) in shown
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert elsewhere(place).startswith(f"{__file__}:")  # there is no folder to be relative to


def test_no_garbage_is_collected_while_stacks_are_read(monkeypatch):
    """Before Python 3.12 a deadlock; a program that has switched it off finds it off."""
    seen, look = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), look())[1])
    for switch in (gc.enable, gc.disable):
        switch()
        was_enabled = gc.isenabled()
        elsewhere(place)
        assert gc.isenabled() == was_enabled
    gc.enable()
    assert seen == [sys.version_info >= (3, 12), False]
