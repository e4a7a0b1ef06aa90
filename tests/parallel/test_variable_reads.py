"""Reading variables: as the array itself, as a copy, in arithmetic, by the protocols of arrays."""

import ctypes
import operator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import strategies_for

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)
on_gpus = pytest.mark.parametrize("place", ["GPU"], indirect=True)


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
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


@pytest.mark.core
def test_reads_across_replicas_are_snapshots(strategy, xp):
    with strategy.scope():
        v = hs.Variable(xp.arange(4.0))
        for array in (
            v.value(),
            v.read_value(),
            v.numpy(),
            v[...],
            v[1:],
            xp.array(v),
            xp.asarray(v),
        ):
            array[...] = -5
        assert v.numpy().tolist() == [0, 1, 2, 3]
        kept = v.value()
        v.assign(xp.zeros(4))
        assert kept.tolist() == [0, 1, 2, 3]


# By NumPy 2.5, which still does it.
@pytest.mark.core
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_reads_in_a_replica_are_the_array_itself(strategy, xp):
    with strategy.scope():
        v = hs.Variable(xp.arange(4.0), aggregation="MEAN")

    def replica():
        view = v.value()
        for array in (v.value(), v[1:], v[...], view.T, xp.asarray(v)):
            assert xp.shares_memory(view, array)
        v.value().shape = xp.asarray(v).shape = (2, 2)
        assert v.shape == v.value().shape == (4,)
        for array in (v.read_value(), xp.array(v), xp.asarray(v, np.float32)):
            assert not xp.shares_memory(view, array)
            array[...] = -1
        v.numpy()[...] = -1
        assert view.tolist() == [0, 1, 2, 3]
        kept = v.read_value()
        v.assign(xp.zeros(4))
        assert v.value().tolist() == [0, 0, 0, 0]
        assert kept.tolist() == [0, 1, 2, 3]

    strategy.run(replica)


@on_the_cpu
def test_reads_in_a_replica_are_read_only(strategy):
    """NumPy can make them, but CuPy cannot."""
    with strategy.scope():
        v = hs.Variable(np.arange(4.0))
        for array in (
            v.value(),
            v.read_value(),
            v.numpy(),
            v[...],
            v[1:],
            np.asarray(v),
            np.array(v),
        ):
            assert array.flags.writeable

    def replica():
        for array in (v.value(), v[...], v[1:], v.value().T, np.asarray(v)):
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
        for array in (v.read_value(), v.numpy(), np.array(v), np.asarray(v, np.float32)):
            assert array.flags.writeable

    strategy.run(replica)


@pytest.mark.core
def test_a_view_that_leaves_run_is_copied(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.arange(6.0).reshape(2, 3))
        left = strategy.run(
            lambda: {"all": v.value(), "part": [v[0], v.value().T], "sum": v.value()[1, 1]}
        )
        v.assign(xp.zeros((2, 3)))
    for one in strategy.experimental_local_results(left):
        assert one["all"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert one["part"][0].tolist() == [0, 1, 2]
        assert one["part"][1].tolist() == [[0, 3], [1, 4], [2, 5]]
        assert one["sum"] == 4


class Result:
    """An object that is not a nest."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Wrapped:
    """An array of a library that knows only `__array__`."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def copy(self):
        return Wrapped(self.array.copy())


@pytest.mark.core
@on_the_cpu
def test_what_holds_a_view_leaves_run_with_a_copy(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
        own = hs.Variable(np.arange(3.0), synchronization="ON_READ", aggregation="SUM")
        kept: Any = {}

        def replica():
            kept["plain"] = Result(
                array=np.ones(2), read_only=np.broadcast_to(1.0, 3), variables=[v], text=""
            )
            kept["plain"].itself = kept["plain"]
            return {
                "slices": hs.IndexedSlices(v.value(), np.arange(3)),
                "memory": memoryview(v.value()),
                "object": Result(array=v.value(), nest={"list": [own.value(), 1]}, variable=v),
                "wrapped": Wrapped(v.value()),
                "plain": kept["plain"],
            }

        left = strategy.run(replica)
        v.assign(np.zeros(3))
        own.assign(np.zeros(3))
    for name, component in left.items():
        (left[name],) = (component,) if N == 1 else (component._component,)
    assert left["slices"].values.tolist() == left["memory"].tolist() == [0, 1, 2]
    assert left["object"].array.tolist() == left["object"].nest["list"][0].tolist() == [0, 1, 2]
    assert left["object"].variable is v
    assert np.asarray(left["wrapped"]).tolist() == [0, 1, 2]
    assert left["plain"] is kept["plain"]


@pytest.mark.core
def test_a_view_that_goes_into_merge_call_is_copied(strategy, xp):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))

    def merge(strategy, value):
        v.assign(xp.zeros(3))
        return value

    found = strategy.run(lambda: replica_context().merge_call(merge, args=(v.value(),)))
    for one in strategy.experimental_local_results(found):
        assert one.tolist() == [0, 1, 2]
    assert not v.numpy().any()


UNARY = [operator.neg, operator.pos, abs, np.exp, np.isnan, np.square]
BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
]
BINARY += [
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
    operator.eq,
    operator.ne,
    operator.matmul,
    divmod,
]
BINARY += [np.maximum, np.hypot, np.logaddexp]
UNARY_OF_NUMPY = [
    np.sum,
    np.mean,
    np.max,
    np.sort,
    np.linalg.norm,
    np.transpose,
    np.cumsum,
    np.argmax,
    np.ravel,
]
UNARY_OF_NUMPY += [np.atleast_2d, np.copy, np.shape, np.ndim, np.size]
BINARY_OF_NUMPY = [np.dot, np.outer, np.add.outer, np.concatenate]


def equal(found, expected):
    """Whether a result equals the array's, in type and bit by bit."""
    if isinstance(expected, tuple):
        return type(found) is type(expected) and all(map(equal, found, expected))
    return type(found) is type(expected) and np.array_equal(hs.asnumpy(found), hs.asnumpy(expected))


@pytest.fixture
def pair(strategy, xp):
    """Two arrays and the variables of them."""
    arrays = xp.array([[1.5, 2.0], [0.5, 3.0]], np.float32), xp.array([[2.0, 1.0], [3.0, 0.25]])
    with strategy.scope():
        return *arrays, *map(hs.Variable, arrays)


def test_arithmetic_is_the_arrays(pair, xp, within):
    array, other, v, w = pair

    def body():
        for fn in (*UNARY, xp.exp, xp.square):
            assert equal(fn(v), fn(array)), fn
        for fn in (*BINARY, np.matmul, xp.matmul, xp.dot, xp.maximum, xp.hypot):
            assert equal(fn(v, w), fn(array, other)), fn
            assert equal(fn(v, other), fn(array, other)), fn
            assert equal(fn(other, v), fn(other, array)), fn
            if fn not in (operator.matmul, np.matmul, xp.matmul, xp.dot):
                assert equal(fn(v, 2), fn(array, 2)), fn
                assert equal(fn(2, v), fn(2, array)), fn
        assert (2 * v).dtype == np.float32  # a Python number is weak
        assert equal(np.add.reduce(v, axis=0), np.add.reduce(array, axis=0))
        assert equal(np.add.accumulate(v), np.add.accumulate(array))
        assert equal(xp.where(v > 1, v, 0), xp.where(array > 1, array, 0))
        out = xp.empty((2, 2), np.float32)
        assert np.multiply(v, v, out=out) is out
        assert equal(out, array * array)
        out += v
        assert equal(out, array * array + array)
        result = v + 0
        result[...] = 7  # fresh

    within(body)
    assert v.numpy().tolist() == array.tolist()


@on_the_cpu
def test_functions_of_numpy(pair, within):
    array, other, v, w = pair

    def body():
        for fn in UNARY_OF_NUMPY:
            assert equal(fn(v), fn(array)), fn
        for fn in BINARY_OF_NUMPY:
            if fn is np.concatenate:
                assert equal(fn([v, w]), fn([array, other]))
                continue
            assert equal(fn(v, w), fn(array, other)), fn
            assert equal(fn(v, other), fn(array, other)), fn
            assert equal(fn(other, v), fn(other, array)), fn
            assert equal(fn(v, 2), fn(array, 2)), fn
            assert equal(fn(2, v), fn(2, array)), fn
        assert equal(np.where(v > 1, v, 0), np.where(array > 1, array, 0))

    within(body)


def test_integers_and_booleans(strategy, xp, within):
    with strategy.scope():
        i, b = hs.Variable([6, 3]), hs.Variable([True, False])

    def body():
        assert (
            (i & 2).tolist() == [2, 2] and (1 | i).tolist() == [7, 3] and (i ^ i).tolist() == [0, 0]
        )
        assert (
            (i << 1).tolist() == [12, 6]
            and (i >> 1).tolist() == [3, 1]
            and (~i).tolist() == [-7, -4]
        )
        assert (b & True).tolist() == [True, False] and (~b).tolist() == [False, True]
        assert xp.arange(10)[i].tolist() == [6, 3]
        assert xp.arange(2)[xp.asarray(b)].tolist() == [0]

    within(body)


def test_python_numbers(strategy, within):
    with strategy.scope():
        f, i, yes, c = hs.Variable(2.75), hs.Variable(3), hs.Variable(True), hs.Variable(1 + 2j)
        vector = hs.Variable([1.0, 2.0, 3.0])

    def body():
        assert (int(f), float(f), float(i), bool(f), bool(yes)) == (2, 2.75, 3.0, True, True)
        assert complex(c) == 1 + 2j
        assert complex(f) == 2.75
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

    within(body)


def test_an_integer_is_an_index_as_its_array_is(strategy, place, within):
    with strategy.scope():
        i, f = hs.Variable(3), hs.Variable(1.0)

    def body():
        if place.kind == "CPU":
            assert "abcdef"[i] == "d"
            assert list(range(i)) == [0, 1, 2]
        else:  # CuPy's arrays are not indices
            with pytest.raises(TypeError):
                range(i)
        with pytest.raises(TypeError):
            "abc"[f]

    within(body)


def test_indexing(strategy, xp, within):
    array = xp.arange(24.0).reshape(2, 3, 4)
    with strategy.scope():
        v, zero = hs.Variable(array), hs.Variable(7.0)

    def body():
        for index in [
            0,
            -1,
            (1, 2),
            (1, 2, 3),
            slice(None, None, -1),
            ...,
            (..., 1),
            None,
            [1, 0],
            array > 5,
        ]:
            assert equal(v[index], array[index])
        assert zero[()] == 7 and zero[...].shape == ()
        with pytest.raises(IndexError):
            v[5]

    within(body)


def test_dlpack(strategy, place, within):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0, dtype=np.float32))

    def body():
        found = place.xp.from_dlpack(v)
        assert type(found) is place.xp.ndarray and found.tolist() == [0, 1, 2]
        found = place.xp.array(found)
        found[:] = 9
        assert v.numpy().tolist() == [0, 1, 2]
        cuda = (2, int(place.devices[RANK].split(":")[1]))
        assert v.__dlpack_device__() == (cuda if place.kind == "GPU" else (1, 0))

    within(body)


@on_the_cpu
def test_it_becomes_a_numpy_array(strategy, within):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0, dtype=np.float32))

    def body():
        assert np.asarray(v, np.float64).dtype == np.float64
        assert np.array(v, copy=True).tolist() == [0, 1, 2]
        assert not hasattr(v, "__cuda_array_interface__")

    within(body)


@on_gpus
def test_it_becomes_a_cupy_array(strategy, xp, within):
    with strategy.scope():
        v = hs.Variable(np.arange(6, dtype=np.float32).reshape(2, 3))

    def replica():
        facts = v.__cuda_array_interface__
        assert (facts["shape"], facts["typestr"], facts["stream"]) == ((2, 3), "<f4", None)
        assert facts["data"][0] == xp.asarray(v).data.ptr  # without a copy

    strategy.run(replica)
    assert not hasattr(v, "__cuda_array_interface__")  # it would name memory that changes

    def body():
        assert xp.asarray(v, np.float64).tolist() == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(
            TypeError,
            match=r"'Variable' is on a GPU and does not become a NumPy array .*call numpy",
        ):
            np.asarray(v)
        with pytest.raises(TypeError):
            np.add(v, np.ones((2, 3), np.float32))

    within(body)


def test_host_copies_of_nests(strategy, within):
    with strategy.scope():
        v = hs.Variable([0.0, 1.0, 2.0])

    def body():
        found = hs.asnumpy({"v": [v, None], "value": v.value()})
        assert type(found["v"][0]) is type(found["value"]) is np.ndarray
        assert found["v"][0].tolist() == found["value"].tolist() == [0, 1, 2]

    within(body)


@on_the_cpu
@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 cannot be told that it must not copy")
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


def test_a_variable_is_written_by_its_methods_only(strategy, xp, within):
    with strategy.scope():
        v: Any = hs.Variable(np.arange(3.0), name="v")

    def body():
        with pytest.raises(
            TypeError, match=r"Variable 'v' in add: .* `\+=`, `out=` or `at`; use assign"
        ):
            np.add(1, 2, out=v)
        with pytest.raises(TypeError, match="`out=` or `at`; use assign"):
            np.divmod(np.ones(3), 2, out=(np.ones(3), v))
        alias = v
        with pytest.raises(TypeError, match="multiply: .* `out=` or `at`"):
            alias *= 2
        with pytest.raises(TypeError, match="matmul: .* `out=` or `at`"):
            alias @= xp.ones((3, 3))
        with pytest.raises(TypeError, match="add: .* `out=` or `at`"):
            np.add.at(v, [0], 1.0)
        with pytest.raises(
            TypeError, match=r"'v' does not support item assignment; .*; v.assign\(new\)"
        ):
            v[0] = 1.0
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


@pytest.mark.core
def test_no_read_communicates(strategy, xp):
    with strategy.scope():
        v = hs.Variable(xp.arange(6.0).reshape(2, 3), aggregation="SUM")
        s = hs.Variable(2)

    def reads():
        return [
            *(repr(v), str(v), v.name, v.dtype, v.shape, v.device, v.size, v.ndim, len(v), hash(v)),
            *(v + 1, 1 - v, v @ v.value().T, v == 0, np.add.reduce(v), v[0], v[...], list(v)),
            *(
                v.value(),
                v.read_value(),
                v.numpy(),
                xp.asarray(v),
                xp.from_dlpack(v),
                hs.asnumpy(v),
            ),
            *(int(s), float(s), bool(s), v.aggregation, v.trainable, v.synchronization),
        ]

    with strategy.scope():
        if RANK == N - 1:
            reads()
    strategy.run(lambda: reads() if RANK == 0 else None)
    if RANK == 0:
        reads()
    with strategy.scope():
        before = strategy.replica_group.communicator.calls.number
        reads()
        assert strategy.replica_group.communicator.calls.number == before
    strategy.run(lambda: v.assign(xp.ones((2, 3))))
    assert (v.numpy() == N).all()


# ---- HPCSTRAT_CHECK


WRITES: dict[str, Any] = {
    "assign": lambda s, v: v.assign(np.arange(3.0)),
    "assign in a replica": lambda s, v: s.run(lambda: v.assign_add(np.ones(3))),
    "gradients": lambda s, v: s.run(
        lambda: hs.optimizers.SGD(0.5).apply_gradients([(np.ones(3), v)])
    ),
    "rows": lambda s, v: s.run(lambda: hs.optimizers.SGD(0.5).apply_gradients([(rows(), v)])),
    "an update": lambda s, v: s.extended.update(v, lambda v: v.assign_add(np.ones(3))),
}


def rows():
    return hs.IndexedSlices(np.ones(2), np.array([0, 2]), (3,))


@pytest.fixture
def checked(monkeypatch, strategy):
    monkeypatch.setattr(strategy.replica_group.communicator, "checks", N > 1)
    return strategy


@on_the_cpu
def test_updates_of_every_kind_are_known(checked):
    with checked.scope():
        v = hs.Variable(np.arange(3.0), aggregation="MEAN")
        for first in WRITES.values():
            for second in WRITES.values():
                first(checked, v)
                second(checked, v)


@pytest.mark.core
@on_the_cpu
@pytest.mark.mpi(min_size=2)  # only values of several ranks are compared
@pytest.mark.parametrize("odd", sorted({0, N - 1}))
@pytest.mark.parametrize("last", [None, *WRITES])
def test_the_next_update_finds_what_was_written_past_it(checked, last, odd):
    with checked.scope():
        v = hs.Variable(np.arange(3.0), aggregation="MEAN")
        if last in WRITES:
            WRITES[last](checked, v)

    def scattered():
        if RANK == odd:
            # Past the array's flag, as NumPy's `add.at` does before 2.5.
            ctypes.c_double.from_address(v.value().ctypes.data).value += 2.0

    checked.run(scattered)
    for name in ("assign", "gradients", "rows", "an update"):
        with pytest.raises(
            RuntimeError,
            match=r"since the last update .* shape \(3,\) .*HPCSTRAT_CHECK.*read_value",
        ):
            WRITES[name](checked, v)
        checked.run(scattered)
        WRITES["assign"](checked, v)  # the next check starts from there
        checked.run(scattered)
