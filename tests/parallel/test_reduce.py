"""Strategy.reduce: elementwise over replicas, and along axes within them too."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES
from transports import has, kind

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N = COMM.size
RANK = COMM.rank
OPERATIONS = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def replica_context() -> Any:
    return hs.get_replica_context()


def each(strategy, values):
    """The distributed value whose component on replica r is `values[r]`; arrays on its device."""
    mine = values[RANK]
    return strategy.run(lambda: strategy.xp.asarray(mine) if isinstance(mine, np.ndarray) else mine)


def reduced(strategy, op, values, axis):
    """A host copy of the reduction of these arrays of the replicas, on their devices."""
    found = strategy.reduce(op, each(strategy, values), axis)
    assert isinstance(found, (np.ndarray, np.generic) if strategy.xp is np else strategy.xp.ndarray)
    return hs.asnumpy(found)


def same_bits(value):
    return len(set(COMM.allgather(hs.asnumpy(value).tobytes()))) == 1


def test_dtypes(strategy):
    """Integer sums keep their dtype; along an axis, up to 16 bits grow. Means are TensorFlow's."""
    means: dict[Any, Any] = {np.int8: np.float32, np.uint16: np.float32}
    means |= {np.int32: np.float64, np.uint64: np.float64}
    longer = {np.int8: np.int64, np.uint16: np.uint64}
    for dtype in (*means, np.float16, kind("bfloat16"), np.float64, np.complex64):
        if not has(strategy.xp, np.dtype(dtype)):  # CuPy and bfloat16
            continue
        value = each(strategy, [np.full(3, r + 1).astype(dtype) for r in range(N)])
        total, expected = strategy.reduce("SUM", value, None), np.array(N * (N + 1) // 2)
        # From 16 ranks on the sum of int8 wraps around.
        assert total.dtype == dtype and total.tolist() == [expected.astype(dtype)] * 3
        total, mean = strategy.reduce("SUM", value, 0), strategy.reduce("MEAN", value, 0)
        assert total.dtype == longer.get(dtype, dtype)
        assert hs.asnumpy(total) == 3 * N * (N + 1) / 2
        assert mean.dtype == means.get(dtype, dtype)
        assert hs.asnumpy(mean) == np.asarray((N + 1) / 2).astype(mean.dtype)
        if N > 1:
            mean = strategy.reduce("MEAN", value, None)
            assert mean.dtype == means.get(dtype, dtype)
            assert hs.asnumpy(mean).tolist() == [(N + 1) / 2] * 3
        if np.dtype(dtype).itemsize == 2 and dtype is not np.uint16:  # whose sum would be 2048
            assert reduced(strategy, "MEAN", [np.ones(5000, dtype)] * N, 0) == 1
    flags = each(strategy, [np.array([r == 0, True, False]) for r in range(N)])
    assert strategy.reduce("MIN", flags, None).tolist() == [N == 1, True, False]
    assert strategy.reduce("MAX", flags, None).tolist() == [True, True, False]
    assert bool(strategy.reduce("MIN", flags, 0)) is False
    assert bool(strategy.reduce("MAX", flags, 0)) is True


def test_axes(strategy):
    parts = [(np.arange(24.0).reshape(2, 3, 4) * (r + 1)) % 7 - r for r in range(N)]
    for axis in (2, -3, (2, 0), [0, 2], (0, 1, 2), (-1, 0), ()):
        over = (0, *((a % 3) + 1 for a in (axis if isinstance(axis, (tuple, list)) else (axis,))))
        for op, function in OPERATIONS.items():
            found = reduced(strategy, op, parts, axis)
            np.testing.assert_allclose(found, function(np.stack(parts), axis=over), rtol=1e-14)
            assert same_bits(found)


def test_empty_parts_do_not_count(strategy):
    for empty in ([0], [N - 1], range(1, N)):
        parts = [
            np.zeros((0, 2)) if r in empty and N > 1 else np.full((r + 1, 2), r - 5.0)
            for r in range(N)
        ]
        everything = np.concatenate(parts)
        for op, function in OPERATIONS.items():
            found = reduced(strategy, op, parts, 0)
            np.testing.assert_allclose(found, function(everything, axis=0), rtol=1e-14)
            found = reduced(strategy, op, [part.astype(np.int32) for part in parts], (0, 1))
            np.testing.assert_allclose(found, function(everything), rtol=1e-14)


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
        with pytest.raises(ValueError, match=f"Strategy.reduce: {op} .* no elements"):
            strategy.reduce(op, integers, 0)
    assert strategy.reduce("MEAN", nothing, 1).shape == (0,)


def test_nan_inf_and_overflows_come_through(strategy, place):
    """Not as an exception on the one rank that asked for those."""
    parts = [np.array([np.nan if r == N - 1 else 1.0, np.inf, 2.0]) for r in range(N)]
    # NCCL's minima and maxima may leave a NaN out.
    for op in OPERATIONS if place.kind == "CPU" else ("SUM", "MEAN"):
        found = reduced(strategy, op, parts, None)
        assert np.isnan(found[0]) and found[1] == np.inf and np.isfinite(found[2])
        assert np.isnan(reduced(strategy, op, parts, 0))
    values = each(strategy, [np.full((2, 3), 65_504.0, np.float16)] * N)
    slices = strategy.run(
        lambda: hs.IndexedSlices(strategy.xp.full((1, 2), 1e-45, np.float32), np.array([RANK]))
    )
    for op, expected in [("SUM", np.inf), ("MEAN", 65_504.0)]:
        with np.errstate(all="raise" if RANK == N - 1 else "ignore"):
            found = strategy.reduce(op, values, axis=0)
            strategy.reduce(op, slices, axis=None)  # a mean of the smallest number underflows
        np.testing.assert_array_equal(hs.asnumpy(found), np.full(3, expected, np.float16))


def test_a_nest_takes_no_more_calls_than_an_array(strategy):
    """Its arrays are on the device and on the host, and are reduced where they are."""
    xp, total = strategy.xp, N * (N - 1) / 2
    value = strategy.run(
        lambda: {
            "loss": xp.array(1.0 * RANK),
            "more": [xp.full((1, 3), RANK + 0.5), None, {"x": np.full((1, 2), RANK)}],
        }
    )
    counts = [strategy.replica_group.communicator.calls.number]
    for nest in (value["loss"], {"loss": value["loss"], "none": None, "again": [value["loss"]]}):
        found = strategy.reduce("SUM", nest, None)
        counts.append(strategy.replica_group.communicator.calls.number)
    assert counts[2] - counts[1] == counts[1] - counts[0]
    assert found["loss"] == found["again"][0] == total and found["none"] is None
    for axis in (None, 0):
        for op, scale in [("SUM", 1), ("MEAN", N)]:
            more = strategy.reduce(op, value["more"], axis)
            assert type(more[0]) is xp.ndarray and type(more[2]["x"]) is np.ndarray
            assert more[0].ravel().tolist() == [N * N / 2 / scale] * 3 and more[1] is None
            assert more[2]["x"].ravel().tolist() == [total / scale] * 2


def test_none_from_one_rank_alone_is_an_error_on_every_rank(strategy):
    for leaf in (None, [None, None]):
        assert strategy.run(lambda leaf=leaf: replica_context().all_reduce("SUM", leaf)) == leaf
        if N > 1:
            own = leaf if RANK == 0 else strategy.xp.ones(3)
            message = "rank 0: ReplicaContext.all_reduce.SUM"
            with pytest.raises(hs.ReplicaMismatchError, match=message):
                strategy.run(lambda own=own: replica_context().all_reduce("SUM", own))


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
    with pytest.raises(ValueError, match=r"Strategy\.reduce: .* nested more than 1000 levels"):
        reduced(2000 if RANK == N - 1 else 900)
    assert reduced(900) == N


def test_plain_values(strategy):
    """The mean of a value that is the same everywhere is the value itself."""
    xp = strategy.xp
    assert strategy.reduce("MEAN", xp.array([[1, 3], [5, 7]]), (0, 1)) == 4
    assert strategy.reduce("MAX", xp.array([1.0, 3.0]), 0) == 3
    found = strategy.reduce("SUM", {"a": 0, "b": each(strategy, list(range(N)))}, None)
    assert found == {"a": 0, "b": N * (N - 1) // 2} and isinstance(found["b"], np.generic)
    with strategy.scope():
        v = hs.Variable([1.0, 2.0])
    assert strategy.reduce("MEAN", v, 0) == 1.5
    for value, axis in [(2.5, None), (xp.array([0.0, 1.0]), 0)] if N > 1 else ():
        with pytest.raises(ValueError, match=r"Strategy.reduce: SUM of .* not distributed"):
            strategy.reduce("SUM", value, axis)


@pytest.mark.mpi(min_size=2)
def test_mismatches(strategy):
    """The error names the reduction once, and what each rank passed."""
    for op, in_words in [("SUM", "SUM"), ("MEAN", "SUM, for MEAN")]:
        axis = 0 if RANK else 1
        message = rf"rank 0: Strategy\.reduce\({in_words}, axis=1[,)]"
        with pytest.raises(hs.ReplicaMismatchError, match=message):
            strategy.reduce(op, strategy.run(lambda: strategy.xp.ones((2, 3))), axis=axis)
    sizes = each(strategy, [np.zeros(4 if r == 0 else 2) for r in range(N)])
    message = r"rank 0: .*\(4,\)(.|\n)*ranks? 1\b.*\(2,\)"
    with pytest.raises(hs.ReplicaMismatchError, match=message):
        strategy.reduce("SUM", sizes, axis=None)
    xp, is_last = strategy.xp, RANK == N - 1
    slices = strategy.run(lambda: hs.IndexedSlices(xp.ones((1, 2)), xp.array([RANK])))
    with pytest.raises(hs.ReplicaMismatchError, match="MEAN"):
        strategy.reduce("SUM" if is_last else "MEAN", slices, None)
    with pytest.raises(hs.ReplicaMismatchError, match="other"):
        strategy.reduce("SUM", {"other" if is_last else "w": slices}, None)
    assert strategy.reduce("SUM", slices, None).indices.tolist() == list(range(N))


def test_slices_arrays_and_plain_leaves_in_one_nest(strategy):
    xp, total = strategy.xp, N * (N - 1) / 2

    def own(rows):
        return hs.IndexedSlices(xp.full((rows, 2), RANK + 0.5), xp.full(rows, RANK), (N + 1, 2))

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
            assert type(found[name]) is hs.IndexedSlices and found[name].shape == (N + 1, 2)
    mean = strategy.reduce("MEAN", value["a"], None)
    assert mean.values[:, 0].tolist() == [(r + 0.5) / N for r in range(N)]
    # Nothing is sent before all values are checked.
    before = strategy.replica_group.communicator.calls.number
    with pytest.raises(ValueError, match="IndexedSlices are reduced by SUM or MEAN, not by MAX"):
        strategy.reduce("MAX", value, None)
    # The ranks raise together.
    assert strategy.replica_group.communicator.calls.number - before <= 2


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


def test_keys_in_another_order_on_another_rank(strategy):
    """Sortable keys are summed right; others are refused, rather than summed crosswise."""
    for keys in (("b", "a", "c"), (2, 1), ("x", 1, None), (b"a", ("t", 2))):
        value = strategy.run(lambda keys=keys: in_two_orders(*keys))
        expected = {key: N * i for i, key in enumerate(keys)}
        assert strategy.reduce("SUM", value, None) == expected
    same = (Key(1, "one"), Key(2, "two"))
    assert set(
        strategy.reduce("SUM", strategy.run(lambda: {key: 1 for key in same}), None).values()
    ) == {N}
    if N == 1:
        return
    for keys in ((Key(1), Key(2)), same):
        value = strategy.run(lambda keys=keys: {key: np.ones(1) for key in in_two_orders(*keys)})
        for call in (
            lambda value=value: strategy.reduce("SUM", value, None),
            lambda value=value: strategy.reduce("SUM", value, 0),
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
    for key in ("a, NoneIsLeaf", "a': *, 'b", "a" * 10_000):
        value = strategy.run(lambda key=key: {key: 1.0, "b" if RANK else "c": 1.0})
        with pytest.raises(hs.ReplicaMismatchError, match="the ranks must make the same call"):
            strategy.reduce("SUM", value, None)
    assert strategy.reduce("SUM", strategy.run(lambda: 1), None) == N


# ---- any arrays

LEAVES = st.tuples(
    st.sampled_from([np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64]),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 1000),
)
HOW = [*[(op, None) for op in OPERATIONS], *itertools.product(("SUM", "MEAN"), (0, -1))]


@hypothesis.given(st.lists(LEAVES, max_size=5), st.sampled_from(HOW))
def test_any_arrays(strategy, leaves, how):
    """Elementwise, or along an axis, along which the replicas have parts of different sizes."""
    op, axis = how

    def part(rank, dtype, shape, seed):
        sizes = [*shape]
        if axis is not None:
            sizes[axis] = (sizes[axis] + rank * seed) % 5
        return np.random.default_rng([seed, rank]).integers(0, 50, sizes).astype(dtype)

    def expected(parts):
        whole = np.stack(parts) if axis is None else np.concatenate(parts, axis)
        over, dtype = axis or 0, whole.dtype
        if op == "SUM":
            return whole.sum(over, dtype=dtype if axis is None or dtype.itemsize > 2 else None)
        if op != "MEAN" or (axis is None and N == 1):
            return OPERATIONS[op](whole, axis=over).astype(dtype)
        with np.errstate(invalid="ignore"):
            mean = np.asarray(whole.sum(over, dtype=np.float64) / np.float64(whole.shape[over]))
        integers = np.float32 if dtype.itemsize <= 2 else np.float64
        return mean.astype(integers if dtype.kind in "iu" else dtype)

    value = strategy.run(lambda: [strategy.xp.asarray(part(RANK, *leaf)) for leaf in leaves])
    for leaf, found in zip(leaves, strategy.reduce(op, value, axis), strict=True):
        wanted = np.asarray(expected([part(rank, *leaf) for rank in range(N)]))
        rtol = 1e-6 if wanted.dtype == np.float32 else 1e-12
        host = np.asarray(hs.asnumpy(found))
        np.testing.assert_allclose(host, wanted, rtol=rtol, strict=True)
        assert same_bits(host)
