"""A distributed value refuses to be a number or an array, and says what to do instead."""

import copy
import math
import operator
import pickle
from typing import Any

import numpy as np
import pytest

import hpcstrat as hs

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv),
    *(operator.floordiv, operator.mod, divmod, operator.pow, operator.lshift, operator.rshift),
    *(operator.and_, operator.xor, operator.or_, operator.eq, operator.ne, operator.lt),
    *(operator.le, operator.gt, operator.ge),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
]
ARRAY_FUNCTIONS = (np.asarray, np.array, np.sin, np.mean, np.sum, np.shape, np.isnan, np.size)
UNARY = {
    **{function.__name__: function for function in (bool, float, int, complex, round, abs, len)},
    **{function.__name__: function for function in (iter, sum, max, math.floor, math.sqrt)},
    **{f"np.{function.__name__}": function for function in (*ARRAY_FUNCTIONS, np.argmax)},
    **{f"operator.{name}": getattr(operator, name) for name in ("not_", "index", "neg", "pos")},
    "invert": operator.invert,
    "if": lambda x: 1 if x else 2,
    "unpacking": lambda x: [*x],
    "in": lambda x: 1 in x,
    "getitem": lambda x: x[0],
    "setitem": lambda x: operator.setitem(x, 0, 1),
    "format": lambda x: f"{x:.3f}",
    "a list's index": [1, 2].__getitem__,
    "np.where": lambda x: np.where(x, 1, 2),
    "np.concatenate": lambda x: np.concatenate([np.ones(2), x]),
    "np.add.reduce": np.add.reduce,
    "out=": lambda x: np.ones(2).sum(out=x),
    "CuPy's question": lambda x: x.__cupy_get_ndarray__(),
}
OTHERS = [
    *(None, True, 2, 2.5, 1j, "text", [1], (1,), np.float32(3), np.int64(2)),
    *(np.ones(3), np.array(1.0), np.ones(0)),
]


@pytest.fixture(params=[hs.PerReplica, hs.Mirrored])
def value(request) -> Any:
    return request.param(np.float64(0.5), 1, 4)


def refused(value):
    """A context that expects the error, which must say what to do instead."""
    return pytest.raises(
        TypeError,
        match=rf"^{type(value).__name__}\.__\w+__: this is one value per replica; reduce it first: "
        r"strategy\.reduce\('MEAN', value, axis=None\).*strategy\.experimental_local_results\(value\)",
    )


@pytest.mark.parametrize("name", UNARY)
def test_it_is_no_number_and_no_array(value, name):
    with refused(value):
        UNARY[name](value)


@pytest.mark.parametrize("operation", BINARY)
def test_operators_on_both_sides(value, operation):
    for other in [*OTHERS, copy.copy(value), hs.Variable(np.ones(3))]:
        is_variable = isinstance(other, hs.Variable)
        if operation.__name__[0] == "i" and (is_variable or type(other) in (list, tuple)):
            continue  # written in place, by their own rules
        with refused(value):
            operation(value, other)
        if not isinstance(other, str) or operation is not operator.mod:  # "text" % value formats
            with refused(value):
                operation(other, value)


def test_it_is_shown_as_one_of_many(value):
    name = type(value).__name__
    assert (
        repr(value)
        == str(value)
        == f"{value}"
        == "%s" % value  # noqa: UP031
        == f"{name}(replica 1 of 4: {np.float64(0.5)!r})"
    )
    assert f"{value!s:>60}" == repr(value).rjust(60)


def test_identity_counts_in_sets_dicts_and_lists(value):
    other = copy.copy(value)
    assert len({value, other, value}) == 2 and {value: 1, other: 2}[value] == 1
    assert value in [value] and hash(value) == object.__hash__(value)


def test_copies(value):
    for copied in copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)):
        other = copied(value)
        assert type(other) is type(value) and other is not value and repr(other) == repr(value)


def replica_context() -> Any:
    return hs.get_replica_context()


CALLS = {
    "asnumpy": hs.asnumpy,
    "Dataset": hs.data.Dataset.from_tensors,
    "Mean.update_state": lambda value: hs.metrics.Mean().update_state(value),
    "ReplicaContext.all_reduce": lambda value: replica_context().all_reduce("SUM", value),
    "ReplicaContext.all_gather": lambda value: replica_context().all_gather(value, 0),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_take_arrays_name_themselves(value, call):
    with pytest.raises(TypeError, match=f"^{call}: this is one value per replica; reduce it first"):
        CALLS[call](value)
