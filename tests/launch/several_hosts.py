"""Programs on several hosts: MPICH's emulated ones, or any division of the ranks."""

import ast

import pytest
from slow import slow_but

# `sys.argv[1]` is the division: for each rank its host; empty to ask MPI.
START = """
    import dataclasses, sys, tempfile, warnings
    import numpy as np
    import hpcstrat as hs
    from hpcstrat._transports import hosts
    from hpcstrat._process import worlds

    warnings.filterwarnings("ignore", "iterating over .* have no elements")  # of short batches, meant
    division = tuple(int(host) for host in sys.argv[1])
    if division:
        hosts.FEW_RANKS = 0  # agree as more than 16 ranks do
        world = worlds.start()
        host_comm = world.comm.Split(division[world.rank])
        local = dict(hosts=division, host_comm=host_comm, local_rank=host_comm.rank, local_size=host_comm.size)
        worlds._world = dataclasses.replace(world, **local)
    strategy = hs.MultiWorkerMirroredStrategy()
    N, rank = strategy.num_replicas_in_sync, hs.rank()
    hosts = worlds.start().hosts
    mine = [other for other in range(N) if hosts[other] == hosts[rank]]
"""
REPORT = """
    for r in range(N):  # each rank in its turn
        if r == rank:
            print(repr(found), flush=True)
        hs.barrier()
"""


SHAPES = {
    "1 + 1": (0, 1),
    "2 + 2": (0, 1, 0, 1),
    "3 + 1": (0, 0, 0, 1),
    "1 + 2": (0, 1, 1),
    "2 + 1 + 1": (0, 1, 2, 0),
    "1 + 2 + 1": (0, 1, 1, 2),
    "2 + 2 + 2": (0, 1, 2, 2, 1, 0),  # the last ranks are in the reverse order of the hosts
}
BY_MPI = ("1 + 1", "2 + 2", "2 + 1 + 1")
"""Divisions that MPICH makes itself."""


def on_hosts(*quick, most=2):
    """For each division of the ranks between up to so many hosts, all but these slow."""
    shapes = [shape for shape, hosts in SHAPES.items() if len({*hosts}) <= most]
    return pytest.mark.parametrize("shape", slow_but(quick, shapes))


def run(launch, shape, program, **variables):
    """Runs a program on several hosts; returns each rank's `found` at its end, and its host."""
    hosts, env = SHAPES[shape], {"HPCSTRAT_OUTPUT": "all", **variables}
    division = "".join(map(str, hosts))
    if shape in BY_MPI:
        if launch.open_mpi:
            pytest.skip("only MPICH can pose as several hosts")
        division, env = "", env | {"MPIR_CVAR_NUM_CLIQUES": str(len({*hosts}))}
    result = launch(START + program + REPORT, len(hosts), division, env=env)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    return [ast.literal_eval(line) for line in result.stdout.splitlines()], hosts
