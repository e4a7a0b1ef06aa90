"""A strategy's program from outside: its output, and its end if one rank fails."""

import pytest
from slow import slow_but

PROGRAM = """
    import sys
    import hpcstrat as hs
    import numpy as np

    print("top")
    strategy = hs.CentralStorageStrategy()

    def replica_fn():
        context = hs.get_replica_context()
        i = context.replica_id_in_sync_group
        print("replica", i)
        if sys.argv[1] == str(i):
            raise ValueError("in the replica")
        return context.all_reduce(hs.ReduceOp.SUM, np.ones(3))

    result = strategy.run(replica_fn)
    print("sum", strategy.reduce(hs.ReduceOp.SUM, result, axis=None).tolist())
"""


@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 3, 4]))
def test_it_prints_as_one_program(launch, ranks):
    result = launch(PROGRAM, ranks, "none")
    count = ranks or 1
    assert result.status == 0
    assert result.stderr == ""
    total = [float(count**2)] * 3
    lines = result.stdout.splitlines()
    assert sorted(lines) == sorted(["top", *(f"replica {i}" for i in range(count)), f"sum {total}"])
    assert lines[0] == "top"
    assert result.leftovers == []


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_replicas_exception_ends_all(launch, failing):
    result = launch(PROGRAM, 3, str(failing))
    assert result.status != 0
    assert result.tagged(failing)[-1] == "ValueError: in the replica"
    assert result.leftovers == []


@pytest.mark.parametrize("status", slow_but([0], [0, 3]))
def test_a_rank_that_leaves_early_ends_those_that_wait_for_it(launch, status):
    program = """
    import sys
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    if hs.rank() == 1:
        sys.exit(int(sys.argv[1]))
    hs.barrier()
"""
    result = launch(program, 3, str(status))
    assert result.status != 0
    assert "rank 1 left the program before the others" in result.stderr
    assert result.leftovers == []


@pytest.mark.parametrize("others", slow_but(["go on"], ["go on", "wait in the replica function"]))
def test_an_exception_that_one_rank_catches_ends_the_job_with_its_traceback(launch, others):
    program = """
    import contextlib
    import sys
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()

    def replica_fn():
        if hs.rank() == 1:
            raise KeyError("of rank 1 alone")
        if sys.argv[1] != "go on":
            hs.get_replica_context().all_reduce("SUM", 1.0)

    with contextlib.suppress(KeyError):
        strategy.run(replica_fn)
    hs.barrier()
    print("went on")
"""
    result = launch(program, 3, others)
    assert result.status != 0
    assert "KeyError: 'of rank 1 alone'" in "\n".join(result.tagged(1))
    assert "other ranks did not raise there" in "\n".join(result.tagged(1))
    assert "went on" not in result.stdout
    assert result.leftovers == []


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_leaves_nothing(launch):
    program = """
    import os
    import signal
    import hpcstrat as hs
    import numpy as np

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        variable = hs.Variable(np.zeros(1_000_000))
    if hs.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    variable.assign(np.ones(1_000_000))
    hs.barrier()
    print("went on")
"""
    result = launch(program, 3)
    assert result.status != 0
    assert "went on" not in result.stdout
    assert result.leftovers == []


def test_a_message_on_its_way_does_not_hold_up_a_barrier(launch):
    """MPI moves a large message only during calls of MPI, even if a rank waits in one of ours."""
    program = """
    import hpcstrat as hs
    import numpy as np
    from mpi4py import MPI

    strategy = hs.CentralStorageStrategy()
    world = MPI.COMM_WORLD
    data = np.full(20_000_000, world.rank, np.uint8)
    if world.rank == 0:
        world.Send(data, dest=1)
    elif world.rank == 1:
        request = world.Irecv(data, source=0)
    hs.barrier()
    if world.rank == 1:
        request.Wait()
        print(hs.any_rank(False), data.max())
    else:
        hs.any_rank(False)
"""
    result = launch(program, 3, env={"HPCSTRAT_OUTPUT": "all"})
    assert result.status == 0
    assert result.stdout.split() == ["False", "0"]
