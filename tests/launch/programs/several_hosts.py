"""A job on several hosts: `from several_hosts import *`, in the end `report(found)`.

`sys.argv[1]` is the division: for each rank its host; empty to ask MPI.
"""

import dataclasses
import sys
import warnings

import hpcstrat as hs
from hpcstrat._memory.shared_file import SharedFile
from hpcstrat._process import worlds
from hpcstrat._transports import hosts as _hosts

warnings.filterwarnings("ignore", "iterating over .* have no elements")  # of short batches, meant
division = tuple(int(host) for host in sys.argv[1])
if division:
    _hosts.FEW_RANKS = 0  # agree as more than 16 ranks do
    world = worlds.start()
    assert world.comm is not None
    comm = world.comm.Split(division[world.rank])
    local = {"host_comm": comm, "local_rank": comm.rank, "local_size": comm.size}
    worlds._world = dataclasses.replace(world, hosts=division, **local)
strategy = hs.MultiWorkerMirroredStrategy()
N, rank = strategy.num_replicas_in_sync, hs.rank()
hosts = worlds.start().hosts
mine = [other for other in range(N) if hosts[other] == hosts[rank]]


def report(found):
    """Prints what each rank has found, in its turn."""
    for r in range(N):
        if r == rank:
            print(repr(found), flush=True)
        hs.barrier()


class Memory:
    """Refuses to commit memory while it is full."""

    is_full = False

    def __init__(self):
        commit = SharedFile.commit

        def commit_or_refuse(*arguments):
            if self.is_full:
                raise MemoryError("planted")
            commit(*arguments)

        SharedFile.commit = commit_or_refuse  # pyright: ignore[reportAttributeAccessIssue]
