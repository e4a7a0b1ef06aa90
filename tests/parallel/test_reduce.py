"""Strategy.reduce: elementwise over replicas, and along axes within them too."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def replica_context() -> Any:
    return hs.get_replica_context()


def here(strategy, value):
    """An array on the replica's device, a number as it is."""
    return strategy.xp.asarray(value) if isinstance(value, np.ndarray) else value


def each(strategy, values):
    """The distributed value whose component on replica r is `values[r]`."""
    return strategy.run(lambda: here(strategy, values[RANK]))


def reduced(strategy, op, values, axis):
    """A host copy of the reduction of these arrays of the replicas, on their devices."""
    found = strategy.reduce(op, each(strategy, values), axis)
    assert isinstance(found, (np.ndarray, np.generic) if strategy.xp is np else strategy.xp.ndarray)
    return hs.asnumpy(found)


def same_bits(value):
    return len(set(COMM.allgather(hs.asnumpy(value).tobytes()))) == 1


def has_bfloat16(xp):
    """Whether NumPy, or this version of CuPy, computes with it."""
    try:
        return (xp.asarray(np.ones(1, BFLOAT16)) / 1).dtype == BFLOAT16
    except (TypeError, ValueError):
        return False


@pytest.mark.core
@pytest.mark.parametrize("op", [hs.ReduceOp.SUM, "SUM", "sum", "Sum"])
def test_operations_and_their_names(strategy, op):
    assert strategy.reduce(op, each(strategy, list(range(N))), axis=None) == N * (N - 1) // 2


@pytest.mark.core
def test_elementwise(strategy):
    values = [np.array([[r, -r], [2.0, r * r]], np.float32) for r in range(N)]
    arrays = {
        op: strategy.reduce(op, each(strategy, values), None)
        for op in ("SUM", "MEAN", "MIN", "MAX")
    }
    found = hs.asnumpy(arrays)
    stacked = np.stack(values)
    assert np.array_equal(found["SUM"], stacked.sum(0))
    assert np.array_equal(found["MEAN"], stacked.sum(0) / np.float32(N))
    assert np.array_equal(found["MIN"], stacked.min(0)) and np.array_equal(
        found["MAX"], stacked.max(0)
    )
    for one in arrays.values():
        assert isinstance(one, strategy.xp.ndarray) and one.dtype == np.float32 and same_bits(one)
        one[...] = 0  # fresh


@pytest.mark.core
def test_dtypes(strategy):
    """Integer sums keep their dtype; along an axis, up to 16 bits grow. Means are TensorFlow's."""
    means = {
        np.int8: np.float32,
        np.uint16: np.float32,
        np.int32: np.float64,
        np.uint64: np.float64,
    }
    for dtype in (*means, np.float16, BFLOAT16, np.float64, np.complex64):
        if dtype is BFLOAT16 and not has_bfloat16(strategy.xp):
            continue
        value = each(strategy, [np.full(3, r + 1).astype(dtype) for r in range(N)])
        total, expected = strategy.reduce("SUM", value, None), np.array(N * (N + 1) // 2)
        # From 16 ranks on the sum of int8 wraps around.
        assert total.dtype == dtype and total.tolist() == [expected.astype(dtype)] * 3
        total = strategy.reduce("SUM", value, 0)
        assert (
            total.dtype == {np.int8: np.int64, np.uint16: np.uint64}.get(dtype, dtype)
            and hs.asnumpy(total) == 3 * N * (N + 1) / 2
        )
        mean = strategy.reduce("MEAN", value, 0)
        assert mean.dtype == means.get(dtype, dtype)
        assert hs.asnumpy(mean) == np.asarray((N + 1) / 2).astype(mean.dtype)
        if N > 1:
            mean = strategy.reduce("MEAN", value, None)
            assert mean.dtype == means.get(dtype, dtype)
            assert hs.asnumpy(mean).tolist() == [(N + 1) / 2] * 3
    flags = each(strategy, [np.array([r == 0, True, False]) for r in range(N)])
    assert strategy.reduce("MIN", flags, None).tolist() == [N == 1, True, False]
    assert strategy.reduce("MAX", flags, None).tolist() == [True, True, False]
    assert (
        bool(strategy.reduce("MIN", flags, 0)) is False
        and bool(strategy.reduce("MAX", flags, 0)) is True
    )


@pytest.mark.core
def test_the_documented_partial_batch(strategy):
    """Six elements over two replicas, four and two: TensorFlow's example, for any number."""
    sizes = [4] + [2] * (N - 1)
    losses = [np.arange(float(size)) + 10 * r for r, size in enumerate(sizes)]
    everything = np.concatenate(losses)
    assert reduced(strategy, "MEAN", losses, 0) == pytest.approx(everything.mean(), rel=1e-15)
    assert reduced(strategy, "SUM", losses, 0) == everything.sum()
    if N > 1:
        with pytest.raises(
            hs.ReplicaMismatchError, match=r"rank 0: .*\(4,\)(.|\n)*ranks? 1\b.*\(2,\)"
        ):
            strategy.reduce("SUM", each(strategy, losses), axis=None)


CORE_AXIS = pytest.param((0, 1), marks=pytest.mark.core)


@pytest.mark.parametrize(
    "axis", [0, 1, 2, -1, -3, CORE_AXIS, (2, 0), [0, 2], (0, 1, 2), (-1, 0), ()], ids=str
)
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
def test_axes(strategy, axis, op):
    parts = [(np.arange(24.0).reshape(2, 3, 4) * (r + 1)) % 7 - r for r in range(N)]
    found = reduced(strategy, op, parts, axis)
    over = (0, *((a % 3) + 1 for a in (axis if isinstance(axis, (tuple, list)) else (axis,))))
    fn = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}[op]
    np.testing.assert_allclose(found, fn(np.stack(parts), axis=over), rtol=1e-14)
    assert same_bits(found)


EMPTY = {"the first": [0], "the last": [N - 1], "all but the first": list(range(1, N))}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("op", "named"), [("SUM", "SUM"), ("MEAN", "SUM, for MEAN")])
def test_a_mismatch_names_the_reduction_once(strategy, op, named):
    axis = 0 if RANK else 1
    rank = rf"rank 0: Strategy\.reduce\({named}, axis=1[,)]"
    with pytest.raises(hs.ReplicaMismatchError, match=rank):
        strategy.reduce(op, strategy.run(lambda: strategy.xp.ones((2, 3))), axis=axis)


@pytest.mark.core
@pytest.mark.parametrize("ranks", EMPTY)
def test_empty_parts_do_not_count(strategy, ranks):
    empty = EMPTY[ranks]
    parts = [
        np.zeros((0, 2)) if r in empty and N > 1 else np.full((r + 1, 2), r - 5.0) for r in range(N)
    ]
    everything = np.concatenate(parts)
    for op, fn in [("SUM", np.sum), ("MEAN", np.mean), ("MIN", np.min), ("MAX", np.max)]:
        found = reduced(strategy, op, parts, 0)
        np.testing.assert_allclose(found, fn(everything, axis=0), rtol=1e-14)
        found = reduced(strategy, op, [part.astype(np.int32) for part in parts], (0, 1))
        np.testing.assert_allclose(found, fn(everything), rtol=1e-14)


def test_nothing_at_all(strategy):
    nothing = each(strategy, [np.zeros((0, 3), np.float32)] * N)
    assert strategy.reduce("SUM", nothing, 0).tolist() == [0, 0, 0]
    for op in ("MEAN", "MIN", "MAX"):
        found = strategy.reduce(op, nothing, 0)
        assert strategy.xp.isnan(found).all() and found.shape == (3,) and found.dtype == np.float32
    integers = each(strategy, [np.zeros((0, 3), np.int32)] * N)
    assert strategy.reduce("SUM", integers, 0).tolist() == [0, 0, 0]
    assert strategy.xp.isnan(strategy.reduce("MEAN", integers, 0)).all()
    for op in ("MIN", "MAX"):
        with pytest.raises(
            ValueError, match=f"Strategy.reduce: {op} along an axis that has no elements"
        ):
            strategy.reduce(op, integers, 0)
    assert strategy.reduce("MEAN", nothing, 1).shape == (0,)


@pytest.mark.core
def test_nan_and_inf_come_through(strategy, place):
    parts = [np.array([np.nan if r == N - 1 else 1.0, np.inf, 2.0]) for r in range(N)]
    for op in ("SUM", "MEAN", "MIN", "MAX"):
        found = reduced(strategy, op, parts, None)
        assert found[1] == np.inf and np.isfinite(found[2])
        # NCCL's minima and maxima may leave a NaN out.
        if place.kind == "CPU" or op in (
            "SUM",
            "MEAN",
        ):
            assert np.isnan(found[0]) and np.isnan(reduced(strategy, op, parts, 0))


def test_means_of_16_bit_floats_are_of_all_elements(strategy):
    """5000 ones sum to 2048 in float16."""
    for dtype in (np.float16, BFLOAT16) if has_bfloat16(strategy.xp) else (np.float16,):
        found = reduced(strategy, "MEAN", [np.ones(5000, dtype)] * N, 0)
        assert (found, found.dtype) == (1, dtype)


@pytest.mark.core
def test_numbers(strategy):
    """As programs sum their losses: NumPy's scalars come back, not arrays without dimensions."""
    for values in ([float(r) for r in range(N)], list(range(N)), [np.float32(r) for r in range(N)]):
        found = strategy.reduce("SUM", each(strategy, values), axis=None)
        assert found == N * (N - 1) / 2 and isinstance(found, np.generic)


@pytest.mark.core
def test_nests_travel_together(strategy):
    xp = strategy.xp

    def replica():
        return {
            "loss": xp.array(1.0 * RANK),
            "more": [xp.full(3, RANK, np.int32), None, {"x": xp.ones((2, 2)) * RANK}],
        }

    value = strategy.run(replica)
    counts = [strategy.replica_group.communicator.calls.number]
    for nest in (value["loss"], value):
        found = strategy.reduce("SUM", nest, None)
        counts.append(strategy.replica_group.communicator.calls.number)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    total = N * (N - 1) / 2
    assert found["loss"] == total and found["more"][1] is None
    assert found["more"][0].tolist() == [total] * 3 and found["more"][0].dtype == np.int32
    assert found["more"][2]["x"].tolist() == [[total] * 2] * 2
    assert strategy.reduce("MEAN", value["more"][0], 0) == (N - 1) / 2


def test_none_from_one_rank_alone_is_an_error_on_every_rank(strategy):
    for leaf in (None, [None, None]):
        assert (
            strategy.run(lambda leaf=leaf: hs.get_replica_context().all_reduce("SUM", leaf)) == leaf
        )
        if N > 1:
            own = leaf if RANK == 0 else strategy.xp.ones(3)
            with pytest.raises(
                hs.ReplicaMismatchError, match="rank 0: ReplicaContext.all_reduce.SUM"
            ):
                strategy.run(lambda own=own: hs.get_replica_context().all_reduce("SUM", own))


def test_a_nest_that_is_too_deep_is_an_error_on_every_rank(strategy):
    def reduced(levels):
        value = each(strategy, [1] * N)
        for _ in range(levels):
            value = [value]
        value = strategy.reduce("SUM", value, axis=None)
        for _ in range(levels):
            (value,) = value
        return value

    assert reduced(900) == N
    with pytest.raises(
        ValueError, match=r"Strategy\.reduce: the list is nested more than 1000 levels deep"
    ):
        reduced(2000 if RANK == N - 1 else 900)
    assert reduced(900) == N


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_an_overflow_along_an_axis_is_inf_on_every_rank(strategy, op):
    """Not an exception on the one rank that asked for those."""
    values = each(strategy, [np.full((2, 3), 65_504.0, np.float16)] * N)
    expected = np.full(3, np.inf if op == "SUM" else 65_504.0, np.float16)
    slices = strategy.run(
        lambda: hs.IndexedSlices(strategy.xp.full((1, 2), 1e-45, np.float32), np.array([RANK]))
    )
    with np.errstate(all="raise" if RANK == N - 1 else "ignore"):
        found = strategy.reduce(op, values, axis=0)
        strategy.reduce(op, slices, axis=None)  # a mean of the smallest number underflows
    np.testing.assert_array_equal(hs.asnumpy(found), expected)
    assert strategy.reduce("SUM", each(strategy, [1.0] * N), axis=None) == N


@pytest.mark.parametrize("axis", [None, 0])
def test_arrays_of_the_device_and_of_the_host_in_one_nest(strategy, axis):
    """Each is reduced where it is."""
    xp = strategy.xp
    value = strategy.run(
        lambda: {"host": np.full((1, 2), RANK), "device": [xp.full((1, 2), RANK + 0.5)]}
    )
    for op, scale in [("SUM", 1), ("MEAN", N)]:
        found = strategy.reduce(op, value, axis)
        for one, kind, total in [
            (found["host"], np, N * (N - 1) / 2),
            (found["device"][0], xp, N * N / 2),
        ]:
            assert isinstance(one, kind.ndarray) and one.ravel().tolist() == [total / scale] * 2


@pytest.mark.core
def test_arrays_that_are_not_contiguous_have_no_dimensions_or_no_elements(strategy):
    xp = strategy.xp
    whole = here(strategy, np.arange(24.0).reshape(4, 6) * (RANK + 1))
    views = {
        "steps": whole[::2, ::-3],
        "turned": whole.T,
        "one": whole[1, 2],
        "none": whole[:, :0],
        "row": whole[3],
    }
    spread = xp.broadcast_to(xp.asarray(RANK + 1.0), (3, 2))
    found = hs.asnumpy(
        strategy.reduce("SUM", strategy.run(lambda: {**views, "spread": spread}), None)
    )
    everything = np.arange(24.0).reshape(4, 6) * (N * (N + 1) // 2)
    assert np.array_equal(found["steps"], everything[::2, ::-3]) and np.array_equal(
        found["turned"], everything.T
    )
    assert found["one"] == everything[1, 2] and found["none"].shape == (4, 0)
    assert (
        np.array_equal(found["row"], everything[3])
        and found["spread"].tolist() == [[N * (N + 1) / 2] * 2] * 3
    )
    along = strategy.reduce("SUM", strategy.run(lambda: [whole.T, whole[::2, ::-3]]), 0)
    assert np.array_equal(hs.asnumpy(along[0]), everything.T.sum(0))
    assert np.array_equal(hs.asnumpy(along[1]), everything[::2, ::-3].sum(0))


@pytest.mark.core
def test_plain_values(strategy):
    """The mean of a value that is the same everywhere is the value itself."""
    xp = strategy.xp
    assert strategy.reduce("MEAN", 3.5, None) == 3.5
    assert strategy.reduce("MEAN", xp.array([1.0, 3.0]), 0) == 2
    assert strategy.reduce("MEAN", xp.array([[1, 3], [5, 7]]), (0, 1)) == 4
    assert strategy.reduce("MAX", xp.array([1.0, 3.0]), 0) == 3
    assert strategy.reduce("SUM", 0, None) == 0
    assert strategy.reduce("SUM", 0.0, None) == 0
    assert strategy.reduce("SUM", {"a": 0, "b": each(strategy, list(range(N)))}, None) == {
        "a": 0,
        "b": N * (N - 1) // 2,
    }
    with strategy.scope():
        v = hs.Variable([1.0, 2.0])
    assert strategy.reduce("MEAN", v, None).tolist() == [1, 2]
    assert strategy.reduce("MEAN", v, 0) == 1.5


@pytest.mark.mpi(min_size=2)  # with one replica it is that replica's value
@pytest.mark.parametrize("value", [1, 2.5, np.ones(3), np.array([0.0, 1.0])], ids=repr)
def test_the_sum_of_a_plain_value_is_refused(strategy, value):
    for axis in (None, 0) if np.ndim(value) else (None,):
        with pytest.raises(
            ValueError, match=r"Strategy.reduce: SUM of a value that is not distributed"
        ):
            strategy.reduce("SUM", here(strategy, value), axis)
    assert strategy.reduce("SUM", each(strategy, [1] * N), None) == N


@pytest.mark.core
def test_slices(strategy):
    xp = strategy.xp
    value = strategy.run(
        lambda: hs.IndexedSlices(xp.full((1, 2), RANK + 1.0), xp.array([RANK]), (N + 1, 2))
    )
    for op, scale in [("SUM", 1), ("MEAN", N)]:
        found = strategy.reduce(op, value, None)
        assert isinstance(found, hs.IndexedSlices) and found.shape == (N + 1, 2)
        assert found.indices.tolist() == list(range(N))
        assert found.values[:, 0].tolist() == [(r + 1) / scale for r in range(N)]


@pytest.mark.core
def test_slices_arrays_and_plain_leaves_in_one_nest(strategy):
    xp, total = strategy.xp, N * (N - 1) / 2

    def own(rows):
        return hs.IndexedSlices(xp.full((rows, 2), RANK + 0.5), xp.full(rows, RANK))

    def replica():
        return {"a": own(1), "b": xp.full(3, RANK), "c": None, "d": own(2), "e": xp.asarray(RANK)}

    value = strategy.run(replica)
    in_replica = strategy.run(lambda: replica_context().all_reduce("SUM", replica()))
    (in_replica,) = strategy.experimental_local_results(in_replica)[:1]
    across = strategy.reduce("SUM", {**value, "plain": 0}, None)
    assert across["plain"] == 0 and across["c"] is None
    for found in (across, in_replica):
        assert found["b"].tolist() == [total] * 3 and found["e"] == total
        for name, rows in (("a", 1), ("d", 2)):
            assert found[name].indices.tolist() == np.repeat(range(N), rows).tolist()
            assert found[name].values[:, 1].tolist() == (found[name].indices + 0.5).tolist()
    # Nothing is sent before all values are checked.
    before = strategy.replica_group.communicator.calls.number
    with pytest.raises(ValueError, match="IndexedSlices are reduced by SUM or MEAN, not by MAX"):
        strategy.reduce("MAX", value, None)
    assert (
        strategy.replica_group.communicator.calls.number - before <= 2
    )  # the ranks raise together


@pytest.mark.mpi(min_size=2)
def test_slices_that_differ_are_refused(strategy):
    last = RANK == N - 1

    def own():
        return hs.IndexedSlices(here(strategy, np.ones((1, 2))), here(strategy, np.array([RANK])))

    with pytest.raises(hs.ReplicaMismatchError, match=r"MEAN"):
        strategy.reduce("SUM" if last else "MEAN", strategy.run(own), None)
    with pytest.raises(hs.ReplicaMismatchError, match=r"other"):
        strategy.reduce("SUM", strategy.run(lambda: {"other" if last else "w": own()}), None)

    def reduced():
        with pytest.raises(hs.ReplicaMismatchError, match=r"MEAN"):
            hs.get_replica_context().all_reduce("SUM" if last else "MEAN", own())

    strategy.run(reduced)
    assert strategy.reduce("SUM", strategy.run(own), None).indices.tolist() == list(range(N))


class Key:
    """A key that does not sort, and looks like other keys."""

    def __init__(self, name, repr_="key"):
        self.name, self.repr = name, repr_

    def __repr__(self):
        return self.repr


def in_two_orders(*keys):
    """A dict whose keys are in another order on odd ranks, each with its number as its value."""
    order = list(enumerate(keys))
    return {key: float(number) for number, key in (reversed(order) if RANK % 2 else order)}


@pytest.mark.core
@pytest.mark.parametrize("axis", [None, 0])
def test_keys_in_another_order_on_another_rank(strategy, axis):
    """Sortable keys are summed right; others are refused, rather than summed crosswise."""
    for keys in (("b", "a", "c"), (2, 1), ("x", 1, None), (b"a", ("t", 2))):
        value = strategy.run(
            lambda keys=keys: {k: strategy.xp.full(1, v) for k, v in in_two_orders(*keys).items()}
        )
        found = strategy.reduce("SUM", value, axis)
        assert {key: float(one.sum()) for key, one in found.items()} == {
            key: N * i for i, key in enumerate(keys)
        }
    same = (Key(1, "one"), Key(2, "two"))
    assert set(
        strategy.reduce("SUM", strategy.run(lambda: {key: 1 for key in same}), None).values()
    ) == {N}
    if N == 1:
        return
    for keys in ((Key(1), Key(2)), same):
        value = strategy.run(lambda keys=keys: {key: np.ones(1) for key in in_two_orders(*keys)})
        for call in (
            lambda value=value: strategy.reduce("SUM", value, axis),
            lambda value=value: strategy.gather(value, 0),
            lambda value=value: strategy.experimental_local_results(value),
            lambda keys=keys: strategy.run(
                lambda: replica_context().all_reduce("SUM", in_two_orders(*keys))
            ),
            lambda keys=keys: strategy.run(
                lambda: replica_context().merge_call(
                    lambda strategy, nest: None, (in_two_orders(*keys),)
                )
            ),
        ):
            with pytest.raises(hs.ReplicaMismatchError, match="the ranks must make the same call"):
                call()
    assert strategy.reduce("SUM", strategy.run(lambda: 1), None) == N


@pytest.mark.mpi(min_size=2)  # one replica's keys cannot differ from another's
def test_keys_that_differ_in_what_is_long_or_odd(strategy):
    for key in ("a, NoneIsLeaf", "a': *, 'b", "a" * 10_000):
        value = strategy.run(lambda key=key: {key: 1.0, "b" if RANK else "c": 1.0})
        with pytest.raises(hs.ReplicaMismatchError, match="the ranks must make the same call"):
            strategy.reduce("SUM", value, None)
    assert strategy.reduce("SUM", strategy.run(lambda: 1), None) == N


@pytest.mark.core
def test_within_merge_call(strategy):
    def merge(strategy, value):
        return strategy.reduce("SUM", value, None)

    found = strategy.run(lambda: replica_context().merge_call(merge, (strategy.xp.full(3, RANK),)))
    for one in strategy.experimental_local_results(found):
        assert one.tolist() == [N * (N - 1) / 2] * 3


# ---- any nest, any shape, any dtype

CORE_STRATEGIES = [pytest.param(STRATEGIES[0], marks=pytest.mark.core), *STRATEGIES[1:]]
core_on_one_strategy = pytest.mark.parametrize("strategy", CORE_STRATEGIES, indirect=True)

DTYPES = [np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64]
leaf = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.integers(0, 1000),
)


def nests(*others):
    return st.recursive(
        st.one_of(leaf, *others),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
            st.fixed_dictionaries({"list": st.lists(inner, max_size=2), "x": inner}),
        ),
        max_leaves=6,
    )


def build(plan, rank, axis=None, xp: Any = np):
    """The nest of `plan` with replica `rank`'s numbers; sizes along `axis` differ by rank."""
    if isinstance(plan, tuple):
        dtype, shape, seed = plan
        sizes = list(shape)
        if axis is not None:
            sizes[axis] = (sizes[axis] + rank * seed) % 5
        return xp.asarray(
            np.asarray(np.random.default_rng([seed, rank]).integers(0, 50, sizes)).astype(dtype)
        )
    if isinstance(plan, list):
        return [build(one, rank, axis, xp) for one in plan]
    if isinstance(plan, dict):
        return {key: build(one, rank, axis, xp) for key, one in plan.items()}
    return plan


def check(found, plan, parts, expected_of):
    """Compares a nest with what `expected_of` makes of each leaf's parts."""
    if isinstance(plan, tuple):
        expected = np.asarray(expected_of(parts))
        host = hs.asnumpy(found)
        np.testing.assert_allclose(
            host, expected, rtol=1e-6 if expected.dtype == np.float32 else 1e-12
        )
        assert host.shape == expected.shape and found.dtype == expected.dtype
        assert same_bits(host)
    elif isinstance(plan, list):
        assert isinstance(found, list) and len(found) == len(plan)
        for i, one in enumerate(plan):
            check(found[i], one, [part[i] for part in parts], expected_of)
    elif isinstance(plan, dict):
        assert isinstance(found, dict) and found.keys() == plan.keys()
        for key, one in plan.items():
            check(found[key], one, [part[key] for part in parts], expected_of)
    else:
        assert found is None


@core_on_one_strategy
@hypothesis.given(nests(st.none()), st.sampled_from(["SUM", "MIN", "MAX"]))
def test_any_nest_elementwise(strategy, plan, op):
    def expected_of(leaves):
        stacked = np.stack(leaves)
        if op == "SUM":
            return stacked.sum(0, dtype=stacked.dtype)
        return stacked.min(0) if op == "MIN" else stacked.max(0)

    parts = [build(plan, rank) for rank in range(N)]
    found = strategy.reduce(op, strategy.run(lambda: build(plan, RANK, None, strategy.xp)), None)
    check(found, plan, parts, expected_of)


@core_on_one_strategy
@hypothesis.given(nests(st.none()), st.sampled_from(["SUM", "MEAN"]))
def test_any_nest_along_its_first_axis(strategy, plan, op):
    def expected_of(leaves):
        whole = np.concatenate(leaves)
        if op == "SUM":
            return whole.sum(0, dtype=whole.dtype if whole.dtype.itemsize > 2 else None)
        mean = whole.mean(0, dtype=np.float64) if len(whole) else np.full(whole.shape[1:], np.nan)
        integers = np.float32 if whole.dtype.itemsize <= 2 else np.float64
        return np.asarray(mean).astype(integers if whole.dtype.kind in "iu" else whole.dtype)

    parts = [build(plan, rank, 0) for rank in range(N)]
    found = strategy.reduce(op, strategy.run(lambda: build(plan, RANK, 0, strategy.xp)), 0)
    check(found, plan, parts, expected_of)


@core_on_one_strategy
@hypothesis.given(nests(), st.sampled_from([0, -1]))
def test_any_nest_gathered(strategy, plan, axis):
    parts = [build(plan, rank, axis) for rank in range(N)]
    found = strategy.gather(strategy.run(lambda: build(plan, RANK, axis, strategy.xp)), axis)
    check(found, plan, parts, lambda leaves: np.concatenate(leaves, axis))
