"""A script between mpiexec and a rank: it copies the rank's output to a file, and marks its lines.

mpiexec runs this file as a script: it must start fast, so it imports only the standard library. The
process becomes the rank, so that signals and the exit status are the rank's, and leaves a process
behind that copies.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import sys
import time

_LINE = re.compile(rb"[^\r\n]+[\r\n]*|[\r\n]+")
_LONGEST = 1 << 16  # bytes of a line that is not whole yet
_LAST_SECONDS = 5.0  # for processes that the rank has started, when the rank has ended


def _main(rank_names: str, folder: str, marks: str, appends: str, *program: str) -> None:
    """Becomes the rank.

    Args:
        rank_names: the variables that may hold the rank, with commas between.
        folder: the folder of the files rank-N.log; empty for no files.
        marks: not empty if each line that is shown starts with the rank.
        appends: not empty to append to the files, instead of replacing them.
        program: the rank's command.
    """
    rank = next((os.environ[name] for name in rank_names.split(",") if name in os.environ), "0")
    log = None
    if folder:
        path = os.path.join(folder, f"rank-{rank}.log")
        log = _open_log(path, bool(appends))
        os.environ["_HPCSTRAT_LOG"] = path  # for output that the rank hides
    pipes = {1: os.pipe(), 2: os.pipe()}
    process = os.getpid()
    # The copying process is detached, so that the program does not wait for it, and in its own
    # session: however the rank ends, its last output still arrives.
    if child := os.fork():
        os.waitpid(child, 0)
        for output, (_, write) in pipes.items():
            os.dup2(write, output)
        # No other file is inherited: Python's are closed on exec.
        try:
            os.execvp(program[0], program)
        except OSError as error:
            sys.exit(f"hpcstrat run: {program[0]}: {error.strerror}")
    os.setsid()
    if os.fork():
        os._exit(0)
    for _, write in pipes.values():
        os.close(write)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    outputs = {read: output for output, (read, _) in pipes.items()}
    _copy(process, outputs, log, f"[rank {rank}] ".encode() if marks else b"")


def _open_log(path: str, appends: bool) -> int:
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if appends else os.O_TRUNC)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, mode, 0o666)
    except OSError as error:
        sys.exit(f"hpcstrat run: --tee: {error}")


def _copy(process: int, outputs: dict[int, int], log: int | None, tag: bytes) -> None:
    """Copies to the log and the outputs until all processes of the rank end, or for some seconds.

    The seconds count from the end of the rank itself.
    """
    selector = selectors.DefaultSelector()
    streams = {read: _Tagged(tag) for read in outputs}
    for read in outputs:
        selector.register(read, selectors.EVENT_READ)
    end = -1
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or there are no such files
        end = os.pidfd_open(process)
        selector.register(end, selectors.EVENT_READ)
    deadline = None
    while outputs.keys() & selector.get_map().keys():
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for key, _ in selector.select(left):
            if key.fd == end:
                selector.unregister(end)
                deadline = time.monotonic() + _LAST_SECONDS
                continue
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            if log is not None and (problem := _write(log, data)):
                path = os.environ["_HPCSTRAT_LOG"]
                text = f"hpcstrat run: --tee: {path}: {problem}; nothing more is copied to it\n"
                _write(2, text.encode())
                log = None
            _write(outputs[key.fd], streams[key.fd].add(data) if tag else data)
    for read, stream in streams.items():
        _write(outputs[read], stream.rest())


class _Tagged:
    """A stream whose lines get a tag, unless they have it already, as hpcstrat's messages do."""

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._held = b""  # of a line that is not whole yet
        self._is_inside = False  # a line that was too long to be held

    def add(self, data: bytes) -> bytes:
        """Adds data, and returns what to show now."""
        text = self._held + data
        stop = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - stop >= _LONGEST:
            stop = len(text)
        self._held = text[stop:]
        return self._show(text[:stop])

    def rest(self) -> bytes:
        """Returns what to show at the end."""
        shown, self._held = self._show(self._held), b""
        return shown + b"\n" * self._is_inside

    def _show(self, text: bytes) -> bytes:
        shown = []
        for line in _LINE.findall(text):
            is_tagged = self._is_inside or line.startswith(self._tag) or not line.strip()
            shown.append(line if is_tagged else self._tag + line)
            self._is_inside = not line.endswith((b"\n", b"\r"))
        return b"".join(shown)


def _write(output: int, data: bytes) -> str:
    """Writes all data; returns the error, if any, such as a closed pipe or a full disk."""
    try:
        while data:
            data = data[os.write(output, data) :]
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    _main(*sys.argv[1:])
