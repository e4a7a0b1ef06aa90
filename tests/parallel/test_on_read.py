"""ON_READ variables: one number per replica, combined when it is read."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
AGGREGATIONS = ["SUM", "MEAN", "ONLY_FIRST_REPLICA"]
SHAPES = [(), (3,), (300, 70)]


def make(strategy, initial, aggregation, **kwargs):
    with strategy.scope():
        return hs.Variable(initial, synchronization="ON_READ", aggregation=aggregation, **kwargs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_replicas_write_their_own(strategy, place, xp, aggregation):
    for shape in SHAPES:
        v = make(strategy, xp.full(shape, 2.0 + RANK), aggregation)  # the first rank's, as others

        def replica(v=v, shape=shape):
            before = strategy.replica_group.communicator.calls.number
            v.assign_add(xp.full(shape, 3.0 * RANK))
            v.assign_sub(np.full(shape, 1.0))  # from the host
            for found, more in ((v.value(), 0), (v.read_value(), 0), (v.numpy(), 0), (v + 1, 1)):
                assert np.array_equal(hs.asnumpy(found), np.full(shape, 1.0 + 3 * RANK + more))
            assert strategy.replica_group.communicator.calls.number == before
            assert place.kind == "GPU" or not v.value().flags.writeable  # CuPy's arrays always are

        strategy.run(replica)
        parts = [np.full(shape, 1.0 + 3 * rank) for rank in range(N)]
        expected = sum(parts) / (1 if aggregation == "SUM" else N)
        if aggregation == "ONLY_FIRST_REPLICA":
            expected = parts[0]
        assert type(v.numpy()) is np.ndarray and type(v.read_value()) is xp.ndarray
        for found in (v.read_value(), v.numpy(), strategy.extended.read_var(v)):
            assert np.array_equal(hs.asnumpy(found), expected) and found.dtype == np.float64
            assert len(set(COMM.allgather(found.tobytes()))) == 1
            found[...] = -1  # a copy
        assert np.array_equal(v.numpy(), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_writes_across_replicas_are_of_all(strategy, xp, aggregation):
    for shape in SHAPES:
        v = make(strategy, np.zeros(shape), aggregation, name="total")
        with strategy.scope():
            assert v.assign(xp.full(shape, 12.0)) is v
        assert np.array_equal(v.numpy(), np.full(shape, 12.0))
        own = strategy.experimental_local_results(strategy.run(v.read_value))
        share = 12 / N if aggregation == "SUM" else 12.0
        for found in own:
            assert np.array_equal(hs.asnumpy(found), np.full(shape, share))
        if aggregation == "SUM" and N > 1:
            for verb in ("assign_add", "assign_sub"):
                with pytest.raises(ValueError, match=rf"{verb} of 'total': .*ON_READ .* that sums"):
                    getattr(v, verb)(xp.ones(shape))
            continue
        strategy.run(lambda v=v, shape=shape: v.assign(xp.full(shape, float(RANK))))
        v.assign_add(xp.full(shape, 10.0))
        v.assign_sub(np.ones(shape))
        own = strategy.experimental_local_results(strategy.run(v.read_value))
        for rank, found in enumerate(own):
            assert np.array_equal(hs.asnumpy(found), np.full(shape, rank + 9))


@pytest.mark.mpi(min_size=2)  # with one replica there is nothing to combine
def test_no_aggregation_cannot_be_read(strategy, xp):
    v = make(strategy, np.zeros(3), "NONE", name="total")
    strategy.run(lambda: v.assign_add(xp.full(3, float(RANK))))
    for read in (v.read_value, v.numpy):
        with pytest.raises(ValueError, match=r"of 'total' .*no aggregation.*aggregation='SUM'"):
            read()
    own = strategy.experimental_local_results(strategy.run(v.read_value))
    assert [found.tolist() for found in own] == [[rank] * 3 for rank in range(N)]


@pytest.mark.parametrize("aggregation", ["SUM", "NONE"])
def test_an_update_reads_and_writes_each_replicas_own(strategy, xp, aggregation):
    v, update = make(strategy, xp.zeros(2), aggregation), strategy.extended.update
    strategy.run(lambda: v.assign(xp.full(2, 5.0 + RANK)))

    def add(v, x):
        before = [v.value() + 0, v.read_value(), v[:1] + 0, v.numpy(), v.sum()]
        v.assign_add(x)
        return [*before, v.value()]

    def copies():
        own = strategy.experimental_local_results(strategy.run(v.read_value))
        return [one.tolist() for one in own]

    results = update(v, add, (xp.ones(2),))
    for rank, found in enumerate(strategy.experimental_local_results(results)):
        own = 5.0 + rank
        expected = [[own] * 2, [own] * 2, [own], [own] * 2, 2 * own, [own + 1] * 2]
        assert [one.tolist() for one in found] == expected
    assert copies() == [[6.0 + rank] * 2 for rank in range(N)]
    assert update(v, lambda v: v.assign([1.0, 1.0])) is v
    assert copies() == [[1, 1]] * N

    def merged(strategy):
        return update(v, lambda v: v.assign([2.0, 2.0], read_value=False))

    strategy.run(lambda: hs.get_replica_context().merge_call(merged))
    assert copies() == [[2, 2]] * N
    strategy.extended.update_non_slot([v], lambda: None)
    strategy.extended.update_non_slot([], lambda v: v.assign_sub(v.value() / 2), (v,))
    assert copies() == [[1, 1]] * N


def test_an_update_of_another_variable(strategy, xp):
    """It is the cross-replica context, and that of an `ON_READ` variable the replica context."""
    v, update = make(strategy, xp.full(2, 5.0), "SUM", name="own"), strategy.extended.update
    with strategy.scope():
        w = hs.Variable(xp.zeros(2), name="shared")
    update(w, lambda w: w.assign(v.read_value()))
    assert w.numpy().tolist() == [5.0 * N] * 2
    if N > 1:
        with pytest.raises(RuntimeError, match="one value per replica"):
            update(w, lambda w: v.value())
        with pytest.raises(ValueError, match="Variable.assign_add of 'own': .* use assign"):
            update(w, lambda w: v.assign_add(w))
    strategy.extended.update_non_slot([], lambda: v.assign(w + N))
    assert v.numpy().tolist() == [5 * N + N] * 2
    own = strategy.experimental_local_results(strategy.run(v.read_value))
    assert [one.tolist() for one in own] == [[6.0] * 2] * N
    with pytest.raises(ValueError, match="Variable.assign of 'shared' in a replica context"):
        update(v, lambda v: w.assign(v.value()))
    assert w.numpy().tolist() == [5.0 * N] * 2


@pytest.mark.parametrize("dtype", [np.int16, np.uint32])
def test_a_sum_of_integers_is_shared_out(strategy, xp, dtype):
    v = make(strategy, np.zeros(3, dtype), "SUM")
    strategy.run(lambda: v.assign_add(xp.arange(3, dtype=dtype)))
    assert v.numpy().tolist() == [0, N, 2 * N]
    v.assign(xp.array([N, 0, 5 * N], dtype))
    own = strategy.experimental_local_results(strategy.run(v.read_value))
    assert [found.tolist() for found in own] == [[1, 0, 5]] * N
    if N > 1:
        with pytest.raises(
            ValueError, match=rf"sums over {N} replicas, and .* cannot be divided among them in"
        ):
            v.assign([1, 0, 0])
        assert v.numpy().tolist() == [N, 0, 5 * N]
    v.assign([0, 0, 0])
    assert v.numpy().tolist() == [0, 0, 0]
