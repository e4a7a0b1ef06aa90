"""What cluster resolvers say of ranks on several hosts, and of tasks that a launcher started."""

import socket

import pytest

HOSTS = """
    import sys
    from hpcstrat.cluster_resolver import MPIClusterResolver
    from hpcstrat._process import worlds

    resolver = MPIClusterResolver()
    found = resolver.task_id, resolver.master(), resolver.num_accelerators(), resolver.cluster_spec().as_dict()
    everyones = worlds.start().comm.gather(found)
    sys.stdout.write("".join(f"{found}\\n" for found in everyones or []))
"""
FAILING = """
    import hpcstrat as hs

    resolver = hs.cluster_resolver.MPIClusterResolver()
    resolver.cluster_spec()
    if hs.rank() == 1:
        resolver.master("ps", 0)
    hs.barrier()
"""


def test_a_worker_is_a_host(launch):
    if launch.open_mpi:
        pytest.skip("only MPICH can pose as several hosts")
    result = launch(HOSTS, 3, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert (result.status, result.leftovers) == (0, []), result.stderr
    name = socket.gethostname()
    cluster = {"worker": [name, name]}
    assert result.stdout.splitlines() == [
        f"({host}, '{name}', {{'GPU': 0}}, {cluster})" for host in (0, 1, 0)
    ]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_all(launch):
    result = launch(FAILING, 2)
    assert result.status != 0
    assert result.leftovers == []
    assert (
        "ValueError: ClusterSpec: No such job in cluster: 'ps'; there are 'worker'; pass one of "
        "these" in result.tagged(1)
    )
