import io
import sys
import threading

import pytest
from internals import output


@pytest.fixture
def as_rank(monkeypatch):
    """Installs the gate on this rank of four, as set by a launcher; returns the gated stream."""

    def install(rank, mode=None, stream=None):
        if stream is None:
            stream = io.TextIOWrapper(io.BufferedWriter(io.BytesIO()), encoding="utf-8")
        for name in ("OMPI_COMM_WORLD_SIZE", "HPCSTRAT_OUTPUT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PMI_SIZE", "4")
        monkeypatch.setenv("PMI_RANK", str(rank))
        if mode is not None:
            monkeypatch.setenv("HPCSTRAT_OUTPUT", mode)
        monkeypatch.setattr(output, "_installed", False)
        monkeypatch.setattr(output, "hides", False)
        monkeypatch.setattr(output, "_lead_only", False)
        monkeypatch.setattr(output, "replica_context", lambda: None)
        monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
        monkeypatch.setattr(sys, "stdout", stream)
        output.install()
        return stream

    return install


def shown(stream):
    stream.flush()
    return stream.buffer.raw.getvalue().decode()


def test_rank_0_shows_everything(as_rank):
    stream = as_rank(0)
    print("a", "b")
    assert shown(stream) == "a b\n"


def test_other_ranks_show_in_a_replica_context_only(as_rank, monkeypatch):
    stream = as_rank(1)
    print("hidden")
    monkeypatch.setattr(output, "replica_context", lambda: True)
    print("shown")
    sys.stdout.writelines(["x\n", "y\n"])
    monkeypatch.setattr(output, "replica_context", lambda: False)
    print("hidden")
    sys.stdout.writelines(["hidden\n"])
    assert shown(stream) == "shown\nx\ny\n"


def test_part_of_a_line_is_not_lost_when_the_context_ends(as_rank, monkeypatch):
    stream = as_rank(1)
    monkeypatch.setattr(output, "replica_context", lambda: True)
    print("no end of line", end="")
    monkeypatch.setattr(output, "replica_context", lambda: False)
    assert shown(stream) == "no end of line"


def test_bytes(as_rank, monkeypatch):
    stream = as_rank(1)
    assert sys.stdout.buffer.write(b"hidden") == 6
    assert sys.stdout.buffer.write(memoryview(b"hidden")) == 6
    monkeypatch.setattr(output, "replica_context", lambda: True)
    sys.stdout.buffer.write(b"shown")
    assert shown(stream) == "shown"


def test_whole_lines_arrive(as_rank):
    stream = as_rank(0)
    print("a", "b")
    print("part", end="")
    assert stream.buffer.raw.getvalue() == b"a b\n"
    print(" of a line", end="", flush=True)
    assert stream.buffer.raw.getvalue() == b"a b\npart of a line"


class Pieces(io.RawIOBase):
    """An unbuffered stream, like stdout with PYTHONUNBUFFERED; records each write."""

    def __init__(self):
        self.pieces = []

    def writable(self):
        return True

    def write(self, data):
        self.pieces.append(bytes(data))
        return len(data)


def test_whole_lines_arrive_of_unbuffered_output_too(as_rank):
    pieces = Pieces()
    stream = as_rank(0, stream=io.TextIOWrapper(pieces, write_through=True))  # pyright: ignore[reportArgumentType]
    print("a", "b")
    thread = threading.Thread(target=print, args=("c", "d"))
    print("unfinished ", end="")
    thread.start()
    thread.join()
    print("line")
    assert pieces.pieces == [b"a b\n", b"c d\n", b"unfinished line\n"]
    print("last", end="")
    stream.flush()
    assert pieces.pieces[3:] == [b"last"]


def test_what_follows_a_line_is_kept_until_its_own_line_is_whole(as_rank):
    pieces = Pieces()
    stream = as_rank(0, stream=io.TextIOWrapper(pieces, write_through=True))  # pyright: ignore[reportArgumentType]
    print("a\nb ", end="")
    print("c\nd", end="")
    print("\r1 of 2", end="")  # a progress bar does not wait for a line
    print("\r2 of 2\nlast", end="")
    assert pieces.pieces == [b"a\n", b"b c\n", b"d\r1 of 2", b"\r2 of 2\n"]
    stream.flush()
    assert pieces.pieces[4:] == [b"last"]


def test_the_value_and_the_errors_of_write_stay(as_rank):
    as_rank(1)
    assert sys.stdout.write("four") == 4
    with pytest.raises(TypeError):
        sys.stdout.write(4)  # pyright: ignore[reportArgumentType]


def test_lead(as_rank, monkeypatch):
    stream = as_rank(1, "lead")
    monkeypatch.setattr(output, "replica_context", lambda: True)
    print("hidden")
    assert shown(stream) == ""


def test_all(as_rank):
    stream = as_rank(1, "all")
    print("shown")
    assert shown(stream) == "shown\n"


def test_another_value_is_an_error(as_rank):
    with pytest.raises(ValueError, match=r"HPCSTRAT_OUTPUT='none' is not allowed: 'all' .* 'lead'"):
        as_rank(1, "none")


def test_no_launcher_no_gate(monkeypatch):
    monkeypatch.setattr(output, "_installed", False)
    monkeypatch.setattr(output.launchers, "find", lambda: None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    output.install()
    assert not output._installed
    assert "write" not in vars(sys.stdout)


@pytest.mark.parametrize("context", [None, False, True])
def test_a_thread_counts_as_its_creators_context(as_rank, monkeypatch, context):
    stream = as_rank(1)
    main = threading.current_thread()
    monkeypatch.setattr(
        output, "replica_context", lambda: context if threading.current_thread() is main else None
    )

    def grandchild():
        print("grandchild")

    def child():
        print("child")
        thread = threading.Thread(target=grandchild)
        thread.start()
        thread.join()

    thread = threading.Thread(target=child)
    thread.start()
    # The creator leaves its context; the context in which it created the thread counts.
    monkeypatch.setattr(output, "replica_context", lambda: None)
    thread.join()
    assert shown(stream) == ("child\ngrandchild\n" if context else "")


def test_a_thread_may_enter_a_context_of_its_own(as_rank, monkeypatch):
    stream = as_rank(1)
    monkeypatch.setattr(
        output,
        "replica_context",
        lambda: True if threading.current_thread().name == "replica" else None,
    )
    thread = threading.Thread(target=print, args=("shown",), name="replica")
    thread.start()
    thread.join()
    assert shown(stream) == "shown\n"


class Plain:
    """A user-defined stream to which attributes cannot be added."""

    __slots__ = ("text",)

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


def test_no_standard_output(as_rank, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(output, "_installed", False)
    output.install()
    print("nowhere")


def test_odd_streams(as_rank):
    stream = as_rank(1, stream=io.StringIO())
    print("hidden")
    assert stream.getvalue() == ""
    closed = io.TextIOWrapper(io.BufferedWriter(io.BytesIO()))
    closed.close()
    as_rank(1, stream=closed)
    print("hidden")
    plain = as_rank(1, stream=Plain())
    print("shown, for want of a way")
    assert plain.text == "shown, for want of a way\n"
