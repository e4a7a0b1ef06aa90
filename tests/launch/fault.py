"""What a planted fault is, and what many faults have in common."""

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
ANY = "any"
WAIT = "\nhs.barrier()\nprint('went on')\n"


@dataclass(frozen=True)
class Fault:
    """A job with a fault.

    Attributes:
        program: its lines, after the strategy is made by those of `begin`.
        says: patterns of standard error, or of output, where MPICH's mpirun prints.
        first: a pattern of the first line of standard error: the cause usually comes first.
        prints: patterns of standard output; if there are none, nothing is printed.
        status: the exit status; `None` for any but 0, `ANY` if mpirun may not notice a fault.
        ranks: the number of ranks; the program calls the last one `last`.
        limits: seconds that the ranks may wait for each other until the report, and until the end.
            Without them, and without a time-out in `env`, the job must end long before any.
        hosts: whether the ranks pose as several hosts.
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

    @property
    def source(self):
        program = textwrap.dedent(self.program.removesuffix(WAIT))
        end = WAIT if self.program.endswith(WAIT) else ""
        return "from planting import *\n" + self.begin + program + end

    @property
    def variables(self):
        found = dict(self.env)
        if self.limits:
            found["LIMITS"] = "{} {}".format(*self.limits)
        if r"\[rank 0\]" in self.first:
            found["RANK_0_FIRST"] = "1"
        if self.hosts:
            found["MPIR_CVAR_NUM_CLIQUES"] = "2"  # MPICH's emulated hosts
        return found


HERE = r"\S*(program_\w+|planting)\.py:\d+ in "
STALLED = r"\[rank \d\] hpcstrat: the ranks have been waiting for each other for \d s \(HPCSTRAT_STALL_SECONDS\)"
ENDED = r"hpcstrat: the job ends: the ranks have been waiting for each other for \d+ s \(HPCSTRAT_TIMEOUT_SECONDS\)"
CLOSED = r"exited without shutting down \(os\._exit, a signal, or out of memory\)"
# What the launcher prints if it notices the end before the watchdog does.
CLOSED_OR_LAUNCHER = rf"{CLOSED}|BAD TERMINATION|[Ss]ignal|PMI|exited|terminated"
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


def silent(ranks):
    why = r"\(stopped, or in C code that holds the interpreter lock\)"
    return rf"  {ranks}: not answering for \d s {why}; last in .*{HERE}(stop|hold_python|<module>)"


BARRIER = waits("ranks 0, 1", "barrier")


def ended(program, *says, ranks=2, **others):
    """A rank that ends by itself, without an error."""
    return Fault(program + WAIT, says, ranks=ranks, **others)


def raised(program, error, rank=1, ranks=2, **others):
    """An exception of one rank: its traceback comes first."""
    says, first = [rf"\[rank {rank}\] {error}"], rf"\[rank {rank}\] (Traceback|Exception in thread)"
    return Fault(program, says, first, ranks=ranks, **others)


def harmless(program, *prints, **others):
    """Looks like a fault, but is not: the job succeeds and prints nothing on standard error."""
    prints = [*prints, r"went on\n\Z"]
    return Fault(program + WAIT, prints=prints, status=0, ranks=2, **others)
