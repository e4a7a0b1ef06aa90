"""Memory owned by the launcher that survives a crash of the ranks and tells it what to do then.

`hpcstrat run` makes it and passes its place on in a variable. It consists of files without names,
so it vanishes with the launcher, however that ends. Ranks on other hosts have none.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GENERATIONS = 2
"""Files for snapshots: while one is written, the other is whole."""

_VARIABLE = "_HPCSTRAT_JOB"
_NAME = "hpcstrat-job"
_TOKEN_BYTES = 16
_STEPS = struct.Struct("<qq")  # the number of the last step, and how many were done since the start
_STEPS_AT = 64
_RANKS_AT = 4096
_RANK = struct.Struct("<iIdI")  # process, state, when it failed, bytes of the text
_RANK_BYTES = 1024


class State(enum.IntEnum):
    """How far a rank has come.

    From `FAILED` on it says how the program ended there: by an exception, by a KeyboardInterrupt,
    or on request, with its checkpoint saved.
    """

    STARTED = 0
    CONNECTED = 1
    LEFT = 2
    FAILED = 3
    INTERRUPTED = 4
    PREEMPTED = 5


class Note(NamedTuple):
    """What a rank has noted.

    Attributes:
        rank: the rank.
        process: its process id.
        state: how far it has come.
        time: when it failed, by `time.monotonic`; 0 if it did not.
        text: the exception's type, message and place.
    """

    rank: int
    process: int
    state: State
    time: float
    text: str


class JobMemory:
    """A control block, and files for snapshots.

    Each part has one writer, and is read once its writer has ended.

    Attributes:
        place: a word that names it to other processes of this host.
        files: paths of the files for snapshots, if there are any.
    """

    def __init__(self, place: str) -> None:
        self.place: str = place
        process, *numbers, _ = place.split(":")
        control, *files = [f"/proc/{int(process)}/fd/{int(number)}" for number in numbers]
        self.files: tuple[str, ...] = tuple(files)
        file = os.open(control, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._control = mmap.mmap(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which ranks find it."""
        return {_VARIABLE: self.place}

    def close(self) -> None:
        """Gives up the files of `create`, in the process that called it."""
        self._control.close()
        for number in self.place.split(":")[1:-1]:
            os.close(int(number))

    # ---- what ranks write

    def note(self, rank: int, state: State, text: str = "") -> None:
        """Notes that this process is this rank, how far it has come, and what ends it.

        Only a rank that is connected leaves: others have failed, or no rank depended on them.
        """
        if state == State.LEFT:
            note = self.note_of(rank)
            if note is None or note.state != State.CONNECTED:
                return
        at = _RANKS_AT + rank * _RANK_BYTES
        if at < len(self._control):
            encoded = text.encode(errors="replace")[: _RANK_BYTES - _RANK.size]
            self._control[at + _RANK.size : at + _RANK.size + len(encoded)] = encoded
            when = time.monotonic() if state >= State.FAILED else 0.0
            _RANK.pack_into(self._control, at, os.getpid(), state, when, len(encoded))

    def note_step(self, number: int) -> None:
        """Notes that the program has done this step. Only one rank calls this."""
        _, done = self.steps()
        _STEPS.pack_into(self._control, _STEPS_AT, number, done + 1)

    # ---- what is read

    def steps(self) -> tuple[int, int]:
        """The number of the last step, and how many were done since the last start."""
        number, done = _STEPS.unpack_from(self._control, _STEPS_AT)
        return number, done

    def note_of(self, rank: int) -> Note | None:
        """This rank's note; `None` if it has not imported the library, or runs on another host."""
        at = _RANKS_AT + rank * _RANK_BYTES
        if at >= len(self._control):
            return None
        process, state, when, length = _RANK.unpack_from(self._control, at)
        text = self._control[at + _RANK.size : at + _RANK.size + length].decode(errors="replace")
        return Note(rank, process, State(state), when, text) if process else None

    def notes(self, ranks: int) -> dict[int, Note]:
        """The note of each rank that runs on this host and has imported the library."""
        notes = map(self.note_of, range(ranks))
        return {note.rank: note for note in notes if note is not None}

    def first_failure(self, ranks: int) -> Note | None:
        """The first note of an end of the program, if any."""
        failures = [note for note in self.notes(ranks).values() if note.time]
        return min(failures, key=lambda note: note.time, default=None)

    def forget_ranks(self) -> None:
        """Forgets the ranks of the previous start, and how many steps they did.

        The launcher calls this before each start.
        """
        number, _ = self.steps()
        _STEPS.pack_into(self._control, _STEPS_AT, number, 0)
        self._control[_RANKS_AT:] = bytes(len(self._control) - _RANKS_AT)


def create(ranks: int, has_snapshots: bool) -> JobMemory:
    """New memory, which lives as long as this process.

    Args:
        ranks: the most that the job has.
        has_snapshots: whether there are files for snapshots; they take up what is written.

    Raises:
        OSError: the system, or a limit, does not allow it.
    """
    if not hasattr(os, "memfd_create"):  # such as a Python that was built for an old C library
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create")
    token = secrets.token_bytes(_TOKEN_BYTES)
    files: list[int] = []
    try:
        for _ in range(1 + GENERATIONS * has_snapshots):
            files.append(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        os.ftruncate(files[0], _RANKS_AT + ranks * _RANK_BYTES)
        os.pwrite(files[0], token, 0)
        return JobMemory(":".join([str(os.getpid()), *map(str, files), token.hex()]))
    except OSError:
        for file in files:
            os.close(file)
        raise


def expects_snapshots(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher keeps snapshots, here or on another host."""
    return environment.get(_VARIABLE, "").count(":") == 2 + GENERATIONS


def find(environment: Mapping[str, str] = os.environ) -> JobMemory | None:
    """The memory of the launcher that started this process; None without one on this host."""
    place = environment.get(_VARIABLE, "")
    # Our own files, and not those of another process that has the same number on this host.
    with contextlib.suppress(OSError, ValueError):
        process, *numbers, token = place.split(":")
        if _are_ours(process, numbers, bytes.fromhex(token)):
            return JobMemory(place)
    return None


def _are_ours(process: str, numbers: Sequence[str], token: bytes) -> bool:
    paths = [f"/proc/{int(process)}/fd/{int(number)}" for number in numbers]
    # Before anything is opened: to open a FIFO, say, may wait or wake its writer.
    are_files = len(paths) in (1, 1 + GENERATIONS)
    if not are_files or not all(os.readlink(path).startswith(f"/memfd:{_NAME}") for path in paths):
        return False
    with open(paths[0], "rb", buffering=0) as control:
        return len(token) == _TOKEN_BYTES and control.read(_TOKEN_BYTES) == token
