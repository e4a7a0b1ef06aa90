"""What the benchmarks share: ways of doing a thing take turns, round by round, and medians come out."""

import random
import statistics
import time


def repeated(call):
    """A way that makes one call over and over: a function of their number that returns the seconds they took."""

    def way(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return time.perf_counter() - begin

    return way


def interleaved(ways, rounds, calls=1, comm=None):
    """The median seconds of a call of each way, on the slowest rank.

    Each round has an order of its own, the same on all ranks, so that no way always suffers from what the same other
    one leaves behind.

    Args:
        ways: functions by name, such as `repeated` makes, which make so many calls and return the seconds.
        rounds: how many turns each way takes, after one that warms up.
        calls: how many calls a turn is.
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
