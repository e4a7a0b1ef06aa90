"""Ranks that pass different things or make different calls: all raise, and name each call."""

import re
from typing import Any

import numpy as np
import pytest
from internals import ranks_in_words
from misuse import FIVE, ONES, RANK, Env, N
from strategies import STRATEGIES

import hpcstrat as hs

pytestmark = pytest.mark.mpi(min_size=2)  # one rank cannot differ from another


# Whichever communicator a strategy has, its ranks compare their calls in the same lines.
@pytest.fixture(
    scope="module", params=[pytest.param(STRATEGIES[0], marks=pytest.mark.core), *STRATEGIES[1:]]
)
def env(request, place):
    with place.make(request.param) as strategy, place.make(request.param) as other:
        yield Env(place, strategy, other)


@pytest.fixture(autouse=True)
def _nothing_has_changed(env):
    yield
    env.works()
    env.v.assign(np.zeros(3))


def context():
    found: Any = hs.get_replica_context()
    return found


def made(e, value):
    with e.s.scope():
        return hs.Variable(e.here(value))


DIFFERENT = {
    "reduce: shapes": (
        lambda e, odd: e.s.reduce("SUM", e.each(FIVE if odd else ONES), None),
        ("(3,)", "(5,)"),
    ),
    "reduce: dtypes": (
        lambda e, odd: e.s.reduce("SUM", e.each(np.ones(3) if odd else ONES), None),
        ("float64", "float32"),
    ),
    "reduce: operations": (
        lambda e, odd: e.s.reduce("MAX" if odd else "SUM", e.each(ONES), None),
        ("Strategy.reduce(SUM", "Strategy.reduce(MAX"),
    ),
    "reduce: dimensions": (
        lambda e, odd: e.s.reduce("SUM", e.each(np.ones((2, 3 + odd))), 0),
        ("(3,)", "(4,)"),
    ),
    "reduce: axes": (
        lambda e, odd: e.s.reduce("SUM", e.each(np.ones((2, 3))), int(odd)),
        ("Strategy.reduce",),
    ),
    "reduce: axes of a square": (
        lambda e, odd: e.s.reduce("SUM", e.each(np.ones((3, 3))), int(odd)),
        ("axis=0", "axis=1"),
    ),
    "reduce: operations along an axis": (
        lambda e, odd: e.s.reduce("SUM" if odd else "MEAN", e.each(np.ones(3)), 0),
        ("SUM", "MEAN"),
    ),
    "reduce: keys": (
        lambda e, odd: e.s.reduce("SUM", e.each({"a": 1, "c" if odd else "b": 2}), None),
        ("'b': *", "'c': *"),
    ),
    "reduce: None": (
        lambda e, odd: e.s.reduce("SUM", e.each([1, None] if odd else [None, 1]), None),
        ("[0]", "[1]"),
    ),
    "reduce: plain or not": (
        lambda e, odd: e.s.reduce("MEAN", [1, e.each(1)] if odd else [e.each(1), 1], None),
        ("[0]", "[1]"),
    ),
    "gather: keys": (
        lambda e, odd: e.s.gather(e.each({"b" if odd else "a": ONES}), 0),
        ("'a': *", "'b': *"),
    ),
    "reduce: no leaves": (
        lambda e, odd: e.s.reduce("SUM", e.each([ONES] * odd), None),
        ("[]", "[*]"),
    ),
    "reduce: None or not": (
        lambda e, odd: e.s.reduce("SUM", e.each(ONES if odd else None), None),
        ("not distributed",),
    ),
    "gather: no leaves": (lambda e, odd: e.s.gather(e.each([ONES] * odd), 0), ("[]", "[*]")),
    "local results: no leaves": (
        lambda e, odd: e.s.experimental_local_results(e.each([ONES] * odd)),
        ("[]", "[*]"),
    ),
    "local results: None or not": (
        lambda e, odd: e.s.experimental_local_results(e.each(ONES if odd else None)),
        ("not distributed",),
    ),
    "local results: leaves": (
        lambda e, odd: e.s.experimental_local_results(e.each([ONES] * (1 + odd))),
        ("[*]", "[*, *]"),
    ),
    "reduce: leaves": (
        lambda e, odd: e.s.reduce("SUM", e.each([ONES] * (1 + odd)), None),
        ("Strategy.reduce",),
    ),
    "reduce or gather": (
        lambda e, odd: (
            e.s.gather(e.each(ONES), 0) if odd else e.s.reduce("SUM", e.each(ONES), None)
        ),
        ("gather",),
    ),
    "gather: axes": (
        lambda e, odd: e.s.gather(e.each(np.ones((2, 2))), int(odd)),
        ("Strategy.gather",),
    ),
    "gather: shapes": (
        lambda e, odd: e.s.gather(e.each(np.ones((2, 3 + odd))), 0),
        ("(2, 3)", "(2, 4)"),
    ),
    "variables: shapes": (lambda e, odd: made(e, np.ones(3 + odd)), ("(3,)", "(4,)")),
    "variables: dtypes": (
        lambda e, odd: made(e, np.ones(3, np.float32 if odd else np.float64)),
        ("float64", "float32"),
    ),
    "assign or add": (
        lambda e, odd: (e.v.assign_add if odd else e.v.assign)(e.here(ONES)),
        ("Variable.assign_add of 'v'",),
    ),
    "assign: variables": (
        lambda e, odd: (e.none if odd else e.v).assign(e.here(ONES)),
        ("'none'",),
    ),
    "in an update: assign or barrier": (
        lambda e, odd: e.s.extended.update(
            e.v, lambda v: v.assign(e.here(ONES)) if odd else hs.barrier()
        ),
        ("barrier", "Variable.assign of 'v'"),
    ),
    "any_rank or barrier": (
        lambda e, odd: hs.any_rank(False) if odd else hs.barrier(),
        ("any_rank",),
    ),
    "strategies": (
        lambda e, odd: e.place.make(hs.MirroredStrategy if odd else hs.CentralStorageStrategy),
        ("MirroredStrategy",),
    ),
}
DIFFERENT_INSIDE = {
    "all_reduce: shapes": (
        lambda e, odd: context().all_reduce("SUM", e.here(FIVE if odd else ONES)),
        ("(3,)", "(5,)"),
    ),
    "all_reduce: operations": (
        lambda e, odd: context().all_reduce("MIN" if odd else "SUM", e.here(ONES)),
        ("ReplicaContext.all_reduce(SUM", "ReplicaContext.all_reduce(MIN"),
    ),
    "all_reduce: None": (
        lambda e, odd: context().all_reduce("SUM", e.here([None if odd else ONES, ONES])),
        ("ReplicaContext.all_reduce",),
    ),
    "all_reduce: keys": (
        lambda e, odd: context().all_reduce("SUM", {"b" if odd else "a": 1}),
        ("'a': *", "'b': *"),
    ),
    "all_reduce: the other None": (
        lambda e, odd: context().all_reduce("SUM", [1, None] if odd else [None, 1]),
        ("[0]", "[1]"),
    ),
    "all_gather: keys": (
        lambda e, odd: context().all_gather(e.here({"b" if odd else "a": ONES}), 0),
        ("'a': *", "'b': *"),
    ),
    "all_reduce or all_gather": (
        lambda e, odd: (
            context().all_gather(e.here(ONES), 0)
            if odd
            else context().all_reduce("SUM", e.here(ONES))
        ),
        ("all_gather",),
    ),
    "all_reduce or merge_call": (
        lambda e, odd: (
            context().merge_call(lambda s: 0) if odd else context().all_reduce("SUM", e.here(ONES))
        ),
        ("merge_call",),
    ),
    "assign: variables": (
        lambda e, odd: (
            e.large.assign(e.here(np.ones((300, 100)))) if odd else e.v.assign(e.here(ONES))
        ),
        ("'large'",),
    ),
    "assign or all_reduce": (
        lambda e, odd: (
            e.v.assign(e.here(ONES)) if odd else context().all_reduce("SUM", e.here(ONES))
        ),
        ("Variable.assign",),
    ),
}


def check_different(call, env, texts):
    for odd in range(N):
        with pytest.raises(hs.ReplicaMismatchError) as caught:
            call(env, RANK == odd)
        others = [rank for rank in range(N) if rank != odd]
        for text in (*texts, f"rank {odd}", ranks_in_words(others)):
            assert text in str(caught.value)
        if "must make the same call" in str(caught.value):  # later checks name shapes
            assert len(re.findall(r", at \S*parallel/\w+\.py:\d+ ", str(caught.value))) == 2


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_across_replicas(env, name):
    call, texts = DIFFERENT[name]
    check_different(call, env, texts)


@pytest.mark.parametrize("name", DIFFERENT_INSIDE)
def test_ranks_that_differ_in_a_replica(env, name):
    call, texts = DIFFERENT_INSIDE[name]
    check_different(lambda env, odd: env.s.run(lambda: call(env, odd)), env, texts)


PLACES = {
    "reduce": lambda e, value: e.s.reduce("SUM", e.s.run(lambda: value), None),
    "reduce along an axis": lambda e, value: e.s.reduce("MEAN", e.s.run(lambda: value), 0),
    "gather": lambda e, value: e.s.gather(e.s.run(lambda: value), 0),
    "all_reduce": lambda e, value: e.s.run(lambda: context().all_reduce("MAX", value)),
    "all_gather": lambda e, value: e.s.run(lambda: context().all_gather(value, 0)),
}


@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("name", PLACES)
def test_arrays_on_the_gpu_of_some_ranks_only(env, place, name):
    here = place.xp.asarray(ONES)
    for even, odd in [([here], [ONES]), ([here, ONES], [ONES, here]), ([here, here], [here, ONES])]:
        check_different(
            lambda env, is_odd, both=(even, odd): PLACES[name](env, both[is_odd]),
            env,
            ("on the GPU [0",),
        )


def test_devices_that_differ(env, place):
    others = [["CPU:0"] * N, ["GPU:77"] * N, None] if place.kind == "GPU" else [None]
    for other in others:
        check_different(
            lambda env, odd, other=other: type(env.s)(other if odd else place.devices),
            env,
            (place.devices[0],),
        )


def applied(e, rate, value=ONES):
    optimizer = hs.optimizers.SGD(rate)
    return e.s.run(lambda: optimizer.apply_gradients([(e.here(value), e.v)]))


def test_a_search_over_learning_rates_is_shown_the_way(env):
    """If only numbers differ. With other differences it would be misleading."""
    with pytest.raises(
        hs.ReplicaMismatchError,
        match="learning_rate=0.5(.|\n)*To train a model on each rank, .* make",
    ) as one:
        applied(env, 0.5 + RANK)
    assert "apply_gradients" in str(one.value)
    with pytest.raises(hs.ReplicaMismatchError) as other:
        env.s.reduce("MAX" if RANK else "SUM", env.each(ONES), None)
    assert "To train" not in str(other.value)


def test_a_model_on_each_rank():
    """What that message describes: no communication, and other numbers on each rank."""
    w = hs.Variable(np.zeros(3))
    optimizer = hs.optimizers.SGD(0.5 / (1 + RANK))
    for _ in range(1 + RANK):
        optimizer.apply_gradients([(np.ones(3) * 2, w)])
    np.testing.assert_allclose(w.numpy(), [-1.0] * 3)
