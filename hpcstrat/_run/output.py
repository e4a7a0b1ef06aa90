"""What stands between mpiexec and a rank to copy what the rank writes to a file, and to mark its lines.

mpiexec runs this file, as a script of its own: it must start fast, and imports the standard library alone. The process
becomes the rank, so that signals and the exit status are the rank's, and leaves a process behind that copies.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys

_LINE = re.compile(rb"[^\r\n]*[\r\n]+")


def _main(rank_names: str, folder: str, marks: str, goes_on: str, *program: str) -> None:
    """Becomes the rank; `copied` in mpiexec.py has what the arguments mean."""
    rank = next((os.environ[name] for name in rank_names.split(",") if name in os.environ), "0")
    log = None
    if folder:
        path = os.path.join(folder, f"rank-{rank}.log")
        try:
            os.makedirs(folder, exist_ok=True)
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if goes_on else os.O_TRUNC), 0o666)
        except OSError as error:
            sys.exit(f"hpcstrat run: --tee: {error}")
        os.environ["_HPCSTRAT_LOG"] = path  # for what the rank hides
    pipes = [os.pipe(), os.pipe()]
    # The copying process is nobody's child, lest the program waits for it, and in a session of its own: whatever ends
    # the rank, its last words still arrive.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        for number, (read, write) in enumerate(pipes, 1):
            os.close(read)
            os.dup2(write, number)
            os.close(write)
        if log is not None:
            os.close(log)
        try:
            os.execvp(program[0], program)
        except OSError as error:
            sys.exit(f"hpcstrat run: {program[0]}: {error.strerror}")
    os.setsid()
    if os.fork():
        os._exit(0)
    for _, write in pipes:
        os.close(write)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _copy({pipes[0][0]: 1, pipes[1][0]: 2}, log, f"[rank {rank}] ".encode() if marks else b"")


def _copy(outputs: dict[int, int], log: int | None, tag: bytes) -> None:
    """Copies to the log and to the outputs until the rank, and all that it has started, is gone."""
    selector = selectors.DefaultSelector()
    parts = dict.fromkeys(outputs, b"")  # of lines, that are not whole yet
    for read in outputs:
        selector.register(read, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = os.read(key.fd, 1 << 16)
            if not data:
                selector.unregister(key.fd)
            if log is not None:
                _write(log, data)
            if tag:
                data, parts[key.fd] = _tagged(parts[key.fd] + data, tag, not data)
            _write(outputs[key.fd], data)


def _tagged(text: bytes, tag: bytes, is_last: bool) -> tuple[bytes, bytes]:
    """The text's whole lines, each with the tag, which hpcstrat's own have already; and the rest."""
    lines = _LINE.findall(text)
    rest = text[sum(map(len, lines)) :]
    if is_last and rest:
        lines, rest = [*lines, rest + b"\n"], b""
    return b"".join(line if line.startswith(tag) or not line.strip() else tag + line for line in lines), rest


def _write(output: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(output, data) :]
        except OSError:  # nobody reads it any more, or the disk is full; the other copy goes on
            return


if __name__ == "__main__":
    _main(*sys.argv[1:])
