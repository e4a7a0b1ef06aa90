"""What the watchdog concludes from the ranks' statuses, and how statuses travel."""

import contextlib
import gc
import math
import os
import subprocess
import sys
import threading
import time
import types
import weakref
from typing import Any

import numpy as np
import pytest
from internals import (
    LIMIT,
    SETTLING_SECONDS,
    SLOT,
    UNKNOWN,
    CallState,
    RankStatus,
    StallDetector,
    StatusChannel,
    Watchdog,
    _program,
    failure,
    output,
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
    assert [(second, diagnosis.ends, diagnosis.reporter) for second, diagnosis in said.items()] == [
        (60, False, 0),
        (600, True, 0),
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
    assert second == SETTLING_SECONDS and diagnosis.ends and diagnosis.reporter == 0
    assert "rank 1 (process 4711) exited without shutting down" in diagnosis.text
    assert "\n  rank 1: last seen in call 7" in diagnosis.text


def test_the_lowest_that_lives_speaks():
    statuses = [status(7, False), status(8, False), status(8, True), status(8, True)]
    assert diagnoses(statuses, 700)[60].reporter == 2
    assert diagnoses(statuses, 10, dead=[2, 3])[SETTLING_SECONDS].reporter == 0


def test_one_that_does_not_answer_does_not_speak():
    statuses = [status(8, True, beat=-1), status(8, True), status(7, False, beat=-1)]
    diagnosis = diagnoses(statuses, 700)[60]
    assert diagnosis.reporter == 1
    assert (
        "\n  rank 0: not answering for 60 s (stopped, or in C code that holds the interpreter "
        "lock); last in call 8" in diagnosis.text
    )


def test_what_one_that_does_not_answer_was_at_may_be_long_over():
    assert diagnoses([status(8, True, beat=-1), status(8, False)], 1000) == {}
    assert list(diagnoses([status(8, True, beat=-1), status(8, True)], 1000)) == [60, 600]


def test_while_the_job_is_suspended_no_time_counts():
    detector = StallDetector(60, 600)
    assert list(diagnoses(LATE, 50, detector)) == []
    assert list(diagnoses(LATE, 1000, detector, start=5000.0)) == [10, 550]


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
    assert diagnoses(statuses, 700, dead=[1])[600].reporter == 0


def test_notes_travel_whole():
    slots = np.zeros((2, SLOT), np.uint8)
    channels = [StatusChannel(rank, slots, [0, 0]) for rank in range(2)]
    long = status(3, True, call="c" * 5000, location="p" * 5000)
    assert channels[0].publish(long) == [channels[0]._statuses[0], UNKNOWN]
    first, second = channels[1].publish(status(4, False)) or []
    assert first.call == "c" * 400 and first._replace(call="", location="") == long._replace(
        call="", location=""
    )
    assert second == status(4, False)
    slots[0, 20] ^= 255  # half of another status is already there
    assert channels[1].publish(status(5, False)) == [first, status(5, False)]


@pytest.mark.parametrize(
    "text",
    ["重み" * 300, "\0" * 700, '"' * 700, "\U0001f600" * 500, "\udcff" * 500, "a" * 9000],
    ids=["Japanese", "zeros", "quotes", "emoji", "surrogates", "long"],
)
def test_a_note_of_any_text_fits(text):
    slots = np.zeros((2, SLOT), np.uint8)
    channels = [StatusChannel(rank, slots, [0, 0]) for rank in range(2)]
    channels[0].publish(status(3, True, call=text, location=text, extra_seconds=float("inf")))
    seen, _ = channels[1].publish(status(4, False)) or []
    assert (seen.number, seen.waits, seen.extra_seconds) == (
        3,
        True,
        float("inf"),
    )
    assert seen.call[:40] == text[:40].encode(errors="replace").decode()
    assert len(seen.pack()) <= LIMIT


@pytest.fixture
def watch(monkeypatch):
    """Makes watchdogs on mocked channels; they end with the test.

    Before `monkeypatch` does, which gives them back what ends the job.
    """
    channels = []

    def make(channel, calls=None):
        channels.append(channel)
        return Watchdog(0, calls or CallState(2, print), channel)

    yield make
    for channel in channels:
        channel.is_over.set()
    for channel in channels:
        assert channel.has_ended.wait(60)


MAIN = threading.main_thread().ident or 0


class Alone(StatusChannel):
    """The channel of a rank that no other rank answers; its `publish` raises `trouble`."""

    def __init__(self, trouble=None):
        self.root_silence = 0.0
        self.trouble = trouble
        self.statuses: list[RankStatus] = []
        self.is_over = threading.Event()
        self.has_ended = threading.Event()

    def publish(self, status) -> list[RankStatus] | None:
        self.statuses.append(status)
        if self.trouble is not None:
            raise self.trouble
        return self.statuses[-1:]

    def wait(self, seconds):
        if self.is_over.wait(seconds):
            self.has_ended.set()
            threading.Event().wait()  # a watchdog's thread never returns

    @property
    def dead(self):
        return []

    def close(self):
        pass


def test_the_watchs_own_errors_end_nothing(watch, monkeypatch):
    said, ended = [], []
    monkeypatch.setattr(output, "say", said.append)
    monkeypatch.setattr(failure, "end_job", ended.append)
    monkeypatch.setenv("HPCSTRAT_STALL_SECONDS", "0.04")
    channel = Alone(OSError("Stale file handle"))
    one = watch(channel)
    deadline = time.monotonic() + 20
    while len(channel.statuses) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    channel.trouble = None
    one.leave()
    assert len(channel.statuses) >= 5 and ended == []
    assert len(said) == 1
    assert "the watchdog hit an internal error and continues: OSError: Stale file handle" in said[0]


class WithoutRoot(Alone):
    """The channel of a rank of several hosts that has lost another; rank 0 was heard long ago."""

    def __init__(self, lost):
        super().__init__()
        self.lost = lost
        self.root_silence = 1e9

    def publish(self, status):
        self.statuses.append(status)

    @property
    def dead(self):
        return self.lost


@pytest.mark.parametrize(
    "lost, text",
    [
        ([0, 3], "rank 0, or the network to its host, is gone"),
        ([3], "rank 3, on the host of this rank, exited without shutting down"),
        ([], "rank 0 has been silent for 0 s"),
    ],
    ids=["rank 0", "one of its host", "silent"],
)
def test_a_rank_that_rank_0_does_not_end(watch, monkeypatch, lost, text):
    ended = []
    monkeypatch.setattr(failure, "end_job", ended.append)
    monkeypatch.setattr(watchdog, "SETTLING_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.01)
    monkeypatch.setenv("HPCSTRAT_TIMEOUT_SECONDS", "inf" if lost else "0.04")
    monkeypatch.setenv("HPCSTRAT_STALL_SECONDS", "0.04")
    watch(WithoutRoot(lost))
    deadline = time.monotonic() + 20
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert text in ended[0]


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


def test_the_end_of_a_process_is_seen():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    channel = StatusChannel(0, np.zeros((2, SLOT), np.uint8), [os.getpid(), process.pid])
    channel.wait(0)
    assert channel.dead == []
    process.communicate(b"\n")
    channel.wait(10)
    assert channel.dead == [1]
    channel.close()


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
