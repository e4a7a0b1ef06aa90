import io
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from internals import Launcher, launchers, output, reports


@pytest.fixture
def as_rank(monkeypatch):
    """Installs the streams on this rank of four, as set by a launcher; returns the replaced one."""

    def install(rank, mode=None, stream=None, errors=None):
        if stream is None:
            stream = io.TextIOWrapper(io.BufferedWriter(io.BytesIO()), encoding="utf-8")
        for name in ("OMPI_COMM_WORLD_SIZE", "HPCSTRAT_OUTPUT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PMI_SIZE", "4")
        monkeypatch.setenv("PMI_RANK", str(rank))
        if mode is not None:
            monkeypatch.setenv("HPCSTRAT_OUTPUT", mode)
        monkeypatch.setattr(output, "_mode", None)
        monkeypatch.setattr(output, "_hides", False)
        monkeypatch.setattr(output, "_errors", None)
        monkeypatch.setattr(output, "_is_replica", lambda: False)
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", errors or io.StringIO())
        launcher = launchers.find()
        assert launcher is not None
        output.install(launcher, lambda: False)
        return stream

    return install


def shown(stream):
    sys.stdout.flush()
    return stream.buffer.raw.getvalue().decode()


def test_rank_0_shows_everything(as_rank):
    stream = as_rank(0)
    print("a", "b")
    assert shown(stream) == "a b\n"


def test_other_ranks_show_in_a_replica_context_only(as_rank, monkeypatch):
    stream = as_rank(1)
    print("hidden")
    monkeypatch.setattr(output, "_is_replica", lambda: True)
    print("shown")
    sys.stdout.writelines(["x\n", "y\n"])
    monkeypatch.setattr(output, "_is_replica", lambda: False)
    print("hidden")
    sys.stdout.writelines(["hidden\n"])
    assert shown(stream) == "shown\nx\ny\n"


def test_part_of_a_line_is_not_lost_when_the_context_ends(as_rank, monkeypatch):
    stream = as_rank(1)
    monkeypatch.setattr(output, "_is_replica", lambda: True)
    print("no end of line", end="")
    monkeypatch.setattr(output, "_is_replica", lambda: False)
    assert shown(stream) == "no end of line"


def test_bytes(as_rank, monkeypatch):
    stream = as_rank(1)
    assert sys.stdout.buffer.write(b"hidden") == 6
    assert sys.stdout.buffer.write(memoryview(b"hidden")) == 6
    monkeypatch.setattr(output, "_is_replica", lambda: True)
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
    as_rank(0, stream=io.TextIOWrapper(pieces, write_through=True))  # pyright: ignore[reportArgumentType]
    print("a", "b")
    thread = threading.Thread(target=print, args=("c", "d"))
    print("unfinished ", end="")
    thread.start()
    thread.join()
    print("line")
    assert pieces.pieces == [b"a b\n", b"c d\n", b"unfinished line\n"]
    print("last", end="")
    sys.stdout.flush()
    assert pieces.pieces[3:] == [b"last"]


def test_what_follows_a_line_is_kept_until_its_own_line_is_whole(as_rank):
    pieces = Pieces()
    as_rank(0, stream=io.TextIOWrapper(pieces, write_through=True))  # pyright: ignore[reportArgumentType]
    print("a\nb ", end="")
    print("c\nd", end="")
    print("\r1 of 2", end="")  # a progress bar does not wait for a line
    print("\r2 of 2\nlast", end="")
    assert pieces.pieces == [b"a\n", b"b c\n", b"d\r1 of 2", b"\r2 of 2\n"]
    sys.stdout.flush()
    assert pieces.pieces[4:] == [b"last"]


def test_the_value_and_the_errors_of_write_stay(as_rank):
    as_rank(1)
    assert sys.stdout.write("four") == 4
    with pytest.raises(TypeError):
        sys.stdout.write(4)  # pyright: ignore[reportArgumentType]


def test_lead(as_rank, monkeypatch):
    stream = as_rank(1, "lead")
    monkeypatch.setattr(output, "_is_replica", lambda: True)
    print("hidden")
    assert shown(stream) == ""


def test_all(as_rank):
    stream = as_rank(1, "all")
    print("shown")
    assert shown(stream) == "shown\n"


def test_another_value_is_an_error(as_rank):
    with pytest.raises(ValueError, match=r"HPCSTRAT_OUTPUT='none' is not allowed: 'all' .* 'lead'"):
        as_rank(1, "none")


@pytest.mark.parametrize("variables", [{}, {"PMI_SIZE": "1", "PMI_RANK": "0"}], ids=str)
def test_one_rank_has_pythons_own_streams_and_hooks(variables):
    program = """
    import sys
    before = sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.exit
    import hpcstrat
    assert before == (sys.stdout, sys.stderr, sys.excepthook, sys.unraisablehook, sys.exit)
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PMI")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, env=kept | variables, timeout=60, check=True)


def test_a_thread_counts_as_the_top_level(as_rank, monkeypatch):
    """Also one that a replica function starts."""
    stream = as_rank(1)
    main = threading.current_thread()
    monkeypatch.setattr(output, "_is_replica", lambda: threading.current_thread() is main)
    thread = threading.Thread(target=print, args=("hidden",))
    thread.start()
    thread.join()
    print("shown")
    assert shown(stream) == "shown\n"


def test_a_thread_may_enter_a_context_of_its_own(as_rank, monkeypatch):
    stream = as_rank(1)
    monkeypatch.setattr(
        output,
        "_is_replica",
        lambda: threading.current_thread().name == "replica",
    )
    thread = threading.Thread(target=print, args=("shown",), name="replica")
    thread.start()
    thread.join()
    assert shown(stream) == "shown\n"


class Plain:
    """A user-defined stream that can do nothing else."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


def test_no_standard_output(as_rank, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    output.install(Launcher("mpirun", 1, 2), lambda: False)
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
    print("hidden")
    assert plain.text == ""


def test_all_else_of_a_stream_stays(as_rank):
    stream = as_rank(1)
    assert (sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.closed) == ("utf-8", False, False)
    again = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
    again.write("hidden")
    with sys.stdout as same:
        assert same is sys.stdout
    assert stream.closed


def test_standard_error(as_rank, monkeypatch):
    as_rank(1)
    stream = sys.stderr._stream  # pyright: ignore[reportAttributeAccessIssue]
    print("hidden", file=sys.stderr)
    print("bar 1\rbar 2", file=sys.stderr)
    assert stream.getvalue() == ""
    assert output.take_hidden_errors() == "hidden\nbar 2\n"
    assert output.take_hidden_errors() == ""
    try:
        raise ValueError
    except ValueError:
        print("handled", file=sys.stderr)
    with reports.reporting():
        print("reported", file=sys.stderr)
    monkeypatch.setattr(output, "_is_replica", lambda: True)
    print("in a context", file=sys.stderr)
    assert stream.getvalue() == "handled\nreported\nin a context\n"


@pytest.mark.parametrize("level", ["ERROR", "CRITICAL"])
def test_logged_errors_are_shown_by_any_handler_of_this_stream(as_rank, level):
    as_rank(1)
    stream = sys.stderr._stream  # pyright: ignore[reportAttributeAccessIssue]
    logger = logging.Logger("of the test")
    logger.addHandler(logging.StreamHandler())
    logger.log(getattr(logging, level), "shown")
    logger.info("hidden")
    assert stream.getvalue() == "shown\n"


def test_a_handler_of_the_root_logger_from_before_the_import_follows(as_rank, monkeypatch):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.root, "handlers", [handler])
    as_rank(1, errors=stream)
    logging.warning("hidden")
    assert stream.getvalue() == "" and handler.stream is sys.stderr
