"""Shared by the benchmarks: alternatives take turns, and their medians are compared."""

import random
import statistics
import time


def repeated(call):
    """An alternative that repeats a call: from the number of calls to their seconds."""

    def way(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - begin

    return way


def interleaved(ways, rounds, calls=1, comm=None):
    """The median seconds per call of each alternative, on the slowest rank.

    Each round has its own order, equal on all ranks, so that no alternative always runs after the
    same other one and suffers from the state in which that leaves the caches.

    Args:
        ways: functions by name, such as `repeated` makes, which take a number of calls and return
            their seconds.
        rounds: the number of turns of each alternative, after one to warm up.
        calls: the number of calls per turn.
        comm: the ranks, which start each turn together.
    """
    seconds = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name in random.Random(turn).sample(list(ways), len(ways)):
            if comm is not None:
                comm.Barrier()
            taken = ways[name](calls) / calls
            if turn:
                seconds[name].append(taken)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    if comm is None:
        return medians
    return {name: max(comm.allgather(median)) for name, median in medians.items()}


def header(*names):
    """Prints the head of a Markdown table."""
    row(*names)
    row(*["---"] * len(names))


def row(*cells):
    """Prints a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
