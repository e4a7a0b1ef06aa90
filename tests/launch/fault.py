"""What a planted fault is, and texts that many faults have in common."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BEGIN = """
import atexit, contextlib, ctypes, sys, threading, time
import numpy as np
import hpcstrat as hs
from mpi4py import MPI

strategy = hs.CentralStorageStrategy()
rank, last = hs.rank(), hs.rank() == hs.size() - 1
"""
BEGIN_ON_HOSTS = BEGIN.replace("strategy = hs.CentralStorageStrategy()", "hs.barrier()")
HELPERS = """
import os, re, signal, sys, time

def loop():
    while True:
        time.sleep(0.01)

def compute():
    while True:
        pass

def hold_python():
    re.match("(a+)+b", 40 * "a")  # takes years, in C code that lets no other thread run

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def interrupt(function, error=KeyboardInterrupt):
    "The library's next call of this function raises, as the handler of a signal may at any moment."
    def look(frame, event, argument):
        if event == "call" and frame.f_code.co_name == function and "hpcstrat" in frame.f_code.co_filename:
            sys.setprofile(None)
            raise error
    sys.setprofile(look)

def mpirun():
    "The process that the test started: the farthest ancestor with the job's mark."
    mark, process = os.environ["LAUNCHED_BY_TEST"].encode(), os.getpid()
    while True:
        parent = int(re.search("PPid:.([0-9]+)", open(f"/proc/{process}/status").read())[1])
        if mark not in open(f"/proc/{parent}/environ", "rb").read():
            return process
        process = parent
"""
# Rank 0 prints what all ranks raise, even if it comes later on a busy machine.
RANK_0_FIRST = """
import hpcstrat._process.failure
hpcstrat._process.failure._LEAD_DELAY = 30
"""
# The watchdog reads them when the ranks have connected; until then a busy machine may delay one of
# them for long.
LIMITS = """
from hpcstrat._watchdog import channels

def connect(*arguments, connect=channels.connect):
    channel = connect(*arguments)
    os.environ.update(HPCSTRAT_STALL_SECONDS="{}", HPCSTRAT_TIMEOUT_SECONDS="{}")
    return channel

channels.connect = connect
"""
ANY = "any"
WAIT = "\nhs.barrier()\nprint('went on')\n"


@dataclass(frozen=True)
class Fault:
    """A job with a fault.

    Attributes:
        program: its lines, after the strategy is made.
        says: regular expressions; each must match on standard error, or on output, where MPICH's
            mpirun prints.
        first: a regular expression for the first line of standard error; it usually shows that the
            cause comes first.
        prints: regular expressions; each must match on standard output. If there are none, nothing
            is printed.
        status: the exit status; `None` for any but 0, `ANY` if mpirun may not notice a fault.
        ranks: the number of ranks; the program calls the last one `last`.
        begin: the program's first lines.
        env: more variables.
        limits: seconds that the ranks may wait for each other until the report, and until the end.
            Without them, and without a time-out in `env`, the job must end long before any.
        hosts: whether the ranks pose as several hosts.
        left: a pattern of what MPI itself leaves in /dev/shm.
    """

    program: str
    says: Sequence[str] = ()
    first: str = ""
    prints: Sequence[str] = ()
    status: int | str | None = None
    ranks: int = 3
    begin: str = BEGIN
    env: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[float, float] | None = None
    hosts: bool = False
    left: str = ""

    @property
    def source(self):
        first = RANK_0_FIRST if r"\[rank 0\]" in self.first else ""
        limits = LIMITS.format(*self.limits) if self.limits else ""
        return HELPERS + first + limits + self.begin + textwrap.dedent(self.program)


HERE = r"\S*program_\w+\.py:\d+ in "
STALLED = r"\[rank \d\] hpcstrat: the ranks have been waiting for each other for \d s \(HPCSTRAT_STALL_SECONDS\)"
ENDED = r"hpcstrat: the job ends: the ranks have been waiting for each other for \d+ s \(HPCSTRAT_TIMEOUT_SECONDS\)"
CLOSED = r"exited without shutting down \(os\._exit, a signal, or out of memory\)"
LEFT = "left the program before the others"


def stalled(program, waiting, missing, limits=(0.4, 1.2), **others):
    """A fault after which some ranks wait for another: first comes a report, later the end."""
    return Fault(program, [ENDED, waiting, missing], STALLED, limits=limits, **others)


def silenced(program, waiting, missing, **others):
    """The same with a rank that does not answer, which the others know after two seconds."""
    return stalled(program, waiting, missing, limits=(1, 3), **others)


def silenced_root(program, **others):
    """The same with rank 0, which alone could report: the others end the job, and rank 1 says so."""
    silent = (
        r"rank 0 has been silent for \d s: it is stopped, or in C code that holds the interpreter lock.*"
        rf"; it was last in .*, at {HERE}(hold_python|stop|<module>); this rank waits at {HERE}<module>"
    )
    report = rf"\[rank 1\] hpcstrat: {silent}\. The job ends in \d s \(HPCSTRAT_TIMEOUT_SECONDS\)"
    end = rf"\[rank 1\] hpcstrat: the job ends: {silent}"
    return Fault(program, [end], report, limits=(1, 3), **others)


def waits(ranks, call, function="<module>"):
    return rf"  {ranks}: waiting in call \d+, {call}\(.*\), at {HERE}{function}"


def missing(ranks, function):
    return rf"  {ranks}: has not arrived; last in call \d+, .+; now at {HERE}{function}"


def silent(ranks, function="<module>"):
    why = r"\(stopped, or in C code that holds the interpreter lock\)"
    return rf"  {ranks}: not answering for \d s {why}; last in .*{HERE}{function}"


BARRIER = waits("ranks 0, 1", "barrier")
