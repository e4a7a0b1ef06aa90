"""A variable does what its array does: arithmetic, functions, methods, protocols, formatting."""

import operator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import in_both_contexts

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)


@pytest.fixture
def pair(strategy, xp):
    """Two arrays and the variables of them."""
    arrays = xp.array([[1.5, 2.0], [0.5, 3.0]], np.float32), xp.array([[2.0, 1.0], [3.0, 0.25]])
    with strategy.scope():
        return *arrays, *map(hs.Variable, arrays)


def equal(found, expected):
    """Whether a result equals the array's, in type and bit by bit."""
    if isinstance(expected, tuple):
        return type(found) is type(expected) and all(map(equal, found, expected))
    return type(found) is type(expected) and np.array_equal(hs.asnumpy(found), hs.asnumpy(expected))


op = operator
UNARY = [op.neg, op.pos, abs, np.exp, np.isnan, np.square]
BINARY = [
    *(op.add, op.sub, op.mul, op.truediv, op.floordiv, op.mod, op.pow, divmod),
    *(op.lt, op.le, op.gt, op.ge, op.eq, op.ne, np.maximum, np.hypot, np.logaddexp),
]
ALONG_AN_AXIS = ["sum", "prod", "mean", "std", "var", "max", "min", "argmax", "any", "all"]


def test_arithmetic_is_the_arrays(strategy, pair, xp):
    array, other, v, w = pair

    def body():
        for fn in (*UNARY, xp.exp, xp.square):
            assert equal(fn(v), fn(array)), fn
        products = [op.matmul, np.matmul, xp.matmul, xp.dot]
        for fn in (*BINARY, *products, xp.maximum, xp.hypot):
            assert equal(fn(v, w), fn(array, other)), fn
            assert equal(fn(v, other), fn(array, other)), fn
            assert equal(fn(other, v), fn(other, array)), fn
            if fn not in products:
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

    in_both_contexts(strategy, body)
    assert v.numpy().tolist() == array.tolist()


@on_the_cpu
def test_functions_of_numpy(strategy, pair):
    """Some call a method of what they get."""
    array, other, v, w = pair

    def calls(x, y):
        for name in ALONG_AN_AXIS:
            yield from (getattr(np, name)(x), getattr(np, name)(x, axis=0))
        for fn in (np.sort, np.linalg.norm, np.transpose, np.cumsum, np.ravel, np.copy):
            yield fn(x)
        yield from (np.atleast_2d(x), np.shape(x), np.ndim(x), np.size(x))
        for fn in (np.dot, np.outer, np.add.outer):
            yield from (fn(x, y), fn(x, other), fn(other, x), fn(x, 2), fn(2, x))
        yield from (np.concatenate([x, y]), np.where(x > 1, x, 0), np.round(x, 1))
        yield from (np.sum(x, axis=1, keepdims=True, initial=2), np.std(x, ddof=1))
        yield from (np.clip(x, 0, 1), np.transpose(x, (1, 0)), np.reshape(x, (4, 1)))

    def body():
        for i, (found, expected) in enumerate(zip(calls(v, w), calls(array, other), strict=True)):
            assert equal(found, expected), i
        out = np.empty(2, np.float32)
        assert np.sum(v, axis=0, out=out) is out
        assert equal(out, array.sum(axis=0))

    in_both_contexts(strategy, body)


METHODS = [
    *((name, arguments) for name in ALONG_AN_AXIS for arguments in ((), (0,))),
    *((name, ()) for name in ("copy", "flatten", "squeeze", "ravel", "tolist", "transpose")),
    *(("argmin", ()), ("argmin", (0,)), ("min", (1,)), ("sum", (1, np.float64))),
    *(("sum", ((0, 1),)), ("ravel", ("F",)), ("transpose", (1, 0)), ("reshape", (4,))),
    *(("reshape", ((4,),)), ("reshape", (2, -1)), ("astype", (np.float64,))),
    ("astype", (np.int32,)),
]


def test_methods_are_the_arrays(strategy, pair):
    array, _, v, _ = pair

    def body():
        assert equal(v.T, array.T)
        assert (v.nbytes, v.itemsize) == (array.nbytes, array.itemsize)
        for name, arguments in METHODS:
            found, expected = getattr(v, name)(*arguments), getattr(array, name)(*arguments)
            assert equal(found, expected), (name, arguments)
        assert (v.item(1, 0), v.item((0, 1)), v.item(3)) == (0.5, 2.0, 3.0)  # on GPUs too
        assert equal(v.sum(axis=0, keepdims=True), array.sum(axis=0, keepdims=True))
        assert equal(v.reshape(4, 1, order="F"), array.reshape(4, 1, order="F"))
        assert equal(v.dot(v.T), array.dot(array.T))
        assert equal(v.T.dot(array), array.T.dot(array))
        assert equal(v.dot(v.T.copy()), array.dot(array.T))

    in_both_contexts(strategy, body)


@on_the_cpu
def test_other_shapes_are_in_place_in_a_replica_and_copies_elsewhere(strategy):
    array = np.arange(6.0).reshape(2, 3)
    with strategy.scope():
        v = hs.Variable(array)

    def parts():
        reshaped = (v.T, v.transpose(), v.reshape(6), v.ravel(), v.squeeze())
        return (*reshaped, v.astype(v.dtype, copy=False))

    for part in parts():
        part[...] = -1
    assert np.array_equal(v.numpy(), array)

    def replica():
        for part in parts():
            assert np.shares_memory(part, v.value()) and not part.flags.writeable
        for own in (v.copy(), v.flatten(), v.astype(v.dtype), next(iter(v.copy()))):
            own[...] = -1

    strategy.run(replica)
    assert np.array_equal(v.numpy(), array)


def test_integers_and_booleans(strategy, xp):
    with strategy.scope():
        i, b = hs.Variable([6, 3]), hs.Variable([True, False])

    def body():
        assert [(i & 2).tolist(), (1 | i).tolist(), (i ^ i).tolist()] == [[2, 2], [7, 3], [0, 0]]
        assert [(i << 1).tolist(), (i >> 1).tolist(), (~i).tolist()] == [[12, 6], [3, 1], [-7, -4]]
        assert (b & True).tolist() == [True, False] and (~b).tolist() == [False, True]
        assert xp.arange(10)[i].tolist() == [6, 3]
        assert xp.arange(2)[xp.asarray(b)].tolist() == [0]

    in_both_contexts(strategy, body)


def test_python_numbers(strategy):
    with strategy.scope():
        f, i, yes, c = hs.Variable(2.75), hs.Variable(3), hs.Variable(True), hs.Variable(1 + 2j)
        vector = hs.Variable([1.0, 2.0, 3.0], name="w")

    def body():
        assert (int(f), float(f), float(i), bool(f), bool(yes)) == (2, 2.75, 3.0, True, True)
        assert (complex(c), complex(f)) == (1 + 2j, 2.75)
        assert f"{f:.1f} {i:04d} {f:>8.2f}" == "2.8 0003     2.75"
        assert f"{vector}" == str(vector) == repr(vector)
        assert round(f, 1) == np.float32(2.8) and round(i) == 3
        assert (round(f), type(round(f))) == (3, int)
        assert len(vector) == 3
        assert [float(x) for x in vector] == [1, 2, 3]
        assert 2.0 in vector and 5.0 not in vector
        with pytest.raises(ValueError, match="ambiguous"):
            bool(vector)
        for misuse in (lambda: len(f), lambda: float(vector), lambda: round(vector)):
            with pytest.raises(TypeError):
                misuse()
        with pytest.raises(TypeError):
            f"{vector:.1f}"

    in_both_contexts(strategy, body)


def test_indexing_and_iterating(strategy, xp):
    array = xp.arange(24.0).reshape(2, 3, 4)
    with strategy.scope():
        v, zero = hs.Variable(array), hs.Variable(7.0)
    assert len({v, zero, v}) == 2 and {v: 1, zero: 2}[zero] == 2  # by the object
    places = [0, -1, (1, 2), (1, 2, 3), slice(None, None, -1), ..., (..., 1), None, [1, 0]]

    def body():
        for index in (*places, array > 5):
            assert equal(v[index], array[index])
        assert zero[()] == 7 and zero[...].shape == ()
        with pytest.raises(IndexError):
            v[5]
        assert all(equal(found, expected) for found, expected in zip(v, array, strict=True))
        _first, second = v
        assert equal(second, array[1])
        with pytest.raises(TypeError, match="iteration over a 0-d array"):
            list(zero)

    in_both_contexts(strategy, body)


def test_an_integer_is_an_index_and_a_size_as_its_array_is(strategy, place):
    with strategy.scope():
        n: Any = hs.Variable(3)  # for type checkers a size is an int
        f: Any = hs.Variable(1.0)
    random = np.random.default_rng(0).random

    def body():
        with pytest.raises(TypeError):
            "abc"[f]
        if place.kind == "GPU":  # CuPy's arrays are not indices
            with pytest.raises(TypeError):
                range(n)
            return
        assert "abcdef"[n] == "d"
        assert list(range(n)) == [0, 1, 2]
        made = [np.zeros(n), np.ones((n,)), np.empty(n), np.full(n, 1.0), np.tile([1], n)]
        made += [np.repeat([1], n), np.arange(n), np.linspace(0, 1, n), random(n), np.arange(9)[:n]]
        assert [len(one) for one in made] == [3] * 10
        assert np.eye(n).shape == np.ones((n, 3)).shape == (3, 3)
        assert random((n, 2)).shape == np.arange(6).reshape(n, -1).shape == (3, 2)
        assert list(n * [1]) == list(n.item() * np.array([1]))

    in_both_contexts(strategy, body)


def test_it_becomes_an_array_of_its_device_or_the_host(strategy, place):
    with strategy.scope():
        v = hs.Variable(np.arange(3.0, dtype=np.float32))

    cuda = (2, int(place.devices[RANK].split(":")[1]))

    def body():
        found = place.xp.from_dlpack(v)
        assert type(found) is place.xp.ndarray and found.tolist() == [0, 1, 2]
        assert v.__dlpack_device__() == (cuda if place.kind == "GPU" else (1, 0))
        on_host = hs.asnumpy({"v": [v, None], "value": v.value()})
        assert type(on_host["v"][0]) is type(on_host["value"]) is np.ndarray
        assert on_host["v"][0].tolist() == on_host["value"].tolist() == [0, 1, 2]
        assert place.kind == "GPU" or not hasattr(v, "__cuda_array_interface__")

    in_both_contexts(strategy, body)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_it_becomes_a_cupy_array(strategy, xp):
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
        with pytest.raises(TypeError, match=r"on a GPU and does not become a NumPy array .*numpy"):
            np.asarray(v)
        with pytest.raises(TypeError):
            np.add(v, np.ones((2, 3), np.float32))

    in_both_contexts(strategy, body)


@pytest.mark.mpi(min_size=2)  # one replica's value is the whole
def test_what_has_a_value_a_replica_refuses_what_would_communicate(strategy, xp):
    with strategy.scope():
        v, n, i = (
            hs.Variable(value, synchronization="ON_READ", aggregation="SUM", name="own")
            for value in ([[1.0, 2.0]], 1.0, 3)
        )
    methods = {name: arguments for name, arguments in METHODS}
    programs = "v.dot(1.0); v.item(0, 0); list(v); 1.0 in v; v.T; f'{n:.1f}'; round(n, 1); v + 1"
    programs += "; 1 + v; v == v; np.add.reduce(v); xp.asarray(v); xp.exp(v); v[0]; v.value()"
    programs += "; bool(i); int(i); float(i); complex(i); range(i); xp.from_dlpack(v)"
    programs += "".join(f"; v.{name}(*methods['{name}'])" for name in methods)
    before = strategy.replica_group.communicator.calls.number
    names = {"v": v, "n": n, "i": i, "np": np, "xp": xp, "methods": methods}
    for program in programs.split("; "):
        with pytest.raises(RuntimeError) as caught:
            eval(program, names)
        for fact in ("'own' has one value per replica", "read_value() or numpy()"):
            assert fact in str(caught.value), program
    assert strategy.replica_group.communicator.calls.number == before
    assert (v.nbytes, v.itemsize, len(v), v.shape, v.ndim, v.size) == (8, 4, 1, (1, 2), 2, 2)
    assert repr(v) == "Variable('own', shape=(1, 2), dtype=float32, one value per replica)"
    totals = strategy.run(lambda: v.sum() + len(v.T) + round(n))
    assert strategy.experimental_local_results(totals) == (6,) * N
