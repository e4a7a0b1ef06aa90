"""The progress bar shows on a terminal, and as plain lines in a log."""

import io
import os
import pty
import sys

import pytest

import hpcstrat as hs


@pytest.fixture
def written(monkeypatch):
    """What a loop with a bar writes to standard error, which `open_ends` opens."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def run(open_ends, in_loop=lambda bar, i: None, **arguments):
        reader, writer = open_ends()
        with open(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            # A pseudo-terminal has no size.
            bar = hs.progress([3, 1, 2], ncols=60, nrows=20, **arguments)
            assert len(bar) == 3  # pyright: ignore[reportArgumentType]
            assert [(in_loop(bar, i), i)[1] for i in bar] == [3, 1, 2]
        with os.fdopen(reader, "rb", buffering=0) as file:
            return b"".join(pieces(file))

    return run


def pieces(file):
    while True:
        try:
            piece = file.read(4096)
        except OSError:  # the end of a terminal
            return
        if not piece:
            return
        yield piece


def test_a_log_gets_lines_at_the_start_and_the_end(written):
    """And none for a postfix, which programs set in each step."""

    def in_loop(bar, i):
        bar.set_postfix(loss=i)
        bar.set_description("epoch")

    first, last = written(os.pipe, in_loop, desc="steps").splitlines(keepends=True)
    assert first.startswith(b"steps:   0%|") and first.endswith(b"\n") and b"loss" not in first
    assert last.startswith(b"epoch: 100%|") and b"loss=2" in last
    assert b"| 3/3 [" in last and last.endswith(b"\n")


def test_a_terminal_gets_the_bar_and_arguments_win(written, monkeypatch):
    shown = written(pty.openpty)
    assert b"3/3" in shown and b"\r" in shown
    with io.StringIO() as file:
        assert written(os.pipe, file=file) == b""
        assert "\r" in file.getvalue() and "3/3" in file.getvalue()
    assert written(pty.openpty, disable=True) == written(os.pipe, disable=True) == b""
    monkeypatch.setenv("TQDM_DISABLE", "1")  # tqdm's own variable counts
    assert written(pty.openpty) == written(os.pipe) == b""
    assert b"3/3" in written(os.pipe, disable=False)


def test_without_standard_error(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(hs.progress([3, 1, 2])) == [3, 1, 2]
