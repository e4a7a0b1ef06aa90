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
SHAPES = [(), (3,), (5, 9), (7, 7), (70, 130), (400_003,)]


def numbers(shape, dtype, seed=0):
    """Whole numbers, whose sums over a few ranks are exact in every dtype."""
    size = int(np.prod(shape))
    return (
        ((np.arange(size) * 3 + 5 * seed + seed * np.arange(size)) % 7).reshape(shape).astype(dtype)
    )


def same_everywhere(array):
    return len(set(COMM.allgather(array.tobytes()))) == 1


# ---- making them


INITIAL = {
    "complex": (1 + 2j, None, np.complex128),
    "list of floats": ([1.0, 2.0], None, np.float32),
    "list of ints": ([[1, 2], [3, 4]], None, np.int32),
    "empty list": ([], None, np.float32),
    "array of int64": (np.arange(3), None, np.int64),
    "array of float16": (np.ones((2, 3), np.float16), None, np.float16),
    "array of bfloat16": (np.ones(2, BFLOAT16), None, BFLOAT16),
    "big-endian": (np.arange(3, dtype=">i4"), None, np.int32),
    "transposed": (np.arange(6.0).reshape(2, 3).T, None, np.float64),
    "broadcast": (np.broadcast_to(np.float32(3), (4, 5)), None, np.float32),
    "float as bfloat16": (1.5, BFLOAT16, BFLOAT16),
    "int as int64": (2**40, np.int64, np.int64),
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


def test_the_parameter_ranks_value_counts(strategy, xp):
    with strategy.scope():
        small = hs.Variable(xp.full(3, RANK + 7.0))
        large = hs.Variable(lambda: xp.full((300, 70), RANK + 8.0))
    assert small.numpy().tolist() == [7.0] * 3
    assert (large.numpy() == 8).all()


def test_facts(strategy, place):
    kinds, sums = hs.VariableSynchronization, hs.VariableAggregation
    with strategy.scope():
        plain = hs.Variable(1.0)
        told = hs.Variable([1.0], False, "weights", np.float64, kinds.ON_WRITE, sums.SUM, (1,))
        by_name = hs.Variable(1.0, synchronization="on_read", aggregation="mean")
        trained = hs.Variable(1.0, trainable=True, synchronization="ON_READ")
        default = hs.Variable(1.0, synchronization=None, aggregation=None)
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


def test_mirrors_are_synchronized(strategy):
    with strategy.scope():
        if isinstance(strategy, hs.MirroredStrategy):
            with pytest.raises(ValueError, match="Variable: synchronization is NONE, .* Mirrored"):
                hs.Variable(1.0, synchronization="NONE")
        else:
            v = hs.Variable(1.0, synchronization="NONE")
            assert v.synchronization is hs.VariableSynchronization.NONE


def test_names_that_end_in_the_replicas_number(strategy):
    made = []

    def replica():
        context = hs.get_replica_context()
        made.append(hs.Variable(1.0, name=f"foo_{context.replica_id_in_sync_group}"))
        made.append(hs.Variable(1.0, name="layer_1"))
        made.append(hs.Variable(1.0))

    strategy.run(replica)
    assert [v.name for v in made] == ["foo_0", "layer_1", "Variable"]


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


def test_the_initial_value_is_copied(strategy, xp):
    initial = xp.arange(4.0, dtype=np.float32)
    with strategy.scope():
        v = hs.Variable(initial)
        w = hs.Variable(v)
        initial[:] = -1
        v.assign_add(xp.ones(4))
    assert v.numpy().tolist() == [1, 2, 3, 4]
    assert w.numpy().tolist() == [0, 1, 2, 3] and w.dtype == np.float32


def test_a_variable_knows_its_strategy(strategy):
    with strategy.scope():
        v = hs.Variable(1.0)
    assert v.distribute_strategy is strategy
    own = strategy.run(lambda: v.distribute_strategy is strategy)
    assert strategy.experimental_local_results(own) == (True,) * N
    with pytest.raises(AttributeError, match="made outside of every scope"):
        _ = hs.Variable(1.0).distribute_strategy


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


# ---- writing them


def expected_of(verb, before, new):
    if verb == "assign":
        return new
    return before + new if verb == "assign_add" else before - new


def aggregated(aggregation, parts):
    if aggregation == "ONLY_FIRST_REPLICA":
        return parts[0]
    total = functools.reduce(np.add, parts)
    return total if aggregation == "SUM" else (total / len(parts)).astype(parts[0].dtype)


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


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_writes_in_the_cross_replica_context_happen_once(strategy, xp, aggregation):
    for i, shape in enumerate(SHAPES):
        dtype = (np.float32, np.int64)[i % 2]
        for verb in ("assign", "assign_add", "assign_sub"):
            before, new = numbers(shape, dtype), numbers(shape, dtype, 3)
            with strategy.scope():
                v = hs.Variable(before, aggregation=aggregation)
                assert getattr(v, verb)(xp.asarray(new)) is v
            once = expected_of(verb, before, new)
            assert np.array_equal(v.numpy(), once)
            # Outside of the scope too, and from the host.
            assert getattr(v, verb)(new, read_value=False) is None
            assert np.array_equal(v.numpy(), expected_of(verb, once, new))
            assert same_everywhere(v.numpy())


WRITES = [
    ("assign", "SUM", np.float32, SHAPES),
    ("assign_add", "MEAN", np.float32, SHAPES),
    ("assign_sub", "ONLY_FIRST_REPLICA", np.float32, SHAPES),
    ("assign", "MEAN", np.float64, SHAPES[::2]),
    ("assign_add", "SUM", np.float64, SHAPES[1::2]),
    ("assign_sub", "MEAN", BFLOAT16, SHAPES[::2]),
    ("assign", "ONLY_FIRST_REPLICA", np.complex64, SHAPES[::2]),
    ("assign_sub", "SUM", np.complex64, SHAPES[::2]),
    ("assign_add", "SUM", np.int32, SHAPES[1::2]),
    ("assign_sub", "SUM", np.uint8, SHAPES[::2]),
    ("assign", "SUM", np.int16, SHAPES[1::2]),
    ("assign_add", "ONLY_FIRST_REPLICA", np.uint16, SHAPES[::2]),
]


@pytest.mark.parametrize("verb, aggregation, dtype, shapes", WRITES)
def test_writes_in_a_replica_context_are_aggregated(
    strategy, place, verb, aggregation, dtype, shapes
):
    for shape in shapes:
        before = numbers(shape, dtype, 9)
        parts = [numbers(shape, dtype, rank) for rank in range(N)]
        new = aggregated(aggregation, parts)
        with strategy.scope():
            v = hs.Variable(before, aggregation=aggregation)

        def replica(v=v, parts=parts):
            result = getattr(v, verb)(place.xp.asarray(parts[RANK]))
            return result, v.value().copy()

        returned, seen = strategy.run(replica)
        expected = expected_of(verb, before, new)
        assert returned is v
        assert v.numpy().dtype == np.dtype(dtype)
        if place.kind == "GPU" and aggregation == "MEAN":  # its division differs in the last bit
            np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)
        else:
            assert v.numpy().tobytes() == expected.tobytes()
        for one in strategy.experimental_local_results(seen):
            assert hs.asnumpy(one).tobytes() == v.numpy().tobytes()


def test_values_in_columns_are_summed(strategy, place):
    """They are not reduced in place, and NCCL sums 16-bit integers in another dtype."""
    for dtype in (np.float32, np.int16, np.int64):
        with strategy.scope():
            v = hs.Variable(np.ones((2, 3), dtype), aggregation="SUM")
        columns = place.xp.arange(6, dtype=dtype).reshape(3, 2).T
        for _ in range(2):
            strategy.run(lambda v=v, columns=columns: v.assign_add(columns))
        assert v.numpy().tolist() == (1 + 2 * N * np.arange(6).reshape(3, 2).T).tolist()


def test_large_sums_are_in_rank_order_on_the_cpu(strategy, place):
    """And in NCCL's own order on GPUs, the same on all ranks."""
    parts = [
        np.random.default_rng(rank).standard_normal(200_001).astype(np.float32) for rank in range(N)
    ]
    with strategy.scope():
        v = hs.Variable(np.zeros(200_001, np.float32), aggregation="SUM")
    strategy.run(lambda: v.assign(place.xp.asarray(parts[RANK])))
    expected = functools.reduce(np.add, parts)
    if place.kind == "CPU":
        assert v.numpy().tobytes() == expected.tobytes()
    np.testing.assert_allclose(v.numpy(), expected, rtol=0, atol=1e-5)
    assert same_everywhere(v.numpy())


def test_values_are_cast_to_the_dtype(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), aggregation="SUM")
        i = hs.Variable(np.zeros(2, np.int32), aggregation="SUM")
        b = hs.Variable(np.zeros(2, BFLOAT16))
        u = hs.Variable(np.zeros(2, np.uint8))
        yes = hs.Variable([True, False], aggregation="ONLY_FIRST_REPLICA")
        v.assign(xp.array([1.0, 2.0, 3.0]))
        v.assign_add([1, 2, 3])
        v.assign_add(xp.array([1, 2, 3], np.int64))
        v.assign_add(xp.array([True, False, True]))
        i.assign(xp.array([3, -4]))
        i.assign_add([1, 1])
        i.assign_add(xp.array([1, 1], np.uint8))
        b.assign([1.5, 2.5])
        u.assign([255, 0])
    assert (v.numpy().tolist(), v.dtype) == ([4.0, 6.0, 10.0], np.float32)
    assert (i.numpy().tolist(), i.dtype) == ([5, -2], np.int32)
    assert (b.numpy().tolist(), b.dtype) == ([1.5, 2.5], BFLOAT16)
    assert u.numpy().tolist() == [255, 0]
    strategy.run(lambda: v.assign(xp.full(3, RANK + 0.5)))  # a sum of float64 for float32
    assert v.numpy().tolist() == [N * (N - 1) / 2 + 0.5 * N] * 3
    assert v.dtype == np.float32
    strategy.run(lambda: yes.assign([RANK > 0, RANK == 0]))
    assert yes.numpy().tolist() == [False, True]


def test_what_replicas_count_is_summed_whether_it_agrees_or_not(strategy, xp):
    with strategy.scope():
        hits = hs.Variable(0, aggregation="SUM")
        losses = hs.Variable(0.0, aggregation="SUM")
    for step in range(12):

        def replica(step=step):
            hits.assign_add(step * (RANK if step % 3 else 1))
            losses.assign_add(0.5 * (RANK if step % 2 else 1))

        strategy.run(replica)
    agreed, differing = sum(range(0, 12, 3)), sum(step for step in range(12) if step % 3)
    assert hits.numpy() == agreed * N + differing * N * (N - 1) // 2
    assert losses.numpy() == 0.5 * 6 * (N + N * (N - 1) // 2)
    for one in (1, 1.0, True, np.float32(1), np.float64(1), xp.ones(()), xp.array(1)):
        strategy.run(lambda one=one: losses.assign(one))
        assert losses.numpy() == N


@pytest.mark.parametrize("shape", [(6,), (300, 300)], ids=str)
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
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


def test_arrays_of_any_layout_are_written(strategy, xp):
    base = xp.arange(12.0).reshape(3, 4)
    foreign = hs.asnumpy(base).T.astype(">f8")
    with strategy.scope():
        v = hs.Variable(np.zeros((4, 3)), aggregation="MEAN")
        for array in (base.T, xp.asfortranarray(base.T), xp.repeat(base.T, 2, 0)[::2], foreign):
            v.assign(np.zeros((4, 3)))
            v.assign(array)
            assert np.array_equal(v.numpy(), foreign)
            v.assign(np.zeros((4, 3)))
            strategy.run(lambda array=array: v.assign(array))
            assert np.array_equal(v.numpy(), foreign)


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
    shapes = [(1 + 37 * i % 90,) for i in range(30)]
    with strategy.scope():
        variables = [
            hs.Variable(np.full(shape, float(i)), aggregation="SUM")
            for i, shape in enumerate(shapes)
        ]

    def replica():
        for i, v in enumerate(variables):
            v.assign_add(xp.full(v.shape, float(RANK * i)))

    for _ in range(3):
        strategy.run(replica)
    for i, v in enumerate(variables):
        assert set(v.numpy().tolist()) == {i + 3 * i * N * (N - 1) / 2}
