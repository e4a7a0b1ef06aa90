"""The last table of host_step.py: a step compiled and not, with the page faults that it causes.

A compiled update that is faster by itself can be slower in the whole step, if it leaves the memory
of freed gradients where the system takes it back.
"""

import resource
import statistics

from mpi4py import MPI
from rounds import header, interleaved, repeated, row


def _faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _counting(step, found):
    """An alternative that also notes its page faults per step in each turn."""
    way = repeated(step)

    def turn(steps):
        before = _faults()
        seconds = way(steps)
        found.append((_faults() - before) / steps)
        return seconds

    return turn


def uncompiled(strategy, step):
    """The step, after a first one in which the strategy plans its update without compiled loops."""
    storage = strategy.replica_group.storage
    kept, storage._compiles = storage._compiles, False
    step()
    storage._compiles = kept
    return step


def show(name, steps, rounds, count):
    """Prints a row for each step, beside the first: medians on the slowest rank.

    Args:
        name: of the network and the optimizer.
        steps: functions by name.
        rounds: turns of each.
        count: steps in a turn.
    """
    comm = MPI.COMM_WORLD
    faults = {way: [] for way in steps}
    ways = {way: _counting(step, faults[way]) for way, step in steps.items()}
    medians = interleaved(ways, rounds, count, comm)
    first = next(iter(medians.values()))
    for way, seconds in medians.items():
        # Without the turn to warm up, in which memory is new.
        most = max(comm.allgather(statistics.median(faults[way][1:])))
        row(name, way, f"{1e6 * seconds:,.0f}", f"{first / seconds:.2f}", f"{most:,.0f}")
        name = ""


def head():
    """Prints the head of the table."""
    print()
    header("network, optimizer", "way", "microseconds", "the first / that", "page faults a step")
