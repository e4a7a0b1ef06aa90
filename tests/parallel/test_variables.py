"""Variables of every strategy: making, reading and writing them."""

import functools
import operator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STRATEGIES = {"central": hs.CentralStorageStrategy, "mirrored": hs.MirroredStrategy}
if N == 1:
    STRATEGIES["one device"] = functools.partial(hs.OneDeviceStrategy, "CPU:0")
SHAPES = [(), (3,), (5, 9), (7, 7), (70, 130), (400_003,)]  # in a record, in a mailbox, in many chunks of every rank


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    with STRATEGIES[request.param]() as made:
        yield made


@pytest.fixture(params=["cross-replica", "replica"])
def within(request, strategy):
    """Runs a function of no arguments in the context of that name."""
    if request.param == "replica":

        def run(fn):
            box = []
            strategy.run(lambda: box.append(fn()))
            return box[0]

    else:

        def run(fn):
            with strategy.scope():
                return fn()

    return run


def replica_context() -> Any:
    return hs.get_replica_context()


def numbers(shape, dtype, seed=0):
    """Whole numbers, whose sums over a few ranks are exact in every dtype."""
    size = int(np.prod(shape))
    return ((np.arange(size) * 3 + 5 * seed + seed * np.arange(size)) % 7).reshape(shape).astype(dtype)


def same_everywhere(array):
    return len(set(COMM.allgather(np.asarray(array).tobytes()))) == 1


# ---- making them


@pytest.mark.parametrize(
    ("initial", "dtype", "expected"),
    [
        (1.5, None, np.float32),
        (2, None, np.int32),
        (True, None, np.bool_),
        (1 + 2j, None, np.complex128),
        ([1.0, 2.0], None, np.float32),
        ([[1, 2], [3, 4]], None, np.int32),
        ([1, 2.5], None, np.float32),
        ([], None, np.float32),
        ((), None, np.float32),
        (np.float64(1.5), None, np.float64),
        (np.int8(3), None, np.int8),
        (np.arange(3), None, np.int64),
        (np.arange(3.0), None, np.float64),
        (np.ones((2, 3), np.float16), None, np.float16),
        (np.ones(2, BFLOAT16), None, BFLOAT16),
        (np.arange(3, dtype=">i4"), None, np.int32),
        (np.arange(6.0).reshape(2, 3).T, None, np.float64),
        (np.arange(6.0)[::-2], None, np.float64),
        (np.broadcast_to(np.float32(3), (4, 5)), None, np.float32),
        (1.5, np.float64, np.float64),
        (1.5, BFLOAT16, BFLOAT16),
        (1, np.float32, np.float32),
        (2**40, np.int64, np.int64),
        (255, "uint8", np.uint8),
        (np.arange(3.0), np.float32, np.float32),
        (np.arange(3), np.int8, np.int8),
        (lambda: [1.0, 2.0], None, np.float32),
        (lambda: np.arange(3), None, np.int64),
    ],
)
def test_the_dtype_and_the_value(strategy, initial, dtype, expected):
    with strategy.scope():
        v = hs.Variable(initial, dtype=dtype)
    given = np.asarray(initial() if callable(initial) else initial)
    assert v.dtype == np.dtype(expected) and v.dtype.isnative
    assert (v.shape, v.ndim, v.size) == (given.shape, given.ndim, given.size)
    assert isinstance(v.numpy(), np.ndarray)
    assert v.numpy().dtype == v.dtype
    assert v.numpy().tolist() == given.astype(expected).tolist()


def test_the_parameter_ranks_value_counts(strategy):
    with strategy.scope():
        small = hs.Variable(np.full(3, RANK + 7.0))
        large = hs.Variable(lambda: np.full((300, 70), RANK + 8.0))
    assert small.numpy().tolist() == [7.0] * 3
    assert (large.numpy() == 8).all()


def test_facts(strategy):
    with strategy.scope():
        plain = hs.Variable(1.0)
        told = hs.Variable(
            [1.0], False, "weights", np.float64, hs.VariableSynchronization.ON_WRITE, hs.VariableAggregation.SUM, (1,)
        )
        by_name = hs.Variable(1.0, synchronization="on_read", aggregation="mean")
        trained = hs.Variable(1.0, trainable=True, synchronization="ON_READ")
    assert (plain.name, plain.trainable) == ("Variable", True)
    assert (plain.synchronization, plain.aggregation) == (
        hs.VariableSynchronization.AUTO,
        hs.VariableAggregation.NONE,
    )
    assert (told.name, told.trainable, told.dtype) == ("weights", False, np.float64)
    assert told.aggregation is hs.VariableAggregation.SUM
    assert by_name.synchronization is hs.VariableSynchronization.ON_READ
    assert by_name.aggregation is hs.VariableAggregation.MEAN
    assert (by_name.trainable, trained.trainable) == (False, True)
    assert plain.device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert repr(told) == "Variable('weights', shape=(1,), dtype=float64, array([1.]))"
    assert strategy.extended.variable_created_in_scope(plain)


def test_one_variable_makes_another(strategy):
    with strategy.scope():
        first = hs.Variable([1.0, 2.0])
        second = hs.Variable(first)
        first.assign([5.0, 6.0])
    assert second.numpy().tolist() == [1.0, 2.0]
    assert second.dtype == np.float32


def test_the_initial_value_is_copied(strategy):
    initial = np.arange(4.0)
    with strategy.scope():
        v = hs.Variable(initial)
    initial[:] = -1
    assert v.numpy().tolist() == [0, 1, 2, 3]


def test_creators_are_asked_from_the_inside(strategy):
    asked = []

    def creator(label, **changes):
        def create(next_creator, **kwargs):
            asked.append((label, kwargs["name"], sorted(kwargs)))
            return next_creator(**{**kwargs, **changes})

        return create

    with strategy.scope(), hs.variable_creator_scope(creator("outer", dtype=np.float64)):
        with hs.variable_creator_scope(creator("inner", name="renamed")):
            v = hs.Variable(1.0, name="given")
        w = hs.Variable(1.0)
    x = hs.Variable(1.0)
    arguments = ["aggregation", "dtype", "initial_value", "name", "shape", "synchronization", "trainable"]
    assert asked == [("inner", "given", arguments), ("outer", "renamed", arguments), ("outer", None, arguments)]
    assert (v.name, v.dtype, w.dtype, x.dtype) == ("renamed", np.float64, np.float64, np.float32)


def test_a_variable_of_no_scope_is_every_processes_own():
    v = hs.Variable(np.full(3, float(RANK)))
    if RANK == 0:  # so nothing is collective
        v.assign_add(np.ones(3))
    assert v.numpy().tolist() == [RANK + (RANK == 0)] * 3
    v.value()[...] = -1  # a copy
    assert v.numpy().tolist() == [RANK + (RANK == 0)] * 3


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


@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_writes_in_the_cross_replica_context_happen_once(strategy, verb, aggregation):
    for shape in SHAPES:
        for dtype in (np.float32, np.int64):
            before, new = numbers(shape, dtype), numbers(shape, dtype, 3)
            with strategy.scope():
                v = hs.Variable(before, aggregation=aggregation)
                assert getattr(v, verb)(new) is v
            assert np.array_equal(v.numpy(), expected_of(verb, before, new))
            getattr(v, verb)(new)  # outside of the scope too
            assert np.array_equal(v.numpy(), expected_of(verb, expected_of(verb, before, new), new))
            assert same_everywhere(v.numpy())


@pytest.mark.parametrize("verb", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("aggregation", "dtype"),
    [
        *[(aggregation, dtype) for aggregation in ("SUM", "ONLY_FIRST_REPLICA") for dtype in (np.int32, np.uint8)],
        *[
            (aggregation, dtype)
            for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
            for dtype in (np.float32, np.float64, BFLOAT16, np.complex64)
        ],
    ],
    ids=str,
)
def test_writes_in_a_replica_context_are_aggregated(strategy, verb, aggregation, dtype):
    shapes = SHAPES if dtype is np.float32 else SHAPES[::2]
    for shape in shapes:
        before = numbers(shape, dtype, 9)
        parts = [numbers(shape, dtype, rank) for rank in range(N)]
        new = aggregated(aggregation, parts)
        with strategy.scope():
            v = hs.Variable(before, aggregation=aggregation)

        def replica(v=v, parts=parts):
            result = getattr(v, verb)(parts[RANK])
            return result, v.value().copy()

        returned, seen = strategy.run(replica)
        expected = expected_of(verb, before, new)
        assert returned is v
        assert v.numpy().dtype == np.dtype(dtype)
        assert v.numpy().tobytes() == expected.tobytes()
        for one in strategy.experimental_local_results(seen):
            assert np.array_equal(one, expected)


def test_large_sums_are_in_rank_order(strategy):
    parts = [np.random.default_rng(rank).standard_normal(200_001).astype(np.float32) for rank in range(N)]
    with strategy.scope():
        v = hs.Variable(np.zeros(200_001, np.float32), aggregation="SUM")
    strategy.run(lambda: v.assign(parts[RANK]))
    assert v.numpy().tobytes() == functools.reduce(np.add, parts).tobytes()


def test_half_precision_sums_are_rounded_once(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(50_000, np.float16), aggregation="MEAN")
    strategy.run(lambda: v.assign(np.full(50_000, 60_000, np.float16)))
    assert (v.numpy() == 60_000).all()


def test_a_bool_takes_the_first_replicas(strategy):
    with strategy.scope():
        v = hs.Variable([True, False], aggregation="ONLY_FIRST_REPLICA")
    strategy.run(lambda: v.assign([RANK > 0, RANK == 0]))
    assert v.numpy().tolist() == [False, True]


def test_values_are_cast_to_the_dtype(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), aggregation="SUM")
        i = hs.Variable(np.zeros(2, np.int32), aggregation="SUM")
        b = hs.Variable(np.zeros(2, BFLOAT16))
        u = hs.Variable(np.zeros(2, np.uint8))
        v.assign(np.array([1.0, 2.0, 3.0]))
        v.assign_add([1, 2, 3])
        v.assign_add(np.array([1, 2, 3], np.int64))
        v.assign_add(np.array([True, False, True]))
        i.assign(np.array([3, -4]))
        i.assign_add([1, 1])
        i.assign_add(np.array([1, 1], np.uint8))
        b.assign([1.5, 2.5])
        u.assign([255, 0])
    assert (v.numpy().tolist(), v.dtype) == ([4.0, 6.0, 10.0], np.float32)
    assert (i.numpy().tolist(), i.dtype) == ([5, -2], np.int32)
    assert (b.numpy().tolist(), b.dtype) == ([1.5, 2.5], BFLOAT16)
    assert u.numpy().tolist() == [255, 0]
    strategy.run(lambda: v.assign(np.full(3, RANK + 0.5)))  # a sum of float64 for float32
    assert v.numpy().tolist() == [N * (N - 1) / 2 + 0.5 * N] * 3
    assert v.dtype == np.float32


def test_numbers_that_differ_and_equal_arrays_are_summed(strategy):
    with strategy.scope():
        v = hs.Variable(0.0, aggregation="SUM")
    strategy.run(lambda: v.assign(RANK + 0.5))
    assert v.numpy() == N * (N - 1) / 2 + 0.5 * N
    for one in (np.ones(()), np.float32(1), np.float64(1), np.array(1)):  # NumPy's scalars are no plain numbers
        strategy.run(lambda one=one: v.assign(one))
        assert v.numpy() == N


def test_the_same_number_is_a_mean_and_a_first_one(strategy):
    with strategy.scope():
        mean = hs.Variable(0.0, aggregation="MEAN")
        first = hs.Variable(0.0, aggregation="ONLY_FIRST_REPLICA")

    def replica():
        mean.assign_add(2.0)
        first.assign_sub(3)

    strategy.run(replica)
    assert (mean.numpy(), first.numpy()) == (2, -3)


@pytest.mark.parametrize("shape", [(6,), (300, 300)])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_a_value_may_overlap_storage(strategy, shape, aggregation):
    factor = N if aggregation == "SUM" else 1
    start = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    with strategy.scope():
        v = hs.Variable(start, aggregation=aggregation)
        w = hs.Variable(-start, aggregation=aggregation)

    def replica():
        v.assign(v.value()[::-1])
        w.assign(v.value())
        v.assign_add(v.value().T)
        v.assign_sub(v.value())

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


def test_updates_overlap_in_an_update_and_across(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(5.0))
        strategy.extended.update(v, lambda v: v.assign(v.value()[::-1]))
        assert v.numpy().tolist() == [4, 3, 2, 1, 0]
        v.assign(v[::-1])
        assert v.numpy().tolist() == [0, 1, 2, 3, 4]
        v.assign_add(v)
        assert v.numpy().tolist() == [0, 2, 4, 6, 8]


def test_reads_between_writes_see_them(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(1000), aggregation="SUM")

    def replica():
        seen = []
        for step in range(3):
            seen.append(v.read_value())
            v.assign_add(np.full(1000, float(RANK + step)))
        return seen

    found = strategy.experimental_local_results(strategy.run(replica))
    for seen in found:
        total = 0.0
        for step in range(3):
            assert set(seen[step].tolist()) == {total}
            total += N * step + N * (N - 1) / 2


def test_arrays_of_any_layout_are_written(strategy):
    base = np.arange(12.0).reshape(3, 4)
    with strategy.scope():
        v = hs.Variable(np.zeros((4, 3)), aggregation="MEAN")
        for array in (base.T, np.asfortranarray(base.T), base.T.astype(">f8"), np.repeat(base.T, 2, 0)[::2]):
            v.assign(np.zeros((4, 3)))
            v.assign(array)
            assert np.array_equal(v.numpy(), base.T)
            v.assign(np.zeros((4, 3)))
            strategy.run(lambda array=array: v.assign(array))
            assert np.array_equal(v.numpy(), base.T)


def test_an_overflow_is_inf_on_every_rank(strategy):
    """Warnings are errors here, and one rank alone has the element that overflows."""
    with strategy.scope():
        v = hs.Variable(np.full(100_000, 3e38, np.float32), aggregation="SUM")
    change = np.zeros(100_000)
    change[-1] = 3e38
    with np.errstate(all="raise"):
        strategy.run(lambda: v.assign_add(change))
    assert np.isinf(v.numpy()[-1])
    assert (v.numpy()[:-1] == np.float32(3e38)).all()


def test_a_value_too_large_for_the_dtype_is_inf_on_every_rank(strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), aggregation="SUM")
    with np.errstate(all="raise"):
        strategy.run(lambda: v.assign(np.full(3, 1e300 if RANK == 0 else 1.0)))
    assert np.isinf(v.numpy()).all()


def test_a_write_of_a_plain_variable_in_the_scope_is_local(strategy):
    v = hs.Variable(np.full(2, float(RANK)))
    with strategy.scope():
        v.assign_add(np.ones(2))
    assert v.numpy().tolist() == [RANK + 1] * 2


def test_many_variables_at_once(strategy):
    """More than what is kept of messages, and of sizes that alternate between record and mailbox."""
    shapes = [(1 + 37 * i % 90,) for i in range(30)]
    with strategy.scope():
        variables = [hs.Variable(np.full(shape, float(i)), aggregation="SUM") for i, shape in enumerate(shapes)]

    def replica():
        for i, v in enumerate(variables):
            v.assign_add(np.full(v.shape, float(RANK * i)))

    for _ in range(3):
        strategy.run(replica)
    for i, v in enumerate(variables):
        assert set(v.numpy().tolist()) == {i + 3 * i * N * (N - 1) / 2}


# ---- reading them


def test_reads_across_replicas_are_snapshots(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(4.0))
        reads = [v.value(), v.read_value(), v.numpy(), v[...], v[1:], np.asarray(v), np.array(v)]
        for array in reads:
            assert array.flags.writeable
            array[...] = -5
        assert v.numpy().tolist() == [0, 1, 2, 3]
        kept = v.value()
        v.assign(np.zeros(4))
        assert kept.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # by NumPy 2.5, which still does it
def test_reads_in_a_replica_are_the_array_itself(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(4.0), aggregation="MEAN")

    def replica():
        view = v.value()
        assert np.shares_memory(view, v.value())
        assert np.shares_memory(view, v[1:])
        assert np.shares_memory(view, np.asarray(v))
        for array in (view, v[...], v[1:], view.T, np.asarray(v)):
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
        v.value().shape = np.asarray(v).shape = (2, 2)
        assert v.shape == v.value().shape == (4,)
        for array in (v.read_value(), v.numpy(), np.array(v), np.asarray(v, np.float32)):
            assert array.flags.writeable and not np.shares_memory(array, view)
            array[...] = -1
        assert view.tolist() == [0, 1, 2, 3]
        kept = v.read_value()
        v.assign(np.zeros(4))
        assert v.value().tolist() == [0, 0, 0, 0]
        assert kept.tolist() == [0, 1, 2, 3]

    strategy.run(replica)


def test_a_view_that_leaves_run_is_copied(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(6.0).reshape(2, 3))
        left = strategy.run(lambda: {"all": v.value(), "part": [v[0], v.value().T], "sum": v.value()[1, 1]})
        v.assign(np.zeros((2, 3)))
    for one in strategy.experimental_local_results(left):
        assert one["all"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert one["part"][0].tolist() == [0, 1, 2]
        assert one["part"][1].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert one["sum"] == 4


def test_a_view_that_goes_into_merge_call_is_copied(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))

    def merge(strategy, value):
        v.assign(np.zeros(3))
        return value

    found = strategy.run(lambda: replica_context().merge_call(merge, args=(v.value(),)))
    for one in strategy.experimental_local_results(found):
        assert one.tolist() == [0, 1, 2]
    assert not v.numpy().any()


UNARY = [operator.neg, operator.pos, abs, np.exp, np.sum, np.mean, np.max, np.sort, np.linalg.norm, np.transpose]
UNARY += [np.isnan, np.cumsum, np.argmax, np.square, np.ravel, np.atleast_2d, np.copy, np.shape, np.ndim, np.size]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
BINARY += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.matmul, divmod]
BINARY += [np.maximum, np.hypot, np.dot, np.outer, np.add.outer, np.concatenate, np.logaddexp]


def equal(found, expected):
    if isinstance(expected, tuple):
        return all(map(np.array_equal, found, expected)) and type(found) is type(expected)
    return type(found) is type(expected) and np.array_equal(found, expected)


def test_arithmetic_is_the_arrays(strategy, within):
    array = np.array([[1.5, 2.0], [0.5, 3.0]], np.float32)
    other = np.array([[2.0, 1.0], [3.0, 0.25]])
    with strategy.scope():
        v, w = hs.Variable(array), hs.Variable(other)

    def body():
        for fn in UNARY:
            assert equal(fn(v), fn(array)), fn
        for fn in BINARY:
            if fn is np.concatenate:
                assert equal(fn([v, w]), fn([array, other]))
                continue
            assert equal(fn(v, w), fn(array, other)), fn
            assert equal(fn(v, other), fn(array, other)), fn
            assert equal(fn(other, v), fn(other, array)), fn
            if fn is not operator.matmul:
                assert equal(fn(v, 2), fn(array, 2)), fn
                assert equal(fn(2, v), fn(2, array)), fn
        assert (2 * v).dtype == np.float32  # a Python number is weak
        assert equal(np.add.reduce(v, axis=0), np.add.reduce(array, axis=0))
        assert equal(np.add.accumulate(v), np.add.accumulate(array))
        assert equal(np.where(v > 1, v, 0), np.where(array > 1, array, 0))
        out = np.empty((2, 2), np.float32)
        assert np.multiply(v, v, out=out) is out
        assert equal(out, array * array)
        out += v
        assert equal(out, array * array + array)
        result = v + 0
        assert result.flags.writeable  # fresh

    within(body)
    assert np.array_equal(v.numpy(), array)


def test_integers_and_booleans(strategy, within):
    with strategy.scope():
        i, b = hs.Variable([6, 3]), hs.Variable([True, False])

    def body():
        assert (i & 2).tolist() == [2, 2] and (1 | i).tolist() == [7, 3] and (i ^ i).tolist() == [0, 0]
        assert (i << 1).tolist() == [12, 6] and (i >> 1).tolist() == [3, 1] and (~i).tolist() == [-7, -4]
        assert (b & True).tolist() == [True, False] and (~b).tolist() == [False, True]
        assert np.arange(10)[i].tolist() == [6, 3]
        assert np.arange(2)[np.asarray(b)].tolist() == [0]

    within(body)


def test_python_numbers(strategy, within):
    with strategy.scope():
        f, i, yes, c = hs.Variable(2.75), hs.Variable(3), hs.Variable(True), hs.Variable(1 + 2j)
        vector = hs.Variable([1.0, 2.0, 3.0])

    def body():
        assert (int(f), float(f), float(i), bool(f), bool(yes)) == (2, 2.75, 3.0, True, True)
        assert complex(c) == 1 + 2j
        assert complex(f) == 2.75
        assert "abcdef"[i] == "d"
        assert list(range(i)) == [0, 1, 2]
        assert f"{float(f):.1f}" == "2.8"
        assert len(vector) == 3
        assert [float(x) for x in vector] == [1, 2, 3]
        assert 2.0 in vector and 5.0 not in vector
        with pytest.raises(ValueError, match="ambiguous"):
            bool(vector)
        with pytest.raises(TypeError):
            len(f)
        with pytest.raises(TypeError):
            float(vector)
        with pytest.raises(TypeError):
            "abc"[f]

    within(body)


def test_indexing(strategy, within):
    array = np.arange(24.0).reshape(2, 3, 4)
    with strategy.scope():
        v, zero = hs.Variable(array), hs.Variable(7.0)

    def body():
        for index in [0, -1, (1, 2), (1, 2, 3), slice(None, None, -1), ..., (..., 1), None, [1, 0], array > 5]:
            assert equal(v[index], array[index])
        assert zero[()] == 7 and zero[...].shape == ()
        with pytest.raises(IndexError):
            v[5]

    within(body)


def test_arrays_protocols(strategy, within):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0, dtype=np.float32))

    def body():
        assert np.asarray(v, np.float64).dtype == np.float64
        assert np.array(v, copy=True).tolist() == [0, 1, 2]
        found = np.from_dlpack(v)
        assert found.tolist() == [0, 1, 2]
        found = np.array(found)
        found[:] = 9
        assert v.numpy().tolist() == [0, 1, 2]
        assert v.__dlpack_device__() == (1, 0)
        assert hs.asnumpy({"v": [v, None]})["v"][0].tolist() == [0, 1, 2]

    within(body)


def test_no_copy_is_for_replicas(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
        with pytest.raises(ValueError, match="in a replica context only"):
            np.asarray(v, copy=False)

    def replica():
        array = np.asarray(v, copy=False)
        assert np.shares_memory(array, v.value())
        assert not array.flags.writeable

    strategy.run(replica)


def test_a_variable_is_written_by_its_methods_only(strategy, within):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))

    def body():
        with pytest.raises(TypeError, match="add: .* `out=` or `at`; use assign"):
            np.add(1, 2, out=v)
        with pytest.raises(TypeError, match="`out=` or `at`; use assign"):
            np.divmod(np.ones(3), 2, out=(np.ones(3), v))
        alias = v
        with pytest.raises(TypeError, match="multiply: .* `out=` or `at`"):
            alias *= 2
        with pytest.raises(TypeError, match="matmul: .* `out=` or `at`"):
            alias @= np.ones((3, 3))
        with pytest.raises(TypeError, match="add: .* `out=` or `at`"):
            np.add.at(v, [0], 1.0)
        with pytest.raises(TypeError, match="item assignment"):
            v[0] = 1.0  # pyright: ignore[reportIndexIssue]
        with pytest.raises(TypeError):
            np.copyto(v, 1.0)
        with pytest.raises(AttributeError):
            v.dtype = np.float64
        with pytest.raises(AttributeError):
            v.shape = (1, 3)
        with pytest.raises(AttributeError):
            v.other = 1  # a misspelt attribute

    within(body)
    assert v.numpy().tolist() == [0, 1, 2]


def test_equality_is_of_elements_and_hash_of_the_object(strategy):
    with strategy.scope():
        v, w = hs.Variable([1.0, 2.0]), hs.Variable([1.0, 3.0])
    assert (v == w).tolist() == [True, False]
    assert len({v, w, v}) == 2
    assert {v: 1, w: 2}[w] == 2


def test_no_read_communicates(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(6.0).reshape(2, 3), aggregation="SUM")
        s = hs.Variable(2)

    def reads():
        return [
            *(repr(v), str(v), v.name, v.dtype, v.shape, v.device, v.size, v.ndim, len(v), hash(v)),
            *(v + 1, 1 - v, v @ v.value().T, v == 0, np.sum(v), v[0], v[...], list(v)),
            *(v.value(), v.read_value(), v.numpy(), np.asarray(v), np.from_dlpack(v), hs.asnumpy(v)),
            *(int(s), float(s), bool(s), range(s), v.aggregation, v.trainable, v.synchronization),
        ]

    with strategy.scope():
        if RANK == N - 1:
            reads()
    strategy.run(lambda: reads() if RANK == 0 else None)
    if RANK == 0:
        reads()
    with strategy.scope():
        before = strategy._communicator.number
        reads()
        assert strategy._communicator.number == before
    strategy.run(lambda: v.assign(np.ones((2, 3))))
    assert (v.numpy() == N).all()
