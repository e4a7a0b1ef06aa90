"""What of the standard streams a rank shows, and in which pieces."""

import io
import logging
import subprocess
import sys
import threading
import types

import pytest
from internals import launchers, output, reports


class Pieces(io.RawIOBase):
    """A stream that records each write, as one with PYTHONUNBUFFERED does."""

    def __init__(self):
        self.pieces = []

    def writable(self):
        return True

    def write(self, data):
        self.pieces.append(bytes(data))
        return len(data)


class Rank:
    """A rank of four with replaced streams.

    Attributes:
        is_replica: whether the calling thread is in a replica context.
    """

    def __init__(self, patch):
        self._patch = patch
        self.is_replica = lambda: False

    def install(self, rank, mode=None, stream=None, errors=None):
        """Replaces the streams, as those of this rank; returns standard output's own."""
        self.pieces = Pieces()
        self.errors = errors or io.StringIO()
        stream = stream or io.TextIOWrapper(self.pieces, "utf-8", write_through=True)  # pyright: ignore
        self._patch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
        for name, value in {"PMI_SIZE": "4", "PMI_RANK": rank, "HPCSTRAT_OUTPUT": mode}.items():
            self._patch.setenv(name, "" if value is None else str(value))
        for name in ("_mode", "_errors"):
            self._patch.setattr(output, name, None)
        self._patch.setattr(output, "_hides", False)
        self._patch.setattr(output, "_is_replica", lambda: False)
        self._patch.setattr(sys, "unraisablehook", sys.unraisablehook)
        self._patch.setattr(sys, "stdout", stream)
        self._patch.setattr(sys, "stderr", self.errors)
        launcher = launchers.find()
        assert launcher is not None
        output.install(launcher, lambda: self.is_replica())
        return stream

    def shown(self):
        sys.stdout.flush()
        return b"".join(self.pieces.pieces).decode()


@pytest.fixture
def rank(monkeypatch):
    return Rank(monkeypatch)


@pytest.mark.parametrize(
    ("number", "mode", "shown"),
    [
        (0, None, "top\ninside\nx\ny\nbytes"),
        (0, "lead", "top\ninside\nx\ny\nbytes"),
        (1, None, "inside\nx\ny\nbytes"),
        (1, "lead", ""),
        (1, "all", "top\ninside\nx\ny\nbytes"),
    ],
)
def test_a_rank_shows(rank, number, mode, shown):
    rank.install(number, mode)
    assert sys.stdout.write("top") == 3 and sys.stdout.writelines(["\n"]) is None
    rank.is_replica = lambda: True
    print("inside")
    sys.stdout.writelines(["x\n", "y\n"])
    assert sys.stdout.buffer.write(memoryview(b"bytes")) == 5
    rank.is_replica = lambda: False
    assert rank.shown() == shown
    with pytest.raises(ValueError, match="HPCSTRAT_OUTPUT='none'.* 'all' .* 'lead'"):
        rank.install(1, "none")


def test_whole_lines_arrive(rank):
    """Of each thread; what follows a line is kept until its own line is whole."""
    rank.install(0)
    print("a", "b")
    print("unfinished ", end="")
    thread = threading.Thread(target=print, args=("c", "d"))
    thread.start()
    thread.join()
    print("line\nb ", end="")
    print("c\nd", end="")
    print("\r1 of 2", end="")  # a progress bar does not wait for a line
    print("\r2 of 2\nlast", end="")
    lines = [b"a b\n", b"c d\n", b"unfinished line\n", b"b c\n", b"d\r1 of 2", b"\r2 of 2\n"]
    assert rank.pieces.pieces == lines
    sys.stdout.flush()
    assert rank.pieces.pieces[len(lines) :] == [b"last"]


def test_one_rank_has_pythons_own_streams_and_hooks(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "1")
    monkeypatch.setenv("PMI_RANK", "0")
    own = "(sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.exit)"
    program = f"import sys\nbefore = {own}\nimport hpcstrat\nassert before == {own}"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def test_odd_streams(rank, monkeypatch):
    closed = io.StringIO()
    closed.close()
    text = []
    # One that can do nothing else, of the program.
    plain = types.SimpleNamespace(write=text.append, flush=lambda: None)
    for stream in (io.StringIO(), closed, plain):
        rank.install(1, stream=stream)
        print("hidden")
        assert stream in (closed, plain) or stream.getvalue() == ""
    assert text == []
    monkeypatch.setattr(sys, "stdout", None)
    output.install(launchers.Launcher("mpirun", 1, 2), lambda: False)
    print("nowhere")


def test_standard_error(rank):
    rank.install(1)
    print("hidden", file=sys.stderr)
    print("bar 1\rbar 2", file=sys.stderr)
    assert rank.errors.getvalue() == ""
    assert output.take_hidden_errors() == "hidden\nbar 2\n"
    assert output.take_hidden_errors() == ""
    try:
        raise ValueError
    except ValueError:
        print("handled", file=sys.stderr)
    with reports.reporting():
        print("reported", file=sys.stderr)
    rank.is_replica = lambda: True
    print("in a context", file=sys.stderr)
    assert rank.errors.getvalue() == "handled\nreported\nin a context\n"


def test_logged_errors_are_shown_by_any_handler_of_this_stream(rank, monkeypatch):
    earlier = io.StringIO()
    handler = logging.StreamHandler(earlier)  # of the root logger, from before the import
    monkeypatch.setattr(logging.root, "handlers", [handler])
    rank.install(1, errors=earlier)
    logging.warning("hidden")
    assert earlier.getvalue() == "" and handler.stream is sys.stderr
    logger = logging.Logger("of the test")
    logger.addHandler(logging.StreamHandler())
    logger.error("shown")
    logger.info("hidden")
    logger.critical("too")
    assert earlier.getvalue() == "shown\ntoo\n"
