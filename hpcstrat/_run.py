"""`python -m hpcstrat run`: starts a program's ranks with the `mpiexec` of mpi4py's MPI."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpcstrat._process import launchers, mpi_library, segments

_VENDORS = {"Open MPI": "Open MPI", "Intel(R) MPI": "Intel MPI", "HYDRA": "MPICH"}  # by --version
_NAMES = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
_INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_SIGNALS = {*_INTERRUPTS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCHLD}
_prctl, _PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1  # loaded before any fork


def run(options: argparse.Namespace) -> int:
    """Starts the ranks, again while they fail; returns the last status, 2 if none could start."""
    try:
        if launchers.find() is not None or "TORCHELASTIC_RUN_ID" in os.environ:
            raise RuntimeError("a launcher has started this process; start python itself with it")
        mpiexec, vendor = find_mpiexec(options.mpiexec)
    except (RuntimeError, ValueError) as error:
        print(f"hpcstrat run: {error}", file=sys.stderr)
        return 2
    command = [*mpiexec, "-n", str(options.n)]
    if (
        vendor == "Open MPI"
    ):  # else a rank has one core; more ranks than cores, and root, are refused
        command += ["--bind-to", "none", "--oversubscribe", "--allow-run-as-root"]
    program = [sys.executable, *options.python_option, options.program, *options.arguments]
    if ":" in program:  # after which mpiexec would look for another program
        program = ["sh", "-c", f"exec {shlex.join(program)}"]
    restart = 0
    while True:
        since, restart = time.time(), restart + 1
        status, is_interrupted = _start([*command, *program], vendor)
        if status == 0 or is_interrupted or restart > options.restarts:
            return status
        segments.unlink_unused(since)
        text = f"the ranks ended with status {status}; restart {restart} of {options.restarts}"
        print(f"hpcstrat run: {text}", file=sys.stderr)


def _start(command: list[str], vendor: str) -> tuple[int, bool]:
    """The status of one start, 128 + n for signal n, and whether a signal interrupted it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it does not come where it is ignored
    # Others that are ignored, as HUP is under nohup, stay so; ranks inherit that.
    signals = {one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they wait for `sigwait`
    launcher = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        # When this process is killed. MPICH's mpiexec leaves TERM to its ranks, but not KILL.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if vendor == "Open MPI" else signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    # In a session of its own: a Ctrl-C comes once, from here, and not from the terminal too.
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare)
    received: set[int] = set()
    while (status := process.poll()) is None:
        number = signal.sigwait(signals)
        if number == signal.SIGTSTP:  # Ctrl-Z; MPICH ranks go on
            process.send_signal(signal.SIGTSTP)
            os.kill(launcher, signal.SIGSTOP)
            process.send_signal(signal.SIGCONT)
        elif number != signal.SIGCHLD:
            received.add(number)
            process.send_signal(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    # By USR1 too, if the ranks then saved; and by USR2, which ends MPICH's mpiexec.
    ending = received if status == os.EX_TEMPFAIL else received & {*_INTERRUPTS, -status}
    return (status if status >= 0 else 128 - status), bool(ending)


def find_mpiexec(named: str | None = None) -> tuple[list[str], str]:
    """The `mpiexec` of the MPI that mpi4py loads, perhaps with options, and its MPI's name.

    Looks next to the library, in Python's environment and on the PATH. Starts no MPI.

    Raises:
        RuntimeError: there is no MPI or no `mpiexec`, or only that of another MPI.
    """
    try:
        library, version = mpi_library.load().get_vendor()
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"mpi4py or its MPI is missing ({error}): `pip install '.[mpich]'` in hpcstrat's clone "
            "brings both; on a cluster, load the module of its MPI"
        ) from error
    near = re.findall(r" (/\S+)/\S+/libmp(?:i|ich)\S*\.so", Path("/proc/self/maps").read_text())
    folders = [*(f"{folder}/bin" for folder in near), f"{sys.prefix}/bin", *os.get_exec_path()]
    paths = [shutil.which(name, path=folder) for folder in folders for name in _NAMES]
    found = "no mpiexec is near it, in Python's environment or on the PATH"
    for words in [shlex.split(named)] if named else [[path] for path in paths if path]:
        vendor = vendor_of(words)
        if vendor is not None and (vendor == "Open MPI") == (library == "Open MPI"):
            return words, vendor  # MPICH and the MPIs derived from it start each other's ranks
        found = f"{shlex.join(words)} is {f'that of {vendor}' if vendor else 'no known mpiexec'}"
    raise RuntimeError(
        f"mpi4py loads {library} {'.'.join(map(str, version))}, but {found}. Load the module of "
        f"{library}, or name its mpiexec: hpcstrat run --mpiexec PATH"
    )


def vendor_of(mpiexec: list[str]) -> str | None:
    """The name of an `mpiexec`'s MPI, by its `--version`; None if it is unknown."""
    text = subprocess.getoutput(f"timeout 10 {shlex.join(mpiexec)} --version </dev/null")
    return next((name for sign, name in _VENDORS.items() if sign in text), None)
