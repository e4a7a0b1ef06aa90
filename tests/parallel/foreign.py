"""What is the same for arrays of every other library."""

from mpi4py import MPI

import hpcstrat as hs

N = MPI.COMM_WORLD.size


def check_that_it_goes_in(strategy, mine, dtype):
    """`mine`, of this dtype and with the rank added to 0, 1, 2 and 3, as an initial value, reduced and assigned."""
    with strategy.scope():
        v = hs.Variable(mine * 0, aggregation="SUM")
    assert v.dtype.name == dtype
    box = []

    def replica():
        context = hs.get_replica_context()
        assert context is not None
        box.append(context.all_reduce("SUM", mine.T))
        v.assign(mine.T)

    strategy.run(replica)
    shift = N * (N - 1) // 2
    expected = [[shift, 2 * N + shift], [N + shift, 3 * N + shift]]
    assert box[0].dtype.name == dtype and hs.asnumpy(box[0]).tolist() == v.numpy().tolist() == expected
