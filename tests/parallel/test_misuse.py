"""Wrong uses: each raises its error at once on every rank, and the next correct call works."""

import ast
import dataclasses
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from misuse import FIVE, ONES, RANK, Env, N
from public_api import begins_with_a_call
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs

HERE = "CPU:0"


@dataclasses.dataclass(repr=False)
class Case:
    """A wrong use. A test that fails shows its source.

    Attributes:
        wrong: makes it.
        error: what it raises.
        match: what its message says, a pattern.
        right: what the other ranks do if one makes the wrong use alone; None if that is not a
            separate case.
    """

    wrong: Callable[[Env], Any]
    error: type[Exception]
    match: str
    right: Callable[[Env], Any] | None = None

    def __post_init__(self):
        self._line = sys._getframe(2).f_lineno

    def __repr__(self):
        source = pathlib.Path(__file__).read_text()
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and node.lineno == self._line
                and ast.unparse(node.func) == "Case"
            ):
                return ast.unparse(node)
        return f"Case at line {self._line}"


def assigned(name, value, verb="assign"):
    return lambda e: getattr(getattr(e, name), verb)(e.here(value))


def made(value, **kwargs):
    def make(e):
        with e.s.scope():
            return hs.Variable(e.here(value), **kwargs)

    return make


def reduced(op, value, axis=None):
    return lambda e: e.s.reduce(op, e.each(value), axis)


def gathered(value, axis):
    return lambda e: e.s.gather(e.each(value), axis)


def central(*args):
    return lambda e: hs.CentralStorageStrategy(*(args or (e.place.devices,)))


def mirrored(*args):
    return lambda e: hs.MirroredStrategy(*args)


def parameters_on(device):
    return lambda e: hs.CentralStorageStrategy(e.place.devices, device)


def from_function(value):
    return lambda e: e.s.experimental_distribute_values_from_function(lambda context: e.here(value))


def entered(strategy):
    with strategy.scope():
        pass


def in_scope(strategy, fn):
    with strategy.scope():
        return fn()


INT_RANGE = "a value of dtype int64 cannot be cast to the variable's int32"
NO_ARRAY = "is not an array of numbers"
ONE_EACH = "one value per replica; reduce it first"

ACROSS = {
    # strategies
    "devices: too many": Case(
        central([HERE] * (N + 1)), ValueError, f"{N + 1} compute devices .*`mpirun -n {N + 1}`"
    ),
    "devices: none": Case(
        mirrored([]), ValueError, "MirroredStrategy: 0 compute devices were named"
    ),
    "devices: one string": Case(
        central(HERE), TypeError, "the string 'CPU:0' is not a list of devices", central()
    ),
    "devices: mirrored, one string": Case(
        mirrored(HERE), TypeError, "MirroredStrategy: the string"
    ),
    "devices: unknown": Case(
        central(["XPU:0"] * N), ValueError, "CentralStorageStrategy: 'XPU:0' is not a device"
    ),
    "devices: no string": Case(
        mirrored([0] * N), ValueError, "MirroredStrategy: 0 is not a device"
    ),
    "devices: no number": Case(
        central(["CPU"] * N), ValueError, "'CPU' is not a device; write 'CPU:0'"
    ),
    "devices: another job": Case(
        central(["/job:worker/task:0/device:CPU:0"] * N), ValueError, "is not a device"
    ),
    "devices: a second CPU": Case(
        central(["CPU:1"] * N), ValueError, "CentralStorageStrategy: there is no CPU:1", central()
    ),
    "devices: parameter device of nobody": Case(
        parameters_on("GPU:77"),
        ValueError,
        "parameter_device is .*GPU:77, and no rank computes there",
        central(),
    ),
    "devices: parameter device unknown": Case(
        parameters_on("here"), ValueError, "'here' is not a device", central()
    ),
    # scopes
    "scope of another": Case(
        lambda e: in_scope(e.other, lambda: entered(e.s)),
        RuntimeError,
        "Strategy.scope .*scope of another strategy",
    ),
    "run in another's scope": Case(
        lambda e: in_scope(e.other, lambda: e.s.run(lambda: 0)),
        RuntimeError,
        "Strategy.run .*scope of another strategy",
    ),
    "reduce in another's scope": Case(
        lambda e: in_scope(e.other, lambda: e.s.reduce("MEAN", 1, None)),
        RuntimeError,
        "Strategy.reduce .*another strategy",
    ),
    # run
    "run: what the function returned": Case(
        lambda e: e.s.run(5), TypeError, "Strategy.run: fn is 5; pass the function"
    ),
    "run: None": Case(
        lambda e: e.s.run(None), TypeError, "Strategy.run: fn is None; pass the function itself"
    ),
    "run: args is the one argument": Case(
        lambda e: e.s.run(lambda x: 0, args=e.each(ONES)),
        TypeError,
        r"args is of type \w+; it must be a tuple: args=\(x,\)",
    ),
    "run: args is a number": Case(
        lambda e: e.s.run(lambda x: 0, (5)),
        TypeError,
        "Strategy.run: args is of type int; it must be a tuple",
    ),
    "run: args is of type dict": Case(
        lambda e: e.s.run(lambda x: 0, {"x": 1}),
        TypeError,
        "Strategy.run: args is of type dict; it must be a tuple",
    ),
    "update: args is the one argument": Case(
        lambda e: e.s.extended.update(e.v, lambda v, x: 0, args=ONES),
        TypeError,
        "StrategyExtended.update: args is of type ndarray; it must be a tuple",
    ),
    # reduce
    "reduce: no operation": Case(
        reduced("TOTAL", ONES),
        ValueError,
        "Strategy.reduce: reduce_op is 'TOTAL'; it must be one",
        reduced("SUM", ONES),
    ),
    "reduce: operation None": Case(
        reduced(None, ONES), ValueError, "reduce_op is None", reduced("SUM", ONES)
    ),
    "reduce: axis of another kind": Case(
        reduced("SUM", ONES, "0"),
        TypeError,
        "axis is '0'; it must be None, an int",
        reduced("SUM", ONES, 0),
    ),
    "reduce: axis 1.0": Case(
        reduced("SUM", ONES, 1.0),
        TypeError,
        "Strategy.reduce: axis is 1.0",
        reduced("SUM", ONES, 0),
    ),
    "reduce: axis True": Case(
        reduced("SUM", np.ones((2, 2)), True), TypeError, "axis is True", reduced("SUM", ONES, 0)
    ),
    "reduce: axis out of range": Case(
        reduced("MEAN", ONES, 1),
        ValueError,
        "axis 1 does not exist in a value of 1",
        reduced("MEAN", ONES, 0),
    ),
    "reduce: axis too negative": Case(
        reduced("MEAN", ONES, -2), ValueError, "axis -2 does not exist", reduced("MEAN", ONES, 0)
    ),
    "reduce: axis of a number": Case(
        reduced("MEAN", 2.5, 0),
        ValueError,
        "axis 0 does not exist in a value of 0",
        reduced("MEAN", ONES, 0),
    ),
    "reduce: axis twice": Case(
        reduced("SUM", np.ones((2, 2)), (0, -2)),
        ValueError,
        "names a dimension twice",
        reduced("SUM", np.ones((2, 2)), (0, 1)),
    ),
    "reduce: SUM of bool": Case(
        reduced("SUM", np.array([True])),
        TypeError,
        "Strategy.reduce: SUM of bool is not defined",
        reduced("SUM", ONES),
    ),
    "reduce: MEAN of bool along an axis": Case(
        reduced("MEAN", np.array([True]), 0), TypeError, "MEAN of bool", reduced("MEAN", ONES, 0)
    ),
    "reduce: MAX of complex": Case(
        reduced("MAX", np.array([1j])),
        TypeError,
        "MAX of complex128 is not defined",
        reduced("MAX", ONES),
    ),
    "reduce: long double": Case(
        reduced("SUM", np.ones(3, np.longdouble)),
        TypeError,
        "longdouble cannot be reduced|float128 cannot be",
        reduced("SUM", ONES),
    ),
    "reduce: text": Case(
        reduced("SUM", "text"),
        TypeError,
        f"Strategy.reduce: 'text' {NO_ARRAY}",
        reduced("SUM", ONES),
    ),
    "reduce: objects": Case(reduced("SUM", {1, 2}), TypeError, NO_ARRAY, reduced("SUM", ONES)),
    "reduce: dates": Case(
        reduced("MAX", np.datetime64("2020-01-01")), TypeError, NO_ARRAY, reduced("MAX", ONES)
    ),
    "reduce: slices along an axis": Case(
        lambda e: e.s.reduce("SUM", e.each(e.slices), 0), ValueError, "IndexedSlices .*axis=None"
    ),
    "reduce: MAX of slices": Case(
        lambda e: e.s.reduce("MAX", e.each(e.slices), None), ValueError, "SUM or MEAN, not by MAX"
    ),
    # gather
    "gather: number": Case(gathered(2.5, 0), ValueError, "Strategy.gather: axis 0 does not exist"),
    "gather: axis out of range": Case(
        gathered(ONES, 1), ValueError, r"axis 1 does not exist .*\(3,\) on ranks? 0"
    ),
    "gather: axis of another kind": Case(
        gathered(ONES, None),
        TypeError,
        "Strategy.gather: axis is None; it must be an int",
        gathered(ONES, 0),
    ),
    "gather: axis True": Case(
        gathered(np.ones((2, 2)), True), TypeError, "axis is True", gathered(ONES, 0)
    ),
    "gather: slices": Case(
        lambda e: e.s.gather(e.each(e.slices), 0),
        NotImplementedError,
        "Strategy.gather: IndexedSlices cannot be gathered",
        gathered(ONES, 0),
    ),
    "gather: plain slices": Case(
        lambda e: e.s.gather(e.slices, 0), NotImplementedError, "IndexedSlices cannot be gathered"
    ),
    "gather: text": Case(gathered("text", 0), TypeError, NO_ARRAY, gathered(ONES, 0)),
    # values from a function
    **{
        f"values from function: {name}": Case(
            from_function(value),
            TypeError,
            rf"Strategy.experimental_distribute_values_from_function: .*{NO_ARRAY}",
            from_function(1.0),
        )
        for name, value in {
            "text": "text",
            "None": None,
            "function": len,
            "object": object(),
        }.items()
    },
    "values from function: not callable": Case(
        lambda e: e.s.experimental_distribute_values_from_function(5),
        TypeError,
        "not callable",
        from_function(1.0),
    ),
    "values from function: fails": Case(
        lambda e: e.s.experimental_distribute_values_from_function(lambda c: {}["gone"]),
        KeyError,
        "gone",
        from_function(1.0),
    ),
    # one logical device per replica
    "logical device 1": Case(
        lambda e: e.s.experimental_assign_to_logical_device(ONES, 1),
        ValueError,
        "no logical device 1",
    ),
    "logical device -1": Case(
        lambda e: e.s.experimental_assign_to_logical_device(ONES, -1),
        ValueError,
        "no logical device -1",
    ),
    "split: too short": Case(
        lambda e: e.s.experimental_split_to_logical_devices(np.ones((2, 2)), [1]),
        ValueError,
        "experimental_split_to_logical_devices",
    ),
    "split: in two": Case(
        lambda e: e.s.experimental_split_to_logical_devices(np.ones((2, 2)), [2, 1]),
        ValueError,
        "experimental_split_to_logical_devices",
    ),
    # making variables
    "variable of None": Case(
        made(None),
        TypeError,
        "Variable: the initial value is None; it must be an array",
        made(ONES),
    ),
    "variable of text": Case(made("text"), TypeError, "the initial value is 'text'", made(ONES)),
    "variable of a set": Case(made({1, 2}), TypeError, "the initial value is {1, 2}", made(ONES)),
    "variable of dates": Case(
        made(np.zeros(2, "M8[s]")), TypeError, "the initial value is", made(ONES)
    ),
    "variable of records": Case(
        made(np.zeros(2, [("a", "f4")])), TypeError, "the initial value is", made(ONES)
    ),
    "variable of a ragged list": Case(
        made([[1], [2, 3]]), ValueError, "inhomogeneous|setting an array", made(ONES)
    ),
    "variable of text dtype": Case(
        made(1.0, dtype=str),
        TypeError,
        "Variable: dtype is .*; it must be a numeric or boolean",
        made(1.0),
    ),
    "variable of no dtype": Case(made(1.0, dtype="float31"), TypeError, "float31", made(1.0)),
    "variable of another shape": Case(
        made(ONES, shape=(4,)),
        ValueError,
        r"shape \(3,\), but shape=\(4,\)",
        made(ONES, shape=(3,)),
    ),
    "variable of an int too large": Case(
        made(2**40), ValueError, "cannot be cast to int32 without loss", made(2)
    ),
    "variable of a negative uint": Case(
        made(-1, dtype=np.uint8), ValueError, "cannot be cast to uint8", made(1, dtype=np.uint8)
    ),
    "variable of floats as int": Case(
        made([1.5], dtype=np.int32),
        ValueError,
        "cannot be cast to int32",
        made([1], dtype=np.int32),
    ),
    "variable of complex as float": Case(
        made([1j], dtype=np.float32), ValueError, "cannot be cast to float32", made([1.0])
    ),
    "variable of each replica's": Case(
        lambda e: made(e.each(ONES) if N > 1 else hs.PerReplica(ONES, 0, 1))(e),
        ValueError,
        "one value per replica; reduce it",
    ),
    "variable of no aggregation": Case(
        made(1.0, aggregation="MOST"),
        ValueError,
        "Variable: aggregation is 'MOST'; it must",
        made(1.0),
    ),
    "variable of no synchronization": Case(
        made(1.0, synchronization=3), ValueError, "Variable: synchronization is 3", made(1.0)
    ),
    # writing them in the cross-replica context
    "assign: shape": Case(
        assigned("v", FIVE),
        ValueError,
        r"Variable.assign of 'v': .*\(5,\) and the variable \(3,\)",
        assigned("v", ONES * 0),
    ),
    "assign: a number": Case(
        assigned("v", 1.0),
        ValueError,
        r"\(\) and the variable \(3,\); nothing is broadcast",
        assigned("v", ONES * 0),
    ),
    "assign: one more dimension": Case(
        assigned("scalar", [1.0]), ValueError, r"\(1,\) and the variable \(\)"
    ),
    "assign: large": Case(
        assigned("large", np.ones((100, 300))),
        ValueError,
        r"\(100, 300\) and",
        assigned("large", np.zeros((300, 100))),
    ),
    "assign: floats": Case(
        assigned("i", np.ones(3)),
        ValueError,
        "'i': a value of dtype float64 cannot be cast to .* int32",
        assigned("i", [0, 0, 0]),
    ),
    "assign: Python floats": Case(
        assigned("i", [1.0, 2.0, 3.0]), ValueError, "float64 cannot be cast to"
    ),
    "assign: a large array of ints": Case(
        assigned("i", np.array([0, 0, 2**31])), ValueError, INT_RANGE, assigned("i", [0, 0, 0])
    ),
    "assign: large Python ints": Case(assigned("i", [0, 0, -(2**31) - 1]), ValueError, INT_RANGE),
    "assign: complex": Case(
        assigned("v", ONES * 1j), ValueError, "complex64 cannot be cast to the variable's float32"
    ),
    "assign: text": Case(
        assigned("v", ["a", "b", "c"]), ValueError, "the value is .*; it must be an array, a number"
    ),
    "assign: one text": Case(
        assigned("v", "text"), ValueError, "the value is 'text'; it must be an array, a number"
    ),
    "assign: None": Case(assigned("v", None), ValueError, "Variable.assign of 'v'"),
    "assign: numbers to bool": Case(
        assigned("b", np.array([1, 0])), ValueError, "int64 cannot be cast to the variable's bool"
    ),
    "add to bool": Case(
        assigned("b", np.array([True, True]), "assign_add"),
        ValueError,
        "'b': booleans are neither added",
    ),
    "add: shape": Case(
        assigned("v", FIVE, "assign_add"),
        ValueError,
        "Variable.assign_add of 'v': the value has shape",
    ),
    "subtract: shape": Case(
        assigned("v", FIVE, "assign_sub"), ValueError, "Variable.assign_sub of 'v': the value has"
    ),
    "assign: each replica's": Case(
        lambda e: e.v.assign(e.each(ONES) if N > 1 else hs.PerReplica(ONES, 0, 1)),
        ValueError,
        "is a PerReplica, .*reduce it first",
    ),
    "assign to another's": Case(
        lambda e: in_scope(e.s, lambda: e.foreign.assign(ONES)),
        RuntimeError,
        "'foreign': the variable belongs to another",
    ),
    # StrategyExtended
    "reduce_to: nowhere": Case(
        lambda e: e.s.extended.reduce_to("SUM", e.each(ONES), None),
        ValueError,
        "StrategyExtended.reduce_to: destinations is None",
    ),
    "reduce_to: unknown device": Case(
        lambda e: e.s.extended.reduce_to("SUM", e.each(ONES), "here"),
        ValueError,
        "'here' is not a device",
    ),
    "batch_reduce_to: nowhere": Case(
        lambda e: e.s.extended.batch_reduce_to("SUM", [(e.each(ONES), [])]),
        ValueError,
        r"StrategyExtended.batch_reduce_to: destinations is \[\]",
    ),
    "broadcast_to: nowhere": Case(
        lambda e: e.s.extended.broadcast_to(1, None),
        ValueError,
        "StrategyExtended.broadcast_to: destinations",
    ),
    "broadcast_to: a distributed value": Case(
        lambda e: e.s.extended.broadcast_to({"a": hs.PerReplica(1, RANK, N)}, HERE),
        TypeError,
        f"StrategyExtended.broadcast_to: this is {ONE_EACH}",
        lambda e: e.s.extended.broadcast_to({"a": 1}, HERE),
    ),
    "update: no variable": Case(
        lambda e: e.s.extended.update(5, lambda v: 0),
        ValueError,
        "StrategyExtended.update: 5 is not a variable",
    ),
    "update: another's": Case(
        lambda e: e.s.extended.update(e.foreign, lambda v: 0),
        ValueError,
        "StrategyExtended.update: .*is not a variable of this",
    ),
    "update: each replica's": Case(
        lambda e: e.s.extended.update(e.v, lambda v, x: 0, (hs.PerReplica(ONES, RANK, N),)),
        ValueError,
        "StrategyExtended.update: .*reduce it first",
    ),
    "colocate: no scope": Case(
        lambda e: e.s.extended.colocate_vars_with(e.v).__enter__(),
        RuntimeError,
        "colocate_vars_with is for use under",
    ),
    "colocate: another's": Case(
        lambda e: in_scope(e.s, lambda: e.s.extended.colocate_vars_with(e.foreign).__enter__()),
        ValueError,
        "colocate_vars_with: .*not one of this",
    ),
    # a replica's context, kept
    "all_reduce outside": Case(
        lambda e: e.context.all_reduce("SUM", 1),
        RuntimeError,
        "ReplicaContext.all_reduce was called outside",
    ),
    "all_gather outside": Case(
        lambda e: e.context.all_gather(ONES, 0),
        RuntimeError,
        "ReplicaContext.all_gather was called outside",
    ),
    "merge_call outside": Case(
        lambda e: e.context.merge_call(lambda s: 0),
        RuntimeError,
        "ReplicaContext.merge_call was called",
    ),
    "all_reduce in the scope": Case(
        lambda e: in_scope(e.s, lambda: e.context.all_reduce("SUM", 1)),
        RuntimeError,
        "ReplicaContext.all_reduce was called outside",
    ),
}
if importlib.util.find_spec("cupy") is None:
    ACROSS["devices: a GPU without CuPy"] = Case(
        central(["GPU:0"] * N), RuntimeError, "GPU:0 needs CuPy"
    )
else:
    ACROSS["devices: no such GPU"] = Case(
        central(["GPU:77"] * N),
        RuntimeError,
        "CentralStorageStrategy: .*there is no GPU:77; the process of rank 0 sees",
    )
if N > 1:
    ACROSS["OneDeviceStrategy"] = Case(
        lambda e: hs.OneDeviceStrategy(HERE),
        RuntimeError,
        f"one replica, but {N} ranks run; start .* without mpirun",
    )
    ACROSS["reduce: sum of a plain value"] = Case(
        lambda e: e.s.reduce("SUM", [5, e.each(ONES)], None),
        ValueError,
        "SUM of a value that is not distributed",
        reduced("SUM", ONES),
    )
    ACROSS["local results that cannot travel"] = Case(
        lambda e: e.s.experimental_local_results(e.each(lambda: 0)),
        TypeError,
        "Strategy.experimental_local_results: .*cannot travel",
        lambda e: e.s.experimental_local_results(e.each(0)),
    )
    ACROSS["ON_READ as an array"] = Case(
        lambda e: e.own + 1, RuntimeError, "'own' has one value per replica"
    )
    ACROSS["add to ON_READ"] = Case(
        assigned("own", ONES, "assign_add"),
        ValueError,
        "Variable.assign_add of 'own': .*not defined",
        assigned("own", ONES),
    )
else:
    ACROSS["OneDeviceStrategy: unknown"] = Case(
        lambda e: hs.OneDeviceStrategy("here"), ValueError, "OneDeviceStrategy: 'here'"
    )


def scattered(name, verb, values, indices):
    return lambda e: getattr(getattr(e, name), f"scatter_{verb}")(
        hs.IndexedSlices(e.here(values), indices)
    )


ROW = scattered("v", "add", 0.0, [0])
ROWS = {
    "scatter: index": Case(
        scattered("v", "add", 1.0, [0, 3]),
        ValueError,
        r"scatter_add of 'v': an index is not in 0\.\.2",
        ROW,
    ),
    "scatter: negative": Case(
        scattered("v", "sub", 1.0, [-1]), ValueError, r"scatter_sub of 'v': an index is not in", ROW
    ),
    "scatter: indices of floats": Case(
        scattered("v", "add", 1.0, [0.5]),
        ValueError,
        "indices are of dtype float64; pass integers",
        ROW,
    ),
    "scatter: shape": Case(
        scattered("v", "sub", ONES, [0, 1]),
        ValueError,
        r"values have shape \(3,\); for indices of .*it must be \(2,\)",
        ROW,
    ),
    "scatter: into a number": Case(
        scattered("scalar", "add", 1.0, [0]),
        ValueError,
        r"the variable has shape \(\) and no rows",
    ),
    "scatter: an array": Case(
        lambda e: e.v.scatter_add(e.here(ONES)),
        TypeError,
        "sparse_delta is of type ndarray; pass IndexedSlices",
        ROW,
    ),
    "scatter: complex": Case(
        scattered("v", "add", [1j], [0]),
        ValueError,
        "complex128 cannot be cast to the variable's float32",
        ROW,
    ),
    "scatter: bool": Case(
        scattered("b", "add", True, [0]),
        ValueError,
        "it is not defined for bool; use scatter_update",
    ),
    "scatter: one value per replica": Case(
        scattered("v", "add", hs.PerReplica(1.0, RANK, N), [0]),
        ValueError,
        "is a PerReplica, one value per replica",
        ROW,
    ),
    "scatter: to a variable that each replica has": Case(
        scattered("own", "add", 1.0, [0]), NotImplementedError, "'own': the variable is ON_READ"
    ),
    "sparse_read: index": Case(
        lambda e: e.v.sparse_read([3]), ValueError, "sparse_read of 'v': an index is not in 0"
    ),
    "sparse_read: of a number": Case(
        lambda e: e.scalar.sparse_read([0]),
        ValueError,
        r"sparse_read of 'scalar': the variable has shape \(\) and no rows",
    ),
}
ACROSS |= {f"{name}, at the top level": case for name, case in ROWS.items()}


def context():
    found: Any = hs.get_replica_context()
    return found


def summed(value, op="SUM"):
    return lambda e: context().all_reduce(op, e.here(value))


def gathered_inside(value, axis):
    return lambda e: context().all_gather(e.here(value), axis)


INSIDE = {
    "run": Case(
        lambda e: e.s.run(lambda: 0),
        RuntimeError,
        "Strategy.run was called inside a replica function",
    ),
    "reduce": Case(
        lambda e: e.s.reduce("SUM", 1, None),
        RuntimeError,
        "Strategy.reduce was called inside .*all_reduce",
    ),
    "gather": Case(
        lambda e: e.s.gather(e.here(ONES), 0),
        RuntimeError,
        "Strategy.gather was called inside a replica function",
    ),
    "scope": Case(
        lambda e: entered(e.s), RuntimeError, "Strategy.scope was called inside a replica function"
    ),
    "another's run": Case(
        lambda e: e.other.run(lambda: 0), RuntimeError, "Strategy.run was called inside a replica"
    ),
    "values from function": Case(
        from_function(1), RuntimeError, "values_from_function was called inside a replica"
    ),
    "distribute_dataset": Case(
        lambda e: e.s.experimental_distribute_dataset(hs.data.Dataset.range(4).batch(2)),
        RuntimeError,
        "distribute_dataset",
    ),
    "update": Case(
        lambda e: e.s.extended.update(e.v, lambda v: 0),
        RuntimeError,
        "StrategyExtended.update was called inside",
    ),
    "reduce_to": Case(
        lambda e: e.s.extended.reduce_to("SUM", 1, e.v),
        RuntimeError,
        "reduce_to was called inside a replica",
    ),
    "call_for_each_replica": Case(
        lambda e: e.s.extended.call_for_each_replica(lambda: 0),
        RuntimeError,
        "call_for_each_replica was called inside",
    ),
    "all_reduce: no operation": Case(
        summed(1, "AVERAGE"),
        ValueError,
        "ReplicaContext.all_reduce: reduce_op is 'AVERAGE'",
        summed(1),
    ),
    "all_reduce: bool": Case(
        summed(True), TypeError, "ReplicaContext.all_reduce: SUM of bool", summed(1)
    ),
    "all_reduce: text": Case(
        summed({"a": "text"}),
        TypeError,
        f"ReplicaContext.all_reduce: 'text' {NO_ARRAY}",
        summed({"a": 1}),
    ),
    "all_reduce: long double": Case(
        summed(np.longdouble(1)), TypeError, "cannot be reduced", summed(1)
    ),
    "all_reduce: a distributed value": Case(
        summed(hs.PerReplica(1, RANK, N)), TypeError, "one value per replica", summed(1)
    ),
    "all_gather: number": Case(
        gathered_inside(1.0, 0), ValueError, "ReplicaContext.all_gather: axis 0 does not exist"
    ),
    "all_gather: axis": Case(
        gathered_inside(ONES, 1), ValueError, "ReplicaContext.all_gather: axis 1 does not exist"
    ),
    "all_gather: axis None": Case(
        gathered_inside(ONES, None), TypeError, "all_gather: axis is None", gathered_inside(ONES, 0)
    ),
    "all_gather: slices": Case(
        lambda e: context().all_gather(e.slices, 0),
        NotImplementedError,
        "ReplicaContext.all_gather: IndexedSlices",
        gathered_inside(ONES, 0),
    ),
    "broadcast: root": Case(
        lambda e: context().broadcast(e.here(ONES), N),
        ValueError,
        rf"ReplicaContext.broadcast: root is {N}; it must be the index of a replica, 0\.\.{N - 1}",
        lambda e: context().broadcast(e.here(ONES)),
    ),
    "broadcast: a root of another kind": Case(
        lambda e: context().broadcast(e.here(ONES), True),
        ValueError,
        "root is True; it must be the index of a replica",
    ),
    "broadcast: text": Case(
        lambda e: context().broadcast(["text"]),
        TypeError,
        f"'text' {NO_ARRAY}",
        lambda e: context().broadcast([1.0]),
    ),
    "broadcast: a distributed value": Case(
        lambda e: context().broadcast(hs.PerReplica(1, RANK, N)), TypeError, "one value per replica"
    ),
    "reduce_scatter: number": Case(
        lambda e: context().reduce_scatter("SUM", 1.0),
        ValueError,
        r"ReplicaContext.reduce_scatter: axis 0 does not exist in an array of shape \(\)",
    ),
    "reduce_scatter: axis": Case(
        lambda e: context().reduce_scatter("SUM", e.here(ONES), 1),
        ValueError,
        r"axis 1 does not exist in an array of shape \(3,\)",
        lambda e: context().reduce_scatter("SUM", e.here(ONES)),
    ),
    "reduce_scatter: axis None": Case(
        lambda e: context().reduce_scatter("SUM", e.here(ONES), None),
        TypeError,
        "axis is None; it must be an int",
    ),
    "reduce_scatter: no operation": Case(
        lambda e: context().reduce_scatter("AVERAGE", e.here(ONES)),
        ValueError,
        "reduce_op is 'AVERAGE'",
    ),
    "reduce_scatter: bool": Case(
        lambda e: context().reduce_scatter("SUM", e.here(ONES > 0)),
        TypeError,
        "reduce_scatter: SUM of bool",
    ),
    "scan: mean": Case(
        lambda e: context().scan("MEAN", 1.0),
        ValueError,
        "ReplicaContext.scan: reduce_op is MEAN, which has no result for the first replica; pass "
        "SUM, MIN or MAX",
    ),
    "scan: inclusive": Case(
        lambda e: context().scan("SUM", 1.0, 1),
        TypeError,
        "ReplicaContext.scan: inclusive is 1; it must be True or False",
    ),
    "all_to_all: too many": Case(
        lambda e: context().all_to_all([e.here(ONES)] * (N + 1)),
        ValueError,
        f"ReplicaContext.all_to_all: values is {N + 1} values; pass a list of {N}, one per replica",
        lambda e: context().all_to_all([e.here(ONES)] * N),
    ),
    "all_to_all: an array": Case(
        lambda e: context().all_to_all(e.here(ONES)),
        ValueError,
        "values is of type ndarray; pass a list of",
    ),
    "all_to_all: text": Case(
        lambda e: context().all_to_all(["text"] * N), TypeError, f"'text' {NO_ARRAY}"
    ),
    "neighbor_exchange: text": Case(
        lambda e: context().neighbor_exchange(1.0, "text"),
        TypeError,
        f"ReplicaContext.neighbor_exchange: 'text' {NO_ARRAY}",
        lambda e: context().neighbor_exchange(1.0, 1.0),
    ),
    "merge_call: no function": Case(
        lambda e: context().merge_call(5), TypeError, "merge_call: fn is 5; pass the function"
    ),
    "merge_call: args is the one argument": Case(
        lambda e: context().merge_call(lambda s, x: 0, args=ONES),
        TypeError,
        "merge_call: args is of type ndarray; it must be",
    ),
    "assign: no aggregation": Case(
        assigned("none", ONES),
        ValueError,
        "Variable.assign of 'none' in a replica context: it has no aggregation.*='SUM'",
    ),
    "assign: mean of ints": Case(
        assigned("mean", np.ones(3, np.int32)),
        ValueError,
        "'mean': the mean .*float64 and does not fit int32",
    ),
    "assign: shape": Case(
        assigned("v", FIVE),
        ValueError,
        r"Variable.assign of 'v': .*\(5,\) and the variable \(3,\)",
        assigned("v", ONES),
    ),
    "assign: large": Case(
        assigned("large", FIVE),
        ValueError,
        r"of 'large': .*\(5,\)",
        assigned("large", np.ones((300, 100))),
    ),
    "assign: a number": Case(
        assigned("v", 1.0), ValueError, r"\(\) and the variable \(3,\)", assigned("v", ONES)
    ),
    "assign: floats": Case(
        assigned("i", ONES),
        ValueError,
        "float32 cannot be cast to the variable's int32",
        assigned("i", [1, 2, 3]),
    ),
    "assign: large ints": Case(
        assigned("i", np.array([0, 0, 2**31])), ValueError, INT_RANGE, assigned("i", [1, 2, 3])
    ),
    "assign: complex": Case(
        assigned("v", ONES * 1j), ValueError, "complex64 cannot be cast to", assigned("v", ONES)
    ),
    "assign: a distributed value": Case(
        lambda e: e.v.assign(hs.PerReplica(ONES, RANK, N)),
        ValueError,
        "is a PerReplica",
        assigned("v", ONES),
    ),
    "add to bool": Case(
        assigned("b", np.array([True, True]), "assign_add"),
        ValueError,
        "neither added",
        assigned("b", np.array([True, True])),
    ),
    "assign to another's": Case(
        lambda e: e.foreign.assign(ONES), RuntimeError, "'foreign': the variable belongs to another"
    ),
    "own: shape": Case(assigned("own", FIVE), ValueError, r"Variable.assign of 'own': .*\(5,\)"),
    "new variable": Case(
        lambda e: hs.Variable(None),
        TypeError,
        "the initial value is None",
        lambda e: hs.Variable(1.0),
    ),
    **ROWS,
    "scatter: no aggregation": Case(
        scattered("none", "add", 1.0, [0]),
        ValueError,
        "scatter_add of 'none' in a replica context: it has no aggregation",
    ),
    "scatter: mean of ints": Case(
        scattered("mean", "add", 1, [0]), ValueError, "'mean': the mean .* does not fit int32"
    ),
    "scatter: update of each replica's": Case(
        scattered("v", "update", 1.0, [0]),
        NotImplementedError,
        "aggregation is SUM, and it needs ONLY_FIRST_REPLICA",
    ),
    "random_generator": Case(lambda e: context().random_generator(-1), ValueError, "non-negative"),
}
if N > 1:  # with one rank each process is all of them
    INSIDE["all_to_all: dtypes"] = Case(
        lambda e: context().all_to_all(
            [e.here(ONES.astype("f8" if r == 1 else "f4")) for r in range(N)]
        ),
        ValueError,
        "values for the replicas differ in structure or dtypes: .*float32; .*float64",
        lambda e: context().all_to_all([e.here(ONES)] * N),
    )
    INSIDE["assign to one of no scope"] = Case(
        lambda e: e.outside.assign(ONES),
        RuntimeError,
        "'outside': the variable was made outside of this strategy's scope",
    )


@pytest.fixture(scope="module", params=slow_but(STRATEGIES[:1], STRATEGIES))
def env(request, place):
    with place.make(request.param) as strategy, place.make(request.param) as other:
        yield Env(place, strategy, other)


@pytest.fixture(autouse=True)
def _nothing_has_changed(env):
    yield
    env.works()
    env.v.assign(np.zeros(3))


NOT_OURS = {
    "random_generator": "NumPy makes it",
    "values from function: fails": "the function's own",
    "values from function: not callable": "Python calls it",
    "variable of a ragged list": "NumPy reads it",
}
"""Errors that come through the library."""


def check_text(name, error):
    """Checks that a misuse's message, if it is the library's, names the call."""
    if name not in NOT_OURS:
        assert begins_with_a_call(str(error)), str(error)


CORE_ACROSS = [
    "devices: too many",
    "OneDeviceStrategy",
    "OneDeviceStrategy: unknown",
    "reduce: sum of a plain value",
]
CORE_INSIDE = ["broadcast: root", "all_to_all: too many", "all_to_all: dtypes"]
CORE_ACROSS_ON_ONE = [
    "devices: a second CPU",
    "reduce: text",
    "gather: axis of another kind",
    "variable of text",
]
CORE_ACROSS_ON_ONE += ["assign: shape", "update: no variable", "values from function: fails"]
CORE_INSIDE_ON_ONE = [
    "all_reduce: text",
    "broadcast: root",
    "assign: shape",
    "new variable",
    "scatter: index",
]


def named(cases, core):
    """The cases by name, for `parametrize`; where the number of ranks matters they are core."""
    marks = pytest.mark.core
    return [
        pytest.param(name, case, id=name, marks=marks if name in core else ())
        for name, case in cases.items()
    ]


def with_right(cases):
    return {name: case for name, case in cases.items() if case.right is not None}


@pytest.mark.parametrize(("name", "case"), named(ACROSS, CORE_ACROSS))
def test_across_replicas(env, name, case):
    with pytest.raises(case.error, match=case.match) as caught:
        case.wrong(env)
    check_text(name, caught.value)


@pytest.mark.parametrize(("name", "case"), named(INSIDE, CORE_INSIDE))
def test_in_a_replica(env, name, case):
    with pytest.raises(case.error, match=case.match) as caught:
        env.s.run(lambda: case.wrong(env))
    check_text(name, caught.value)


several = pytest.mark.mpi(min_size=2)  # one rank is all of them


@several
@pytest.mark.parametrize(("name", "case"), named(with_right(ACROSS), CORE_ACROSS_ON_ONE))
def test_across_replicas_on_one_rank_only(env, name, case):
    for odd in {0, N - 1}:
        with pytest.raises(case.error, match=case.match) as caught:
            (case.wrong if RANK == odd else case.right)(env)
        assert RANK == odd or f"found by rank {odd}" in str(caught.value)


@several
@pytest.mark.parametrize(("name", "case"), named(with_right(INSIDE), CORE_INSIDE_ON_ONE))
def test_in_a_replica_on_one_rank_only(env, name, case):
    for odd in {0, N - 1}:
        with pytest.raises(case.error, match=case.match) as caught:
            env.s.run(lambda odd=odd: (case.wrong if RANK == odd else case.right)(env))
        assert RANK == odd or f"found by rank {odd}" in str(caught.value)


# ---- arrays on a GPU, in strategies whose replicas compute on the CPU

ON_GPU = "an array is on a GPU, and this strategy's replicas compute on the CPU"
AWAY = {
    "reduce": (lambda s, x: s.reduce("SUM", s.run(lambda: x), None), f"Strategy.reduce: {ON_GPU}"),
    "reduce along an axis": (
        lambda s, x: s.reduce("MEAN", s.run(lambda: x), 0),
        f"Strategy.reduce: {ON_GPU}",
    ),
    "reduce slices": (
        lambda s, x: s.reduce("SUM", s.run(lambda: hs.IndexedSlices(x, np.arange(3), (5,))), None),
        f"Strategy.reduce: {ON_GPU}",
    ),
    "all_reduce": (
        lambda s, x: s.run(lambda: context().all_reduce("MAX", [np.ones(2), x])),
        f"ReplicaContext.all_reduce: {ON_GPU}",
    ),
    "all_gather": (
        lambda s, x: s.run(lambda: context().all_gather(x, 0)),
        f"ReplicaContext.all_gather: {ON_GPU}",
    ),
    "variable": (
        lambda s, x: in_scope(s, lambda: hs.Variable(x)),
        "Variable: the value is on a GPU, .*hs.asnumpy",
    ),
    "assign": (
        lambda s, x: in_scope(s, lambda: hs.Variable(np.zeros(3, np.float32), name="v")).assign(x),
        "Variable.assign of 'v': the value is on a GPU, .*hs.asnumpy",
    ),
}
if N > 1:  # one replica's value is returned as it is
    AWAY["gather"] = (
        lambda s, x: s.gather(s.run(lambda: [np.ones(2), x]), 0),
        f"Strategy.gather: {ON_GPU}",
    )


@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("name", AWAY)
def test_arrays_on_a_gpu_where_replicas_compute_on_the_cpu(env, place, name):
    call, match = AWAY[name]
    with type(env.s)([HERE] * N) as strategy:
        with pytest.raises(TypeError, match=match):
            call(strategy, place.xp.asarray(ONES))
        for odd in {0, N - 1}:
            with pytest.raises(TypeError, match=match) as caught:
                call(strategy, place.xp.asarray(ONES) if RANK == odd else ONES)
            assert RANK == odd or f"found by rank {odd}" in str(caught.value)
        assert strategy.reduce("SUM", strategy.run(lambda: ONES), None).tolist() == [N] * 3


@several
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_ranks_that_would_share_a_gpu(env, place, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(
        RuntimeError, match=rf"ranks 0, 1.* would compute on one GPU, 1 for {N} ranks; .*share-gpu"
    ):
        type(env.s)([place.devices[0]] * N)
