"""hs.function on GPUs: what a graph cannot have, where the function runs as it is."""

import contextlib
import functools
import warnings

import numpy as np
import pytest
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
    train,
    warned,
)
from internals import gpu, step_graphs
from strategies import strategies_for

import hpcstrat as hs

pytestmark = MARKS


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def falls_back(strategy, optimizer, change, said, **options):
    """Compares a function that cannot be captured, on any rank or on some."""

    def decorate(fn, wrap):
        def step(batch):
            return change(fn, batch)

        return wrap(step)

    eager, _ = train(strategy, optimizer, lambda fn: decorate(fn, lambda step: step), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other, step = train(strategy, optimizer, lambda fn: decorate(fn, hs.function), **options)
    check_equal(eager, other)
    assert captured(step) == (0, False)
    texts = [str(one.message) for one in caught]
    assert len(texts) == 1 and all(said in text for text in texts), texts
    assert all("step runs without a CUDA graph from now on: " in text for text in texts)


def reads(when, ranks):
    def change(step, batch):
        if when == "before" and RANK in ranks:
            float(batch[0].sum())
        loss = step(batch)
        if when == "after" and RANK in ranks:
            float(loss)
        if when == "between":
            if RANK in ranks:
                float(loss)
            loss = step(batch)
        return loss

    return change


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("ranks", [range(N), [0], [N - 1]], ids=["all", "first", "last"])
def test_a_host_that_reads(strategy, when, ranks):
    said = (
        "in change: RuntimeError: an array that is read on the host cannot be part of a CUDA graph"
    )
    said += "; do it outside of the function"
    if RANK not in ranks and when != "before":  # found in an exchange after the function
        said += f" (found by rank {ranks[0]})"
    falls_back(strategy, OPTIMIZERS["Adam"], reads(when, ranks), said)


def test_the_line_that_reads(mirrored):
    line = reads.__code__.co_firstlineno + 3
    said = f"test_function_refused.py:{line} in change: RuntimeError: an array that is read on the"
    falls_back(mirrored, OPTIMIZERS["Adam"], reads("before", range(N)), said)


@pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])
def test_a_step_that_reads_runs_once_in_each_call(mirrored, ranks):
    """Its Python code counts: the second call shows that it reads."""
    calls = []

    @hs.function
    def step(x):
        calls.append(0)
        loss = (x * 0.5 ** len(calls)).sum()
        return loss if RANK not in ranks or float(loss) > 0 else -loss

    run = functools.partial(mirrored.run, step, args=(mirrored.xp.ones(2),))
    found = []
    assert len(warned(lambda: found.extend(own(run()) for _ in range(5)))) == 1
    assert found == [1, 0.5, 0.25, 0.125, 0.0625] and len(calls) == 5
    assert captured(step) == (0, False)


class Pair:
    """Not a nest."""

    def __init__(self, *members):
        self.members = members


def constant(step, batch):
    step(batch)
    return hs.get_strategy().xp.asarray(np.ones(3, np.float32))


def sets_the_rate(step, batch):
    step(batch)
    step.__self__.optimizer.learning_rate = 0.5


def writes_to_its_argument(step, batch):
    step(batch)
    batch[0][...] *= 0.5


def catches(step, batch):
    with contextlib.suppress(RuntimeError):
        return step(batch) * step.__self__.optimizer.iterations


def catches_cupys(step, batch):
    loss, model = step(batch), step.__self__
    with contextlib.suppress(RuntimeError):
        model.last += float(loss > -1) / 2
    return loss


def measures(step, batch):
    model = step.__self__
    before = model.xp.cuda.get_current_stream().record()
    loss, after = step(batch), model.xp.cuda.Event()
    after.record()
    model.events = [before, after]
    return loss


def counts_on_the_host(step, batch):
    step(batch)
    return step.__self__.optimizer.iterations


def across_replicas(call):
    def change(step, batch):
        step(batch)
        return hs.get_replica_context().merge_call(lambda _: call(step.__self__.optimizer))

    return change


def computes_elsewhere(step, batch):
    loss, model = step(batch), step.__self__
    model.xp.cuda.Stream.null.synchronize()  # which made the array
    with model.other_stream:
        model.last += model.xp.ones(()) / 2
    model.other_stream.synchronize()
    return loss


CANNOT = {
    "an argument": (OPTIMIZERS["SGD"], writes_to_its_argument, "writes to an array that is an arg"),
    "the number of steps": (OPTIMIZERS["SGD"], counts_on_the_host, "SGD.iterations, a value on"),
    "the same across replicas": (
        OPTIMIZERS["SGD"],
        across_replicas(lambda optimizer: optimizer.iterations),
        "SGD.iterations, a value on the host, cannot be part",
    ),
    "a rate set across replicas": (
        OPTIMIZERS["SGD"],
        across_replicas(lambda optimizer: setattr(optimizer, "learning_rate", 0.5)),
        "SGD.learning_rate, a value on the host, cannot be part",
    ),
    "a flag across replicas": (
        OPTIMIZERS["SGD"],
        across_replicas(lambda optimizer: hs.any_rank(True)),
        "any_rank cannot be part of a CUDA graph",
    ),
    "another stream": (OPTIMIZERS["SGD"], computes_elsewhere, "work on another stream cannot be"),
    "a new rate": (OPTIMIZERS["SGD"], sets_the_rate, "SGD.learning_rate, a value on the host, can"),
    "a refusal that is caught": (OPTIMIZERS["SGD"], catches, "SGD.iterations, a value on the host"),
    "one of CuPy's that is caught": (
        OPTIMIZERS["SGD"],
        catches_cupys,
        "an array that is read on the host cannot be part",
    ),
    "events": (OPTIMIZERS["SGD"], measures, "an event cannot be part of a CUDA graph"),
    "an object of rank 0": (
        OPTIMIZERS["SGD"],
        lambda step, batch: hs.broadcast_object(1) * step(batch),
        "broadcast_object cannot be part of a CUDA graph",
    ),
    "a flag": (
        OPTIMIZERS["SGD"],
        lambda step, batch: hs.any_rank(True) * step(batch),
        "any_rank cannot be part of a CUDA graph",
    ),
    "arrays of the host": (OPTIMIZERS["SGD"], constant, "so H2D transfers are disallowed"),
    "an object": (
        OPTIMIZERS["SGD"],
        lambda step, batch: Pair(step(batch)),
        "it returns an object of type Pair",
    ),
}


@pytest.mark.parametrize(("optimizer", "change", "said"), CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_captured(mirrored, optimizer, change, said):
    models = [Model(mirrored, optimizer) for _ in range(2)]
    step = hs.function(lambda batch: change(models[1].step, batch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches(mirrored):
            mirrored.run(models[0].step, args=(batch,))
            mirrored.run(step, args=(batch,))
            for event in models[1].events:  # the program may wait for them
                event.synchronize()
    check_equal(models[0].state(), models[1].state())
    assert float(models[1].last) in (1, 1 + CALLS / 2)
    assert captured(step) == (0, False) and len(caught) == 1
    assert all(said in str(one.message) for one in caught), caught[0].message


def test_gradients_that_are_not_arrays_of_their_variables_dtypes(mirrored):
    with mirrored.scope():
        variables = [hs.Variable(np.zeros(3, np.float32)) for _ in range(2)]
        optimizer = hs.optimizers.SGD(0.5)

    @hs.function
    def step(x):
        optimizer.apply_gradients(zip([x, x.astype(np.float64)], variables, strict=True))

    run = functools.partial(mirrored.run, step, args=(mirrored.xp.full(3, RANK + 1, np.float32),))
    texts = warned(lambda: [run() for _ in range(4)])
    assert [v.numpy()[0] for v in variables] == [-N * (N + 1)] * 2
    assert captured(step) == (0, False) and len(texts) == 1
    said = "this step of SGD, given a gradient that is not a float32 array, cannot be part"
    assert all(said in text for text in texts), texts


@pytest.mark.parametrize("use", [float, lambda v: v.assign_add(1) and 1], ids=["read", "write"])
def test_a_variable_outside_of_every_scope(mirrored, use):
    """It is on the host: the program changes it there, and a graph would not see that."""
    if N > 1 and use is not float:
        pytest.skip("only a single replica may write it")
    xp, found, seen = mirrored.xp, [], hs.Variable(0.0)
    step = hs.function(lambda x: x * use(seen))

    def run():
        for i in range(6):
            if use is float:
                seen.assign(float(i))
            found.append(own(mirrored.run(step, args=(xp.ones(3),)))[0])

    texts = warned(run)
    assert found == ([0, 1, 2, 3, 4, 5] if use is float else [1] * 6)
    assert float(seen) == 5 + (use is not float)
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("outside of every scope" in t or "of no strategy" in t for t in texts), texts


RANDOM = {
    "drawn": lambda random, made: made.binomial(1000, 0.5, 8),
    "a new generator": lambda random, made: random.default_rng().random(8),
}


@pytest.mark.parametrize("draw", RANDOM.values(), ids=RANDOM)
def test_random_numbers_with_a_seed_of_the_host(mirrored, draw):
    """Each call draws others."""
    random = mirrored.xp.random
    made = random.RandomState(RANK)
    step, found = hs.function(lambda x: x * draw(random, made)), []

    def run():
        found.extend(own(mirrored.run(step, args=(mirrored.xp.ones(8),))) for _ in range(8))

    texts = warned(run)
    assert len({one.tobytes() for one in found}) == 8
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("a random number with a seed of the host" in text for text in texts)


@pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])
def test_no_cublas(mirrored, monkeypatch, ranks):
    def load(_):
        raise OSError("libcublas.so.13: cannot open shared object file")

    if RANK in ranks:
        monkeypatch.setattr(gpu.Stream, "products", property(load))
    step, x = hs.function(lambda x: x @ x), mirrored.xp.ones((2, 2))
    found = []
    texts = warned(lambda: [found.append(mirrored.run(step, args=(x,))) for _ in range(4)])
    assert [own(one).tolist() for one in found] == [[[2, 2], [2, 2]]] * 4
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("cuBLAS does not start, or there is no memory: libcublas" in one for one in texts)


def test_an_array_on_another_gpu(mirrored):
    xp = mirrored.xp
    if (count := xp.cuda.runtime.getDeviceCount()) == 1:
        pytest.skip("there is one GPU")
    with mirrored.scope():
        v = hs.Variable(np.zeros(3), aggregation="SUM")
    with xp.cuda.Device((RANK + 1) % count):
        other = xp.ones(3)
    step = hs.function(lambda: v.assign_add(other, read_value=False))
    texts = warned(lambda: [mirrored.run(step) for _ in range(5)])
    assert v.numpy().tolist() == [5 * N] * 3
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("an array on another GPU cannot be part" in text for text in texts), texts


@pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])
def test_arguments_on_the_host(mirrored, ranks):
    step, model = hs.function(lambda x: 2 * x), Model(mirrored, OPTIMIZERS["SGD"])
    given = np.ones(3) if RANK in ranks else model.xp.ones(3)
    texts = warned(lambda: [mirrored.run(step, args=(given,)) for _ in range(4)])
    assert len(texts) == 1 and captured(step) == (0, False)
    assert all(text.endswith("on the host, or on another GPU") for text in texts)


CHANGES = {
    "an item": lambda given, new: given["d"].update(y=new),
    "a new item": lambda given, new: given["d"].update(z=new),
    "an element": lambda given, new: given["l"].append(new),
    "a number": lambda given, _: given["d"].update(n=3),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_function_that_changes_a_list_or_a_dict(mirrored, change):
    """Its launches would change nothing."""
    xp = mirrored.xp
    step = hs.function(lambda given: change(given, 2 * given["x"]))
    results = []

    def run():
        for i in range(6):
            given = {"x": xp.full(2, float(i)), "d": {"y": xp.ones(2), "n": 2}, "l": [0]}
            mirrored.run(step, args=(given,))
            results.append(given)

    texts = warned(run)
    for i, given in enumerate(results):
        expected = {"x": xp.full(2, float(i)), "d": {"y": xp.ones(2), "n": 2}, "l": [0]}
        change(expected, xp.full(2, 2.0 * i))
        assert str(hs.asnumpy(given)) == str(hs.asnumpy(expected))
    assert captured(step) == (0, False) and len(texts) == 1
    assert all("it changes a list or a dict that is an argument" in text for text in texts)


def test_numbers_that_change(mirrored):
    """Each is another kind, as in TensorFlow; some are captured, and the rest run as they are."""
    xp = mirrored.xp
    step = hs.function(lambda x, i: x + i)
    x, found = xp.ones(3), []

    def run():
        for i in [*range(12)] * 4:
            found.append(own(mirrored.run(step, args=(x, i)))[0])

    texts = warned(run)
    assert found == [1 + i for i in [*range(12)] * 4]
    assert captured(step) == (8, True)
    assert len(texts) == 1 and all("of more than 8 kinds" in text for text in texts)


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_objects_that_are_new_in_each_call(mirrored, where):
    """None is captured, and the program hears of it; objects that stay are captured again."""
    xp, found = mirrored.xp, []

    @hs.function
    def step(pair):
        if where == "closure":
            return mirrored.run(lambda: pair.members[0] + 1)
        return mirrored.run(lambda pair: pair.members[0] + 1, args=(pair,))

    def run():
        found.extend(own(step(Pair(xp.full(2, float(i)))))[0] for i in range(20))

    texts = warned(run)
    assert found == [i + 1 for i in range(20)] and captured(step) == (0, True)
    assert len(texts) == 1 and all("make other objects once" in text for text in texts)


def test_new_objects_between_captures(mirrored):
    """Each program of a search has shapes that are not repeated, and others that are."""
    step, xp = hs.function(lambda pair, x: pair.members[0] * x), mirrored.xp
    for i in range(12):
        pair = Pair(float(i))
        for size in (3, 3, 3, 2):
            assert own(mirrored.run(step, args=(pair, xp.ones(size))))[0] == i
        assert captured(step) == (1, True)
        del pair


def test_an_update_of_another_variable(strategy):
    """Its slots are made when the step is captured, from a number on the host."""

    def trained(decorate):
        xp = strategy.xp
        with strategy.scope():
            optimizer = hs.optimizers.SGD(0.5, momentum=0.5)
            variables = [hs.Variable(np.zeros(3, np.float32)) for _ in range(2)]

        @decorate
        def step(x):
            used = variables[: len(calls) // 3 + 1]
            optimizer.apply_gradients([(x * (1 + i), v) for i, v in enumerate(used)])

        calls = []
        for _ in range(6):
            calls.append(0)
            strategy.run(step, args=(xp.ones(3, np.float32),))
        return [v.numpy() for v in (*variables, *optimizer.variables)], step

    eager, _ = trained(lambda fn: fn)
    found = []
    texts = warned(lambda: found.extend(trained(hs.function)))
    check_equal(eager, found[0])
    assert captured(found[1]) == (0, False)
    assert len(texts) == 1
    assert all("this step of SGD cannot be part of a CUDA graph" in text for text in texts)


def test_other_modules(mirrored, monkeypatch):
    monkeypatch.setattr(step_graphs, "FOREIGN", ("numpy",))
    step = hs.function(lambda x: 2 * x)
    texts = warned(lambda: [mirrored.run(step, args=(mirrored.xp.ones(2),)) for _ in range(4)])
    assert len(texts) == 1 and captured(step) == (0, False)
    assert all("a rank has imported one of " in text for text in texts)


def test_an_error_of_the_program(mirrored):
    """Raised where the function is captured, and again."""
    calls = []

    @hs.function
    def step(x):
        calls.append(x)
        if len(calls) > 2:
            raise ValueError("odd")
        return x + 1

    x = mirrored.xp.ones(3)
    for _ in range(2):
        mirrored.run(step, args=(x,))

    def third():
        with pytest.raises(ValueError, match="odd"):
            mirrored.run(step, args=(x,))

    texts = warned(third)
    assert len(calls) == 4 and len(texts) == 1
    assert all("in step: ValueError: odd" in text for text in texts)
    with pytest.raises(ValueError, match="odd"):
        mirrored.run(step, args=(x,))
    hs.barrier()
