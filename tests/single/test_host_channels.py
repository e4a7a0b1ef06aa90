"""How statuses of several hosts reach rank 0, and what the ranks know of each other's end."""

import contextlib
import fcntl
import functools
import itertools
import os
import socket
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
from internals import (
    SLOT,
    UNKNOWN,
    Connection,
    Listener,
    MemberChannel,
    RankStatus,
    RootChannel,
    StallDetector,
    host_channels,
    reach,
)

HOSTS = [[0, 1], [2, 3, 4]]


def status(rank, beat=0, **others):
    fields = {
        "number": 7,
        "call": "barrier()",
        "location": "train.py:7 in main",
        "waits": True,
        "progress": 0,
        "extra_seconds": 0.0,
        "gone": False,
    }
    return RankStatus(**(fields | others), process=4700 + rank, beat=beat)


class Ranks:
    """Ranks of several hosts in one process: rank -> its channel; `None` where it is suspended."""

    def __init__(self, hosts, processes):
        size = sum(map(len, hosts))
        self.listener = Listener(len(hosts))
        self.channels = {}
        for ranks in hosts:
            slots = np.zeros((len(ranks), SLOT), np.uint8)
            for index, rank in enumerate(ranks):
                seen = slots, [processes.get(r, 0) for r in ranks]
                self.channels[rank] = (
                    RootChannel(*seen, self.listener, hosts, [4700 + r for r in range(size)])
                    if rank == 0
                    else MemberChannel(
                        index, *seen, ranks, len(hosts), self.reach(rank) if ranks[0] else None
                    )
                )
        self.root, self.beats, self.suspended = self.channels[0], itertools.count(1), set()
        self.statuses = {rank: status(rank) for rank in self.channels}
        for ranks in hosts[1:]:
            assert self.channels[ranks[0]].connect()
        while not self.root.is_complete:
            self.root.wait(0.01)

    def reach(self, rank):
        address = ("127.0.0.1", self.listener.addresses[0][1])
        return functools.partial(reach, [address], self.listener.token, rank)

    def beat(self, root=True):
        """One beat of all ranks, rank 0's last; returns what rank 0 sees."""
        beat = next(self.beats)
        for rank, channel in sorted(self.channels.items(), reverse=True):
            if rank and rank not in self.suspended:
                channel.publish(self.statuses[rank]._replace(beat=beat))
                channel.wait(0)
        if root:
            self.root.wait(0.01)
            return list(self.root.publish(self.statuses[0]._replace(beat=beat)))

    def beat_until(self, condition):
        """Beats until the condition of what rank 0 sees is met."""
        end = time.monotonic() + 30
        while not condition(seen := self.beat()):
            assert time.monotonic() < end, (seen, self.root.dead)
        return seen

    def close(self):
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
def ranks():
    """Makes `Ranks`, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(hosts=HOSTS, processes=None):
            made = Ranks(hosts, processes or {})
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def process():
    """A process that ends when it is told to, or with the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def places(seen):
    return [(one.number, one.call, one.location, one.waits, one.process) for one in seen]


def test_rank_0_sees_all_of_every_rank(ranks):
    job = ranks()
    for rank in job.statuses:
        others = {"waits": rank % 2 == 0, "location": f"train.py:{rank} in 重み"}
        job.statuses[rank] = status(rank, number=7 + rank, call=f"call {rank}\n", **others)
    seen = job.beat_until(lambda seen: UNKNOWN not in seen)
    assert places(seen) == places([job.statuses[rank] for rank in range(5)])
    before = [one.beat for one in seen]
    job.beat_until(lambda seen: all(one.beat > old for one, old in zip(seen, before, strict=True)))
    assert job.root.dead == []
    assert all(job.channels[rank].dead == [] for rank in range(1, 5))


def test_a_host_has_one_connection(ranks):
    job = ranks()
    for _ in range(5):
        job.beat()
    assert sorted(rank for rank, _ in job.root._connections.values()) == [2]


@pytest.mark.parametrize(
    "change",
    [{"number": 8}, {"progress": 1}, {"waits": False}, {"extra_seconds": 9.0}, {"gone": True}],
    ids=str,
)
def test_what_rank_0_decides_by_comes_at_once(ranks, monkeypatch, change):
    """However many places have changed, and must wait for their turn."""
    monkeypatch.setattr(host_channels, "_BYTES", 0)
    job = ranks([[0], list(range(1, 9))])
    for rank in job.statuses:
        job.statuses[rank] = status(rank, location=f"train.py:{rank} in main")
    before = job.beat_until(lambda seen: UNKNOWN not in seen)
    for rank in job.statuses:
        job.statuses[rank] = status(rank, location=f"train.py:{100 + rank} in main")
    job.statuses[8] = job.statuses[8]._replace(**change)
    job.beat(root=False)
    job.root.wait(0.01)
    seen = job.root._by_rank
    assert sum(one.location != old.location for one, old in zip(seen, before, strict=True)) <= 2
    ((name, value),) = change.items()
    if name in ("number", "progress"):
        assert seen[8].progress == before[8].progress + 1
    else:
        assert getattr(seen[8], name) == value
    seen = job.beat_until(lambda seen: seen[8].location == "train.py:108 in main")
    assert {one.location for one in seen[1:]} == {f"train.py:{n} in main" for n in range(101, 109)}


def test_a_frame_is_short(ranks, monkeypatch):
    """Ranks in one place share a line; what has not changed is not said again."""
    job = ranks([[0], list(range(1, 25))])
    sent, send = [], Connection.send
    monkeypatch.setattr(
        Connection, "send", lambda self, frame: sent.append(len(frame)) or send(self, frame)
    )
    frames = []
    for location in ("train.py:7 in main", "train.py:7 in main", "train.py:9 in main"):
        for rank in range(1, 25):
            job.statuses[rank] = status(rank, location=location)
        sent.clear()
        job.beat(root=False)
        frames += sent
    # Rank 1 publishes last, so it is the only one whose frame says all.
    assert [size < 400 for size in frames] == [True] * 3
    for rank in range(1, 25):
        job.statuses[rank] = status(rank, call=400 * "c", location=f"{rank:0400}")
    monkeypatch.setattr(job.channels[1], "_bytes", 5000)
    sent.clear()
    for _ in range(3):
        job.beat(root=False)
    assert max(sent) < 5000 + 200


def test_a_rank_that_never_reported(ranks):
    job = ranks()
    job.suspended.add(3)
    seen = job.beat_until(lambda seen: UNKNOWN not in (seen[2], seen[4]))
    assert seen[3] is UNKNOWN
    job.suspended.clear()
    job.beat_until(lambda seen: seen[3] is not UNKNOWN)


def test_one_rank_of_another_host_stops(ranks):
    job = ranks()
    before = job.beat_until(lambda seen: UNKNOWN not in seen)
    job.suspended.add(3)
    after = job.beat_until(lambda seen: seen[4].beat > before[4].beat + 5)
    assert after[3].beat <= before[3].beat + 1 and after[2].beat > before[2].beat + 5


def test_the_first_rank_of_another_host_stops(ranks, monkeypatch):
    """The next one tells rank 0 of all, and the first one again when it goes on."""
    monkeypatch.setattr(host_channels, "_STAND_IN_SECONDS", 0.5)
    job = ranks()
    before = job.beat_until(lambda seen: UNKNOWN not in seen)
    job.suspended.add(2)
    job.statuses[4] = status(4, location="train.py:9 in main")
    after = job.beat_until(lambda seen: seen[4].beat > before[4].beat + 5)
    assert after[4].location == "train.py:9 in main" and after[2].beat <= before[2].beat + 1
    assert sorted(rank for rank, _ in job.root._connections.values()) == [2, 3]
    assert job.root.dead == [] and job.channels[3].root_silence < 1
    job.suspended.clear()
    job.statuses[4] = status(4, location="train.py:7 in main")
    seen = job.beat_until(lambda seen: seen[2].beat > after[2].beat + 5)
    assert seen[4].location == "train.py:7 in main"


def test_a_silent_host(ranks):
    job = ranks()
    seen = job.beat_until(lambda seen: UNKNOWN not in seen)
    job.suspended |= {2, 3, 4}
    detector, said = StallDetector(3, 6), []
    for second in range(7):
        job.statuses[0] = status(0, number=8)
        said.append(detector.diagnose(job.beat(), job.root.dead, float(second)))
    text = said[-1].text
    assert said[-1].ends and text.count("not answering for") == 1
    assert "waiting in call 8" in text and "last in call 7, barrier(), at train.py:7" in text
    assert [one.beat for one in job.root._by_rank[2:]] == pytest.approx(
        [one.beat for one in seen[2:]], abs=1
    )


def test_the_first_rank_of_another_host_dies(ranks, process):
    """All of its host count as dead until another of its ranks says that they are not."""
    job = ranks(processes={2: process.pid})
    job.beat_until(lambda seen: UNKNOWN not in seen)
    job.suspended.add(2)
    job.channels[2].close()
    job.root.wait(10)
    assert job.root.dead == [2, 3, 4]
    process.communicate(b"\n")
    seen = job.beat_until(lambda seen: job.root.dead == [2])
    job.beat_until(lambda later: later[4].beat > seen[4].beat)
    assert job.channels[3].dead == job.channels[4].dead == [2]


@pytest.mark.parametrize("gone", [False, True], ids=["early", "in order"])
def test_another_rank_dies(ranks, process, gone):
    job = ranks(processes={3: process.pid})
    job.beat_until(lambda seen: UNKNOWN not in seen)
    job.statuses[3] = status(3, gone=gone)
    job.beat()
    job.suspended.add(3)
    process.communicate(b"\n")
    seen = job.beat_until(lambda seen: job.root.dead == [3])
    assert seen[3].gone == gone
    assert job.channels[2].dead == job.channels[4].dead == ([] if gone else [3])
    assert job.channels[1].dead == []


def test_the_first_rank_of_another_host_leaves_in_order(ranks):
    """Before it goes, it has told what the others of its host have said."""
    job = ranks()
    job.statuses = {rank: status(rank, gone=True) for rank in job.statuses}
    for _ in range(3):
        job.beat(root=False)
    job.suspended.add(2)
    job.channels[2].close()
    seen = job.beat_until(lambda seen: job.root.dead == [2])
    assert [one.gone for one in seen] == [True] * 5


def test_rank_0_dies(ranks, process):
    job = ranks(processes={0: process.pid})
    job.beat_until(lambda seen: UNKNOWN not in seen)
    job.root.close()
    process.communicate(b"\n")
    end = time.monotonic() + 30
    while job.channels[1].dead != [0] or job.channels[2].dead != [0]:
        assert time.monotonic() < end
        job.beat(root=False)
    assert job.channels[3].dead == []  # its first rank will end the job


def test_rank_0_is_silent(ranks):
    """One rank of each other host knows; those of rank 0's host see it themselves."""
    job = ranks()
    job.beat_until(lambda seen: UNKNOWN not in seen)
    job.beat(root=False)
    silence = [job.channels[rank].root_silence for rank in (1, 2, 3, 4)]
    for _ in range(3):
        job.beat(root=False)
    later = [job.channels[rank].root_silence for rank in (1, 2, 3, 4)]
    assert [new > old for new, old in zip(later, silence, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


def test_waiting_goes_on_when_statuses_come(ranks):
    """Or each would be answered at once, and the answer answered."""
    job = ranks()
    seen = job.beat_until(lambda seen: UNKNOWN not in seen)
    for _ in range(3):
        job.beat(root=False)
    job.root.wait(0.5)
    assert job.root._by_rank[2].beat >= seen[2].beat + 3


def connect(listener, *said):
    one = socket.create_connection(("127.0.0.1", listener.addresses[0][1]))
    for part in said:
        one.sendall(part)
    return one


def accept_until(listener, count):
    accepted, end = {}, time.monotonic() + 20
    while len(accepted) < count:
        assert time.monotonic() < end, accepted
        accepted |= listener.accept()
    return accepted


def test_strangers_that_connect_keep_no_rank_out():
    listener = Listener(3)
    with contextlib.closing(listener), contextlib.ExitStack() as stack:
        strangers = [
            connect(listener, *said)
            for said in ([], [b"GET / HTTP/1.1\r\n" * 9], [listener.token[:5]], [b"x" * 20])
        ]
        for one in strangers:
            stack.enter_context(one)
        reset = connect(listener)
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reset.close()
        connect(listener, listener.token).close()
        for rank in (1, 2, 3):
            hello = listener.token + struct.pack("<I", rank)
            stack.enter_context(connect(listener, hello[:9], hello[9:]))
        accepted = accept_until(listener, 3)
        assert sorted(accepted) == [1, 2, 3]
        for one in accepted.values():
            one.close()


def test_strangers_that_say_nothing_are_not_collected(monkeypatch):
    open_before = len(os.listdir("/proc/self/fd"))
    listener = Listener(1)
    with contextlib.closing(listener), contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(listener))
            listener.accept()
        own = reach([("127.0.0.1", listener.addresses[0][1])], listener.token, 5)
        ((rank, connection),) = accept_until(listener, 1).items()
        assert rank == 5 and own is not None
        assert len(os.listdir("/proc/self/fd")) - open_before < 100 + 64 + 50
        own.close()
        connection.close()


def unsent_bytes(connection):
    """Bytes that were sent but that the other side has no room for yet, as counted by Linux."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def test_frames_stay_whole_though_the_other_side_pauses():
    """A pause of hours fills the connection, which then accepts part of a frame."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    sender, receiver = Connection(here), Connection(there)
    numbers, sent, received, queued = itertools.count(), [], [], -1

    def send():  # of different lengths, so that no buffer's size is a multiple
        frame = b"%d " % (number := next(numbers)) + b"x" * (number % 101)
        if sender.send(frame):
            sent.append(frame)

    try:
        while queued != (queued := unsent_bytes(here)):
            for _ in range(200):
                send()
        dropped = len(sent)
        end = time.monotonic() + 30
        while len(received) < dropped + 3:
            assert time.monotonic() < end
            received += receiver.receive() or []
            send()
        assert received == sent[: len(received)] and next(numbers) > len(sent)
        sender.close()
        while (frames := receiver.receive()) is not None:
            received += frames
        assert received == sent[: len(received)]
    finally:
        sender.close()
        receiver.close()
