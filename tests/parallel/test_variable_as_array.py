"""A variable has the methods of its array, and is formatted, rounded and iterated like it."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
on_the_cpu = pytest.mark.parametrize("place", ["CPU"], indirect=True)
several = pytest.mark.mpi(min_size=2)  # one replica's value is the whole
METHODS = {
    "transpose": [(), (1, 0)],
    "reshape": [(6,), ((6,),), (3, -1)],
    "ravel": [(), ("F",)],
    "squeeze": [()],
    "astype": [(np.float64,), (np.int32,)],
    "copy": [()],
    "flatten": [()],
    "sum": [(), (0,), (1, np.float64), ((0, 1),)],
    "prod": [(), (0,)],
    "mean": [(), (0,)],
    "std": [(), (0,)],
    "var": [(), (0,)],
    "max": [(), (0,)],
    "min": [(), (1,)],
    "argmax": [(), (0,)],
    "argmin": [(), (0,)],
    "any": [(), (0,)],
    "all": [(), (0,)],
    "tolist": [()],
}


@pytest.fixture(params=["cross-replica", "replica"])
def within(request, strategy):
    """Runs a function of no arguments in the context of that name."""

    def in_scope(fn):
        with strategy.scope():
            fn()

    return strategy.run if request.param == "replica" else in_scope


@pytest.fixture
def pair(strategy, xp):
    """An array and a variable of it."""
    array = xp.array([[1.5, 2.0, -3.0], [0.5, 0.0, 4.0]], np.float32)
    with strategy.scope():
        return array, hs.Variable(array)


def equal(found, expected):
    return type(found) is type(expected) and np.array_equal(hs.asnumpy(found), hs.asnumpy(expected))


def test_methods_are_the_arrays(pair, within):
    array, v = pair

    def body():
        assert equal(v.T, array.T)
        assert (v.nbytes, v.itemsize) == (array.nbytes, array.itemsize)
        for name, calls in METHODS.items():
            for arguments in calls:
                assert equal(getattr(v, name)(*arguments), getattr(array, name)(*arguments)), (
                    name,
                    arguments,
                )
        assert (v.item(1, 2), v.item((0, 1)), v.item(3)) == (4.0, 2.0, 0.5)  # on GPUs too
        assert equal(v.sum(axis=0, keepdims=True), array.sum(axis=0, keepdims=True))
        assert equal(v.reshape(3, 2, order="F"), array.reshape(3, 2, order="F"))
        assert equal(v.dot(v.T), array.dot(array.T))
        assert equal(v.T.dot(array), array.T.dot(array))
        assert equal(v.dot(v.T.copy()), array.dot(array.T))

    within(body)


def test_a_backward_pass(pair, xp, within):
    array, w = pair
    x = xp.ones((4, 3), np.float32)

    def body():
        assert equal((x @ w.T) @ w, (x @ array.T) @ array)
        assert equal(x - w.mean(axis=0), x - array.mean(axis=0))

    within(body)


@on_the_cpu
def test_functions_of_numpy_that_call_methods(pair, within):
    array, v = pair

    def body():
        for fn in (
            np.sum,
            np.prod,
            np.mean,
            np.std,
            np.var,
            np.max,
            np.min,
            np.argmax,
            np.any,
            np.all,
        ):
            assert equal(fn(v), fn(array)), fn
            assert equal(fn(v, axis=0), fn(array, axis=0)), fn
        assert equal(
            np.sum(v, axis=1, keepdims=True, initial=2),
            np.sum(array, axis=1, keepdims=True, initial=2),
        )
        assert equal(np.std(v, ddof=1), np.std(array, ddof=1))
        assert equal(np.round(v, 1), np.round(array, 1))
        assert equal(np.clip(v, 0, 1), np.clip(array, 0, 1))
        assert equal(np.transpose(v, (1, 0)), np.transpose(array, (1, 0)))
        assert equal(np.reshape(v, (3, 2)), np.reshape(array, (3, 2)))
        out = np.empty(3, np.float32)
        assert np.sum(v, axis=0, out=out) is out
        assert equal(out, array.sum(axis=0))

    within(body)


@on_the_cpu
def test_other_shapes_are_in_place_in_a_replica_and_copies_elsewhere(strategy):
    array = np.arange(6.0).reshape(2, 3)
    with strategy.scope():
        v = hs.Variable(array)
        for part in (
            v.T,
            v.transpose(),
            v.reshape(6),
            v.ravel(),
            v.squeeze(),
            v.astype(v.dtype, copy=False),
        ):
            part[...] = -1
    assert np.array_equal(v.numpy(), array)

    def replica():
        for part in (
            v.T,
            v.transpose(),
            v.reshape(6),
            v.ravel(),
            v.squeeze(),
            v.astype(v.dtype, copy=False),
        ):
            assert np.shares_memory(part, v.value()) and not part.flags.writeable
        for own in (v.copy(), v.flatten(), v.astype(v.dtype), next(iter(v.copy()))):
            own[...] = -1

    strategy.run(replica)
    assert np.array_equal(v.numpy(), array)


def test_a_number_is_formatted_and_rounded(strategy, within):
    with strategy.scope():
        f, i = hs.Variable(2.567), hs.Variable(7)
        vector = hs.Variable([1.0, 2.0], name="w")

    def body():
        assert f"{f:.1f} {i:04d} {f:>8.2f}" == "2.6 0007     2.57"
        assert f"{vector}" == str(vector) == repr(vector)
        assert round(f, 1) == np.float32(2.6) and round(i) == 7
        assert (round(f), type(round(f))) == (3, int)
        for misuse in (lambda: f"{vector:.1f}", lambda: round(vector)):
            with pytest.raises(TypeError):
                misuse()

    within(body)


def test_iterating(strategy, xp, within):
    array = xp.arange(6.0).reshape(2, 3)
    with strategy.scope():
        v, n = hs.Variable(array), hs.Variable(3)

    def body():
        assert all(equal(found, expected) for found, expected in zip(v, array, strict=True))
        _first, second = v
        assert equal(second, array[1])
        with pytest.raises(TypeError, match="iteration over a 0-d array"):
            list(n)
        with pytest.raises(TypeError):
            _first, _second = n

    within(body)


@on_the_cpu
def test_membership_is_of_elements(strategy):
    with strategy.scope():
        v = hs.Variable([[1.0, 2.0], [3.0, 4.0]])
    assert 4.0 in v and 5.0 not in v


@on_the_cpu
def test_an_integer_is_a_size_as_a_numpy_scalar_is(strategy, within):
    with strategy.scope():
        n: Any = hs.Variable(3)  # for type checkers a size is an int

    def body():
        for size in (
            *(
                np.zeros(n),
                np.ones((n,)),
                np.empty(n),
                np.full(n, 1.0),
                np.tile([1], n),
                np.repeat([1], n),
            ),
            *(
                np.arange(n),
                np.linspace(0, 1, n),
                np.random.default_rng(0).random(n),
                np.arange(9)[:n],
                range(n),
            ),
        ):
            assert len(size) == 3
        assert np.eye(n).shape == np.ones((n, 3)).shape == (3, 3)
        assert np.random.default_rng(0).random((n, 2)).shape == (3, 2)
        assert np.arange(6).reshape(n, -1).shape == (3, 2)
        assert list(n * [1]) == list(n.item() * np.array([1]))

    within(body)


@several
def test_what_has_a_value_a_replica_refuses_what_would_communicate(strategy):
    with strategy.scope():
        v = hs.Variable([[1.0, 2.0]], synchronization="ON_READ", aggregation="SUM", name="own")
        n = hs.Variable(1.0, synchronization="ON_READ", aggregation="SUM", name="own")
        for name, calls in {
            **METHODS,
            "dot": [(1.0,)],
            "item": [(0, 0)],
            "__iter__": [()],
            "__contains__": [(1.0,)],
        }.items():
            with pytest.raises(
                RuntimeError, match="'own' has one value per replica.*call read_value"
            ):
                getattr(v, name)(*calls[0])
        for read in (lambda: v.T, lambda: f"{n:.1f}", lambda: round(n, 1)):
            with pytest.raises(RuntimeError, match="'own' has one value per replica"):
                read()
        assert (v.nbytes, v.itemsize) == (8, 4)
    for total in strategy.experimental_local_results(
        strategy.run(lambda: v.sum() + len(v.T) + round(n))
    ):
        assert total == 6


def test_methods_have_no_rank_to_wait_for(pair):
    """Only one rank calls them all: nothing communicates."""
    array, v = pair
    if RANK == N - 1:
        for name, calls in METHODS.items():
            getattr(v, name)(*calls[0])
        assert v.T.shape == array.T.shape and f"{v}" and len(list(v)) == 2
