"""What the watchdog concludes from the ranks' statuses, and what it says of this rank."""

import contextlib
import gc
import math
import os
import re
import sys
import threading
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
from internals import (
    SETTLING_SECONDS,
    UNKNOWN,
    CallState,
    RankStatus,
    StallDetector,
    Watchdog,
    _program,
    failure,
    reports,
    user_frame_of,
    watchdog,
)


def status(number, waits, **others):
    fields = {
        "call": "Strategy.reduce(SUM)",
        "location": "train.py:7 in main",
        "progress": 0,
        "extra_seconds": 0.0,
    }
    return RankStatus(
        **({"number": number, "waits": waits, "gone": False, "process": 4711} | fields | others)
    )


def diagnoses(statuses, seconds, detector=None, dead=(), start=0.0):
    """The diagnoses in `seconds` seconds without a change: second -> diagnosis."""
    detector = detector or StallDetector(60, 600)
    said = {}
    for tenth in range(int(10 * seconds) + 1):
        beating = [
            one if one.beat < 0 else one._replace(beat=int(10 * start) + tenth) for one in statuses
        ]
        diagnosis = detector.diagnose(beating, dead, start + tenth / 10)
        if diagnosis is not None:
            said[tenth / 10] = diagnosis
            if diagnosis.ends:
                break
    return said


LATE = [
    status(8, True),
    status(7, False, call="Strategy.run", location="train.py:9 in load"),
    status(8, True),
]


def test_a_rank_that_does_not_come():
    said = diagnoses(LATE, 700)
    assert [(second, diagnosis.ends) for second, diagnosis in said.items()] == [
        (60, False),
        (600, True),
    ]
    report, end = said[60].text, said[600].text
    assert "waiting for each other for 60 s" in report and "ends in 540 s" in report
    assert "waiting for each other for 600 s" in end
    for text in (report, end):
        assert (
            "\n  ranks 0, 2: waiting in call 8, Strategy.reduce(SUM), at train.py:7 in main" in text
        )
        assert (
            "\n  rank 1: has not arrived; last in call 7, Strategy.run; now at train.py:9 in load"
            in text
        )


@pytest.mark.parametrize(
    "statuses",
    [
        [status(7, False), status(7, False)],
        [UNKNOWN, UNKNOWN],
        [status(7, False), status(6, False)],
    ],
    ids=["all compute", "nobody has begun", "one is ahead and waits for nobody"],
)
def test_nobody_waits(statuses):
    assert diagnoses(statuses, 700) == {}


def test_all_wait_in_one_call():
    said = diagnoses([status(7, True), status(7, True)], 700)
    assert list(said) == [60, 600]


@pytest.mark.parametrize("change", ["number", "progress"])
def test_any_progress_begins_anew(change):
    detector = StallDetector(60, 600)
    assert list(diagnoses(LATE, 599, detector)) == [60]
    later = [*LATE[:1], LATE[1]._replace(**{change: getattr(LATE[1], change) + 1}), *LATE[2:]]
    assert list(diagnoses(later, 599, detector, start=600.0)) == [60]


def test_waiting_begins_when_the_first_rank_waits():
    detector = StallDetector(60, 600)
    assert diagnoses([status(7, False), status(7, False)], 1000, detector) == {}
    assert list(diagnoses([status(7, False), status(7, True)], 700, detector, start=1000.0)) == [
        60,
        600,
    ]


def test_any_rank_may_extend_the_timeout():
    patient = [*LATE[:1], LATE[1]._replace(extra_seconds=1000.0), *LATE[2:]]
    assert list(diagnoses(patient, 2000)) == [1060, 1600]


@pytest.mark.parametrize("waits", [True, False])
def test_a_dead_rank(waits):
    statuses = [status(8, waits), status(7, False)]
    ((second, diagnosis),) = diagnoses(statuses, 10, dead=[1]).items()
    assert second == SETTLING_SECONDS and diagnosis.ends
    assert "rank 1 (process 4711) exited without shutting down" in diagnosis.text
    assert "\n  rank 1: last seen in call 7" in diagnosis.text


def test_one_that_does_not_answer():
    statuses = [status(8, True), status(8, True, beat=-1), status(7, False)]
    assert (
        "\n  rank 1: not answering for 60 s (stopped, or in C code that holds the interpreter "
        "lock); last in call 8" in diagnoses(statuses, 700)[60].text
    )


def test_what_one_that_does_not_answer_was_at_may_be_long_over():
    assert diagnoses([status(8, True, beat=-1), status(8, False)], 1000) == {}
    assert list(diagnoses([status(8, True, beat=-1), status(8, True)], 1000)) == [60, 600]


def test_while_the_job_is_suspended_no_time_counts():
    detector = StallDetector(60, 600)
    assert list(diagnoses(LATE, 50, detector)) == []
    # But for two seconds of the pause, which may have been of a rank that holds the lock.
    assert list(diagnoses(LATE, 1000, detector, start=5000.0)) == [8, 548]


@pytest.mark.parametrize("pause", [0.5, 1.9, 2.0, 3.0, 30.0])
def test_pauses_hide_no_hang(pause):
    """Rank 0 holds the interpreter lock for a while, again and again."""
    detector, found, now = StallDetector(60, 600), [], 0.0
    while not (found and found[-1].ends) and now < 20_000:
        beating = [one._replace(beat=int(10 * now)) for one in LATE]
        found += filter(None, [detector.diagnose(beating, [], now)])
        now += pause
    assert [diagnosis.ends for diagnosis in found] == [False, True]


def test_a_process_that_does_not_end():
    statuses = [
        status(9, False, gone=True),
        status(9, False, gone=True, beat=-1),
        status(9, False, gone=True),
    ]
    said = diagnoses(statuses, 700, dead=[2])
    assert list(said) == [60, 600]
    assert (
        "\n  rank 0: has finished, but its process does not end; now at train.py:7"
        in said[600].text
    )
    assert "\n  ranks 1, 2: has finished" in said[600].text
    assert diagnoses([one._replace(beat=0) for one in statuses], 700) == {}


def test_one_that_left_may_die():
    statuses = [status(9, True), status(9, True, gone=True)]
    assert list(diagnoses(statuses, 50, dead=[1])) == []
    assert diagnoses(statuses, 700, dead=[1])[600].ends


@pytest.fixture
def watch(monkeypatch):
    """Makes watchdogs on mocked channels; their threads end with the test.

    Before `monkeypatch` does, which gives them back what ends the job.
    """
    made = []

    def make(channel, calls=None):
        made.append(channel)
        return Watchdog(1, calls or CallState(2, print), channel)

    yield make
    for channel in made:
        channel.is_over = True
    for channel in made:
        assert channel.has_ended.wait(60)


MAIN = threading.main_thread().ident or 0


class Alone:
    """The channel of a rank that hears nothing; its `exchange` raises `trouble`."""

    def __init__(self, trouble=None, root=UNKNOWN, root_silence=0.0, is_dead=False):
        self.root, self.root_silence, self.is_dead = root, root_silence, is_dead
        self.trouble = trouble
        self.statuses: list[RankStatus] = []
        self.is_over = False
        self.has_ended = threading.Event()

    def exchange(self, status):
        if self.is_over and threading.current_thread() is not threading.main_thread():
            self.has_ended.set()
            threading.Event().wait()  # a watchdog's thread never returns
        self.statuses.append(status)
        if self.trouble is not None:
            raise self.trouble

    def wait(self, seconds):
        time.sleep(seconds)

    @property
    def root_is_dead(self):
        return self.is_dead


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
    channel = Alone(OSError("Stale file handle"))
    one = watch(channel)
    wait_for(lambda: len(channel.statuses) >= 5)
    channel.trouble = None
    one.leave()
    assert ended == []
    assert len(said) == 1
    assert "the watchdog hit an internal error and continues: OSError: Stale file handle" in said[0]


SILENT = r"rank 0 has been silent for \d+ s: .*; it was last in call 8, Strategy.reduce\(SUM\), at train.py:7 in main; this rank waits at "


@pytest.mark.parametrize(
    "channel, text",
    [
        (Alone(is_dead=True), "rank 0 exited without shutting down"),
        (Alone(root=status(8, True), root_silence=1e9), SILENT),
        (
            Alone(root=status(8, False, gone=True), root_silence=1e9),
            "rank 0 has finished, and has waited",
        ),
    ],
    ids=["dead", "silent", "finished"],
)
def test_a_rank_ends_the_job_without_rank_0(watch, monkeypatch, channel, text):
    ended = []
    monkeypatch.setattr(failure, "end_job", lambda text, consequence: ended.append(text))
    monkeypatch.setattr(watchdog, "SETTLING_SECONDS", 0.01)
    monkeypatch.setenv("HPCSTRAT_TIMEOUT_SECONDS", "inf" if channel.is_dead else "0.04")
    monkeypatch.setenv("HPCSTRAT_STALL_SECONDS", "0.04")
    watch(channel)
    wait_for(lambda: ended)
    assert re.search(text, ended[0])


@pytest.mark.parametrize(
    "seconds", [[math.inf], [1e308, 1e308], [np.float32(5)], [3, 0.5]], ids=str
)
def test_an_extension_ends_with_its_block(watch, monkeypatch, seconds):
    one = watch(Alone())
    monkeypatch.setattr(_program, "find_connected", lambda: types.SimpleNamespace(watchdog=one))
    with contextlib.ExitStack() as stack:
        for some in seconds:
            stack.enter_context(_program.extend_timeout(some))
        assert one._status().extra_seconds == sum(float(some) for some in seconds)
    assert one._status().extra_seconds == 0


def test_no_working_folder(monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(user_frame_of(MAIN)))
    thread.start()
    thread.join()
    assert found[0].startswith(f"{__file__}:")


@pytest.mark.parametrize("seconds", [-1, -math.inf, math.nan, "long", None, [3], 1j], ids=str)
def test_a_wrong_extension_of_the_timeout(seconds):
    with pytest.raises(
        ValueError, match=r"extend_timeout: seconds is .*; it must be a number from 0 up"
    ):
        _program.extend_timeout(seconds)


def test_the_place_is_a_line_of_the_program():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(user_frame_of(MAIN)))
    line = sys._getframe().f_lineno
    thread.start()
    thread.join()
    name = "test_the_place_is_a_line_of_the_program"
    assert found[0] in [f"{os.path.relpath(__file__)}:{line + i} in {name}" for i in (1, 2)]


def test_no_garbage_is_collected_while_stacks_are_read(monkeypatch):
    """Before Python 3.12 a deadlock; a program that has switched it off finds it off."""
    seen, look = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: (seen.append(gc.isenabled()), look())[1])
    for switch in (gc.enable, gc.disable):
        switch()
        was_enabled = gc.isenabled()
        thread = threading.Thread(target=user_frame_of, args=(MAIN,))
        thread.start()
        thread.join()
        assert gc.isenabled() == was_enabled
    gc.enable()
    assert seen == [sys.version_info >= (3, 12), False]


def test_looking_for_the_place_keeps_nothing_alive():
    class Large:
        pass

    def function():
        large = Large()
        thread = threading.Thread(target=user_frame_of, args=(MAIN,))
        thread.start()
        thread.join()
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert function()() is None
    finally:
        gc.enable()


def test_the_place_of_a_thread_that_waits_in_a_call(watch):
    calls, is_in, is_over = CallState(2, print), threading.Event(), threading.Event()
    one = watch(Alone(), calls)

    def collective():
        calls.thread = threading.get_ident()
        with calls.waiting, calls.waiting:
            is_in.set()
            is_over.wait(10)

    thread = threading.Thread(target=collective, daemon=True)
    thread.start()
    is_in.wait(10)
    try:
        found = one._status()
        assert found.waits and found.location.endswith(" in collective")
    finally:
        is_over.set()
        thread.join(10)
    found = one._status()
    assert not found.waits and " in collective" not in found.location
