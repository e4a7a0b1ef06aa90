"""The first process of a cell: mounts, runs a command, and reports what it left behind."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time


def _main(report, settle, leaves, shm, before, *command):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={shm}", "tmpfs", "/dev/shm"], check=True)
    if before:
        subprocess.run(["sh", "-ec", before], check=True)
    child = os.fork()
    if not child:
        os.setsid()
        os.environ["CELL_COMMAND"] = "1"  # for this process, and those that it starts
        os.execvp(command[0], command)
    status = None
    while status is None:
        process, found = os.wait()
        if process == child:
            status = os.waitstatus_to_exitcode(found)
    for file in (0, 1, 2):  # its reader waits for what is left, if anything is
        os.close(file)
    deadline = time.monotonic() + float(settle)
    allowed = tuple(leaves.splitlines())
    while not all(one.startswith(allowed) for one in _processes()) and time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    folders = ["/dev/shm", os.environ["TMPDIR"]]
    files = [f"{folder}/{name}" for folder in folders for name in sorted(os.listdir(folder))]
    left = [one for one in [*_processes(), *files] if not one.startswith(allowed)]
    found = {"status": status if status >= 0 else 128 - status, "left": left}
    pathlib.Path(report).write_text(json.dumps(found))


def _processes():
    """The commands of the other processes."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        if int(name) != os.getpid():
            with contextlib.suppress(OSError):
                found.append(pathlib.Path(f"/proc/{name}/cmdline").read_text().replace("\0", " "))
    return found


if __name__ == "__main__":
    _main(*sys.argv[1:])
