"""Variables of every strategy: making and writing them."""

import functools
import inspect
import time

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
BFLOAT16 = ml_dtypes.bfloat16
# In a record, in a mailbox, in many chunks of every rank.
SHAPES = [(), (3,), (7, 7), (70, 130), (400_003,)]


INITIAL = {
    "complex": (1 + 2j, None, np.complex128),
    "list of floats": ([1.0, 2.0], None, np.float32),
    "empty list": ([], None, np.float32),
    "array of bfloat16": (np.ones(2, BFLOAT16), None, BFLOAT16),
    "big-endian": (np.arange(3, dtype=">i4"), None, np.int32),
    "transposed": (np.arange(6.0).reshape(2, 3).T, None, np.float64),
    "broadcast": (np.broadcast_to(np.float32(3), (4, 5)), None, np.float32),
    "float as bfloat16": (1.5, BFLOAT16, BFLOAT16),
    "int as uint8": (255, "uint8", np.uint8),
    "array as int8": (np.arange(3), np.int8, np.int8),
    "function of a list": (lambda: [1.0, 2.0], None, np.float32),
}


def test_the_dtype_and_the_value(strategy, xp):
    for case, (initial, dtype, expected) in INITIAL.items():
        with strategy.scope():
            v = hs.Variable(initial, dtype=dtype)
        given = np.asarray(initial() if callable(initial) else initial)
        assert v.dtype == np.dtype(expected) and v.dtype.isnative, case
        assert (v.shape, v.ndim, v.size) == (given.shape, given.ndim, given.size), case
        assert type(v.numpy()) is np.ndarray, case
        assert type(v.value()) is type(v.read_value()) is xp.ndarray, case
        assert v.numpy().dtype == v.value().dtype == v.dtype, case
        assert v.numpy().tolist() == given.astype(expected).tolist(), case


def test_facts(strategy, place):
    kinds, sums = hs.VariableSynchronization, hs.VariableAggregation
    with strategy.scope():
        plain = hs.Variable(1.0)
        told = hs.Variable([1.0], False, "weights", np.float64, kinds.ON_WRITE, sums.SUM, (1,))
        by_name = hs.Variable(1.0, synchronization="on_read", aggregation="mean")
        trained = hs.Variable(1.0, trainable=True, synchronization="ON_READ")
        default = hs.Variable(1.0, synchronization=None, aggregation=None)
        if isinstance(strategy, hs.MirroredStrategy):
            with pytest.raises(ValueError, match="Variable: synchronization is NONE, .* Mirrored"):
                hs.Variable(1.0, synchronization="NONE")
        else:
            assert hs.Variable(1.0, synchronization="NONE").synchronization is kinds.NONE
    assert (plain.name, plain.trainable) == ("Variable", True)
    for v in (plain, default):
        assert (v.synchronization, v.aggregation) == (kinds.AUTO, sums.NONE)
    assert (told.name, told.trainable, told.dtype) == ("weights", False, np.float64)
    assert told.aggregation is sums.SUM
    assert (by_name.synchronization, by_name.aggregation) == (kinds.ON_READ, sums.MEAN)
    assert (by_name.trainable, trained.trainable) == (False, True)
    owner = RANK if isinstance(strategy, hs.MirroredStrategy) else 0
    assert plain.device == f"/job:localhost/replica:0/task:0/device:{place.devices[owner]}"
    assert repr(told) == "Variable('weights', shape=(1,), dtype=float64, array([1.]))"
    assert strategy.extended.variable_created_in_scope(plain)
    own = strategy.run(lambda: plain.distribute_strategy is strategy)
    assert strategy.experimental_local_results(own) == (True,) * N
    with pytest.raises(AttributeError, match="made outside of every scope"):
        _ = hs.Variable(1.0).distribute_strategy


def test_the_arguments_are_tensorflows(strategy):
    arguments = inspect.signature(hs.Variable).parameters
    names = "initial_value trainable name dtype synchronization aggregation shape validate_shape "
    assert list(arguments) == (names + "constraint caching_device").split()
    assert arguments["trainable"].default is None
    assert arguments["aggregation"].default is hs.VariableAggregation.NONE
    with strategy.scope():
        v = hs.Variable([1.0, 2.0], validate_shape=True, constraint=None, caching_device="CPU:0")
    v.assign_add(delta=[1.0, 2.0])  # tf.Variable's name of the value
    v.assign_sub(delta=[0.5, 0.5])
    assert v.numpy().tolist() == [1.5, 3.5]
    # Names may end in the replica's number.
    own = strategy.run(lambda: hs.Variable(1.0, name=f"foo_{hs.replica_id()}"))
    assert (own.name, strategy.run(lambda: hs.Variable(1.0, name="w_1")).name) == ("foo_0", "w_1")


def test_the_initial_value_is_a_copy_of_the_parameter_ranks(strategy, xp):
    initial = xp.full(4, RANK + 7.0, np.float32)
    with strategy.scope():
        v = hs.Variable(initial)
        w = hs.Variable(v)
        large = hs.Variable(lambda: xp.full((300, 70), RANK + 8.0))
        initial[:] = -1
        v.assign_add(xp.ones(4))
    assert v.numpy().tolist() == [8] * 4
    assert w.numpy().tolist() == [7] * 4 and w.dtype == np.float32
    assert (large.numpy() == 8).all()


def test_a_variable_of_no_scope_is_every_processes_own(strategy):
    v = hs.Variable(np.full(3, float(RANK)))
    if RANK == 0:  # so nothing is collective
        v.assign_add(np.ones(3))
    expected = [RANK + (RANK == 0)] * 3
    assert v.numpy().tolist() == expected
    v.value()[...] = -1  # a copy
    assert v.numpy().tolist() == expected
    with strategy.scope():
        v.assign_sub(np.full(3, float(RANK)))
    assert v.numpy().tolist() == [RANK == 0] * 3


ADDITIONS = {
    "assign_add": lambda strategy, v, ones: v.assign_add(ones),
    "assign_add in a replica": lambda strategy, v, ones: strategy.run(v.assign_add, (ones / N,)),
    "scatter_add": lambda strategy, v, ones: v.scatter_add(
        hs.IndexedSlices(ones, np.arange(len(ones)))
    ),
    "update": lambda strategy, v, ones: strategy.extended.update(
        v, lambda v: v.assign(v.value() + 1)
    ),
    "apply_gradients": lambda strategy, v, ones: strategy.run(
        lambda: hs.optimizers.SGD(1.0).apply_gradients([(-ones / N, v)])
    ),
}


@pytest.mark.mpi(min_size=2)
def test_a_write_waits_for_a_rank_that_still_reads(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(20_000), aggregation="SUM")
    before = 0
    for name, add in ADDITIONS.items():
        for late in range(N):
            if late == RANK:
                time.sleep(0.01)  # the others go as far as they can meanwhile
            np.testing.assert_allclose(v.numpy(), before, err_msg=name)
            add(strategy, v, strategy.xp.ones(20_000))
            before += 1


@pytest.mark.parametrize(
    "aggregation, dtype, shapes",
    [
        ("MEAN", BFLOAT16, SHAPES[:3]),
        ("SUM", np.complex64, SHAPES),
        ("SUM", np.uint8, SHAPES[2:]),
        ("SUM", np.int16, SHAPES[1:4]),
        ("ONLY_FIRST_REPLICA", np.uint16, SHAPES[1:4]),
    ],
)
def test_writes_in_a_replica_context_are_aggregated(strategy, place, aggregation, dtype, shapes):
    """test_properties.py has other dtypes. Whole numbers: their sums are exact."""
    for shape in shapes:
        size, parts = int(np.prod(shape)), []
        for rank in range(N):
            part = (np.arange(size) * (3 + rank) + 5 * rank) % 7
            parts.append(part.reshape(shape).astype(dtype))
        new, before = parts[0], np.ones(shape, dtype)
        if aggregation != "ONLY_FIRST_REPLICA":
            new = functools.reduce(np.add, parts)
        if aggregation == "MEAN":
            new = (new / N).astype(dtype)
        verbs = {"assign": new, "assign_add": before + new, "assign_sub": before - new}
        for verb, expected in verbs.items():
            with strategy.scope():
                v = hs.Variable(before, aggregation=aggregation)

            def replica(v=v, verb=verb, parts=parts):
                return getattr(v, verb)(place.xp.asarray(parts[RANK])), v.value().copy()

            returned, seen = strategy.run(replica)
            assert returned is v and v.numpy().dtype == np.dtype(dtype)
            if place.kind == "GPU" and aggregation == "MEAN":  # its division: another last bit
                np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
            else:
                assert v.numpy().tobytes() == expected.tobytes()
            for one in strategy.experimental_local_results(seen):
                assert hs.asnumpy(one).tobytes() == v.numpy().tobytes()
            assert getattr(v, verb)(new, read_value=False) is None


def test_large_sums_are_in_rank_order_on_the_cpu(strategy, place):
    """And in NCCL's own order on GPUs, the same on all ranks."""
    parts = [np.random.default_rng(r).standard_normal(200_001, np.float32) for r in range(N)]
    with strategy.scope():
        v = hs.Variable(np.zeros(200_001, np.float32), aggregation="SUM")
    strategy.run(lambda: v.assign(place.xp.asarray(parts[RANK])))
    expected = functools.reduce(np.add, parts)
    if place.kind == "CPU":
        assert v.numpy().tobytes() == expected.tobytes()
    np.testing.assert_allclose(v.numpy(), expected, rtol=0, atol=1e-5)
    assert len(set(COMM.allgather(v.numpy().tobytes()))) == 1


CASTS = [
    (np.float32, [1, 2], None),
    (np.float32, [1, 2], np.int64),
    (np.float32, [True, False], np.bool_),
    (np.float32, [1.5, 2.5], np.float64),
    (np.int32, [1, -1], np.int64),
    (np.int32, [1, 255], np.uint8),
    (BFLOAT16, [1.5, 2.5], None),
    (np.uint8, [255, 0], None),
]


def test_values_are_cast_to_the_dtype(strategy, xp):
    with strategy.scope():
        for to, value, dtype in CASTS:
            v = hs.Variable(np.zeros(2, to), aggregation="SUM")
            v.assign(value if dtype is None else xp.asarray(value, dtype))
            assert (v.numpy().tolist(), v.dtype) == (value, to), (to, dtype)
        v = hs.Variable(np.zeros(3, np.float32), aggregation="SUM")
        yes = hs.Variable([True, False], aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: v.assign(xp.full(3, RANK + 0.5)))  # a sum of float64 for float32
    assert v.numpy().tolist() == [N * (N - 1) / 2 + 0.5 * N] * 3
    assert v.dtype == np.float32
    strategy.run(lambda: yes.assign([RANK > 0, RANK == 0]))
    assert yes.numpy().tolist() == [False, True]


def test_what_replicas_count_is_summed_whether_it_agrees_or_not(strategy, xp):
    with strategy.scope():
        hits, losses = (hs.Variable(zero, aggregation="SUM") for zero in (0, 0.0))
    for step in range(6):

        def replica(step=step):
            hits.assign_add(step * (RANK if step % 3 else 1))
            losses.assign_add(0.5 * (RANK if step % 2 else 1))

        strategy.run(replica)
    ranks = N * (N - 1) // 2
    assert hits.numpy() == 3 * N + (1 + 2 + 4 + 5) * ranks
    assert losses.numpy() == 0.5 * 3 * (N + ranks)
    for one in (1, 1.0, True, np.float32(1), np.float64(1), xp.ones(()), xp.array(1)):
        strategy.run(lambda one=one: losses.assign(one))
        assert losses.numpy() == N


@pytest.mark.parametrize("shape, aggregation", [((6,), "MEAN"), ((300, 300), "SUM")])
def test_a_value_may_overlap_storage(strategy, shape, aggregation):
    factor = N if aggregation == "SUM" else 1
    start = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    with strategy.scope():
        v = hs.Variable(start, aggregation=aggregation)
        w = hs.Variable(-start, aggregation=aggregation)
    expected = start[::-1] * factor
    strategy.run(lambda: v.assign(v.value()[::-1]))
    assert np.array_equal(v.numpy(), expected)
    strategy.run(lambda: v.assign_add(v[::-1]))
    expected = expected + factor * expected[::-1]
    assert np.array_equal(v.numpy(), expected)
    strategy.run(lambda: v.assign_sub(v.value().T))
    expected = expected - factor * expected.T
    assert np.array_equal(v.numpy(), expected)
    strategy.run(lambda: w.assign(v))
    assert np.array_equal(w.numpy(), factor * expected)
    strategy.extended.update(v, lambda v: v.assign(v.value()[::-1]))
    assert np.array_equal(v.numpy(), expected[::-1])
    v.assign(v[::-1])
    v.assign_add(v)
    assert np.array_equal(v.numpy(), 2 * expected)


@pytest.mark.parametrize("dtype", [np.float64, np.int16])  # NCCL sums int16 in another dtype
def test_arrays_of_any_layout_are_written(strategy, xp, dtype):
    base = xp.arange(12, dtype=dtype).reshape(3, 4)
    foreign = hs.asnumpy(base).T.astype(np.dtype(dtype).newbyteorder(">"))
    with strategy.scope():
        v = hs.Variable(np.zeros((4, 3), dtype), aggregation="SUM")
        for array in (base.T, xp.asfortranarray(base.T), xp.repeat(base.T, 2, 0)[::2], foreign):
            v.assign(array)
            assert np.array_equal(v.numpy(), foreign)
            strategy.run(lambda array=array: v.assign_add(array))
            assert np.array_equal(v.numpy(), (1 + N) * foreign)


def test_an_overflow_is_inf_on_every_rank(strategy, xp):
    """Warnings are errors here, and only one rank has the element that overflows."""
    with strategy.scope():
        v = hs.Variable(np.full(100_000, 3e38, np.float32), aggregation="SUM")
        cast = hs.Variable(np.zeros(3, np.float32), aggregation="SUM")
    change = np.zeros(100_000)
    change[-1] = 3e38
    with np.errstate(all="raise"):
        strategy.run(lambda: v.assign_add(xp.asarray(change)))
        strategy.run(lambda: cast.assign(xp.full(3, 1e300 if RANK == 0 else 1.0)))
    assert np.isinf(v.numpy()[-1])
    assert (v.numpy()[:-1] == np.float32(3e38)).all()
    assert np.isinf(cast.numpy()).all()


def test_many_variables_at_once(strategy, xp):
    """More than is kept of messages, and sizes that alternate between record and mailbox."""
    with strategy.scope():
        starts = [np.full(1 + 37 * i % 90, float(i)) for i in range(30)]
        made = [hs.Variable(start, aggregation="SUM") for start in starts]
    for _ in range(3):
        strategy.run(
            lambda: [v.assign_add(xp.full(v.shape, float(RANK * i))) for i, v in enumerate(made)]
        )
    for i, v in enumerate(made):
        assert set(v.numpy().tolist()) == {i + 3 * i * N * (N - 1) / 2}
