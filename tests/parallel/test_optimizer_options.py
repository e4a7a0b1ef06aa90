"""What every optimizer takes by keyword, compared with a few lines of NumPy."""

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES
from transports import has, kind

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def own(step):
    """The gradient of this replica, and the sum over all of them."""
    every = [np.cos(np.arange(6.0).reshape(3, 2) + 3 * step + rank) for rank in range(N)]
    return every[RANK], np.sum(every, axis=0)


def model(strategy, **options):
    with strategy.scope():
        return hs.Variable(START, name="w"), hs.optimizers.SGD(0.5, **options)


def train(strategy, v, optimizer, steps=4, first=0):
    for step in range(first, first + steps):
        gradient = strategy.xp.asarray(own(step)[0])
        strategy.run(optimizer.apply_gradients, args=([(gradient, v)],))


def by_hand(change, steps=4):
    """The value after some steps of a gradient descent whose gradient is changed by `change`."""
    value = START
    for step in range(steps):
        value = value - 0.5 * change(own(step)[1], value)
    return value


def close(found, expected, tolerance=1e-12):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---- clipping


@pytest.mark.core
def test_values_are_clipped_after_the_sum_over_replicas(strategy):
    v, optimizer = model(strategy, clipvalue=0.3)
    train(strategy, v, optimizer)
    close(v.numpy(), by_hand(lambda g, _: np.clip(g, -0.3, 0.3)))


@pytest.mark.core
def test_each_gradient_is_clipped_to_a_norm_of_its_own(strategy):
    with strategy.scope():
        small, large = hs.Variable(START), hs.Variable(START)
        optimizer = hs.optimizers.SGD(0.5, clipnorm=2.0)

    def step():
        gradient = strategy.xp.asarray(own(0)[0])
        optimizer.apply_gradients([(gradient / 100, small), (100 * gradient, large)])

    strategy.run(step)
    total = own(0)[1]
    close(small.numpy(), START - 0.5 * total / 100)
    close(large.numpy(), START - 0.5 * total * (2 / np.linalg.norm(total)))


FORMS = {
    "one element or none": [
        ((3, 5), "float32"),
        ((0, 4), "float32"),
        ((), "float64"),
        ((1,), "float32"),
        ((20_000,), "float64"),
        ((7,), "float32"),
    ],
    "many variables": [((1 + i % 5,), "float64") for i in range(150)],
    "16 bits and complex": [
        ((300, 5), "float16"),
        ((90,), "bfloat16"),
        ((7,), "complex64"),
        ((40,), "float32"),
        ((30, 30), "complex128"),
    ],
}
NORMS: dict[str, Any] = {
    "clipnorm": lambda most: {"clipnorm": most},
    "global_clipnorm": lambda most: {"global_clipnorm": most},
}
TOLERANCE = {"float64": 1e-12, "complex128": 1e-12, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.core
@pytest.mark.parametrize("option", NORMS)
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
    norms = [np.linalg.norm(total) for total in totals]
    if option == "global_clipnorm":
        norms = [np.linalg.norm(norms)] * len(norms)
    most = float(np.median(norms)) * 0.9 or 1.0
    with strategy.scope():
        variables = [hs.Variable(np.zeros(shape, dtype)) for shape, dtype in made]
        optimizer = hs.optimizers.SGD(1.0, **NORMS[option](most))
    gradients = [
        None if i % 3 == 2 else strategy.xp.asarray(g) for i, g in enumerate(of_ranks[RANK])
    ]
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    for v, total, norm in zip(variables, totals, norms, strict=True):
        expected = -total * min(1, most / norm if norm else 1)
        close(v.numpy().astype(expected.dtype), expected, TOLERANCE.get(v.dtype.name, 1e-5))


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("harm", [np.inf, np.nan])
@pytest.mark.parametrize("option", NORMS)
def test_norms_that_are_not_finite_make_gradients_nan(strategy, option, harm, is_sparse):
    xp = strategy.xp
    with strategy.scope():
        harmed, other = hs.Variable(START), hs.Variable(START)
        optimizer = hs.optimizers.SGD(0.5, **NORMS[option](1e6))
    gradient = xp.ones(START.shape)
    gradient[0, 0] = harm if RANK == N - 1 else 1
    rows = hs.IndexedSlices(gradient, xp.arange(3)) if is_sparse else gradient
    pairs = [(rows, harmed), (xp.ones(START.shape), other)]
    strategy.run(optimizer.apply_gradients, args=(pairs,))
    assert np.isnan(harmed.numpy()).all()
    expected = START - 0.5 * N if option == "clipnorm" else np.full_like(START, np.nan)
    np.testing.assert_array_equal(other.numpy(), expected)


@pytest.mark.parametrize("option", NORMS)
def test_norms_are_those_of_arrays_and_of_rows(strategy, option):
    """Of rows that several ranks name, and one rank twice."""
    xp = strategy.xp
    with strategy.scope():
        v, table, other = (hs.Variable(START) for _ in range(3))
        optimizer = hs.optimizers.SGD(0.5, **NORMS[option](0.25))

    def of_rank(rank):
        return np.array([2, 0, 2]), np.cos(np.arange(6.0).reshape(3, 2) + rank)

    def step():
        rows, values = map(xp.asarray, of_rank(RANK))
        slices = hs.IndexedSlices(values, rows)
        optimizer.apply_gradients([(slices, table), (values, v), (slices, other)])

    strategy.run(step)
    total, of_table = np.zeros_like(START), np.zeros_like(START)
    for rank in range(N):
        rows, values = of_rank(rank)
        total += values
        np.add.at(of_table, rows, values)
    gradients = [of_table, total, of_table]
    norms = [np.linalg.norm(g) for g in gradients]
    if option == "global_clipnorm":
        norms = [np.linalg.norm(norms)] * 3
    for found, gradient, norm in zip((table, v, other), gradients, norms, strict=True):
        assert norm > 0.25
        close(found.numpy(), START - 0.5 * gradient * (0.25 / norm))


@pytest.mark.parametrize("option", NORMS)
@pytest.mark.parametrize("where", ["in the replicas", "across replicas"])
def test_norms_of_gradients_that_are_summed_already(strategy, option, where):
    v, optimizer = model(strategy, **NORMS[option](0.5))
    total = own(0)[1]
    pairs = [(strategy.xp.asarray(total), v)]
    if where == "across replicas":
        optimizer.apply_gradients(pairs)
    else:
        strategy.run(lambda: optimizer.apply_gradients(pairs, skip_gradients_aggregation=True))
    close(v.numpy(), START - 0.25 * total / np.linalg.norm(total))


@pytest.mark.core
@pytest.mark.parametrize("option", NORMS)
def test_a_restored_program_clips_the_same_bits(strategy, option, mpi_tmp_path):
    """Though a variable got its first gradient, and so its slot, after the others."""
    shapes = [40, 8, 5]

    def made():
        with strategy.scope():
            variables = [hs.Variable(np.zeros(n)) for n in shapes]
            return variables, hs.optimizers.Adagrad(0.1, **NORMS[option](0.7))

    def step(variables, optimizer, gradients):
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(lambda: optimizer.apply_gradients(pairs))

    for trial in range(10):
        random = np.random.default_rng([trial, RANK])
        gradients = [strategy.xp.asarray(random.standard_normal(n)) for n in shapes]
        first, restored = made(), made()
        step(*first, [None, *gradients[1:]])
        step(*first, gradients)
        Checkpoint(v=first[0], o=first[1]).save(mpi_tmp_path / "file")
        Checkpoint(v=restored[0], o=restored[1]).restore(mpi_tmp_path / "file")
        for one in (first, restored):
            step(*one, gradients)
        for one, other in zip(first[0], restored[0], strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()


# ---- decay and learning rates


def test_weights_decay_by_the_learning_rate(strategy):
    v, optimizer = model(strategy)
    optimizer.weight_decay = 0.1
    train(strategy, v, optimizer)
    close(v.numpy(), by_hand(lambda g, value: g + 0.1 * value))


def test_a_variable_is_a_learning_rate_that_can_be_assigned(strategy):
    v, optimizer = model(strategy)
    with strategy.scope():
        rate = hs.Variable(0.0)
    optimizer.learning_rate = rate
    value = START
    for step in range(4):
        rate.assign(2.0**-step)
        train(strategy, v, optimizer, 1, step)
        value = value - 2.0**-step * own(step)[1]
    close(v.numpy(), value)


def test_a_learning_rate_that_changes_between_steps(strategy):
    v, optimizer = model(strategy, momentum=0.9)
    velocity, value = 0, START
    for step, rate in enumerate([0.5, 0.25, 2.0]):
        optimizer.learning_rate = rate
        assert optimizer.learning_rate == rate
        train(strategy, v, optimizer, 1, step)
        velocity = 0.9 * velocity - rate * own(step)[1]
        value = value + velocity
    close(v.numpy(), value)
    with pytest.raises(ValueError, match="SGD: learning_rate is -1"):
        optimizer.learning_rate = -1
    assert optimizer.learning_rate == 2.0


def test_what_an_optimizer_keeps(strategy):
    v, optimizer = model(strategy, momentum=0.5)
    train(strategy, v, optimizer, 2)
    found = {one.name: one.numpy() for one in optimizer.variables}
    assert list(found) == ["SGD/iterations", "SGD/learning_rate", "SGD/momentum/w"]
    assert found["SGD/iterations"] == 2
    assert found["SGD/learning_rate"] == 0.5
    close(found["SGD/momentum/w"], -0.25 * own(0)[1] - 0.5 * own(1)[1])
    assert [one.shape for one in optimizer.variables] == [(), (), v.shape]


@pytest.mark.core
@pytest.mark.parametrize("dtype", [np.int64, np.float16])
@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm"])
def test_gradients_of_other_dtypes_are_clipped_with_rows(strategy, option, dtype):
    xp, options = strategy.xp, dict[str, Any]({option: 1.0})
    with strategy.scope():
        w, table = hs.Variable(np.zeros(2)), hs.Variable(np.zeros((2, 1)))
        optimizer = hs.optimizers.SGD(1.0, **options)
    rows = hs.IndexedSlices(xp.zeros((1, 1)), xp.asarray([0]))
    strategy.run(lambda: optimizer.apply_gradients([(xp.asarray([3, 4], dtype), w), (rows, table)]))
    np.testing.assert_allclose(
        w.numpy(), [-0.6, -0.8]
    )  # [3, 4] for each replica has this direction


# ---- what is refused


FIELDS: dict[str, Any] = {
    "clipnorm": 0.25 + RANK,
    "global_clipnorm": 0.25 + RANK,
    "clipvalue": 0.25 + RANK,
    "weight_decay": 0.25 + RANK,
    "momentum": 0.25 if RANK else 0.5,
    "nesterov": RANK > 0,
    "global_clipnorm of one rank": None if RANK else 0.25,
}


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_fields_that_differ_are_refused(strategy, name, is_sparse):
    field = name.split()[0]
    v, optimizer = model(strategy, **{"momentum": 0.5, field: FIELDS[name]})
    gradient = strategy.xp.asarray(own(0)[0])
    if is_sparse:
        gradient = hs.IndexedSlices(gradient, strategy.xp.arange(3))
    with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s)SGD\.apply_gradients.*{field}="):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    assert np.array_equal(v.numpy(), START) and optimizer.iterations == 0
    v, optimizer = model(strategy)
    train(strategy, v, optimizer)  # the next call works
    close(v.numpy(), by_hand(lambda g, _: g))


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
@pytest.mark.parametrize("other", ["global_clipnorm", "clipvalue", "weight_decay"])
def test_fields_of_the_same_value_are_told_apart(strategy, other):
    v, optimizer = model(strategy, momentum=0.5, **{other if RANK else "clipnorm": 0.25})
    gradient = strategy.xp.asarray(own(0)[0])
    with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s)clipnorm=0\.25.*{other}=0\.25"):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    assert np.array_equal(v.numpy(), START) and optimizer.iterations == 0


@pytest.mark.core
@pytest.mark.parametrize("where", ["stepped", "restored"])
def test_fields_are_fixed_once_there_are_slots(strategy, where, mpi_tmp_path):
    v, optimizer = model(strategy, momentum=0.5)
    optimizer.momentum = 0.25  # not yet
    train(strategy, v, optimizer, 1)
    if where == "restored":
        Checkpoint(v=v, optimizer=optimizer).save(mpi_tmp_path / "file")
        v, optimizer = model(strategy, momentum=0.25)
        Checkpoint(v=v, optimizer=optimizer).restore(mpi_tmp_path / "file")
    before = repr(optimizer)
    for name, value in {
        "momentum": 0.9,
        "nesterov": True,
        "clipnorm": 1.0,
        "weight_decay": 1,
    }.items():
        with pytest.raises(
            AttributeError, match=rf"SGD: {name} is .* pass {name}=.* to a new optimizer"
        ):
            setattr(optimizer, name, value)
    assert repr(optimizer) == before
    optimizer.learning_rate = 2.0
    train(strategy, v, optimizer, 1, 1)
    velocity = -0.5 * own(0)[1]
    close(v.numpy(), START + velocity + 0.25 * velocity - 2 * own(1)[1])


optimizers: Any = hs.optimizers  # for calls that no type checker would accept


@pytest.mark.parametrize(
    ("make", "name", "value", "error", "message"),
    [
        (optimizers.SGD, "clipnorm", 0, ValueError, "SGD: clipnorm is 0; it must be positive or"),
        (optimizers.SGD, "clipvalue", "x", TypeError, "SGD: clipvalue is 'x'; it must be a number"),
        (optimizers.AdamW, "weight_decay", -1, ValueError, "AdamW: weight_decay is -1; it must be"),
        (optimizers.SGD, "momentum", 1.5, ValueError, "SGD: momentum is 1.5; it must be from 0"),
        (optimizers.Adam, "beta_1", 1, ValueError, "Adam: beta_1 is 1; it must be at least 0 and"),
        (optimizers.Lion, "beta_1", 0, ValueError, "Lion: beta_1 is 0; it must be above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_field_out_of_range(make, name, value, error, message):
    with pytest.raises(error, match=message):
        make(**{name: value})
    optimizer = make()
    before = repr(optimizer)
    with pytest.raises(error, match=message):
        setattr(optimizer, name, value)
    assert repr(optimizer) == before


def test_fields_that_exclude_each_other():
    with pytest.raises(ValueError, match="SGD: clipnorm and clipvalue exclude each other"):
        optimizers.SGD(clipnorm=1, clipvalue=1)
    optimizer = optimizers.SGD(clipnorm=1)
    with pytest.raises(ValueError, match="SGD: global_clipnorm and clipnorm exclude each other"):
        optimizer.global_clipnorm = 1
    assert optimizer.global_clipnorm is None
