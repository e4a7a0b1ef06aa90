"""The processes of a job, which carry a mark, and what they leave behind."""

import os
import pathlib
import re
import time
import uuid

_LOOKS = 3  # at a process that seems to be another job's: at first it may not run its program yet
_SETTLE_SECONDS = 20


class Processes:
    """The processes whose environment has a mark, and the files in shared memory that they map."""

    def __init__(self):
        self.mark = ("LAUNCHED_BY_TEST", uuid.uuid4().hex)
        self._looks = {}
        self._ours = set()
        self._files = set()

    def all(self):
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._ours &= there
        self._looks = {process: looks for process, looks in self._looks.items() if process in there}
        for process in there - self._ours:
            if self._looks.setdefault(process, 0) < _LOOKS:
                if "=".join(self.mark).encode() in _read(process, "environ"):
                    self._ours.add(process)
                self._looks[process] += 1
        return self._ours

    def running(self):
        return [process for process in self.all() if runs(process)]

    def with_variable(self, *words):
        """Those whose environment has one of the words."""
        wanted = {word.encode() for word in words}
        return {one for one in self.all() if wanted & {*_read(one, "environ").split(b"\0")}}

    def look(self):
        """Notes the files that they map; they are mapped for as long as MPI runs."""
        for process in self.all():
            maps = _read(process, "maps").decode(errors="replace")
            self._files.update(re.findall(r" (/dev/shm/\S+)$", maps, re.MULTILINE))

    def leftovers(self, folders):
        """What is left, also in their own folders, after some seconds in which they may end."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (running := self.running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        commands = [_read(process, "cmdline").replace(b"\0", b" ") for process in running]
        left = [f"process: {command.decode(errors='replace')}" for command in commands]
        if not folders:
            return left + sorted(filter(os.path.exists, self._files))
        files = [str(path) for folder in folders for path in pathlib.Path(folder).iterdir()]
        return left + [re.sub(r"^/proc/\d+/root", "", path) for path in files]


def parent(process):
    return int((_fields(process) or [0, 0])[1])


def runs(process):
    """Not a zombie that waits for `init`, which may take its status only once per second."""
    fields = _fields(process)
    # Its threads may outlive the first.
    return bool(fields) and (fields[0] != b"Z" or fields[17] != b"1")


def _fields(process):
    """Of its status, after the name of its program."""
    return _read(process, "stat").rpartition(b")")[2].split()


def _read(process, name):
    try:
        return pathlib.Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:  # it has ended, or is another user's
        return b""
