"""hs.function on GPUs: the values of a step that runs as it is, and the kinds of its calls."""

import functools

import graphs
import numpy as np
import pytest
from graphs import COMM, MARKS, OPTIMIZERS, RANK, SHAPES, Model, Momentum, N, batches, captured, own
from internals import connect, function, graph_numbers, select
from strategies import strategies_for
from test_metrics_of_labels import CASES, data

import hpcstrat as hs

pytestmark = MARKS


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_values_of_eager_steps(strategy, optimizer):
    graphs.compare(strategy, optimizer)


def test_products(mirrored):
    """Those for which CuPy calls cuBLAS, and others."""
    xp, whole = mirrored.xp, np.random.default_rng(0).integers(-9, 9, (3, 3))
    pairs = [(whole.astype(dtype), whole.T.astype(dtype)) for dtype in ("f", "d", "e", "l")]
    whole = whole + 0.0
    pairs += [(whole[0], whole[1]), (whole[:1], whole[:, :1]), (whole[:0], whole)]
    pairs += [(whole[:, :0], whole[:0])]
    step = hs.function(lambda *pairs: [f(a, b) for a, b in pairs for f in (xp.matmul, xp.dot)])
    given = tuple((xp.asarray(a), xp.asarray(b)) for a, b in pairs)
    found = [mirrored.run(step, args=given) for _ in range(4)][-1]
    expected = [a @ b for a, b in pairs for _ in range(2)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own(one), other)
    assert captured(step) == 1


# ---- what runs, and how often


def test_python_code_runs_three_times(mirrored, capsys):
    """Numbers, globals and attributes are those of the third call, and prints no more."""
    global LEVEL
    model, calls, found = Model(mirrored, OPTIMIZERS["SGD"]), [], []

    @hs.function
    def step(x):
        calls.append(0)
        print("called")
        return x * LEVEL + len(calls) * model.last

    for i in range(8):
        LEVEL, model.last = 10.0**i, 1 + i
        found.append(own(mirrored.run(step, args=(mirrored.xp.ones(1),)))[0])
    assert found == [1 + 1, 10 + 4, *[100 + 9] * 6]
    assert len(calls) == 3 and captured(step) == 1
    assert capsys.readouterr().out.count("called") == 3


@pytest.mark.parametrize("how", ["hosts", "HPCSTRAT_CHECK"])
def test_where_it_runs_as_it_is(place, how, monkeypatch):
    """It takes all that a graph cannot have."""
    monkeypatch.setattr(function, "FOREIGN", ("numpy",))
    is_check = how == "HPCSTRAT_CHECK"
    with (
        place.make(hs.MirroredStrategy) if is_check else hs.MirroredStrategy(["CPU:0"] * N) as made
    ):
        monkeypatch.setattr(made.replica_group.communicator, "checks", is_check)
        calls, given = [], made.xp.zeros(2)

        @hs.function
        def step(x, number):
            calls.append(float(x[0]))
            x += number
            return x + 0

        found = [own(made.run(step, args=(given, np.ones(1)[0])))[0] for _ in range(5)]
    assert calls == [0, 1, 2, 3, 4] and found == [1, 2, 3, 4, 5] and captured(step) == 0


def test_arguments_that_are_written_to(mirrored):
    """Results are right; from the third call on the writes are to the graph's copies."""
    xp = mirrored.xp

    @hs.function
    def step(given):
        given["x"] += 1
        given["y"] = 2 * given["x"]
        return given["y"]

    for i in range(6):
        given = {"x": xp.full(2, float(i))}
        assert own(mirrored.run(step, args=(given,))).tolist() == [2 * i + 2] * 2
        assert given["x"].get().tolist() == [i + (i < 2)] * 2 and ("y" in given) == (i < 2)
    assert captured(step) == 1


# ---- kinds of functions


LEVEL = 1.0


class Times:
    def __init__(self, level):
        self.level = level

    def __call__(self, x):
        return x * self.level

    def step(self, x):
        return x * self.level


class Doubles:
    @hs.function
    @staticmethod
    def outside(x):
        return 2 * x

    @staticmethod
    @hs.function
    def inside(x):
        return 2 * x

    @classmethod
    @hs.function
    def of_class(cls, x):
        return 2 * x


def test_what_is_called(mirrored):
    xp, made = mirrored.xp, Doubles()
    for fn in (
        functools.partial(lambda level, x: x * level, 2.0),
        Times(2.0),
        functools.update_wrapper(lambda x: x * 2.0, Times.step),
        hs.function(lambda x: x * 2.0),
        lambda x, level=2.0: x * level,
    ):
        step = hs.function(fn)
        for i in range(6):
            assert own(mirrored.run(step, args=(xp.full(2, i + 1.0),)))[0] == 2 * (i + 1), fn
        assert captured(step) == 1, fn
    for fn in (made.outside, Doubles.outside, made.inside, made.of_class, Doubles.of_class):
        assert [own(mirrored.run(fn, args=(xp.ones(1),)))[0] for _ in range(4)] == [2] * 4
    assert captured(Doubles.outside) == captured(Doubles.inside) == 1
    steps = [hs.function(Times(level).step) for level in (2.0, 3.0)]  # methods of two objects
    outer = hs.function(lambda i: mirrored.run(steps[i], args=(xp.ones(1),)))
    assert [own(outer(i % 2))[0] for i in range(10)] == [2, 3] * 5
    assert captured(outer) == 2


def test_functions_that_close_over_other_values(mirrored):
    """One kind for each, though the function is another in each call."""
    xp, arrays = mirrored.xp, [mirrored.xp.full(2, value) for value in (3.0, 4.0)]

    @hs.function
    def outer(number, i, power):
        array = arrays[i]
        return mirrored.run(lambda x, p=power: x * number * array**p, args=(xp.ones(2),))

    for i in range(40):
        number, which, power = float(i % 2), i // 2 % 2, i // 4 % 2
        assert own(outer(number, which, power))[0] == number * (3 + which) ** power
    assert captured(outer) == 8


def test_functions_among_the_arguments_and_around_one(mirrored):
    """Which of them are the same counts, though `functools.wraps` has made them look alike."""
    one, ten = lambda x: x + 1, lambda x: x * 10
    step, add, xp = hs.function(lambda x, a, b, c: c(b(a(x)))), hs.function(one), mirrored.xp

    def times(level):
        @functools.wraps(add)
        def call(x):
            return add(x) * level

        return call

    for fn, args, expected in [
        (step, (one, one, ten), 30),
        (step, (one, ten, ten), 200),
        (step, (one, ten, one), 21),
        (times(2.0), (), 4),
        (times(3.0), (), 6),
        (add, (), 2),
    ]:
        for _ in range(4):
            assert own(mirrored.run(fn, args=(xp.ones(1), *args)))[0] == expected
    assert captured(step) == captured(add) == 3


def test_outside_of_strategies(place):
    double = hs.function(lambda x: 2 * x)
    assert double(21) == 42
    with place.make(hs.MirroredStrategy) as made:
        assert double(place.xp.full(2, 3.0)).tolist() == [6, 6]
        assert made.run(lambda: double(4)) is not None


# ---- kinds of arguments


def test_shapes(mirrored):
    """A graph for each shape, from its third call on; graphs of all ranks belong together."""
    other = 4 - (RANK == N - 1)
    for sizes, count in [
        ((4, 2, 4, 2, 4, 2, 4, 2, 3, 4, 4), 2),
        ((4, 4, 4, 4, other, 4, *[other] * 4, 4), 2 if N == 1 else 1),
    ]:
        given = functools.partial(batches, sizes=sizes)
        graphs.compare(mirrored, OPTIMIZERS["Adam"], count, given=given)


def test_calls_that_part_for_good(mirrored):
    """The graph that the ranks cannot launch together goes, in the end."""
    xp, calls = mirrored.xp, []
    step = hs.function(lambda x, i: (calls.append(0), x * i)[1])
    most = function.PATIENCE + 3

    def run(number, of_last, times=most):
        number, before = of_last if RANK == N - 1 else number, len(calls)
        for _ in range(times):
            assert own(mirrored.run(step, args=(xp.ones(1), number))) == number
        return len(calls) - before

    run(0, 5)
    for numbers in [(0, 0), (1, 2), (1, 1), (0, 0)]:
        assert run(*numbers) <= most
        assert run(*numbers) == 0
    # The last rank drops its graphs, of which the others launch one meanwhile.
    graphs.warned(lambda: [run(0, i, 3) for i in range(3, 13)])
    assert run(0, 0) <= most
    assert run(0, 0) == 0


def test_strides_dtypes_types_and_signs(mirrored):
    whole = mirrored.xp.arange(12.0).reshape(3, 4)
    arrays = [whole.T.copy().T, whole[::-1], whole.astype(np.float32), whole.astype(int), whole.T]
    calls = [(whole, number) for number in (0.0, -0.0, np.float32(0), 1, True)]
    step = hs.function(lambda x, number: (x.ravel() * number, type(number).__name__))
    for array, number in [*calls, *[(array, 1) for array in arrays]]:
        found, name = [mirrored.run(step, args=(array, number)) for _ in range(4)][-1]
        expected = array.get().ravel() * number
        assert own(found).dtype == expected.dtype and own(found).tobytes() == expected.tobytes()
        assert select(name) == type(number).__name__
    assert captured(step) == function.MOST_KINDS


def test_more_kinds_than_are_kept(mirrored):
    """Those of the last calls are; a warning tells of a program that has no graphs."""
    xp = mirrored.xp
    step, x, found = hs.function(lambda x, i: x + i), xp.ones(3), []

    def run(numbers):
        found.extend(own(mirrored.run(step, args=(x, i)))[0] - i for i in numbers)

    # In the second, one that was captured goes, which is 1.
    for numbers in ([*range(8)] * 4, [0, *[8] * 4, 0]):
        assert graphs.warned(lambda numbers=numbers: run(numbers)) == []
        assert captured(step) == 8
    (text,) = graphs.warned(lambda: run([*range(20, 40)] * 4))
    assert f"more than {function.MOST_KINDS} kinds" in text and set(found) == {1}
    assert captured(step) == 0


# ---- what changes between calls


def test_assign_restore_numbers_and_options(strategy, tmp_path):
    """The graph reads and writes the same memory, and gets the numbers of each step."""
    folder = COMM.bcast(str(tmp_path))

    def between(i, model):
        model.kept = [graphs.poison(strategy)]
        if i == 3:
            saved = hs.checkpoint.Checkpoint(optimizer=model.optimizer, w=model.weights)
            path = saved.save(f"{folder}/saved")
            model.weights[1].assign(np.full(SHAPES[1], 2, np.float32))
            model.mean.reset_state()
            model.last = lambda: saved.restore(path)
        if i == 4:
            model.optimizer.learning_rate = 0.125
        if i == 6:
            model.last()
        if i == 8:  # another kernel: another graph
            model.optimizer.is_signed = True

    graphs.compare(
        strategy,
        lambda: Momentum(0.5),
        between=between,
        given=lambda made: batches(made, (4,) * 12),
    )


def test_a_schedule_is_asked_once_a_step(strategy):
    """Also where an option has changed, where the ranks' calls differ, and in two updates."""
    asked = []
    model = Model(strategy, lambda: Momentum(lambda step: asked.append(int(step)) or 0.5))  # pyright: ignore[reportArgumentType]
    step = hs.function(lambda batch: model.step(batch) + model.step(batch))
    sizes = [4] * 6 + [4 - (RANK == N - 1)] + [4] * 8
    for i, batch in enumerate(batches(strategy, sizes)):
        model.optimizer.is_signed = i in (8, 9)
        strategy.run(step, args=(batch,))
    assert asked == [*range(2 * len(sizes))]


@pytest.mark.mpi(min_size=2)
def test_a_rank_with_another_rate(mirrored):
    model = Model(mirrored, OPTIMIZERS["SGD"])
    step = hs.function(model.step)
    (batch,) = batches(mirrored, (4,))
    for _ in range(4):
        mirrored.run(step, args=(batch,))
    before, done = [v.numpy() for v in model.weights], model.optimizer.iterations
    model.optimizer.learning_rate = 0.25 * (1 + RANK)
    with pytest.raises(hs.ReplicaMismatchError, match="learning_rate=0.25"):
        mirrored.run(step, args=(batch,))
    graphs.check_equal(before, [v.numpy() for v in model.weights])
    assert model.optimizer.iterations == done
    model.optimizer.learning_rate = 0.25
    for _ in range(4):
        mirrored.run(step, args=(batch,))
    assert captured(step) == 1 and model.optimizer.iterations == done + 4


# ---- signals


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.mpi(max_size=1)
def test_a_signal_before_a_launch(mirrored, monkeypatch):
    """It comes while the numbers are written; the next launch has them."""
    models = [Model(mirrored, OPTIMIZERS["SGD"]) for _ in range(2)]
    steps = [models[0].step, hs.function(models[1].step)]
    for i, batch in enumerate(batches(mirrored)):
        for model, step in zip(models, steps, strict=True):
            model.optimizer.learning_rate = 0.5 if i < 4 else 0.125
            if i == 4 and model is models[1]:
                with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                    patched.setattr(graph_numbers, "numbers_kernel", lambda _: interrupt)
                    mirrored.run(step, args=(batch,))
            mirrored.run(step, args=(batch,))
    graphs.check_equal(models[0].state(), models[1].state())


@pytest.mark.mpi(max_size=1)
def test_after_a_signal_in_a_launch_the_variables_are_gone(mirrored, monkeypatch):
    """They have the step, but their optimizer has not counted it."""
    communicator, (batch,) = mirrored.replica_group.communicator, batches(mirrored, (4,))

    def launch_and_interrupt(graph, launch=communicator.launch_graph):
        launch(graph)
        raise KeyboardInterrupt

    for steps in (2, 4):  # before: the next call captures, or launches
        model = Model(mirrored, OPTIMIZERS["SGD"])
        step = hs.function(model.step)
        for _ in range(steps):
            mirrored.run(step, args=(batch,))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(communicator, "launch_graph", launch_and_interrupt)
            mirrored.run(step, args=(batch,))
        with pytest.raises(RuntimeError, match=r"an exception interrupted .*make it again"):
            model.state()


@pytest.mark.mpi(min_size=2)
def test_a_signal_after_the_ranks_have_agreed(mirrored, monkeypatch):
    """Others have launched: the next call would end the job."""
    xp = mirrored.xp
    step = hs.function(lambda x: hs.get_replica_context().all_reduce("SUM", x))
    for _ in range(4):
        mirrored.run(step, args=(xp.ones(3),))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(xp, "copyto", interrupt)
        mirrored.run(step, args=(xp.ones(3),))
    calls = connect().calls
    assert calls.barred is not None and calls.barred.error is not None
    calls.barred = None  # here it came to all
    assert own(mirrored.run(step, args=(xp.ones(3),))).tolist() == [N] * 3


# ---- what else a function may contain


def test_metrics(mirrored):
    given = data(RANK, 0)

    def trained(decorate):
        with mirrored.scope():
            metrics = [(make(), pair) for make, pair, _ in CASES.values()]

        @decorate
        def step(pairs, weights):
            for (metric, _), pair in zip(metrics, pairs, strict=True):
                metric.update_state(*pair, weights)

        arrays = [[mirrored.xp.asarray(one) for one in pair(given)] for _, pair in metrics]
        for i in range(10):
            # Whole, because threads add them up in any order.
            weights = mirrored.xp.asarray(np.ceil(given["weights"]) + i)
            mirrored.run(step, args=(arrays, weights if i % 2 else None))
        return [metric.result() for metric, _ in metrics], step

    graphs.check_same(trained, 2)


def test_a_variable_outside_of_every_scope(mirrored):
    """It is a number of the capture, as others on the host."""
    seen = hs.Variable(0.0)
    step, found = hs.function(lambda x: x * float(seen)), []
    for i in range(5):
        seen.assign(float(i))
        found.append(own(mirrored.run(step, args=(mirrored.xp.ones(1),)))[0])
    assert found == [0, 1, 2, 2, 2]
