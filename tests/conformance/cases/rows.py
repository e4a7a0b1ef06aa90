"""Rows of variables: read and written by their indices."""
import numpy as np

from _common import attempt, local, on, plain, raises, replica

SUMS = ("add", "sub")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")


def slices(hs, values, indices, dtype=np.float32):
    return hs.IndexedSlices(np.array(values, dtype), np.array(indices))


def variable(hs, strategy, value=(10, 20, 30), dtype=np.float32, **kwargs):
    with strategy.scope():
        return hs.Variable(np.array(value, dtype), **kwargs)


def aggregated(hs, strategy, aggregation, **kwargs):
    return variable(hs, strategy, aggregation=getattr(hs.VariableAggregation, aggregation), **kwargs)


@on("central", "mirrored")
def case_scatter_in_cross_replica_context(hs, strategy):
    labels = {}
    for aggregation in AGGREGATIONS:
        for verb in SUMS + (("update",) if aggregation in ("NONE", "ONLY_FIRST_REPLICA") else ()):
            v = aggregated(hs, strategy, aggregation)
            getattr(v, f"scatter_{verb}")(slices(hs, [2, 3, 4], [0, 2, 0]))
            labels[f"{aggregation} {verb}"] = plain(hs, v.read_value())
    return labels


def case_scatter_in_cross_replica_context_with_any_aggregation(hs, strategy):
    labels = {}
    for aggregation in ("SUM", "MEAN"):
        v = aggregated(hs, strategy, aggregation)
        v.scatter_update(slices(hs, [2, 30, 4], [0, 1, 0]))
        labels[f"{aggregation} update"] = plain(hs, v.read_value())
    return labels


def written(hs, strategy, v, verb):
    """What one write in a replica context leaves: every replica's view right after it."""
    def fn():
        r = replica(hs)
        getattr(v, f"scatter_{verb}")(slices(hs, [2 + r, 4], [0, 1 if r else 0]))
        return v.read_value()
    return local(hs, strategy, strategy.run(fn))


@on("mirrored")
def case_scatter_in_replica_context(hs, strategy):
    labels = {}
    for aggregation in AGGREGATIONS[1:]:
        for verb in SUMS + (("update",) if aggregation == "ONLY_FIRST_REPLICA" else ()):
            v = aggregated(hs, strategy, aggregation)
            labels[f"{aggregation} {verb} seen"] = written(hs, strategy, v, verb)
            labels[f"{aggregation} {verb}"] = plain(hs, v.read_value())
    return labels


def case_scatter_sums_in_replica_context(hs, strategy):
    labels = {}
    for verb in SUMS:
        v = aggregated(hs, strategy, "SUM")
        written(hs, strategy, v, verb)
        labels[verb] = plain(hs, v.read_value())
    return labels


@on("mirrored")
def case_scatter_that_no_aggregation_brings_together(hs, strategy):
    labels = {}
    for aggregation in ("SUM", "MEAN"):
        v = aggregated(hs, strategy, aggregation)
        labels[f"{aggregation} update"] = raises(written, hs, strategy, v, "update")
        labels[f"{aggregation} update unchanged"] = plain(hs, v.read_value())
    return labels


@on("mirrored")
def case_scatter_into_on_read(hs, strategy):
    with strategy.scope():
        v = hs.Variable(np.zeros(3, np.float32), synchronization=hs.VariableSynchronization.ON_READ,
                        aggregation=hs.VariableAggregation.SUM)
    labels = {}
    for verb in (*SUMS, "update"):
        labels[verb] = raises(getattr(v, f"scatter_{verb}"), slices(hs, [1], [0]))
        labels[f"{verb} in run"] = raises(strategy.run, lambda: getattr(v, f"scatter_{verb}")(slices(hs, [1], [0])))
    return labels


@on("central", "mirrored")
def case_scatter_shapes(hs, strategy):
    matrix = np.arange(12).reshape(4, 3)
    labels = {}
    for label, value, values, indices in [
        ("number", [1, 2, 3], 2, [0, 2]),
        ("table of indices", [1, 2, 3], [[2, 1], [1, 1]], [[0, 2], [1, 0]]),
        ("one index", [1, 2, 3], 2, 0),
        ("rows", matrix, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [3, 0, 3]),
        ("number into rows", matrix, 5, [3, 3]),
        ("nothing", [1, 2, 3], np.zeros(0), np.zeros(0, np.int32)),
        ("nothing into rows", matrix, np.zeros((0, 3)), np.zeros(0, np.int64)),
    ]:
        v = variable(hs, strategy, value)
        v.scatter_add(slices(hs, values, indices))
        labels[label] = plain(hs, v.read_value())
        v.scatter_update(slices(hs, values, indices))
        labels[f"{label} update"] = plain(hs, v.read_value())
    return labels


@on("central", "mirrored")
def case_scatter_dtypes(hs, strategy):
    whole = variable(hs, strategy, [-7, 3], np.int32)
    whole.scatter_add(slices(hs, [2, 3], [0, 0], np.int32))
    truth = variable(hs, strategy, [True, False, False], np.bool_)
    truth.scatter_update(slices(hs, [True, False], [1, 0], np.bool_))
    return {"int32": plain(hs, whole.read_value()), "bool": plain(hs, truth.read_value())}


@on("central", "mirrored")
def case_scatter_errors(hs, strategy):
    v, table, scalar = variable(hs, strategy), variable(hs, strategy, np.ones((3, 2))), variable(hs, strategy, 1)
    labels = {
        "negative": raises(v.scatter_add, slices(hs, [2], [-1])),
        "too large": raises(v.scatter_add, slices(hs, [2, 1], [3, 0])),
        "shorter": raises(v.scatter_update, slices(hs, [2, 1], [0, 1, 2])),
        "one row for many": raises(table.scatter_update, slices(hs, [5, 6], [1])),
        "no dimensions": raises(scalar.scatter_add, slices(hs, [2], [0])),
        "indices of floats": raises(v.scatter_add, slices(hs, [2], [0.0])),
        "an array": raises(v.scatter_add, np.ones(3, np.float32)),
    }
    return {**labels, "unchanged": plain(hs, [v.read_value(), table.read_value(), scalar.read_value()])}


MATRIX = np.arange(24).reshape(2, 3, 4)


def case_sparse_read(hs, strategy):
    v = variable(hs, strategy, MATRIX.reshape(6, 4))
    labels = {label: attempt(lambda: plain(hs, v.sparse_read(np.array(indices)))) for label, indices in {
        "list": [5, 0, 5], "table": [[2, 0], [1, 1]], "one": 2, "negative": [-1], "too large": [0, 6]}.items()}
    return {**labels, "in run": local(hs, strategy, strategy.run(lambda: v.sparse_read(np.array([replica(hs), 0]))))}


@on("central", "mirrored")
def case_variable_references(hs, strategy):
    v, w = variable(hs, strategy), variable(hs, strategy)
    return {"same": v.ref() == v.ref(), "other": v.ref() == w.ref(), "in a set": len({v.ref(), w.ref(), v.ref()}),
            "deref": v.ref().deref() is v, "get_shape": list(v.get_shape())}
