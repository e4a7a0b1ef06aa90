"""The clocks of several hosts in one trace."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpcstrat._communicators.base import Communicator
from hpcstrat._edge import names_call

_ROUNDS = 16


def zero(communicator: Communicator, hosts: Sequence[int]) -> int:
    """Nanoseconds of this process's clock when the trace begins, at the same moment on all ranks. Collective.

    Processes of one host share a clock. Those of several meet some times: each leaves only after all have come, so of
    two ranks the one's leaving is later than the other's coming, which bounds how far apart their clocks are.

    Args:
        communicator: of all ranks.
        hosts: for each rank the index of its host.
    """
    everyones = meet(communicator, _ROUNDS if len(set(hosts)) > 1 else 1)
    moment = everyones[0][-1][1]
    first = hosts.index(hosts[communicator.rank])
    return moment if first == 0 else moment + sum(difference(everyones[0], everyones[first])) // 2


@names_call("HPCSTRAT_TIMELINE, the clocks")
def meet(communicator: Communicator, rounds: int) -> list[list[tuple[int, int]]]:
    """When each rank came to each meeting and left it, in nanoseconds of its own clock. Collective."""
    met = []
    for _ in range(rounds):
        come = time.perf_counter_ns()
        communicator.barrier()
        met.append((come, time.perf_counter_ns()))
    return communicator.all_gather_obj(met)


def difference(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """What the other's clock shows more than the one's, in nanoseconds: at least and at most."""
    least = max(come - left for (_, left), (come, _) in zip(one, other, strict=True))
    most = min(left - come for (come, _), (_, left) in zip(one, other, strict=True))
    return least, most
