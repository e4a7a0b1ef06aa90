"""hs.function on GPUs: arrays that are neither arguments nor made in the function."""

import gc
import sys
import types
import weakref
from typing import Any

import numpy as np
import pytest
import strategies
from graphs import (
    CALLS,
    MARKS,
    OPTIMIZERS,
    RANK,
    Model,
    N,
    batches,
    captured,
    check_equal,
    own,
    warned,
)
from internals import captured_step, reachable, select, step_graphs

import hpcstrat as hs

pytestmark = MARKS


SCALE: Any = None


class Masked:
    """Objects whose attributes a function reads."""

    last: Any = None

    def __init__(self, mask):
        self.mask = mask

    def scale(self, x):
        return x * self.mask * SCALE


def test_a_global_that_is_bound_anew(mirrored):
    """The function sees the new array, from a later graph."""
    global SCALE
    xp, results, junk = mirrored.xp, [], []

    @hs.function
    def step(x):
        return [x * SCALE, (lambda: SCALE + 0)()]

    x = xp.ones(1000)
    for i in range(10):
        if i % 5 == 0:
            SCALE = xp.full(1000, 2.0 + i)
            junk = [xp.full(1000, np.nan) for _ in range(4)]
        results += [own(leaf) for leaf in mirrored.run(step, args=(x,))]
        del junk[:1]
    assert captured(step) == (2, True)
    SCALE = None
    assert [set(result) for result in results] == [{2.0}] * 10 + [{7.0}] * 10


def test_an_attribute_that_is_bound_anew(mirrored):
    """The graph has the old array, which stays alive, as other values of the capture do."""
    xp = mirrored.xp
    things = [Masked(xp.full(1000, 3.0)), {"v": (Masked(xp.full(1000, 4.0)),)}]

    def inner(x):
        return x * things[0].mask + things[1]["v"][0].mask

    @hs.function
    def step(x):
        return inner(x)

    x = xp.ones(1000)
    for _ in range(4):
        mirrored.run(step, args=(x,))
    things[0].mask = things[1]["v"] = None
    gc.collect()
    junk = [xp.full(1000, np.nan) for _ in range(6)]
    assert set(own(mirrored.run(step, args=(x,)))) == {7.0}
    assert captured(step) == (1, True) and len(junk) == 6


def test_arrays_behind_methods_and_modules(mirrored, monkeypatch):
    """And behind arguments. The graph has the old arrays, as above."""
    global SCALE
    xp, thing, given = mirrored.xp, Masked(1.0), Masked(mirrored.xp.full(1000, 2.0))
    SCALE = xp.full(1000, 3.0)
    monkeypatch.setattr(strategies, "SCALE", xp.full(1000, 4.0), raising=False)

    @hs.function
    def step(x, given):
        return thing.scale(x) + given.mask + strategies.SCALE  # pyright: ignore[reportAttributeAccessIssue]

    x = xp.ones(1000)
    for _ in range(4):
        mirrored.run(step, args=(x, given))
    SCALE = given.mask = None
    monkeypatch.delattr(strategies, "SCALE")
    junk = [xp.full(1000, np.nan) for _ in range(6)]
    assert set(own(mirrored.run(step, args=(x, given)))) == {9.0}
    assert captured(step) == (1, True) and len(junk) == 6


PACKAGE: Any = types.ModuleType("graph_package")
PACKAGE.inner = types.ModuleType("graph_package.inner")


def in_a_package(x):
    return x * PACKAGE.inner.MASK


def imported(x):
    import graph_package.inner  # pyright: ignore[reportMissingImports]

    return x * graph_package.inner.MASK


def imported_by_name(x):
    from graph_package.inner import MASK  # pyright: ignore[reportMissingImports]

    return x * MASK


@pytest.mark.parametrize("fn", [in_a_package, imported, imported_by_name])
def test_arrays_in_packages(mirrored, monkeypatch, fn):
    """The graph has the old array."""
    xp = mirrored.xp
    for module in (PACKAGE, PACKAGE.inner):
        module.__file__ = __file__
        monkeypatch.setitem(sys.modules, module.__name__, module)
    PACKAGE.inner.MASK = xp.full(1000, 3.0)
    step, x = hs.function(fn), xp.ones(1000)
    for _ in range(4):
        mirrored.run(step, args=(x,))
    PACKAGE.inner.MASK = None
    junk = [xp.full(1000, np.nan) for _ in range(6)]
    assert set(own(mirrored.run(step, args=(x,)))) == {3.0}
    assert captured(step) == (1, True) and len(junk) == 6


def test_a_generator(mirrored):
    """Each launch draws other numbers, as each call does; the graph writes to the old one's."""
    xp, random = mirrored.xp, [mirrored.xp.random.default_rng(seed) for seed in (RANK, RANK)]
    things = [Masked(random[0])]
    step, x = hs.function(lambda x: x * things[0].mask.random(1000)), xp.ones(1000)
    found = [own(mirrored.run(step, args=(x,))) for _ in range(5)]
    things[0].mask = random[0] = None
    gc.collect()
    junk = [xp.full(1000, np.nan) for _ in range(9)]
    found.append(own(mirrored.run(step, args=(x,))))
    check_equal(found, [random[1].random(1000).get() for _ in range(6)])
    assert captured(step) == (1, True) and len(junk) == 9


def test_memory_that_is_no_array(mirrored):
    xp = mirrored.xp
    things = [Masked(mirrored.run(lambda: xp.full(1000, 3.0)))]
    mask = select(things[0].mask)
    things[0].mask = mask.data
    del mask
    step = hs.function(lambda x: x * xp.ndarray(1000, np.float64, things[0].mask))
    x = xp.ones(1000)
    for _ in range(4):
        mirrored.run(step, args=(x,))
    things[0].mask = None
    gc.collect()
    junk = mirrored.run(lambda: [xp.full(1000, np.nan) for _ in range(9)])
    assert set(own(mirrored.run(step, args=(x,)))) == {3.0}
    assert captured(step) == (1, True) and len(junk) == 9


def test_a_plan_that_is_dropped(mirrored, monkeypatch):
    """Transforms work in its memory."""
    xp = mirrored.xp
    monkeypatch.setattr(reachable, "is_of_program", lambda path: "simulated" not in path)
    step, x = hs.function(lambda x: xp.fft.fft(x) + 1), xp.arange(1000.0)
    for _ in range(4):
        mirrored.run(step, args=(x,))
    xp.fft.config.get_plan_cache().clear()
    gc.collect()
    junk = mirrored.run(lambda: [xp.ones(2000) for _ in range(9)])
    found = own(mirrored.run(step, args=(x,)))
    np.testing.assert_allclose(found, np.fft.fft(np.arange(1000.0)) + 1)
    assert all((own(one) == 1).all() for one in junk)
    assert captured(step) == (1, True)


def test_a_metric_that_is_dropped(mirrored):
    """The graph writes to its memory, which no new variable gets."""
    xp, metrics = mirrored.xp, []
    with mirrored.scope():
        metrics.append(hs.metrics.Mean())
    step = hs.function(lambda x: metrics[0].update_state(x))
    for _ in range(4):
        mirrored.run(step, args=(xp.ones(3),))
    metrics[0] = None
    gc.collect()
    with mirrored.scope():
        variables = [hs.Variable(np.full(2, 7.0)) for _ in range(8)]
    mirrored.run(step, args=(xp.ones(3),))
    assert captured(step) == (1, True)
    assert all(v.numpy().tolist() == [7, 7] for v in variables)


reshape: Any = 0


def test_a_global_with_the_name_of_an_attribute(mirrored):
    """It is none of the function's, which has one kind."""
    global reshape
    step = hs.function(lambda x: x.reshape(-1))
    for reshape in range(12):  # noqa: B007
        mirrored.run(step, args=(mirrored.xp.ones((2, 2)),))
    assert captured(step) == (1, True)


def test_more_objects_than_are_looked_at(mirrored, monkeypatch):
    monkeypatch.setattr(reachable, "MOST_OBJECTS", 500)
    things = [Masked(i) for i in range(1000)]
    step = hs.function(lambda x: x * len(things))
    texts = warned(lambda: [mirrored.run(step, args=(mirrored.xp.ones(2),)) for _ in range(4)])
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("it can reach more than 500 objects" in text for text in texts)


LAST: Any = None


def keep_in_a_global(*given):
    global LAST
    LAST = given[-1]


KEEPS = {
    "global": keep_in_a_global,
    "attribute": lambda model, _, loss: setattr(model, "last", loss),
    "list": lambda _, losses, loss: losses.append(loss),
    "class": lambda *given: setattr(Masked, "last", given[-1]),
    "view": lambda _, losses, loss: losses.append({"loss": loss.reshape(1)}),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_a_function_that_keeps_an_array(mirrored, keep):
    """In each call another, which a launch would not bind; found before a capture keeps one."""
    model, losses, calls = Model(mirrored, OPTIMIZERS["SGD"]), [], []

    @hs.function
    def step(batch):
        calls.append(0)
        keep(model, losses, model.step(batch) * model.last)

    texts = warned(lambda: [mirrored.run(step, args=(batch,)) for batch in batches(mirrored)])
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("it keeps an array that it makes" in text for text in texts)
    assert len(calls) == CALLS and len(losses) in (0, CALLS)


# ---- a graph's own memory


def test_objects_whose_method_is_decorated(mirrored):
    """They, and what graphs have of them, do not live as long as their class."""

    class Trainer(Model):
        @hs.function
        def train(self, batch):
            return self.step(batch)

    dead, given = [], batches(mirrored)
    for _ in range(12):
        trainer = Trainer(mirrored, OPTIMIZERS["Adam"])
        model = Model(mirrored, OPTIMIZERS["Adam"])
        for batch in given:
            mirrored.run(trainer.train, args=(batch,))
            mirrored.run(model.step, args=(batch,))
        check_equal(trainer.state(), model.state())
        assert captured(Trainer.train) == (1, True)
        dead.append(weakref.ref(trainer))
        dead.append(weakref.ref(trainer.weights[0]))
        del trainer
        gc.collect()
    assert [one() for one in dead[:-2]] == [None] * 22


def test_an_argument_with_the_identity_of_another(mirrored):
    step, found = hs.function(lambda x, given: x * given.mask), []
    for i in range(6):
        given = Masked(float(i))
        found += [own(mirrored.run(step, args=(mirrored.xp.ones(1), given)))[0] for _ in range(4)]
        del given
    assert found == [i for i in range(6) for _ in range(4)]
    assert captured(step) == (1, True)


def test_memory_of_closed_strategies(place):
    """The function lives on, and its graphs have no memory any more."""
    step = hs.function(lambda x: (2 * x).sum(axis=0))
    groups = getattr(step, step_graphs.STEPS)
    for _ in range(2):
        with place.make(hs.MirroredStrategy) as made:
            for _ in range(4):
                made.run(step, args=(made.xp.ones((100, 10)),))
            (graphs,) = groups._by_group.values()  # not those of the one before
            ((graph, _),) = graphs._steps.values()
            pool = weakref.ref(graph._pool)
            assert graph.is_captured and pool() is not None
        assert not graph.is_captured and pool() is None and not graph._results


def test_a_pool_without_memory(mirrored, monkeypatch):
    """The program's pool has enough, which it frees."""
    xp, calls = mirrored.xp, []
    made, cupys = xp.cuda.MemoryPool, xp.get_default_memory_pool()

    class Full:
        def __init__(self):
            self.pool = made()

        def malloc(self, nbytes):
            if not calls:
                raise MemoryError
            return self.pool.malloc(nbytes)

    class Freed:
        def free_all_blocks(self):
            calls.append(0)
            cupys.free_all_blocks()

    monkeypatch.setattr(xp.cuda, "MemoryPool", Full)
    monkeypatch.setattr(xp, "get_default_memory_pool", Freed)
    step = hs.function(lambda x: 2 * x + 1)
    for _ in range(4):
        assert own(mirrored.run(step, args=(xp.ones(3),))).tolist() == [3, 3, 3]
    assert captured(step) == (1, True) and len(calls) == 1


def test_no_memory_to_compare_arguments(mirrored, monkeypatch):
    def fails(*_):
        raise MemoryError("no memory to compare")

    monkeypatch.setattr(captured_step, "_are_equal", fails)
    step, found = hs.function(lambda x: 2 * x), []

    def run():
        found.extend(own(mirrored.run(step, args=(mirrored.xp.ones(1),)))[0] for _ in range(4))

    texts = warned(run)
    assert found == [2] * 4
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("no memory to compare" in text for text in texts)


@pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])
def test_no_memory_for_a_graph(mirrored, monkeypatch, ranks):
    """CUDA takes it when a graph is uploaded."""
    xp = mirrored.xp
    stream, end = xp.cuda.Stream, xp.cuda.Stream.end_capture

    class Graph:
        def __init__(self, graph):
            self.graph = graph

        def upload(self, _):
            raise MemoryError("no memory for the graph")

    if RANK in ranks:
        monkeypatch.setattr(stream, "end_capture", lambda self: Graph(end(self)))
    model, other = (Model(mirrored, OPTIMIZERS["SGD"]) for _ in range(2))
    step = hs.function(model.step)

    def run():
        for batch in batches(mirrored):
            mirrored.run(step, args=(batch,))
            mirrored.run(other.step, args=(batch,))

    texts = warned(run)
    check_equal(model.state(), other.state())
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("no memory for the graph" in text for text in texts)
