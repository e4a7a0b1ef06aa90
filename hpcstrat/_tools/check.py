"""`python -m hpcstrat check`: moves data between all ranks, checks it, and reports the speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from hpcstrat._core.call_name import names_call
from hpcstrat._core.types import ReduceOp
from hpcstrat._process import worlds
from hpcstrat._replicas.group import ReplicaGroup
from hpcstrat._strategies.base import group_of
from hpcstrat._strategies.strategies import MirroredStrategy, MultiWorkerMirroredStrategy

_SIZES = (1 << 10, 1 << 20, 1 << 25)  # bytes
_ROUNDS = 5


@names_call("check")
def check() -> int:
    """Prints a table on the lead; returns the exit status, 1 if anything arrived wrong.

    Collective.
    """
    world = worlds.start()
    is_one_host = world.local_size == world.size
    strategy = MirroredStrategy() if is_one_host else MultiWorkerMirroredStrategy()
    group = group_of(strategy)
    title = f"{strategy.num_replicas_in_sync} ranks"
    table = Table("call", "bytes per rank", "microseconds", "GB/s", "", title=title)
    is_right = True
    for name, call in (("all_reduce", _all_reduce), ("all_gather", _all_gather)):
        for nbytes in _SIZES:
            seconds, right = _time_call(group, nbytes // 8, call)
            is_right &= right
            rate = f"{nbytes / seconds / 1e9:,.2f}"
            verdict = "right" if right else "[bold red]WRONG"
            table.add_row(name, f"{nbytes:,}", f"{1e6 * seconds:,.0f}", rate, verdict)
    if world.rank == 0:
        Console().print(table)
        print(
            "All data arrived."
            if is_right
            else "Data was corrupted in transfer: do not use this configuration."
        )
    strategy.close()
    return 0 if is_right else 1


def _time_call(
    group: ReplicaGroup, count: int, call: Callable[[ReplicaGroup, int], bool]
) -> tuple[float, bool]:
    """The best time of several rounds, on the slowest rank; and whether all data was right."""
    times, right = [], True
    for _ in range(_ROUNDS):
        # All ranks start together: waiting for a late rank is not the call's time.
        group.communicator.barrier()
        start = time.perf_counter()
        right &= call(group, count)
        times.append(time.perf_counter() - start)
    by_rank = group.communicator.all_gather_obj((min(times), right))
    return max(seconds for seconds, _ in by_rank), all(is_right for _, is_right in by_rank)


def _all_reduce(group: ReplicaGroup, count: int) -> bool:
    xp, n, rank = group.xp, group.communicator.size, group.communicator.rank
    # Numbers that differ between ranks and between elements, and whose sum is exact: a misplaced
    # part cannot look right.
    (total,) = group.communicator.all_reduce([xp.arange(count) % 1009 + float(rank)], ReduceOp.SUM)
    return bool((total == n * (xp.arange(count) % 1009) + n * (n - 1) / 2).all())


def _all_gather(group: ReplicaGroup, count: int) -> bool:
    xp, n, rank = group.xp, group.communicator.size, group.communicator.rank
    (parts,) = group.communicator.all_gather([xp.full(count, rank, np.float64)], 0)
    return bool((parts == xp.repeat(xp.arange(n, dtype=np.float64), count)).all())
