"""The progress bar shows on a terminal, but not in a log."""

import os
import pty
import sys

import pytest

import hpcstrat as hs


@pytest.fixture
def written(monkeypatch):
    """What a loop with a bar writes to standard error, which `open_ends` opens."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)

    def run(open_ends, **arguments):
        reader, writer = open_ends()
        with open(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            # A pseudo-terminal has no size.
            bar = hs.progress([3, 1, 2], ncols=40, nrows=20, **arguments)
            assert (len(bar), list(bar)) == (3, [3, 1, 2])  # pyright: ignore[reportArgumentType]
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


def test_a_pipe_gets_nothing(written):
    assert written(os.pipe) == b""


def test_a_terminal_gets_the_bar(written):
    assert b"3/3" in written(pty.openpty)


def test_arguments_win(written):
    assert b"3/3" in written(os.pipe, disable=False)
    assert written(pty.openpty, disable=True) == b""


def test_tqdms_own_variable_counts(written, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert written(pty.openpty) == b""


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "none"])
def test_without_standard_error(monkeypatch, tmp_path, is_closed):
    stream = open(tmp_path / "file", "w")
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream if is_closed else None)
    assert list(hs.progress([3, 1, 2])) == [3, 1, 2]
