"""Sums of any nests, and updates of any variables, compared with NumPy.

Reductions and gathers of nests across replicas: test_reduce.py. Data: test_data_distributed.py.

The draws are the same on every rank; what a rank passes follows from them and from its number.
"""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import compiled
from mpi4py import MPI
from strategies import STRATEGIES
from transports import has, kind

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
DTYPES = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.float32, np.float64]
# In a record, in a mailbox, in chunks.
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from([(), (0,), (3, 0, 2), (1000,), (70, 130), (40_001,)]),
)
LEAVES = st.tuples(SHAPES, st.sampled_from(DTYPES))
NESTS = st.recursive(
    LEAVES | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def numbers(shape, dtype, seed):
    """Whole numbers, whose sums over a few ranks are exact in every dtype."""
    return ((np.arange(np.prod(shape)) * (seed + 3) + 5 * seed) % 11).reshape(shape).astype(dtype)


def mapped(fn, plan):
    """A nest like the plan, whose leaves `fn` makes from their shapes and dtypes."""
    if isinstance(plan, list):
        return [mapped(fn, one) for one in plan]
    if isinstance(plan, dict):
        return {key: mapped(fn, one) for key, one in plan.items()}
    return None if plan is None else fn(*plan)


def bits(nest):
    """What nests are compared by: structure, shapes, dtypes and every bit."""
    if isinstance(nest, list):
        return [*map(bits, nest)]
    if isinstance(nest, dict):
        return [(key, bits(value)) for key, value in nest.items()]
    return None if nest is None else (nest.shape, nest.dtype.name, nest.tobytes())


@hypothesis.given(NESTS, st.sampled_from(["SUM", "MIN", "MAX"]))
def test_all_reduce(strategy, plan, op):
    def expected(shape, dtype):
        stacked = np.stack([numbers(shape, dtype, rank) for rank in range(N)])
        found = {"SUM": stacked.sum, "MIN": stacked.min, "MAX": stacked.max}[op](0)
        return np.asarray(found).astype(dtype)

    def step():
        value = mapped(lambda shape, dtype: strategy.xp.asarray(numbers(shape, dtype, RANK)), plan)
        found = hs.get_replica_context().all_reduce(op, value)  # pyright: ignore[reportOptionalMemberAccess]
        assert bits(hs.asnumpy(found)) == bits(mapped(expected, plan))

    strategy.run(step)


OPTIMIZERS = {
    "momentum": lambda: hs.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: hs.optimizers.Adam(0.1),
    "decay": lambda: hs.optimizers.RMSprop(0.1, weight_decay=0.1),
    "clipped": lambda: hs.optimizers.Adam(0.1, global_clipnorm=0.5),
}
# Fewer elements than ranks, 16-bit elements between two words, more than one chunk or two. Of each
# variable its shape, its dtype, whether it has a gradient, and whether there is a gap before it.
PLANS = st.lists(
    st.tuples(
        SHAPES | st.sampled_from([(63,), (65,), (32_769,), (65_539,)]),
        st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)
ROUNDING = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}


@pytest.fixture(scope="module")
def compiles(strategy):
    """Whether loops are compiled for the first update, however small: with one of the strategies."""
    is_compiled = compiled.compiler() is not None and isinstance(strategy, hs.MirroredStrategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FEWEST_UPDATES", 0 if is_compiled else math.inf)
        patch.setattr(compiled, "FEWEST", math.inf)
        yield is_compiled


@hypothesis.given(st.sampled_from(list(OPTIMIZERS)), PLANS, st.integers(1, 2))
def test_optimizers_are_one_replicas_on_the_sum(strategy, place, compiles, name, plan, steps):
    """Next to the same optimizer on plain variables, which gets the sum in rank order.

    The bits are the same, except where sums are made in another order: of norms, and by NCCL.
    """
    name = "momentum" if compiles else name  # a compiler takes half a second for each
    plan = [one for one in plan if has(place.xp, kind(one[1]))]
    hypothesis.assume(any(has_gradient for _, _, has_gradient, _ in plan))

    def drawn(shape, dtype, *seed):
        return np.random.default_rng(seed).standard_normal(shape).astype(kind(dtype))

    initial = [drawn(shape, dtype, i) for i, (shape, dtype, *_) in enumerate(plan)]
    with strategy.scope():
        variables, gaps, optimizer = [], [], OPTIMIZERS[name]()
        for one, (*_, has_gap) in zip(initial, plan, strict=True):
            gaps.append(hs.Variable(np.zeros(3, np.int8)) if has_gap else None)
            variables.append(hs.Variable(one))
    alone, one_replica = [hs.Variable(one) for one in initial], OPTIMIZERS[name]()

    def gradients(rank, step):
        return [
            drawn(shape, dtype, i, rank + 1, step) if has_gradient else None
            for i, (shape, dtype, has_gradient, _) in enumerate(plan)
        ]

    def total(parts):
        if parts[0] is None:
            return None
        wide = np.float32 if parts[0].itemsize == 2 else parts[0].dtype
        found = parts[0].astype(wide)
        for part in parts[1:]:
            found = found + part.astype(wide)
        return found.astype(parts[0].dtype)

    for step in range(steps):
        mine = [None if one is None else strategy.xp.asarray(one) for one in gradients(RANK, step)]
        strategy.run(lambda mine=mine: optimizer.apply_gradients(zip(mine, variables, strict=True)))
        everyones = zip(*(gradients(rank, step) for rank in range(N)), strict=True)
        one_replica.apply_gradients(zip(map(total, everyones), alone, strict=True))
    pairs = zip([*variables, *optimizer.variables], [*alone, *one_replica.variables], strict=True)
    for v, w in pairs:
        if place.kind == "GPU" or name == "clipped":
            rounding = ROUNDING.get(v.dtype.name, 0)
            np.testing.assert_allclose(
                v.numpy().astype(float), w.numpy().astype(float), rtol=rounding, atol=rounding
            )
        else:
            assert v.numpy().tobytes() == w.numpy().tobytes()
        assert len(set(COMM.allgather(v.numpy().tobytes()))) == 1
