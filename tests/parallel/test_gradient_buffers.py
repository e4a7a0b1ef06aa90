"""Gradient buffers: the same results as from other arrays, and errors on all ranks."""

import functools

import numpy as np
import pytest
from internals import Strategy, call_named, device_names, hosts, make_mirrored_group, worlds
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
SUM = N * (N + 1) // 2  # of the replicas' contributions: rank r has r + 1 parts


@functools.cache
def connected():
    comm = worlds.start().comm
    assert comm is not None
    return hosts.HostsCommunicator(comm.Dup(), comm.Split(RANK == N - 1))


class OnHosts(hs.MirroredStrategy):
    """A mirrored strategy of ranks as if on two hosts, the last alone on one."""

    def __init__(self, _):
        with call_named("OnHosts"):
            Strategy.__init__(self, make_mirrored_group([device_names.CPU] * N, connected()))


def pytest_generate_tests(metafunc):
    if "everywhere" in metafunc.fixturenames:
        cases = [pytest.param("CPU", OnHosts, id="hosts")] + [
            pytest.param(kind, made, id=f"{kind}: {made.__name__}", marks=marks)
            for kind, marks in [("CPU", ()), ("GPU", pytest.mark.gpu)]
            for made in STRATEGIES
        ]
        mark = pytest.mark.parametrize(("place", "everywhere"), cases, indirect=True)
        # It takes precedence over the parameters that `place` has itself.
        metafunc.definition.add_marker(mark)


@pytest.fixture
def everywhere(request, place):
    """A strategy of ranks on GPUs, on one host, or on several."""
    with place.make(request.param) as strategy, strategy.scope():
        yield strategy


@pytest.fixture
def central(place):
    with place.make(hs.CentralStorageStrategy) as strategy, strategy.scope():
        yield strategy


def test_buffers_are_made_once(central):
    variables = [hs.Variable(np.ones(shape, np.float32)) for shape in [(7,), (20, 50), (), (0, 3)]]
    optimizer = hs.optimizers.SGD(0.1)
    buffers = optimizer.gradient_buffers(variables)
    assert type(buffers) is list and type(buffers[0]) is central.xp.ndarray
    again = optimizer.gradient_buffers(variables)
    for buffer, same, variable in zip(buffers, again, variables, strict=True):
        assert buffer is same and not hs.asnumpy(buffer).any()
        assert buffer.shape == variable.shape and buffer.dtype == np.float32
    with pytest.raises(ValueError, match=r"SGD\.gradient_buffers: .* at least one"):
        optimizer.gradient_buffers([])
    with pytest.raises(ValueError, match=r"SGD\.gradient_buffers: a variable occurs twice"):
        optimizer.gradient_buffers([variables[0], variables[0]])


@pytest.mark.mpi(min_size=2)  # one rank needs no message
def test_buffers_start_where_numbers_of_any_dtype_may(central):
    """Also between variables of a few bytes, which leave odd addresses."""
    for count in (1, 3, 5):
        small = hs.Variable(np.zeros(count, np.uint8))
        variables = [hs.Variable(np.zeros(n, np.float64)) for n in (10, 3)]
        addresses = [
            buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr
            for buffer in hs.optimizers.SGD(0.1).gradient_buffers(variables)
        ]
        assert [address % 8 for address in addresses] == [0, 0]
        assert addresses[0] % 64 == 0 and small.shape == (count,)


@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
def test_ranks_that_differ(central):
    variables, optimizer = [hs.Variable(np.ones(n)) for n in (5, 9)], hs.optimizers.SGD(0.1)
    message = r"rank 0: SGD\.gradient_buffers of 'Variable'"
    with pytest.raises(hs.ReplicaMismatchError, match=message):
        optimizer.gradient_buffers(variables if RANK == 0 else variables[:1])
    buffers = optimizer.gradient_buffers(variables)

    def apply(gradients):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    copies = [buffer.copy() for buffer in buffers]
    message = r"rank 0: SGD\.apply_gradients from buffers\(SUM\) of"
    with pytest.raises(hs.ReplicaMismatchError, match=message):
        central.run(apply, args=(buffers if RANK == 0 else copies,))
    central.run(apply, args=(buffers,))


OPTIMIZERS = {
    "Adam": (lambda: hs.optimizers.Adam(0.01), ["float64", "float32"]),
    "clipnorm": (lambda: hs.optimizers.Adam(0.01, clipnorm=0.5), ["float32", "float16"]),
    "global_clipnorm": (
        lambda: hs.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
        ["float32"],
    ),
}
# Also messages that every rank sums itself, and large ones, summed in parts in the same order.
FORMS = [
    [(300, 70), (7,), (), (0, 3), (40, 50), (999,)],
    [(900,), (1100,)],
    [(8191,), (1,), (3,)],
    [(1,), (0,), (100_001,)],
]


def trained(strategy, optimizer, forms, dtypes, in_buffers):
    """The variables after steps with random gradients, which are copied or are in buffers."""
    xp, random = strategy.xp, np.random.default_rng(1)
    variables = [
        hs.Variable(random.random(form) - 0.5, dtype=dtypes[i % len(dtypes)])
        for i, form in enumerate(forms)
    ]
    buffers = optimizer.gradient_buffers(variables) if in_buffers else None

    def step(number):
        random, gradients = np.random.default_rng((number, RANK)), []
        for v in variables:
            value = random.random(v.shape) - 0.5
            # NCCL adds up in another order in each of its operations. Where gradients cancel, an
            # optimizer that divides by their size makes any difference of what is left of them.
            # Of multiples of 1/256 even float16 holds the sums of eight ranks.
            value = value if xp is np else np.round(value * 256) / 256
            gradients.append(xp.asarray(value.astype(v.dtype)))
        if buffers is not None:
            for buffer, gradient in zip(buffers, gradients, strict=True):
                buffer[...] = gradient
            # What is moved in between does not change them.
            context = hs.get_replica_context()
            assert context is not None
            context.all_reduce("SUM", xp.ones(100_000))
        optimizer.apply_gradients(zip(buffers or gradients, variables, strict=True))

    for number in range(3):
        strategy.run(step, args=(number,))
    return [v.numpy() for v in variables]


@pytest.mark.parametrize(("optimizer", "dtypes"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_results_are_those_of_other_arrays(everywhere, optimizer, dtypes):
    """On the host to the bit. 16-bit floats, and what is sent with them, go another way."""
    for forms in FORMS:
        expected, found = (
            trained(everywhere, optimizer(), forms, dtypes, has_buffers)
            for has_buffers in (False, True)
        )
        for one, other in zip(found, expected, strict=True):
            if everywhere.xp is np:
                np.testing.assert_array_equal(one, other, strict=True)
            else:
                rtol = 2e-3 if one.dtype == np.float16 else 1e-5
                np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


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
def test_in_another_order_views_and_one_for_all(everywhere, size):
    """Each gradient is then copied to where another gradient is."""
    model, other = Model(*[size] * 3), Model(size)
    a, b, c = model.buffers
    (of_other,) = other.buffers
    for gradients, change in [
        ([a, b, c[::-1]], [1, 2, 3]),
        ([b, c, a], [2, 3, 1]),
        ([c, a[:], b[::-1]], [3, 1, 2]),
        ([a.reshape(-1), b[::-1], c[:]], [1, 2, 3]),
        ([b, b, b], [2, 2, 2]),
        ([a, of_other, c], [1, 10, 3]),
    ]:
        everywhere.run(lambda given=gradients: (model.write(), other.write(10), model.apply(given)))
        model.check(change)


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
        model.buffers[1][...] = SUM
        pairs = [(model.buffers[1], v)]  # which is summed already
        model.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)

    for number in (1, 2):
        everywhere.run(step)
        model.check([1, 5])
        expected = np.zeros((20, 3))
        expected[[4, 7]] = -number * SUM
        assert np.array_equal(table.numpy(), expected)


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
