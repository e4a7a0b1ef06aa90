"""A strategy's program from outside: what it prints, and how it ends when one rank goes wrong."""

import pytest

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


@pytest.mark.parametrize("ranks", [None, 1, 2, 3, 4])
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


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_replicas_exception_ends_all(launch, failing):
    result = launch(PROGRAM, 3, str(failing))
    assert result.status != 0
    assert result.seconds < 15
    assert result.tagged(failing)[-1] == "ValueError: in the replica"
    assert result.leftovers == []


@pytest.mark.parametrize("status", [0, 3])
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
    assert result.seconds < 15
    assert "rank 1 left the program before the others" in result.stderr
    assert result.leftovers == []
