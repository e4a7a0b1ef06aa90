"""hs.function on GPUs: memory of arrays that the program drops, and of the graphs themselves."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from graphs import MARKS, RANK, captured, check_equal, own, poison
from internals import function

import hpcstrat as hs

pytestmark = MARKS

MASK: Any = None


class Holder:
    array: Any = None


HOLDERS = {  # how to keep an array, and to read it
    "a global": (lambda _, new: globals().update(MASK=new), lambda _: MASK),
    "a view": (lambda h, new: setattr(h, "array", new.repeat(2)[::2]), lambda h: h.array),
    "memory": (
        lambda h, new: setattr(h, "array", new.data),
        lambda h: hs.get_strategy().xp.ndarray(1000, np.float64, h.array),
    ),
}


def test_an_array_that_is_dropped(mirrored):
    """The graph has the array of the capture, whatever the program reads by then."""
    xp = mirrored.xp
    for name, (keep, read) in HOLDERS.items():
        holder = Holder()
        keep(holder, xp.full(1000, 3.0))
        step, x = hs.function(lambda x, given, read=read: x * read(given)), xp.ones(1000)
        for _ in range(4):
            mirrored.run(step, args=(x, holder))
        keep(holder, xp.full(1000, 5.0))
        junk = poison(mirrored)
        assert set(own(mirrored.run(step, args=(x, holder)))) == {3.0}, name
        keep(holder, xp.ones(1))
        assert captured(step) == 1 and junk


def test_a_generator(mirrored):
    """Each launch draws other numbers, as each call does; the graph writes to the old one's."""
    xp, holder = mirrored.xp, Holder()
    holder.array, same = (mirrored.xp.random.default_rng(RANK) for _ in range(2))
    step, x = hs.function(lambda x: x * holder.array.random(1000)), xp.ones(1000)
    found = [own(mirrored.run(step, args=(x,))) for _ in range(5)]
    holder.array = None
    junk = poison(mirrored)
    found.append(own(mirrored.run(step, args=(x,))))
    check_equal(found, [same.random(1000).get() for _ in range(6)])
    assert captured(step) == 1 and junk


def test_a_plan_that_is_dropped(mirrored):
    """Transforms work in its memory."""
    xp = mirrored.xp
    step, x = hs.function(lambda x: xp.fft.fft(x) + 1), xp.arange(1000.0)
    expected = np.fft.fft(np.arange(1000.0)) + 1
    for _ in range(4):
        np.testing.assert_allclose(own(mirrored.run(step, args=(x,))), expected)
        gc.collect()  # what is left of this call would keep that memory for the graph
    xp.fft.config.get_plan_cache().clear()
    gc.collect()
    junk = mirrored.run(lambda: [xp.ones(2000) for _ in range(9)])
    np.testing.assert_allclose(own(mirrored.run(step, args=(x,))), expected)
    assert all((own(one) == 1).all() for one in junk)
    assert captured(step) == 1


def test_a_metric_that_is_dropped(mirrored):
    """The graph writes to its memory, which no new variable gets."""
    xp, metrics = mirrored.xp, []
    with mirrored.scope():
        metrics.append(hs.metrics.Mean())
    step = hs.function(lambda x: metrics[0].update_state(x))
    for _ in range(4):
        mirrored.run(step, args=(xp.ones(3),))
    metrics.clear()
    gc.collect()
    with mirrored.scope():
        variables = [hs.Variable(np.full(2, 7.0)) for _ in range(8)]
    with pytest.raises(IndexError):
        metrics[0].update_state(xp.ones(3))
    mirrored.run(step, args=(xp.ones(3),))
    assert captured(step) == 1
    assert all(v.numpy().tolist() == [7, 7] for v in variables)


# ---- a graph's own memory


def free_memory(xp):
    """How many bytes of the GPU's memory neither arrays nor graphs have."""
    gc.collect()
    xp.get_default_memory_pool().free_all_blocks()
    return xp.cuda.runtime.memGetInfo()[0]


def test_memory_of_many_kinds(mirrored):
    """Eight are kept; the memory of the others is free again."""
    xp, free = mirrored.xp, []
    step, x = hs.function(lambda x, i: ((x + i) * 2 - x).sum()), xp.ones(100_000)
    for i in range(3 * function.MOST_KINDS):
        for _ in range(4):
            assert own(mirrored.run(step, args=(x, i))) == 100_000 * (1 + 2 * i)
        assert captured(step) == min(i + 1, function.MOST_KINDS)
        if i > 2 * function.MOST_KINDS:
            free.append(free_memory(xp))
    assert free[0] - min(free) < 1e6  # bytes; a graph has more


def test_memory_of_closed_strategies(place):
    """The function lives on, and its graphs have no memory any more."""
    xp, free = place.xp, []

    def fn(x):
        return (2 * x).sum(axis=0)

    step = hs.function(fn)
    for used in (fn, step, step):
        with place.make(hs.MirroredStrategy) as made:
            for _ in range(4):
                made.run(used, args=(xp.ones((100, 10_000)),))
            assert captured(step) == (used is step)
        free.append(free_memory(xp))
        assert captured(step) == 0
    assert free[0] - min(free) < 1e6


def test_memory_of_errors_that_are_kept(mirrored):
    """A graph that was refused leaves nothing, though its error and traceback live."""
    xp, kept, errors, free = mirrored.xp, [], [], []
    x = xp.ones(1_000_000)
    for _ in range(4):
        step = hs.function(lambda x: kept.append(x + 1))
        for _ in range(2):
            mirrored.run(step, args=(x,))
        with pytest.raises(RuntimeError, match="outlives it") as caught:
            mirrored.run(step, args=(x,))
        errors.append(caught.value)
        kept.clear()
        free.append(free_memory(xp))
    assert free[0] - min(free) < 1e6  # bytes; an array has more


def test_objects_whose_method_is_decorated(mirrored):
    """They live as long as their kinds, and not as long as their class."""

    class Trainer:
        @hs.function
        def train(self, x):
            return x + 1

    trainers = [Trainer() for _ in range(function.MOST_KINDS + 2)]
    dead = [weakref.ref(one) for one in trainers]
    while trainers:
        for _ in range(4):
            assert own(mirrored.run(trainers[0].train, args=(mirrored.xp.ones(1),))) == 2
        del trainers[0]
    gc.collect()
    assert captured(Trainer.train) == function.MOST_KINDS
    assert [one() is None for one in dead] == [True] * 2 + [False] * function.MOST_KINDS


def test_arrays_in_a_circle(mirrored):
    """They do not outlive the function, though Python has not collected them yet."""

    @hs.function
    def step(x):
        circle = [x * 2]
        circle.append(circle)
        return circle[0] + 1

    gc.disable()
    try:
        for i in range(5):
            assert own(mirrored.run(step, args=(mirrored.xp.full(2, float(i)),)))[0] == 2 * i + 1
    finally:
        gc.enable()
    assert captured(step) == 1


def test_a_pool_without_memory(mirrored, monkeypatch):
    """The program's pool has enough, which it frees."""
    xp, calls = mirrored.xp, []
    made, cupys = xp.cuda.MemoryPool, xp.get_default_memory_pool()

    class Full(made):
        def malloc(self, size):
            if not calls:
                raise MemoryError
            return super().malloc(size)

    class Freed:
        def free_all_blocks(self):
            calls.append(0)
            cupys.free_all_blocks()

    monkeypatch.setattr(xp.cuda, "MemoryPool", Full)
    monkeypatch.setattr(xp, "get_default_memory_pool", Freed)
    step = hs.function(lambda x: 2 * x + 1)
    for _ in range(4):
        assert own(mirrored.run(step, args=(xp.ones(3),))).tolist() == [3, 3, 3]
    assert captured(step) == 1 and len(calls) == 1
