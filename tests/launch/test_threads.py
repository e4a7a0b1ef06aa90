"""BLAS threads: a rank's share of the cores that it may run on."""

import os

import pytest
from slow import slow_but

PROGRAM = """
    import os, sys
    import numpy as np
    from threadpoolctl import threadpool_info
    from hpcstrat._process import worlds

    world = worlds.start()
    blas = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    own = os.sched_getaffinity(0)
    rows = world.comm.gather((blas, own))
    if world.rank == 0:
        print(rows)
"""


def shares(result):
    assert result.status == 0
    rows = eval(result.stdout)
    if not rows[0][0]:
        pytest.skip("this NumPy's BLAS is none that threadpoolctl knows")
    return [(set(blas), own) for blas, own in rows]


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
def test_each_rank_takes_its_share(launch, ranks):
    rows = shares(launch(PROGRAM, ranks))
    for blas, own in rows:
        share = sum(1 / sum(core in other for _, other in rows) for core in own)
        assert blas == {max(1, int(share + 1e-9))}


@pytest.mark.slow
def test_one_rank_is_not_limited(launch):
    rows = shares(launch(PROGRAM, env={"OMPI_MCA_hwloc_base_binding_policy": "none"}))
    assert rows[0][0] == {len(os.sched_getaffinity(0))}


@pytest.mark.slow
def test_the_users_variable_wins(launch):
    # Ranks that mpirun binds to one core each get one thread from OpenBLAS itself, whatever the
    # variable says.
    env = {"OPENBLAS_NUM_THREADS": "2", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    assert [blas for blas, _ in shares(launch(PROGRAM, 2, env=env))] == [{2}, {2}]


@pytest.mark.slow
def test_bound_ranks(launch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    options = ["--bind-to", "core"]
    rows = shares(launch(PROGRAM, 2, options=options))
    assert [blas for blas, _ in rows] == [{1}, {1}]
