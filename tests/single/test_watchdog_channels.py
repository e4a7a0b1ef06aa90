"""How statuses reach rank 0, what the ranks see of each other's end, and who may connect."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest
from internals import channels

UNKNOWN, Link, RootChannel = channels.UNKNOWN, channels.Link, channels.RootChannel
RankStatus = channels.RankStatus


def status(rank, beat=0, **others):
    fields = {"number": 7 + rank, "call": "barrier()", "location": f"train.py:{rank} in main"}
    fields |= {"waits": True, "progress": 0, "extra_seconds": 0.0, "gone": False}
    return RankStatus(**(fields | others), process=4700 + rank, beat=beat)


@pytest.fixture
def closing():
    """Closes what it is given with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda thing: (stack.callback(thing.close), thing)[1]


@pytest.fixture(params=[True, False], ids=["one host", "several"])
def job(request, closing):
    """The channels of three ranks, connected as a job's are."""
    listener = closing(channels.Listener(3, request.param))
    root = closing(RootChannel(3))
    members = [closing(reach(listener, rank)) for rank in (1, 2)]
    until(lambda: listener.admit_to(root) or root.is_complete)
    return root, *members


def reach(listener, rank):
    address = listener.addresses[0]
    if not isinstance(address, str):
        address = "127.0.0.1", address[1]
    channel = channels.reach([address], f"{listener.token} {rank}\n".encode())
    assert channel is not None
    return channel


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_end_of_a_rank_is_seen(job):
    root, first, second = job
    second.exchange(status(2, gone=True))
    closing = threading.Timer(0.1, second.close)
    closing.start()
    # The end of a connection wakes it.
    until(lambda: root.wait(100) or root.exchange(status(0)) or root.dead)
    closing.join()
    # What it said last is not lost.
    assert root.dead == [2] and root.statuses[2] == status(2, gone=True)
    root.close()
    until(lambda: first.exchange(status(1)) or first.root_is_dead)


def test_the_silence_of_rank_0_counts_while_this_rank_waits(job, monkeypatch):
    root, first, _ = job
    now = [0.0]
    monkeypatch.setattr(channels, "time", type("Clock", (), {"monotonic": lambda: now[0]}))

    def look(seconds, **others):
        now[0] += seconds
        first.exchange(status(1, **others))
        return first.root_silence

    begin = look(0.5)
    assert look(0.5) == begin + 0.5
    assert look(3600.0) == begin + 2.5  # it was suspended itself, perhaps with rank 0
    assert look(0.5, waits=False) == 0.0  # who computes needs no rank 0
    assert look(0.5, number=9) == 0.0  # a rank 0 that takes part in calls is well
    assert look(0.5, number=9) == 0.5
    assert look(0.5) == 0.0
    assert look(0.5, waits=False, gone=True) == 0.5
    assert look(0.5) == 1.0
    root.exchange(status(0))
    monkeypatch.undo()
    until(lambda: first.exchange(status(1)) or first.root == status(0))
    assert first.root_silence == 0.0


def test_a_child_does_not_keep_the_connection_of_its_parent(closing):
    one, other = socket.socketpair()
    link, rest = closing(Link(one)), Link(other)
    os.register_at_fork(after_in_child=rest.close)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the test is over
        os._exit(0)
    try:
        rest.close()
        until(lambda: link.receive() or link.is_closed)
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


# ---- what travels


def test_a_status_of_any_text_is_a_line():
    for text in ("重み" * 300, "\0" * 700, '"' * 700, "\n" * 300, "\U0001f600" * 500, "a" * 9000):
        packed = status(3, call=text, location=text, extra_seconds=float("inf")).pack()
        assert packed.count(b"\n") == 1 and packed.endswith(b"\n") and len(packed) < 12_000
        cut = status(3, call=text[:400], location=text[-400:], extra_seconds=float("inf"))
        assert RankStatus.unpack(packed) == cut


def test_lines_stay_whole_though_the_other_side_pauses(closing):
    one, other = map(Link, socket.socketpair())
    closing(one)
    closing(other)
    lines = [b"%d" % i * 5000 for i in range(1000)]
    for line in lines:
        one.send(line + b"\n")  # and drops what has no room
    got = []
    until(lambda: got.extend(other.receive()) or one.send(b"end\n") or got[-1:] == [b"end"])
    assert len(got) < len(lines) and set(got) <= {*lines, b"end"}


# ---- strangers


@pytest.fixture
def open_port(closing):
    """A listener for two ranks, rank 0's channel, and what connects to the port."""
    listener, root = closing(channels.Listener(2, False)), closing(RootChannel(2))
    address = "127.0.0.1", listener.addresses[0][1]
    return listener, root, lambda: closing(socket.create_connection(address))


def resets(stranger):
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


STRANGERS = {
    "a reset": resets,
    "silence": lambda stranger: None,
    "garbage": lambda stranger: stranger.sendall(os.urandom(1000) + b"\n"),
    "a wrong token": lambda stranger: stranger.sendall(b"0" * 32 + b" 1\n"),
    "a slow byte": lambda stranger: stranger.sendall(b"G"),
}


@pytest.mark.parametrize("acts", STRANGERS.values(), ids=STRANGERS)
def test_strangers_keep_no_rank_out(open_port, closing, acts):
    listener, root, connect = open_port
    for _ in range(100):  # more than may wait
        acts(connect())
        listener.admit_to(root)
    assert not root.is_complete
    member = closing(reach(listener, 1))
    until(lambda: listener.admit_to(root) or root.is_complete)
    member.exchange(status(1))
    until(lambda: root.exchange(status(0)) or root.statuses[1] == status(1))
    assert root.dead == []


def test_a_stranger_that_talks_without_end_is_cut_off(open_port):
    listener, root, connect = open_port
    stranger = connect()
    stranger.setblocking(False)

    def is_cut_off():
        listener.admit_to(root)
        try:
            return not stranger.send(bytes(1 << 17))
        except BlockingIOError:
            return False
        except OSError:
            return True

    until(is_cut_off)
