"""Reading variables: as the array itself or as a copy; what no read does; HPCSTRAT_CHECK."""

import ctypes
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import in_both_contexts

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


def replica_context() -> Any:
    return hs.get_replica_context()


def test_reads_across_replicas_are_snapshots(strategy, xp):
    with strategy.scope():
        v = hs.Variable(xp.arange(4.0))
        reads = (v.value(), v.read_value(), v.numpy(), v[...], v[1:], xp.array(v), xp.asarray(v))
        for array in reads:
            array[...] = -5
        assert v.numpy().tolist() == [0, 1, 2, 3]
        kept = v.value()
        v.assign(xp.zeros(4))
        assert kept.tolist() == [0, 1, 2, 3]


# By NumPy 2.5, which still does it.
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

    def replica():
        for array in (v.value(), v[...], v[1:], v.value().T, np.asarray(v)):
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
        # NumPy 1 cannot be told that it must not copy.
        return np.__version__ < "2" or np.shares_memory(np.asarray(v, copy=False), v.value())

    assert strategy.experimental_local_results(strategy.run(replica)) == (True,) * N
    if np.__version__ >= "2":
        with pytest.raises(ValueError, match="in a replica context only"), strategy.scope():
            np.asarray(v, copy=False)


def test_a_view_that_leaves_run_is_copied(strategy, xp):
    """Or goes into merge_call."""
    with strategy.scope():
        v = hs.Variable(np.arange(6.0).reshape(2, 3))

    def merge(strategy, value):
        v.assign(xp.zeros((2, 3)))
        return value

    left = strategy.run(lambda: [v.value()[0], v.value().T, v.value()[1, 1], v.value()])
    merged = strategy.run(lambda: replica_context().merge_call(merge, args=(v.value(),)))
    assert not v.numpy().any()
    for one in strategy.experimental_local_results(merged):
        assert one.tolist() == [[0, 1, 2], [3, 4, 5]]
    for one in strategy.experimental_local_results(left):
        expected = [[0, 1, 2], [[0, 3], [1, 4], [2, 5]], 4, [[0, 1, 2], [3, 4, 5]]]
        assert [part.tolist() for part in one] == expected


class Result:
    """An object that is not a nest."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Wrapped(Result):
    """An array of a library that knows only `__array__`."""

    array: np.ndarray

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def copy(self):
        return Wrapped(array=self.array.copy())


@on_the_cpu
def test_what_holds_a_view_leaves_run_with_a_copy(strategy):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0))
        own = hs.Variable(np.arange(3.0), synchronization="ON_READ", aggregation="SUM")
    plain: Any = Result(array=np.ones(2), read_only=np.broadcast_to(1.0, 3), variables=[v])
    plain.itself = plain
    left = strategy.run(
        lambda: {
            "slices": hs.IndexedSlices(v.value(), np.arange(3)),
            "memory": memoryview(v.value()),
            "object": Result(array=v.value(), nest={"list": [own.value(), 1]}, variable=v),
            "wrapped": Wrapped(array=v.value()),
            "plain": plain,
        }
    )
    v.assign(np.zeros(3))
    own.assign(np.zeros(3))
    for name, component in left.items():
        (left[name],) = (component,) if N == 1 else (component._component,)
    arrays = [left["slices"].values, left["memory"], np.asarray(left["wrapped"])]
    arrays += [left["object"].array, left["object"].nest["list"][0]]
    assert [array.tolist() for array in arrays] == [[0, 1, 2]] * 5
    assert left["object"].variable is v and left["plain"] is plain


NO_WRITES = {
    "np.add(1, 2, out=v)": r"Variable 'v' in add: .* `\+=`, `out=` or `at`; use assign",
    "np.divmod(np.ones(3), 2, out=(np.ones(3), v))": "`out=` or `at`; use assign",
    "v.__imul__(2)": "multiply: .* `out=` or `at`",
    "v.__imatmul__(xp.ones((3, 3)))": "matmul: .* `out=` or `at`",
    "np.add.at(v, [0], 1.0)": "add: .* `out=` or `at`",
    "v.__setitem__(0, 1.0)": r"'v' does not support item assignment; .*; v.assign\(new\)",
    "np.copyto(v, 1.0)": "copyto",
}


def test_a_variable_is_written_by_its_methods_only(strategy, xp):
    with strategy.scope():
        v: Any = hs.Variable(np.arange(3.0), name="v")

    def body():
        for program, facts in NO_WRITES.items():
            with pytest.raises(TypeError, match=facts):
                eval(program, {"np": np, "xp": xp, "v": v})
        for name in ("dtype", "shape", "misspelt"):
            with pytest.raises(AttributeError):
                setattr(v, name, None)

    in_both_contexts(strategy, body)
    assert v.numpy().tolist() == [0, 1, 2]


def test_no_read_communicates(strategy, xp):
    with strategy.scope():
        v = hs.Variable(xp.arange(6.0).reshape(2, 3), aggregation="SUM")
        s = hs.Variable(2)

    def reads():
        return [
            *(repr(v), str(v), v.name, v.dtype, v.shape, v.device, v.size, v.ndim, len(v), hash(v)),
            *(v + 1, 1 - v, v @ v.value().T, v == 0, np.add.reduce(v), v[0], v[...], list(v)),
            *(v.value(), v.read_value(), v.numpy(), xp.asarray(v), xp.from_dlpack(v)),
            *(v.T, v.sum(0), v.reshape(6), v.tolist(), v.item(1), v.copy(), f"{v}", hs.asnumpy(v)),
            *(int(s), float(s), bool(s), v.aggregation, v.trainable, v.synchronization),
        ]

    before = strategy.replica_group.communicator.calls.number
    with strategy.scope():
        reads()
    reads()
    assert strategy.replica_group.communicator.calls.number == before
    strategy.run(lambda: reads() if RANK == 0 else None)
    strategy.run(lambda: v.assign(xp.ones((2, 3))))
    assert (v.numpy() == N).all()


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
@pytest.mark.mpi(min_size=2)  # only values of several ranks are compared
def test_the_next_update_finds_what_was_written_past_it(checked):
    def scattered(odd):
        if RANK == odd:
            # Past the array's flag, as NumPy's `add.at` does before 2.5.
            ctypes.c_double.from_address(v.value().ctypes.data).value += 2.0

    with checked.scope():
        v = hs.Variable(np.arange(3.0), aggregation="MEAN")
    for last in WRITES.values():
        for name, odd in {"assign": 0, "gradients": N - 1, "rows": 0, "an update": N - 1}.items():
            last(checked, v)
            WRITES[name](checked, v)  # nothing is wrong yet
            checked.run(scattered, (odd,))
            with pytest.raises(RuntimeError, match=r"last update .*\(3,\).*HPCSTRAT_CHECK"):
                WRITES[name](checked, v)
            checked.run(scattered, (odd,))
            WRITES["assign"](checked, v)  # the next check starts from there
