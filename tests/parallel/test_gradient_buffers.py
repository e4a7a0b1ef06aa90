"""Gradient buffers: the same results as from other arrays, and errors on all ranks."""

import functools

import drawn
import numpy as np
import pytest
from internals import (
    HostsCommunicator,
    Strategy,
    call_named,
    device_names,
    make_mirrored_group,
    worlds,
)
from mpi4py import MPI
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
SUM = N * (N + 1) // 2  # of the replicas' contributions: rank r has r + 1 parts


@functools.cache
def connected(name):
    """Ranks as if on several hosts: the last alone on one, in turns on two, or each alone."""
    comm = worlds.start().comm
    assert comm is not None
    if name == "single":
        return HostsCommunicator(comm.Dup(), MPI.COMM_SELF)
    return HostsCommunicator(comm.Dup(), comm.Split(RANK % 2 if name == "turns" else RANK == N - 1))


class OnHosts(hs.MirroredStrategy):
    """A mirrored strategy of ranks with this kind of connection."""

    def __init__(self, name):
        with call_named("OnHosts"):
            group = make_mirrored_group([device_names.CPU] * N, connected(name))
            Strategy.__init__(self, group)


ON_HOSTS = {"hosts": "last", "hosts in turns": "turns", "hosts of one rank": "single"}
ON_ONE_HOST = {made.__name__: made for made in STRATEGIES}
CASES = [(kind, name) for kind in ("CPU", "GPU") for name in ON_ONE_HOST]
CASES += [("CPU", name) for name in ON_HOSTS]
# With two ranks each would be alone on its host.
CORE = [("CPU", "hosts"), ("GPU", "CentralStorageStrategy")]


def pytest_generate_tests(metafunc):
    if "everywhere" in metafunc.fixturenames:
        cases = [
            pytest.param(
                *case,
                marks=[pytest.mark.core] * (case in CORE)
                + [pytest.mark.slow] * (case[1] in [*ON_HOSTS][1:]),
            )
            for case in CASES
        ]
        mark = pytest.mark.parametrize(
            ("place", "everywhere"), cases, indirect=True, ids=map(": ".join, CASES)
        )
        # It takes precedence over the parameters that `place` has itself.
        metafunc.definition.add_marker(mark)


@pytest.fixture
def everywhere(request, place):
    """A strategy of ranks on GPUs, on one host, or on several."""
    name = request.param
    made = OnHosts(ON_HOSTS[name]) if name in ON_HOSTS else place.make(ON_ONE_HOST[name])
    with made as strategy, strategy.scope():
        yield strategy


SHAPES = [(7,), (20, 50), (), (40_000,), (0, 3)]


def made(seed):
    random = np.random.default_rng(seed)
    return [hs.Variable(random.standard_normal(shape).astype(np.float32)) for shape in SHAPES]


@pytest.mark.core
@pytest.mark.parametrize("kind", STRATEGIES)
def test_gradients_in_buffers_do_the_same(place, kind):
    with place.make(kind) as strategy, strategy.scope():
        xp = strategy.xp
        copied, in_place = made(0), made(0)
        one, other = hs.optimizers.Adam(0.1), hs.optimizers.Adam(0.1)

        def step(number):
            gradients = [xp.full(shape, (RANK + 1) * (number + 1), np.float32) for shape in SHAPES]
            one.apply_gradients(zip(gradients, copied, strict=True))
            buffers = other.gradient_buffers(in_place)
            for buffer, gradient in zip(buffers, gradients, strict=True):
                assert buffer.shape == gradient.shape and buffer.dtype == np.float32
                buffer[...] = gradient
            # What is moved in between does not change them.
            hs.get_replica_context().all_reduce("SUM", xp.ones(100_000))
            other.apply_gradients(zip(buffers, in_place, strict=True))
            # Some of them, or in another order, are ordinary gradients.
            for gradient in gradients:
                gradient[...] = 1.0
            buffers[0][...] = 1.0
            one.apply_gradients([(gradients[1], copied[1]), (gradients[0], copied[0])])
            other.apply_gradients([(gradients[1], in_place[1]), (buffers[0], in_place[0])])

        for number in range(3):
            strategy.run(step, args=(number,))
        for v, w in zip(copied, in_place, strict=True):
            assert np.array_equal(v.numpy(), w.numpy())


def test_buffers_are_made_once(place):
    with place.make(hs.CentralStorageStrategy) as strategy, strategy.scope():
        variables, optimizer = made(1), hs.optimizers.SGD(0.1)
        first = optimizer.gradient_buffers(variables)
        second = optimizer.gradient_buffers(variables)
        assert all(a is b for a, b in zip(first, second, strict=True))
        assert not any(hs.asnumpy(buffer).any() for buffer in first)
        with pytest.raises(ValueError, match=r"SGD\.gradient_buffers: .* at least one"):
            optimizer.gradient_buffers([])
        with pytest.raises(ValueError, match=r"SGD\.gradient_buffers: a variable occurs twice"):
            optimizer.gradient_buffers([variables[0], variables[0]])


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_buffers_start_where_numbers_of_any_dtype_may(place):
    """Also between variables of a few bytes, which leave odd addresses."""
    with place.make(hs.CentralStorageStrategy) as strategy, strategy.scope():
        for count in (1, 3, 5):
            small = hs.Variable(np.zeros(count, np.uint8))
            variables = [hs.Variable(np.zeros(n, np.float64)) for n in (10, 3)]
            buffers = hs.optimizers.SGD(0.1).gradient_buffers(variables)
            addresses = [
                buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr
                for buffer in buffers
            ]
            assert [address % 8 for address in addresses] == [0, 0]
            assert addresses[0] % 64 == 0 and small.shape == (count,)


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_buffers_for_different_variables(place):
    with place.make(hs.CentralStorageStrategy) as strategy, strategy.scope():
        variables, optimizer = made(2), hs.optimizers.SGD(0.1)
        with pytest.raises(
            hs.ReplicaMismatchError, match=r"rank 0: SGD\.gradient_buffers of 'Variable'"
        ):
            optimizer.gradient_buffers(variables if RANK == 0 else variables[:1])
        assert len(optimizer.gradient_buffers(variables)) == len(variables)


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_one_rank_passes_its_buffers_and_another_does_not(place):
    with place.make(hs.CentralStorageStrategy) as strategy, strategy.scope():
        variables, optimizer = made(2), hs.optimizers.SGD(0.1)
        buffers = optimizer.gradient_buffers(variables)
        gradients = buffers if RANK == 0 else [buffer.copy() for buffer in buffers]
        with pytest.raises(
            hs.ReplicaMismatchError, match=r"rank 0: SGD\.apply_gradients from buffers\(SUM\) of"
        ):
            strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
        strategy.run(lambda: optimizer.apply_gradients(zip(buffers, variables, strict=True)))


# ---- results, wherever the ranks are

OPTIMIZERS = {
    "SGD": lambda: hs.optimizers.SGD(0.1),
    "Adam": lambda: hs.optimizers.Adam(0.01),
    "clipvalue": lambda: hs.optimizers.Adam(0.01, clipvalue=0.5),
    "clipnorm": lambda: hs.optimizers.Adam(0.01, clipnorm=0.5),
    "global_clipnorm": lambda: hs.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
}
DTYPES = ["float32", "float64 float32", "float32 float16"]
FORMS = [(300, 70), (7,), (), (0, 3), (40, 50), (999,)]


def trained(strategy, optimizer, forms, dtypes, in_buffers):
    """The variables after steps with random gradients, which are copied or are in buffers."""
    xp, random = strategy.xp, np.random.default_rng(1)
    dtypes = [dtypes[i % len(dtypes)] for i in range(len(forms))]
    values = [random.random(form) - 0.5 for form in forms]
    variables = [
        hs.Variable(value, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)
    ]
    buffers = optimizer.gradient_buffers(variables) if in_buffers else None

    def step(number):
        random = np.random.default_rng((number, RANK))
        gradients = [
            xp.asarray(drawn.numbers(random, v.shape, v.dtype, xp is not np)) for v in variables
        ]
        if buffers is not None:
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer[...] = gradient
        optimizer.apply_gradients(zip(buffers or gradients, variables, strict=True))

    for number in range(3):
        strategy.run(step, args=(number,))
    return [v.numpy() for v in variables]


@pytest.mark.parametrize("optimizer", slow_but(["Adam", "clipnorm"], OPTIMIZERS))
@pytest.mark.parametrize("dtypes", DTYPES)
def test_results_are_those_of_other_arrays(everywhere, place, optimizer, dtypes):
    """16-bit floats take another path between hosts, as does everything in a message with them."""
    expected, found = (
        trained(everywhere, OPTIMIZERS[optimizer](), FORMS, dtypes.split(), in_buffers)
        for in_buffers in (False, True)
    )
    drawn.check_equal(found, expected, place)


@pytest.mark.parametrize("sizes", [(900, 1100), (8191, 1, 3), (1, 0, 300_000)], ids=str)
def test_any_number_of_elements(everywhere, place, sizes):
    """Messages that every rank sums itself, and large ones, summed in parts in the same order."""
    forms = [(size,) for size in sizes]
    expected, found = (
        trained(everywhere, hs.optimizers.Adam(0.01), forms, ["float32"], in_buffers)
        for in_buffers in (False, True)
    )
    drawn.check_equal(found, expected, place)


# ---- buffers that are passed as any gradient is: closed forms of whole numbers


class Model:
    """Variables from 0, changed by the sums of gradients, with buffers."""

    def __init__(self, *sizes):
        self.variables = [hs.Variable(np.zeros(size, np.float32)) for size in sizes]
        self.optimizer = hs.optimizers.SGD(1.0)
        self.buffers = self.optimizer.gradient_buffers(self.variables)
        self.expected = [0] * len(sizes)

    def write(self, factor=1):
        """Buffer i gets a multiple of i + 1."""
        for i, buffer in enumerate(self.buffers):
            buffer[...] = factor * (i + 1) * (RANK + 1)

    def apply(self, gradients=None):
        self.optimizer.apply_gradients(zip(gradients or self.buffers, self.variables, strict=True))

    def check(self, change):
        """That variable i has changed by `change[i]` times the sum over the ranks."""
        for i, v in enumerate(self.variables):
            self.expected[i] -= change[i] * SUM
            assert (v.numpy() == self.expected[i]).all()


@pytest.mark.parametrize("size", [3, 20_000])
def test_in_another_order(everywhere, size):
    """Each gradient is then copied to where another gradient is."""
    model = Model(*[size] * 3)
    for turn in range(3):

        def step(turn=turn):
            model.write()
            gradients = [model.buffers[(i + turn) % 3] for i in range(3)]
            gradients[2] = gradients[2][::-1]  # a view
            model.apply(gradients)

        everywhere.run(step)
        model.check([(i + turn) % 3 + 1 for i in range(3)])


@pytest.mark.parametrize("size", [3, 20_000])
def test_views_of_buffers_and_one_for_all(everywhere, size):
    model = Model(*[size] * 3)

    def step(form):
        model.write()
        model.apply([form(buffer) for buffer in model.buffers])

    for form in (lambda one: one[:], lambda one: one[::-1], lambda one: one.reshape(-1)):
        everywhere.run(step, args=(form,))
        model.check([1, 2, 3])
    everywhere.run(lambda: (model.write(), model.apply([model.buffers[1]] * 3)))
    model.check([2, 2, 2])


def test_buffers_of_other_variables(everywhere):
    """Of the same shapes."""
    one, other = Model(300, 7), Model(300, 7)

    def step():
        other.write(10)
        one.apply(other.buffers)
        one.write()
        other.write(10)
        other.apply([one.buffers[0], other.buffers[1]])
        one.write()
        one.apply()

    for _ in range(2):
        everywhere.run(step)
        one.check([11, 22])
        other.check([1, 20])


def test_some_of_them_and_rows_beside_them(everywhere):
    model = Model(300, 7)
    table = hs.Variable(np.zeros((20, 3)))
    w, v = model.variables
    xp = everywhere.xp

    def step():
        model.write()
        rows = hs.IndexedSlices(xp.full((2, 3), RANK + 1.0), xp.asarray([4, 7]))
        pairs = [*zip(model.buffers, model.variables, strict=True)]
        model.optimizer.apply_gradients([*pairs, (rows, table)])
        model.write()
        model.optimizer.apply_gradients([(None, w), (model.buffers[1], v)])

    for number in (1, 2):
        everywhere.run(step)
        model.check([1, 4])
        expected = np.zeros((20, 3))
        expected[[4, 7]] = -number * SUM
        assert np.array_equal(table.numpy(), expected)


def test_gradients_that_are_summed_already(everywhere):
    model = Model(300, 7)

    def step():
        for i, buffer in enumerate(model.buffers):
            buffer[...] = (i + 1) * SUM
        pairs = zip(model.buffers, model.variables, strict=True)
        model.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    everywhere.run(step)
    model.check([1, 2])


def test_they_stay_when_larger_gradients_come(everywhere):
    """Their variables were updated by other arrays first, through memory that all updates share."""
    small, large = (hs.Variable(np.zeros(size, np.float32)) for size in (3, 30_000))
    optimizer, xp = hs.optimizers.SGD(1.0), everywhere.xp
    everywhere.run(lambda: optimizer.apply_gradients([(xp.full(3, RANK + 1, xp.float32), small)]))
    (buffer,) = buffers = optimizer.gradient_buffers([small])

    def step():
        buffer[...] = 4 * (RANK + 1)
        optimizer.apply_gradients([(xp.full(30_000, 2 * (RANK + 1), xp.float32), large)])
        optimizer.apply_gradients([*zip(buffers, [small], strict=True)])

    everywhere.run(step)
    assert small.numpy().tolist() == [-5 * SUM] * 3
    assert (large.numpy() == -2 * SUM).all()


def test_they_are_a_list(everywhere):
    buffers = hs.optimizers.SGD(0.1).gradient_buffers([hs.Variable(np.zeros(3))])
    assert type(buffers) is list and type(buffers[0]) is everywhere.xp.ndarray
