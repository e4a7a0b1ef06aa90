"""hs.function on GPUs: the values of a step that runs as it is, captured or not."""

import contextlib
import gc
import warnings
from typing import Any

import numpy as np
import pytest
import strategies
from internals import reachable, select, step_graphs
from lamb import LAMB
from mpi4py import MPI
from strategies import ShardedMirroredStrategy, strategies_for

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
SHAPES = [(6, 5), (5,), (5, 3), (3,)]
CALLS = 7

pytestmark = [
    pytest.mark.core,
    pytest.mark.parametrize("place", ["GPU"], indirect=True),
]


@pytest.fixture(params=[*strategies_for(N), ShardedMirroredStrategy])
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


@pytest.fixture
def mirrored(place):
    with place.make(hs.MirroredStrategy) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_foreign_module(monkeypatch):
    monkeypatch.setattr(step_graphs, "FOREIGN", ())  # other tests may have imported one


def batches(strategy, sizes=(4,) * CALLS):
    """Batches of these sizes per replica, or per replica and call."""
    xp, rng = strategy.xp, np.random.default_rng(RANK)
    found = []
    for size in sizes:
        x, y = (rng.random((size, columns), np.float32) for columns in (6, 3))
        pair = xp.asarray(x), xp.asarray(y)
        found.append(
            strategy.experimental_distribute_values_from_function(lambda _, pair=pair: pair)
        )
    return found


class Model:
    """A network with its optimizer and its step."""

    def __init__(self, strategy, optimizer):
        rng = np.random.default_rng(0)
        self.strategy, self.xp = strategy, strategy.xp
        with strategy.scope():
            self.weights = [hs.Variable(rng.normal(0, 0.3, s).astype(np.float32)) for s in SHAPES]
            self.optimizer = optimizer()
            self.mean = hs.metrics.Mean()
        self.last: Any = self.xp.ones(())
        self.restore: Any = None

    def step(self, batch):
        x, y = batch
        a, b, c, d = self.weights
        hidden = self.xp.maximum(x @ a + b, 0)
        error = (self.xp.dot(hidden, c) + d - y) / (4 * N)
        back = (error @ c.value().T) * (hidden > 0)
        gradients = [x.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        self.optimizer.apply_gradients(zip(gradients, self.weights, strict=True))
        loss = (error * error).sum()
        self.mean.update_state(loss)
        return loss

    def state(self):
        return [
            *[v.numpy() for v in self.weights],
            *[v.numpy() for v in self.optimizer.variables],
            self.mean.result(),
        ]


def own(value):
    return hs.asnumpy(select(value))


def train(strategy, optimizer, decorate, given=None, between=None):
    """The losses of all calls and the state after them, and the model's step."""
    model = Model(strategy, optimizer)
    step = decorate(model.step)
    losses = []
    for i, batch in enumerate(batches(strategy) if given is None else given(strategy)):
        if between is not None:
            between(i, model)
        losses.append(strategy.run(step, args=(batch,)))
    return [*map(own, losses), *model.state()], step


def captured(step):
    """The graphs of a function, and whether it still makes some."""
    of_groups = getattr(step, step_graphs.STEPS)._by_group.values()
    graphs = [s for g in of_groups for s in g._steps.values() if s is not None and s.is_captured]
    return len(graphs), not any(g.is_eager for g in of_groups)


def check_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def compare(strategy, optimizer, graphs=1, **options):
    eager, _ = train(strategy, optimizer, lambda fn: fn, **options)
    other, step = train(strategy, optimizer, hs.function, **options)
    check_equal(eager, other)
    assert captured(step) == (graphs, bool(graphs))


OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.5),
    "momentum": lambda: hs.optimizers.SGD(0.5, momentum=0.9, nesterov=True),
    "Adam": lambda: hs.optimizers.Adam(0.01),
    "schedule": lambda: hs.optimizers.SGD(hs.optimizers.schedules.CosineDecay(0.5, 5)),
    "global_clipnorm": lambda: hs.optimizers.Adam(0.01, global_clipnorm=0.05),
    "clipnorm, ema": lambda: hs.optimizers.SGD(
        lambda step: 1 / (1 + step), clipnorm=0.01, use_ema=True, ema_overwrite_frequency=3
    ),
    "decay": lambda: hs.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_values_of_eager_steps(strategy, optimizer):
    compare(strategy, optimizer)


def test_results_stay(mirrored):
    """A later launch does not overwrite what the program holds."""
    model = Model(mirrored, OPTIMIZERS["SGD"])

    @hs.function
    def step(batch):
        x, _ = batch
        return {"loss": model.step(batch), "sums": [x.sum(axis=0), 3, "text"], "none": None}

    results = [mirrored.run(step, args=(batch,)) for batch in batches(mirrored)]
    assert captured(step) == (1, True)
    for result, batch in zip(results, batches(mirrored), strict=True):
        sums = mirrored.run(lambda pair: pair[0].sum(axis=0), args=(batch,))
        np.testing.assert_array_equal(own(result["sums"][0]), own(sums))
        assert own(result["sums"][1]) == 3 and result["none"] is None
    assert len({float(own(result["loss"])) for result in results}) == CALLS


# ---- kinds of functions


def test_around_run_and_reduce(strategy):
    def trained(decorate):
        model = Model(strategy, OPTIMIZERS["momentum"])

        @decorate
        def train_step(batch):
            def replica_step(batch):  # another function in each call
                return model.step(batch)

            return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

        losses = [train_step(batch) for batch in batches(strategy)]
        return [*map(hs.asnumpy, losses), *model.state()], train_step

    eager, _ = trained(lambda fn: fn)
    other, step = trained(hs.function())
    check_equal(eager, other)
    assert captured(step) == (1, True)


def test_a_method_that_calls_a_function(mirrored):
    class Trainer(Model):
        @hs.function
        def run(self, batch):
            return self.forward(batch)

        @hs.function
        def forward(self, batch):
            return self.step(batch)

    trainer, model = Trainer(mirrored, OPTIMIZERS["SGD"]), Model(mirrored, OPTIMIZERS["SGD"])
    for batch in batches(mirrored):
        mirrored.run(trainer.run, args=(batch,))
        mirrored.run(model.step, args=(batch,))
    check_equal(trainer.state(), model.state())
    assert captured(Trainer.run) == (1, True)
    assert not getattr(Trainer.forward, step_graphs.STEPS)._by_group


def test_outside_of_strategies(place):
    double = hs.function(lambda x: 2 * x)
    assert double(21) == 42
    with place.make(hs.MirroredStrategy) as made:
        assert double(place.xp.full(2, 3.0)).tolist() == [6, 6]
        assert made.run(lambda: double(4)) is not None


# ---- what changes between calls


def test_shapes(mirrored):
    """A graph for each shape, from its third call on."""
    sizes = (4, 2, 4, 2, 4, 2, 4, 2, 3, 4, 4)
    compare(mirrored, OPTIMIZERS["Adam"], 2, given=lambda made: batches(made, sizes))


def test_shapes_of_one_replica(mirrored):
    """Graphs of all ranks belong together."""
    sizes = (4, 4, 4, 4, 4 - (RANK == N - 1), 4, *[4 - (RANK == N - 1)] * 4, 4)
    compare(
        mirrored,
        OPTIMIZERS["Adam"],
        2 if N == 1 else 1,
        given=lambda made: batches(made, sizes),
    )


def test_assign_restore_and_options(strategy, tmp_path):
    """The graph reads and writes the same memory, and gets the numbers of each step."""
    folder = COMM.bcast(str(tmp_path))

    def between(i, model):
        model.xp.full(10_000, np.nan)  # reuses what is free
        if i == 3:
            saved = hs.checkpoint.Checkpoint(optimizer=model.optimizer, w=model.weights)
            path = saved.save(f"{folder}/saved")
            model.weights[1].assign(np.full(SHAPES[1], 2, np.float32))
            model.mean.reset_state()
            model.restore = lambda: saved.restore(path)
        if i == 4:
            model.optimizer.momentum = 0.5
            model.optimizer.learning_rate = 0.125
        if i == 6:
            model.restore()
        if i == 8:  # another kernel: another graph
            model.optimizer.clipnorm = 0.01

    compare(
        strategy,
        OPTIMIZERS["momentum"],
        between=between,
        given=lambda made: batches(made, (4,) * 12),
    )


def test_messages_that_grow(strategy):
    """A larger update takes other memory, and the graph keeps its own."""

    def between(i, model):
        if i in (3, 5):
            with model.strategy.scope():
                large = hs.Variable(np.zeros((i, 5000), np.float32))
            one = model.optimizer.apply_gradients
            model.strategy.run(lambda: one([(model.xp.ones((i, 5000), np.float32), large)]))
            gc.collect()
            model.kept = [model.xp.full(5000 * i, np.nan, np.float32) for i in range(1, 6)]

    compare(strategy, OPTIMIZERS["SGD"], between=between)


def test_a_rank_with_another_rate(mirrored):
    if N == 1:
        pytest.skip("there is one rank")
    model = Model(mirrored, OPTIMIZERS["SGD"])
    step = hs.function(model.step)
    (batch,) = batches(mirrored, (4,))
    for _ in range(4):
        mirrored.run(step, args=(batch,))
    before, done = [v.numpy() for v in model.weights], model.optimizer.iterations
    model.optimizer.learning_rate = 0.25 * (1 + RANK)
    with pytest.raises(hs.ReplicaMismatchError, match="learning_rate=0.25"):
        mirrored.run(step, args=(batch,))
    check_equal(before, [v.numpy() for v in model.weights])
    assert model.optimizer.iterations == done
    model.optimizer.learning_rate = 0.25
    for _ in range(4):
        mirrored.run(step, args=(batch,))
    assert captured(step) == (1, True) and model.optimizer.iterations == done + 4


def test_negative_zero(mirrored):
    step = hs.function(lambda x, number: x * number)
    for number in (0.0, np.float32(0)):
        for sign in (1, -1):
            for _ in range(4):
                (first, *_) = own(mirrored.run(step, args=(mirrored.xp.ones(2), sign * number)))
                assert np.signbit(first) == (sign < 0)
    assert captured(step) == (4, True)


# ---- what else a function may contain


def test_other_calls_in_a_replica(strategy):
    def trained(decorate):
        model = Model(strategy, OPTIMIZERS["Adam"])
        with strategy.scope():
            average = hs.Variable(
                np.zeros(6, np.float32),
                aggregation=hs.VariableAggregation.MEAN,
            )
            own = hs.Variable(
                np.zeros(6, np.float32),
                synchronization=hs.VariableSynchronization.ON_READ,
                aggregation=hs.VariableAggregation.SUM,
            )

        @decorate
        def step(batch):
            loss, context = model.step(batch), hs.get_replica_context()
            average.assign(0.9 * average + 0.1 * batch[0].mean(axis=0))
            own.assign_add(batch[0].sum(axis=0))
            total = context.all_reduce("MEAN", {"loss": loss, "count": 4})
            return total, average.value() + 1

        results = [strategy.run(step, args=(batch,)) for batch in batches(strategy)]
        found = [select(leaf) for total, more in results for leaf in (total["loss"], more)]
        return [*map(hs.asnumpy, found), *model.state(), average.numpy(), own.numpy()], step

    eager, _ = trained(lambda fn: fn)
    other, step = trained(hs.function)
    check_equal(eager, other)
    assert captured(step) == (1, True)


def test_two_optimizers(strategy):
    def trained(decorate):
        models = [Model(strategy, OPTIMIZERS[name]) for name in ("Adam", "schedule")]

        @decorate
        def step(batch):
            return models[0].step(batch) + models[1].step(batch) + models[0].step(batch)

        losses = [own(strategy.run(step, args=(batch,))) for batch in batches(strategy)]
        return [*losses, *models[0].state(), *models[1].state()], step

    eager, _ = trained(lambda fn: fn)
    other, step = trained(hs.function)
    check_equal(eager, other)
    assert captured(step) == (1, True)


def test_gradient_buffers(strategy):
    def trained(decorate):
        model = Model(strategy, OPTIMIZERS["momentum"])
        (w, _, _, _), xp = model.weights, model.xp
        (buffer,) = buffers = model.optimizer.gradient_buffers([w])

        @decorate
        def step(batch):
            xp.matmul(batch[0].T, xp.tanh(batch[0] @ w), out=buffer)
            buffers.ready(buffer)
            model.optimizer.apply_gradients(zip(buffers, [w], strict=True))

        for batch in batches(strategy):
            strategy.run(step, args=(batch,))
        return model.state(), step

    eager, _ = trained(lambda fn: fn)
    other, step = trained(hs.function)
    check_equal(eager, other)
    assert captured(step) == (1, True)


@pytest.mark.parametrize("rows", [6, 60_000], ids=["small", "large"])
def test_gradients_that_another_function_marks(strategy, rows):
    """The sums of large ones have started; a graph would add up once more."""

    def trained(decorate):
        xp = strategy.xp
        with strategy.scope():
            w, optimizer = hs.Variable(np.zeros((rows, 5), np.float32)), hs.optimizers.SGD(0.5)
        (buffer,) = buffers = optimizer.gradient_buffers([w])

        def mark(x):
            xp.add(x, w.value(), out=buffer)
            buffers.ready(buffer)

        @decorate
        def apply():
            optimizer.apply_gradients(zip(buffers, [w], strict=True))

        for i in range(12):
            if i % 4 == 3:
                buffer[...] = i
            else:
                strategy.run(mark, args=(xp.full((rows, 5), i, np.float32),))
            strategy.run(apply)
        return [w.numpy()]

    check_equal(trained(lambda fn: fn), trained(hs.function))


# ---- what a graph cannot have: the function runs as it is


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
    assert len(texts) == (RANK == 0) and all(said in text for text in texts), texts
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
        "in change: RuntimeError: the current stream is capturing, so D2H transfers are disallowed"
    )
    if 0 not in ranks and when != "before":  # found in an exchange after the function
        said += f" (found by rank {N - 1})"
    falls_back(strategy, OPTIMIZERS["Adam"], reads(when, ranks), said)


def test_the_line_that_reads(mirrored):
    line = reads.__code__.co_firstlineno + 3
    said = f"test_function.py:{line} in change: RuntimeError: the current stream is capturing"
    falls_back(mirrored, OPTIMIZERS["Adam"], reads("before", range(N)), said)


class PlainSGD(hs.optimizers.Optimizer):
    """Without a formula."""

    @property
    def slots(self):
        return {}

    def update_rule(self, learning_rate, step):
        def apply(value, gradient, slots, scratch):
            value -= np.multiply(gradient, learning_rate, out=scratch)

        return hs.optimizers.UpdateRule(apply, {"learning_rate": learning_rate})


class Centralize(hs.optimizers.UpdateStep):
    """Overrides `transform`."""

    def transform(self, grads_and_vars, optimizer):
        return [(gradient - gradient.mean(), v) for gradient, v in grads_and_vars]


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


def counts_on_the_host(step, batch):
    step(batch)
    return step.__self__.optimizer.iterations


CANNOT = {
    "an argument": (OPTIMIZERS["SGD"], writes_to_its_argument, "writes to an array that is an arg"),
    "the number of steps": (OPTIMIZERS["SGD"], counts_on_the_host, "SGD.iterations, a value on"),
    "a new rate": (OPTIMIZERS["SGD"], sets_the_rate, "SGD.learning_rate, a value on the host, can"),
    "a refusal that is caught": (OPTIMIZERS["SGD"], catches, "SGD.iterations, a value on the host"),
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
    "accumulation": (
        lambda: hs.optimizers.SGD(0.5, gradient_accumulation_steps=2),
        lambda step, batch: step(batch),
        "a step that collects gradients, such as their accumulation, cannot be part",
    ),
    "an own rule": (
        lambda: PlainSGD(0.5),
        lambda step, batch: step(batch),
        "this step of PlainSGD cannot be part of a CUDA graph",
    ),
    "norms that take numbers": (
        lambda: LAMB(0.01),
        lambda step, batch: step(batch),
        "this step of LAMB cannot be part of a CUDA graph",
    ),
    "a transformation": (
        lambda: hs.optimizers.SGD(0.5, steps=[Centralize()]),
        lambda step, batch: step(batch),
        "this step of SGD cannot be part of a CUDA graph",
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
    check_equal(models[0].state(), models[1].state())
    assert captured(step) == (0, False) and len(caught) == (RANK == 0)
    assert all(said in str(one.message) for one in caught), caught[0].message


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
    assert captured(step) == (0, False) and len(texts) == (RANK == 0)
    assert all("outside of every scope" in t or "of no strategy" in t for t in texts), texts


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
    assert captured(step) == (0, False) and len(texts) == (RANK == 0)
    assert all("an array on another GPU cannot be part" in text for text in texts), texts


def warned(call):
    """The texts of the warnings, on rank 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("ranks", [range(N), [N - 1]], ids=["all", "last"])
def test_arguments_on_the_host(mirrored, ranks):
    step, model = hs.function(lambda x: 2 * x), Model(mirrored, OPTIMIZERS["SGD"])
    given = np.ones(3) if RANK in ranks else model.xp.ones(3)
    texts = warned(lambda: [mirrored.run(step, args=(given,)) for _ in range(4)])
    assert len(texts) == (RANK == 0) and captured(step) == (0, False)
    assert all(text.endswith("on the host, or on another GPU") for text in texts)


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
    assert len(texts) == (RANK == 0) and all("of more than 8 kinds" in text for text in texts)


def test_an_update_of_another_variable(strategy):
    """Its slots are made when the step is captured, from a number on the host or a variable."""

    def trained(decorate, ema):
        xp = strategy.xp
        with strategy.scope():
            optimizer = hs.optimizers.SGD(0.5, use_ema=ema, momentum=0.5)
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

    for ema in (False, True):
        eager, _ = trained(lambda fn: fn, ema)
        found = []
        texts = warned(lambda ema=ema, found=found: found.extend(trained(hs.function, ema)))
        check_equal(eager, found[0])
        assert captured(found[1]) == (0, False)
        assert len(texts) == (RANK == 0)
        assert all("this step of SGD cannot be part of a CUDA graph" in text for text in texts)


def test_other_modules(mirrored, monkeypatch):
    monkeypatch.setattr(step_graphs, "FOREIGN", ("numpy",))
    step = hs.function(lambda x: 2 * x)
    texts = warned(lambda: [mirrored.run(step, args=(mirrored.xp.ones(2),)) for _ in range(4)])
    assert len(texts) == (RANK == 0) and captured(step) == (0, False)
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
    assert len(calls) == 4 and len(texts) == (RANK == 0)
    assert all("in step: ValueError: odd" in text for text in texts)
    with pytest.raises(ValueError, match="odd"):
        mirrored.run(step, args=(x,))
    hs.barrier()


# ---- arrays that are neither arguments nor made in the function

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
    assert captured(step) == (0, False) and len(texts) == (RANK == 0)
    assert all("it can reach more than 500 objects" in text for text in texts)


KEEPS = {
    "attribute": lambda model, _, loss: setattr(model, "last", loss),
    "list": lambda _, losses, loss: losses.append(loss),
    "class": lambda *given: setattr(Masked, "last", given[-1]),
    "view": lambda _, losses, loss: losses.append({"loss": loss.reshape(1)}),
}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_a_function_that_keeps_an_array(mirrored, keep):
    """In each call another, which a launch would not bind."""
    model, losses = Model(mirrored, OPTIMIZERS["SGD"]), []

    @hs.function
    def step(batch):
        keep(model, losses, model.step(batch) * model.last)

    texts = warned(lambda: [mirrored.run(step, args=(batch,)) for batch in batches(mirrored)])
    assert captured(step) == (0, False) and len(texts) == (RANK == 0)
    assert all("it keeps an array that it makes" in text for text in texts)
    assert len(losses) in (0, CALLS + 1)  # also by the capture
