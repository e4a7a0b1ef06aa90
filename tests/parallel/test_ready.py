"""Gradient buffers marked ready: same results as without marks, and errors on all ranks."""

import contextlib
import functools
import gc

import drawn
import numpy as np
import pytest
from internals import (
    HierarchicalCommunicator,
    Strategy,
    call_named,
    device_names,
    make_mirrored_group,
    state_of_optimizer,
    storage,
    worlds,
)
from mpi4py import MPI
from slow import slow_but
from strategies import ShardedMirroredStrategy

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
several = pytest.mark.mpi(min_size=2)  # one rank cannot differ from another


@functools.cache
def connected(name):
    """Ranks as if on several hosts: the last alone on one, in turns on two, or each alone."""
    comm = worlds.start().comm
    assert comm is not None
    if name == "single":
        return HierarchicalCommunicator(comm.Dup(), MPI.COMM_SELF)
    return HierarchicalCommunicator(
        comm.Dup(), comm.Split(RANK % 2 if name == "turns" else RANK == N - 1)
    )


class OnHosts(hs.MirroredStrategy):
    """A mirrored strategy of ranks with this kind of connection."""

    def __init__(self, name, shard_updates):
        with call_named("OnHosts"):
            Strategy.__init__(
                self,
                make_mirrored_group([device_names.CPU] * N, connected(name), (), shard_updates),
            )


class ShardedCentral(hs.CentralStorageStrategy):
    """Central storage whose updates are split over the GPUs."""

    def __init__(self, devices=None):
        super().__init__(devices, shard_updates=True)


ON_HOSTS = {
    "hosts": functools.partial(OnHosts, "last", False),
    "hosts in turns": functools.partial(OnHosts, "turns", False),
    "hosts, sharded": functools.partial(OnHosts, "last", True),
    "hosts in turns, sharded": functools.partial(OnHosts, "turns", True),
    "hosts of one rank": functools.partial(OnHosts, "single", False),
    "hosts of one rank, sharded": functools.partial(OnHosts, "single", True),
}
ON_ONE_HOST = {
    "central": hs.CentralStorageStrategy,
    "mirrored": hs.MirroredStrategy,
    "sharded": ShardedMirroredStrategy,
}
ON_GPUS = {**ON_ONE_HOST, "sharded central": ShardedCentral}


CASES = [
    *(("CPU", name) for name in [*ON_ONE_HOST, *ON_HOSTS]),
    *(("GPU", name) for name in ON_GPUS),
]
QUICK = [("CPU", name) for name in ("mirrored", "hosts", "hosts in turns, sharded")]
QUICK += [("GPU", name) for name in ON_GPUS]
# With two ranks each would be alone on its host.
CORE = [
    ("CPU", "hosts"),
    ("CPU", "hosts in turns, sharded"),
]
CORE += [("GPU", "central"), ("GPU", "sharded central")]


def pytest_generate_tests(metafunc):
    if "strategy" in metafunc.fixturenames:
        quick, core = QUICK, CORE
        # Errors: where sums do not start early, nothing is under way.
        if "model" in metafunc.fixturenames:
            quick, core = QUICK[1:], [CORE[0], CORE[2]]
        marks = {
            case: [pytest.mark.slow] * (case not in quick) + [pytest.mark.core] * (case in core)
            for case in CASES
        }
        cases, names = (
            [pytest.param(*case, marks=marks[case]) for case in CASES],
            map(": ".join, CASES),
        )
        mark = pytest.mark.parametrize(("place", "strategy"), cases, indirect=True, ids=names)
        # It takes precedence over the parameters that `place` has itself.
        metafunc.definition.add_marker(mark)


@pytest.fixture
def strategy(request, place):
    """Ranks on GPUs, on one host, and on several."""
    name = request.param
    with ON_HOSTS[name]() if name in ON_HOSTS else place.make(ON_GPUS[name]) as made:
        yield made


@pytest.fixture(autouse=True)
def _sums_of_few_bytes_begin_too(monkeypatch):
    monkeypatch.setattr(storage, "FEWEST_BYTES", 1000)


def begins(strategy, place):
    """Whether sums start before `apply_gradients`."""
    return N > 1 and (place.kind == "GPU" or isinstance(strategy, OnHosts))


SHAPES = [(300, 70), (7,), (), (0, 3), (40, 50), (999,)]
OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.1),
    "Adam": lambda: hs.optimizers.Adam(0.01),
    "clipvalue": lambda: hs.optimizers.Adam(0.01, clipvalue=0.5),
    "clipnorm": lambda: hs.optimizers.Adam(0.01, clipnorm=0.5),
    "global_clipnorm": lambda: hs.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
}
BEGIN_LATER = ("clipnorm", "global_clipnorm")
ORDERS = {
    "all": [5, 4, 3, 2, 1, 0],
    "some": [4, 0],
    "small ones": [5, 2, 1],
    "all but one": [0, 1, 2, 4],
}


class Model:
    """Variables, their optimizer, and its buffers."""

    def __init__(self, strategy, make, shapes=None, dtypes=None):
        shapes = shapes or SHAPES
        dtypes = dtypes or ["float32"] * len(shapes)
        self.strategy = strategy
        random = np.random.default_rng(1)
        with strategy.scope():
            values = [
                (random.random(shape) - 0.5).astype(dtype)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
            self.variables = [hs.Variable(value, name=f"v{i}") for i, value in enumerate(values)]
            self.optimizer = make()
            self.buffers = self.optimizer.gradient_buffers(self.variables)
        self.start = [v.numpy() for v in self.variables]

    def train(self, marked=(), steps=4):
        for step in range(steps):
            self.strategy.run(self.step, args=(step, marked))
        return [v.numpy() for v in self.variables]

    def step(self, step, marked=()):
        """A step with gradients that depend on step and rank; these are marked, in this order."""
        self.write(step)
        for i in marked:
            self.buffers.ready(self.buffers[i])
        self.apply()

    def write(self, step):
        random = np.random.default_rng((step, RANK))
        for buffer in self.buffers:
            buffer[...] = self.strategy.xp.asarray(
                drawn.numbers(random, buffer.shape, buffer.dtype, self.strategy.xp is not np)
            )

    def apply(self):
        self.optimizer.apply_gradients(zip(self.buffers, self.variables, strict=True))

    @property
    def plan(self):
        (plan,) = state_of_optimizer(self.optimizer).plans.values()
        return plan


# ---- results


@pytest.mark.parametrize("optimizer", slow_but(["Adam", "clipvalue", "clipnorm"], OPTIMIZERS))
def test_results_are_those_without_marks(strategy, place, optimizer):
    expected = Model(strategy, OPTIMIZERS[optimizer]).train()
    drawn.check_equal(Model(strategy, OPTIMIZERS[optimizer]).train([4, 0]), expected, place)


@pytest.mark.parametrize("order", slow_but(["all", "some"], ORDERS))
@pytest.mark.parametrize("dtypes", ["float32", "float64 float32", "float32 float16"])
def test_any_of_any_dtype_in_any_order(strategy, place, order, dtypes):
    """16-bit floats take another path between hosts, as does everything in a message with them."""
    dtypes = (dtypes.split() * 6)[:6]
    expected = Model(strategy, OPTIMIZERS["Adam"], dtypes=dtypes).train(steps=2)
    drawn.check_equal(
        Model(strategy, OPTIMIZERS["Adam"], dtypes=dtypes).train(ORDERS[order], 2), expected, place
    )


SIZES = [(900, 1100), (8191, 1, 3), (1, 0, 300_000)]
SIZES += [pytest.param(sizes, marks=pytest.mark.slow) for sizes in [(3, 5), (100_000, 30)]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_number_of_elements(strategy, place, sizes):
    """Messages that every rank sums itself, and large ones, summed in parts in the same order."""
    shapes = [(size,) for size in sizes]
    expected = Model(strategy, OPTIMIZERS["Adam"], shapes).train(steps=2)
    drawn.check_equal(Model(strategy, OPTIMIZERS["Adam"], shapes).train([1, 0], 2), expected, place)


def test_exact_sums(strategy, place):
    """Whole numbers, by a closed form; other exchanges meanwhile do not interfere."""
    shapes = [(50, 60), (70,), (4000,)]
    model = Model(strategy, lambda: hs.optimizers.SGD(1.0), shapes, ["float32"] * 3)
    before = [v.numpy() for v in model.variables]
    with strategy.scope():
        other = hs.Variable(np.zeros(5, np.float32))
        plain = hs.optimizers.SGD(1.0)

    def step(number):
        for i in (2, 1, 0):
            model.buffers[i][...] = (RANK + 1) * (i + 1) * (number + 1)
            model.buffers.ready(model.buffers[i])
            total = hs.get_replica_context().all_reduce(
                "SUM", strategy.xp.full(20_000, float(RANK + 1))
            )
            assert total.tolist() == [N * (N + 1) / 2] * 20_000
            plain.apply_gradients([(strategy.xp.ones(5, np.float32), other)])
        assert bool(model.plan.buffers.started) is begins(strategy, place)
        model.apply()
        assert not model.plan.buffers.marked and not model.plan.buffers.started

    for number in range(3):
        strategy.run(step, args=(number,))
    assert other.numpy().tolist() == [-9.0 * N] * 5
    for i, (v, value) in enumerate(zip(model.variables, before, strict=True)):
        expected = value.astype(np.float64) - (i + 1) * (1 + 2 + 3) * N * (N + 1) / 2
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-5)


def test_two_optimizers_and_slices_beside_buffers(strategy, place):
    results = []
    for marked in ([], [1, 0]):
        one = Model(strategy, OPTIMIZERS["Adam"], [(300,), (700,)])
        two = Model(strategy, OPTIMIZERS["Adam"], [(900,), (60, 50)])
        with strategy.scope():
            table = hs.Variable(np.ones((20, 3), np.float32))

        def step(number, marked=marked, one=one, two=two, table=table):
            xp = strategy.xp
            one.write(number)
            two.write(number + 1)
            for i in marked:
                one.buffers.ready(one.buffers[i])
                two.buffers.ready(two.buffers[i])
            rows = hs.IndexedSlices(xp.full((2, 3), RANK + 1, np.float32), xp.asarray([RANK, 7]))
            two.apply()
            pairs = [*zip(one.buffers, one.variables, strict=True), (rows, table)]
            one.optimizer.apply_gradients(pairs)

        for number in range(2):
            strategy.run(step, args=(number,))
        results.append([v.numpy() for v in (*one.variables, *two.variables, table)])
    drawn.check_equal(results[1], results[0], place)


def test_several_at_once_and_few_bytes_that_wait(strategy, place):
    model = Model(strategy, OPTIMIZERS["SGD"], [(10,), (100,), (200,), (5,)])

    def step():
        model.write(0)
        model.buffers.ready(model.buffers[3], model.buffers[1])
        assert model.plan.buffers.marked == {1, 3} and not model.plan.buffers.started
        model.buffers.ready(model.buffers[2])
        assert model.plan.buffers.marked == {1, 2, 3}
        assert model.plan.buffers.started == ({1, 2, 3} if begins(strategy, place) else set())
        model.apply()

    strategy.run(step)
    expected = Model(strategy, OPTIMIZERS["SGD"], [(10,), (100,), (200,), (5,)]).train(steps=1)
    drawn.check_equal([v.numpy() for v in model.variables], expected, place)


@pytest.mark.parametrize("optimizer", slow_but(["global_clipnorm"], BEGIN_LATER))
def test_what_is_done_with_gradients_first_is_done_first(strategy, optimizer):
    model = Model(strategy, OPTIMIZERS[optimizer])

    def step():
        model.write(0)
        model.buffers.ready(*model.buffers)
        assert model.plan.buffers.marked and not model.plan.buffers.started
        model.apply()

    strategy.run(step)


# ---- errors: all ranks raise each, and the next step is right


def check_works(model, place):
    for _ in range(2):
        model.strategy.run(model.step, args=(3, [0, 1]))
    other = Model(model.strategy, OPTIMIZERS["SGD"], [v.shape for v in model.variables])
    for mine, v in zip(other.variables, model.start, strict=True):
        mine.assign(v)
    for _ in range(2):
        other.strategy.run(other.step, args=(3,))
    drawn.check_equal(
        [v.numpy() for v in model.variables], [v.numpy() for v in other.variables], place
    )


@pytest.fixture
def model(strategy):
    """A model whose variables must be as at the start when `check_works` is called."""
    return Model(strategy, OPTIMIZERS["SGD"], [(30, 50), (4000,), (3,)])


WRONG = {
    "none": (
        lambda m: m.buffers.ready(),
        ValueError,
        r"GradientBuffers\.ready: got no arguments; pass gradient buffers",
    ),
    "a view": (
        lambda m: m.buffers.ready(m.buffers[0][:]),
        ValueError,
        r"argument 1 of 1, of type .*ndarray, is not one",
    ),
    "slices": (
        lambda m: m.buffers.ready(m.buffers[1], hs.IndexedSlices(m.buffers[0], m.buffers[2])),
        ValueError,
        "argument 2 of 2, of type IndexedSlices, is not one of these buffers",
    ),
    "one twice": (
        lambda m: m.buffers.ready(m.buffers[1], m.buffers[1]),
        ValueError,
        "of 'v1' is marked twice",
    ),
    "again": (
        lambda m: [m.buffers.ready(m.buffers[i]) for i in (0, 1, 0)],
        ValueError,
        "gradient of 'v0' is marked twice in this step; mark each once",
    ),
    "other gradients": (
        lambda m: (
            m.buffers.ready(m.buffers[0]),
            m.optimizer.apply_gradients([(m.strategy.xp.ones(v.shape), v) for v in m.variables]),
        ),
        ValueError,
        r"SGD\.apply_gradients: some gradient buffers are marked ready .* zip\(buffers, variables\)",
    ),
    "some of the buffers": (
        lambda m: (
            m.buffers.ready(m.buffers[0]),
            m.optimizer.apply_gradients(list(zip(m.buffers, m.variables, strict=True))[:2]),
        ),
        ValueError,
        "it takes all of them",
    ),
    "without a gradient": (
        lambda m: (
            m.buffers.ready(m.buffers[0]),
            m.optimizer.apply_gradients(zip([*m.buffers[:2], None], m.variables, strict=True)),
        ),
        ValueError,
        "it takes all of them",
    ),
    "an exception": (lambda m: (m.buffers.ready(*m.buffers), {}["missing"]), KeyError, "missing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_on_all_ranks(model, place, wrong):
    call, error, message = WRONG[wrong]

    def step():
        model.write(1)
        call(model)

    with pytest.raises(error, match=message):
        model.strategy.run(step)
    assert not model.plan.buffers.marked and not model.plan.buffers.started
    check_works(model, place)


@several
@pytest.mark.parametrize("wrong", ["a view", "one twice"])
def test_what_is_wrong_on_one_rank(model, place, wrong):
    call, error, message = WRONG[wrong]

    def step():
        model.write(1)
        if RANK == 1:
            call(model)
        else:
            model.buffers.ready(model.buffers[1])

    with pytest.raises(error, match=message):
        model.strategy.run(step)
    check_works(model, place)


@several
def test_ranks_that_mark_different_buffers(model, place):
    def step():
        model.write(1)
        model.buffers.ready(model.buffers[1])
        model.buffers.ready(model.buffers[0 if RANK else 2])

    with pytest.raises(
        hs.ReplicaMismatchError, match=r"rank 0: GradientBuffers\.ready of 'v2'.*\n.*'v0'"
    ):
        model.strategy.run(step)
    check_works(model, place)


@several
def test_ranks_of_which_one_marks_and_others_do_not(model, place):
    def step():
        model.write(1)
        if RANK:
            model.buffers.ready(model.buffers[1])
        else:
            model.apply()

    with pytest.raises(
        hs.ReplicaMismatchError, match=r"rank 0: SGD\.apply_gradients.*\n.*GradientBuffers\.ready"
    ):
        model.strategy.run(step)
    check_works(model, place)


@several
def test_outside_of_a_replica_function(model, place):
    with pytest.raises(
        RuntimeError, match=r"GradientBuffers\.ready was called outside of a replica function"
    ):
        with model.strategy.scope():
            model.buffers.ready(model.buffers[0])
    with pytest.raises(RuntimeError):
        model.buffers.ready(model.buffers[0])
    check_works(model, place)


@several
def test_gradients_that_are_summed_already(model, place):
    def step():
        model.write(1)
        model.buffers.ready(model.buffers[0])
        model.optimizer.apply_gradients(
            zip(model.buffers, model.variables, strict=True), skip_gradients_aggregation=True
        )

    with pytest.raises(ValueError, match="without skip_gradients_aggregation"):
        model.strategy.run(step)
    check_works(model, place)


def test_marks_without_a_step(model, place):
    """It is an error when the function marks again, or when the step takes other gradients."""
    model.strategy.run(lambda: model.buffers.ready(*model.buffers))
    with pytest.raises(ValueError, match="is marked twice in this step"):
        model.strategy.run(lambda: model.buffers.ready(model.buffers[0]))
    check_works(model, place)


def test_an_error_that_the_function_catches(model, place):
    def step():
        model.write(3)
        model.buffers.ready(model.buffers[1])
        with contextlib.suppress(ValueError):
            model.buffers.ready(model.buffers[1])
        with contextlib.suppress(ValueError):
            model.optimizer.apply_gradients([(model.buffers[0], model.variables[0])])
        model.buffers.ready(model.buffers[0])
        model.apply()

    model.strategy.run(step)
    other = Model(model.strategy, OPTIMIZERS["SGD"], [v.shape for v in model.variables])
    model.strategy.run(other.step, args=(3,))
    drawn.check_equal(
        [v.numpy() for v in model.variables], [v.numpy() for v in other.variables], place
    )


def test_buffers_of_other_variables_of_the_optimizer(model, place):
    with model.strategy.scope():
        v = hs.Variable(np.zeros(400, np.float32))
        other = model.optimizer.gradient_buffers([v])

    def step():
        model.buffers.ready(model.buffers[0])
        other.ready(other[0])

    with pytest.raises(ValueError, match="buffers of other variables of this optimizer are marked"):
        model.strategy.run(step)


def test_an_optimizer_that_goes_with_its_marks(strategy):
    """Its memory is reused, and what is under way disturbs no other call."""
    gc.collect()
    gc.freeze()  # the next collections need not visit what all tests keep
    for _ in range(3):
        model = Model(strategy, OPTIMIZERS["Adam"], [(40_000,), (24_000,)])
        strategy.run(lambda model=model: model.buffers.ready(model.buffers[1]))
        del model
        gc.collect()
        strategy.run(lambda: [strategy.xp.ones(64_000 * n, np.float32) for n in (1, 1, 2)])
