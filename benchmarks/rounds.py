"""Shared by the benchmarks: alternatives take turns, round by round, and the medians are compared."""

import random
import statistics
import time


def repeated(call):
    """An alternative that repeats a call: a function of the number of calls that returns the seconds they took."""

    def way(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - begin

    return way


def interleaved(ways, rounds, calls=1, comm=None):
    """The median seconds per call of each alternative, on the slowest rank.

    Each round has its own order, equal on all ranks, so that no alternative always runs after the
    same other one and suffers from the state of the caches that it leaves behind.

    Args:
        ways: functions by name, such as `repeated` makes, which take a number of calls and return
            their seconds.
        rounds: the number of turns of each alternative, after one that warms up.
        calls: the number of calls in a turn.
        comm: the ranks, which begin each turn together.
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
