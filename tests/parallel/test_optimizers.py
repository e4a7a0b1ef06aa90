"""Gradients of any layout, dtype and size; their norms; optimizers of one's own.

The optimizers' steps: test_acceptance.py. What they refuse: test_optimizers_refused.py.
"""

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES
from transports import has, kind

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])


@pytest.fixture(scope="module", params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def own(step):
    """The gradient of this replica, and the sum over all of them."""
    every = [np.cos(np.arange(6.0).reshape(3, 2) + 3 * step + rank) for rank in range(N)]
    return every[RANK], np.sum(every, axis=0)


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---- gradients


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.complex64])
def test_each_row_is_summed_by_itself(strategy, xp, dtype):
    """However many other rows there are, and whatever is in them: one is infinite, one is NaN."""
    count = 3000
    with strategy.scope():
        table, optimizer = hs.Variable(np.zeros((count, 2), dtype)), hs.optimizers.SGD(1.0)
    slope = np.stack([np.arange(count) % 7 + 1.0, np.arange(count) % 5], axis=1)
    slope[100], slope[200] = np.inf, np.nan
    names = np.tile(np.arange(count), 4)  # each four times, far from each other

    def replica():
        values = xp.asarray((slope[names] * (RANK + 1)).astype(dtype))
        optimizer.apply_gradients([(hs.IndexedSlices(values, xp.asarray(names)), table)])

    strategy.run(replica)
    found, expected = table.numpy(), (-4 * sum(range(1, N + 1)) * slope).astype(dtype)
    assert not np.isfinite(found[[100, 200]]).any()
    np.testing.assert_array_equal(
        np.delete(found, [100, 200], axis=0), np.delete(expected, [100, 200], axis=0)
    )


LARGE = [(5,), (300, 400)]  # each rank updates whole chunks of the large one
LAYOUTS = {
    "new arrays": lambda xp, g: g,
    "not contiguous": lambda xp, g: xp.repeat(g, 2, axis=-1)[..., ::2],
    "transposed": lambda xp, g: xp.ascontiguousarray(g.T).T,
    "of another dtype": lambda xp, g: g.astype(np.float64),
    "read-only": lambda xp, g: xp.broadcast_to(g[:1], g.shape),
}


def test_large_gradients_of_every_layout(strategy, xp):
    plan = [(layout, shape) for layout in LAYOUTS for shape in LARGE]

    def gradient(layout, shape, rank):  # whole numbers, so that sums are exact
        values = np.arange(np.prod(shape)).reshape(shape) % 97 + 1000 * rank
        return values if layout != "read-only" else np.broadcast_to(values[:1], shape)

    with strategy.scope():
        variables = [hs.Variable(np.full(shape, 7, np.float32)) for _, shape in plan]
        optimizer = hs.optimizers.SGD(1.0)
    for _ in range(2):
        gradients = [
            LAYOUTS[one[0]](xp, xp.asarray(gradient(*one, RANK).astype(np.float32))) for one in plan
        ]
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(optimizer.apply_gradients, args=(pairs,))
        for given, one in zip(gradients, plan, strict=True):
            assert np.array_equal(hs.asnumpy(given), gradient(*one, RANK))  # they are the caller's
    for variable, one in zip(variables, plan, strict=True):
        total = sum(gradient(*one, rank) for rank in range(N))
        assert np.array_equal(variable.numpy(), 7 - 2 * total), one


def test_gradients_that_are_other_variables_values(strategy):
    numbers = np.arange(120_000.0).reshape(300, 400) % 97
    with strategy.scope():
        one, other = hs.Variable(numbers), hs.Variable(numbers[::-1] + 5)
        optimizer = hs.optimizers.SGD(1.0)

    def step():
        optimizer.apply_gradients([(other.value(), one), (one.value(), other)])

    for _ in range(2):
        before = one.numpy(), other.numpy()
        strategy.run(step)
        assert np.array_equal(one.numpy(), before[0] - N * before[1])
        assert np.array_equal(other.numpy(), before[1] - N * before[0])


def test_no_variable_at_all_is_no_step(strategy):
    optimizer = hs.optimizers.SGD(0.5)
    assert strategy.run(lambda: optimizer.apply_gradients([])) is None
    optimizer.apply_gradients(iter([]))
    assert optimizer.iterations == 0


def test_of_many_subsets_of_the_variables_only_some_are_kept(strategy):
    """Any number of them may occur; the buffers stay."""
    with strategy.scope():
        variables = [hs.Variable(np.zeros(3)) for _ in range(5)]
        optimizer = hs.optimizers.SGD(1.0)
    buffers = optimizer.gradient_buffers(variables)
    steps = np.zeros(5)
    for subset in 2 * list(range(1, 32)):
        members = [i for i in range(5) if subset >> i & 1]
        gradients = [strategy.xp.full(3, float(i + 1)) for i in members]
        pairs = [(gradient, variables[i]) for gradient, i in zip(gradients, members, strict=True)]
        strategy.run(lambda pairs=pairs: optimizer.apply_gradients(pairs))
        steps[members] += 1
    found = [v.numpy().tolist() for v in variables]
    assert found == [[-N * (i + 1) * steps[i]] * 3 for i in range(5)]
    again = optimizer.gradient_buffers(variables)
    assert all(one is other for one, other in zip(buffers, again, strict=True))
    assert len(optimizer._state.plans) == 1 + 16


# ---- norms


FORMS = {
    "many variables": [((1 + i % 5,), "float64") for i in range(150)],
    "any": [
        ((300, 5), "float16"),
        ((0, 4), "float32"),
        ((90,), "bfloat16"),
        ((7,), "complex64"),
        ((), "float64"),
        ((30, 30), "complex128"),
        ((20_000,), "float64"),
        ((40,), "float32"),
        ((1,), "float32"),
    ],
}
TOLERANCE = {"float64": 1e-10, "complex128": 1e-10, "float16": 2e-3, "bfloat16": 2e-2}


def clipped(option, most, rate=0.5):
    return hs.optimizers.SGD(rate, **{option: most})


def norms_of(option, gradients):
    """The norm by which each of them is scaled."""
    norms = [np.linalg.norm(one) for one in gradients]
    return norms if option == "clipnorm" else [np.linalg.norm(norms)] * len(norms)


both_norms = pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm"])


@both_norms
@pytest.mark.parametrize("forms", FORMS)
def test_norms_of_gradients_of_all_sizes_and_dtypes(strategy, forms, option):
    """Every third variable has no gradient."""
    random = np.random.default_rng(3)
    made = [(s, kind(name)) for s, name in FORMS[forms] if has(strategy.xp, kind(name))]

    def drawn(shape, dtype):  # of few bits, so that sums are exact
        values = random.integers(-9, 9, shape) + 1j * random.integers(-9, 9, shape)
        return (values if dtype.kind == "c" else values.real).astype(dtype)

    of_ranks = [[drawn(shape, dtype) for shape, dtype in made] for _ in range(N)]
    wide = [[np.asarray(g, "D" if g.dtype.kind == "c" else "d") for g in each] for each in of_ranks]
    totals = [
        0 * parts[0] if i % 3 == 2 else np.sum(parts, axis=0)
        for i, parts in enumerate(zip(*wide, strict=True))
    ]
    norms = norms_of(option, totals)
    most = float(np.median(norms)) * 0.9 or 1.0
    with strategy.scope():
        variables = [hs.Variable(np.zeros(shape, dtype)) for shape, dtype in made]
        optimizer = clipped(option, most, 1.0)
    gradients = [
        None if i % 3 == 2 else strategy.xp.asarray(g) for i, g in enumerate(of_ranks[RANK])
    ]
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    for v, total, norm in zip(variables, totals, norms, strict=True):
        expected = -total * min(1, most / norm if norm else 1)
        close(v.numpy().astype(expected.dtype), expected, TOLERANCE.get(v.dtype.name, 1e-5))


@both_norms
@pytest.mark.parametrize(("harm", "is_sparse"), [(np.inf, False), (np.nan, True)])
def test_norms_that_are_not_finite_make_gradients_nan(strategy, xp, option, harm, is_sparse):
    with strategy.scope():
        harmed, other = hs.Variable(START), hs.Variable(START)
        optimizer = clipped(option, 1e6)
    gradient = xp.ones(START.shape)
    gradient[0, 0] = harm if RANK == N - 1 else 1
    rows = hs.IndexedSlices(gradient, xp.arange(3)) if is_sparse else gradient
    pairs = [(rows, harmed), (xp.ones(START.shape), other)]
    strategy.run(optimizer.apply_gradients, args=(pairs,))
    assert np.isnan(harmed.numpy()).all()
    expected = START - 0.5 * N if option == "clipnorm" else np.full_like(START, np.nan)
    np.testing.assert_array_equal(other.numpy(), expected)


@both_norms
def test_norms_are_those_of_arrays_and_of_rows(strategy, option):
    """Of rows that several ranks name, and one rank twice."""
    with strategy.scope():
        v, table, other = (hs.Variable(START) for _ in range(3))
        optimizer = clipped(option, 0.25)

    def of_rank(rank):
        return np.array([2, 0, 2]), np.cos(np.arange(6.0).reshape(3, 2) + rank)

    def step():
        rows, values = map(strategy.xp.asarray, of_rank(RANK))
        slices = hs.IndexedSlices(values, rows)
        optimizer.apply_gradients([(slices, table), (values, v), (slices, other)])

    strategy.run(step)
    total, of_table = np.zeros_like(START), np.zeros_like(START)
    for rank in range(N):
        rows, values = of_rank(rank)
        total += values
        np.add.at(of_table, rows, values)
    gradients = [of_table, total, of_table]
    norms = norms_of(option, gradients)
    for found, gradient, norm in zip((table, v, other), gradients, norms, strict=True):
        assert norm > 0.25
        close(found.numpy(), START - 0.5 * gradient * (0.25 / norm))


@both_norms
def test_norms_of_gradients_that_are_summed_already(strategy, option):
    """In the replicas, and across them."""
    with strategy.scope():
        v, w, optimizer = hs.Variable(START), hs.Variable(START), clipped(option, 0.5)
    total = strategy.xp.asarray(own(0)[1])
    strategy.run(lambda: optimizer.apply_gradients([(total, v)], skip_gradients_aggregation=True))
    optimizer.apply_gradients([(total, w)])
    for one in (v, w):
        close(one.numpy(), START - 0.25 * own(0)[1] / np.linalg.norm(own(0)[1]))


# ---- optimizers of one's own


class Plain(hs.optimizers.Optimizer):
    """Not a dataclass: it has its own `__init__`, attributes of its own, and two options."""

    in_class = 1.0

    def __init__(self, learning_rate, factor=3.0):
        self.early = factor
        super().__init__(learning_rate)
        self.factor, self.is_signed, self.bound = factor, False, None

    @property
    def slots(self):
        return {"steps": 1.0}

    def numbers(self, rate, step):
        rate *= self.factor * self.early * self.in_class
        return {"rate": rate, "step": step, "is_signed": self.is_signed, "bound": self.bound}

    @staticmethod
    def formula(value, gradient, steps, *, rate, step, is_signed, bound):
        if is_signed:
            gradient = np.sign(gradient)
        if bound is not None:
            gradient = np.minimum(gradient, bound)
        return value - rate * gradient, steps + step


def test_attributes_and_options_of_its_own(strategy):
    """They may change between steps; a `bool` or `None` chooses another formula."""
    with strategy.scope():
        w, optimizer = hs.Variable(np.ones((4, 3))), Plain(0.5)
    total, value = sum(range(1, N + 1)), 1.0
    changes = {"early": 3.0, "factor": 2.0, "in_class": 4.0, "is_signed": True, "bound": 0.5}
    for name, new in [*changes.items(), ("bound", 0.25)]:
        setattr(optimizer, name, new)
        gradient = strategy.xp.full((4, 3), RANK + 1.0)
        strategy.run(optimizer.apply_gradients, args=([(gradient, w)],))
        used = min(1 if optimizer.is_signed else total, optimizer.bound or total)
        value -= 0.5 * optimizer.factor * 3 * optimizer.in_class * used
    assert (w.numpy() == value).all()
    assert (optimizer.variables[-1].numpy() == 1 + 21).all()
