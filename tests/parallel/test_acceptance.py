"""N replicas on a global batch equal one replica on it, for every optimizer and strategy.

The one replica is a closed form here: the gradients of a linear model on the whole batch, and
TensorFlow's update rules written in NumPy. None of it is the library's own code.
"""

import itertools

import numpy as np
import pytest
from adamax import Adamax
from mpi4py import MPI
from slow import slow_but
from strategies import strategies_for

import hpcstrat as hs

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")

# Some replicas get more of a batch of 7 than others; only one gets the last of an epoch, 1 element.
ROWS, BATCH, EPOCHS = 22, 7, 2
SHAPES = {"w": (5, 3), "b": (3,), "s": ()}
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


# ---- TensorFlow's rules: functions of learning rate, step (from 1), value, gradient and, by name,
# the slots


def sgd(rate, t, value, g, slots, momentum=0.0, nesterov=False):
    if not momentum:
        return value - rate * g
    slots["velocity"] = momentum * slots.get("velocity", 0) - rate * g
    return value + (momentum * slots["velocity"] - rate * g if nesterov else slots["velocity"])


def adam(rate, t, value, g, slots, beta_1=0.9, beta_2=0.999, epsilon=1e-7, weight_decay=0.0):
    slots["m"] = beta_1 * slots.get("m", 0) + (1 - beta_1) * g
    slots["v"] = beta_2 * slots.get("v", 0) + (1 - beta_2) * g**2
    corrected = rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    return (
        value
        - rate * weight_decay * value
        - corrected * slots["m"] / (np.sqrt(slots["v"]) + epsilon)
    )


def adamw(rate, t, value, g, slots, weight_decay=0.004, **options):
    return adam(rate, t, value, g, slots, weight_decay=weight_decay, **options)


def adagrad(rate, t, value, g, slots, initial_accumulator_value=0.1, epsilon=1e-7):
    slots["sum"] = slots.get("sum", initial_accumulator_value) + g**2
    return value - rate * g / np.sqrt(slots["sum"] + epsilon)


def rmsprop(rate, t, value, g, slots, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False):
    slots["squares"] = rho * slots.get("squares", 0) + (1 - rho) * g**2
    variance = slots["squares"]
    if centered:
        slots["mean"] = rho * slots.get("mean", 0) + (1 - rho) * g
        variance = variance - slots["mean"] ** 2
    change = rate * g / np.sqrt(variance + epsilon)
    if momentum:
        change = slots["momentum"] = momentum * slots.get("momentum", 0) + change
    return value - change


def adamax(rate, t, value, g, slots, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    slots["m"] = beta_1 * slots.get("m", 0) + (1 - beta_1) * g
    slots["largest"] = np.maximum(beta_2 * slots.get("largest", 0), np.abs(g))
    return value - rate / (1 - beta_1**t) * slots["m"] / (slots["largest"] + epsilon)


CASES = [
    (hs.optimizers.SGD, sgd, {}),
    (hs.optimizers.SGD, sgd, {"momentum": 0.9}),
    (hs.optimizers.SGD, sgd, {"momentum": 0.9, "nesterov": True}),
    (hs.optimizers.SGD, sgd, {"momentum": 0.5, "global_clipnorm": 3.0}),
    (hs.optimizers.Adam, adam, {}),
    (hs.optimizers.Adam, adam, {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-3}),
    (hs.optimizers.Adam, adam, {"global_clipnorm": 2.0}),
    (hs.optimizers.AdamW, adamw, {}),
    (hs.optimizers.AdamW, adamw, {"weight_decay": 0.3, "global_clipnorm": 100.0}),
    (hs.optimizers.Adagrad, adagrad, {}),
    (hs.optimizers.Adagrad, adagrad, {"initial_accumulator_value": 1.0, "epsilon": 1e-2}),
    (hs.optimizers.Adagrad, adagrad, {"global_clipnorm": 0.5}),
    (hs.optimizers.RMSprop, rmsprop, {}),
    (hs.optimizers.RMSprop, rmsprop, {"rho": 0.5, "epsilon": 1e-2}),
    (hs.optimizers.RMSprop, rmsprop, {"momentum": 0.8}),
    (hs.optimizers.RMSprop, rmsprop, {"centered": True}),
    (hs.optimizers.RMSprop, rmsprop, {"centered": True, "momentum": 0.8, "global_clipnorm": 1.0}),
    (Adamax, adamax, {}),
    (Adamax, adamax, {"beta_1": 0.5, "global_clipnorm": 2.0}),
]


def name_of(argument):
    if isinstance(argument, dict):
        return ",".join(f"{name}={value}" for name, value in argument.items()) or "defaults"
    return getattr(argument, "__name__", str(argument))


every_case = pytest.mark.parametrize(("optimizer", "rule", "options"), CASES, ids=name_of)


def cases(*quick):
    """All cases; all but some are slow."""
    return pytest.mark.parametrize(
        ("optimizer", "rule", "options"), slow_but([CASES[at] for at in quick], CASES), ids=name_of
    )


some_cases, few_cases = cases(3, 6, 8, 11, 16, 18), cases(6, 16, 18)
every_strategy = pytest.mark.parametrize(
    "strategy", strategies_for(MPI.COMM_WORLD.size), ids=name_of, indirect=True
)


@pytest.fixture
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


# ---- the model: y = x w + b + s, half the squared error


def data(dtype):
    random = np.random.default_rng(7)
    x, y = random.normal(size=(ROWS, 5)), random.normal(size=(ROWS, 3))
    return x.astype(dtype), y.astype(dtype)


def initial(dtypes):
    random = np.random.default_rng(8)
    return {name: random.normal(size=shape).astype(dtypes[name]) for name, shape in SHAPES.items()}


def gradients_of(values, x, y):
    """The losses' sum over the global batch size: right on a whole batch and on a part."""
    error = x @ values["w"] + values["b"] + values["s"] - y
    return {
        name: g / BATCH
        for name, g in (("w", x.T @ error), ("b", error.sum(axis=0)), ("s", error.sum()))
    }


def batches(dtype):
    """All epochs' batches: with BATCH rows each, except the last one of an epoch, with one."""
    x, y = data(dtype)
    return [
        (x[i : i + BATCH], y[i : i + BATCH]) for _ in range(EPOCHS) for i in range(0, ROWS, BATCH)
    ]


def expected(rule, rate, options, dtypes, data_dtype):
    """The result of one replica, in float64."""
    options = dict(options)
    clipnorm = options.pop("global_clipnorm", None)
    values = {name: value.astype(np.float64) for name, value in initial(dtypes).items()}
    slots = {name: {} for name in values}
    for t, (x, y) in enumerate(batches(data_dtype), start=1):
        gradients = gradients_of(values, x.astype(np.float64), y.astype(np.float64))
        if clipnorm is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
            gradients = {name: g * clipnorm / max(norm, clipnorm) for name, g in gradients.items()}
        values = {
            name: rule(rate, t, value, gradients[name], slots[name], **options)
            for name, value in values.items()
        }
    return values


def train(
    strategy, optimizer, dtypes, data_dtype, created=("w", "b", "s"), passed=(("w", "b", "s"),)
):
    """Trains; returns the variables' final values.

    Args:
        created: the order in which variables are made.
        passed: the orders in which they are passed to the optimizer, in turn.
    """
    start = initial(dtypes)
    orders = itertools.cycle(passed)
    with strategy.scope():
        variables = {name: hs.Variable(start[name], name=name) for name in created}

    def step(batch, order):
        values = {name: variable.value() for name, variable in variables.items()}
        gradients = gradients_of(values, *batch)
        optimizer.apply_gradients([(gradients[name], variables[name]) for name in order])

    dataset = hs.data.Dataset.from_tensor_slices(data(data_dtype)).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(EPOCHS):
        for batch in distributed:
            strategy.run(step, args=(batch, next(orders)))
    assert optimizer.iterations == len(batches(data_dtype))
    found = {name: variable.numpy() for name, variable in variables.items()}
    assert_same_on_all_ranks(found)
    in_replicas = strategy.run(
        lambda: {name: variable.read_value() for name, variable in variables.items()}
    )
    for replica in strategy.experimental_local_results(in_replicas):
        assert bits(replica) == bits(found)
    return found


def bits(values):
    return {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in values.items()}


def assert_same_on_all_ranks(values):
    assert MPI.COMM_WORLD.allgather(bits(values)) == [bits(values)] * MPI.COMM_WORLD.size


def assert_close(found, wanted, tolerance):
    for name, value in found.items():
        np.testing.assert_allclose(
            value, wanted[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


def every(dtype):
    return dict.fromkeys(SHAPES, dtype)


# ---- the tests


@pytest.mark.core
@pytest.mark.parametrize("strategy", [hs.CentralStorageStrategy], indirect=True)
def test_the_batches_are_uneven_and_some_empty(strategy):
    dataset = hs.data.Dataset.from_tensor_slices(data("float32")).batch(BATCH)
    sizes = []
    for x, _ in strategy.experimental_distribute_dataset(dataset):
        sizes.append([len(part) for part in strategy.experimental_local_results(x)])
    assert [sum(step) for step in sizes] == [7, 7, 7, 1]
    assert (len(set(sizes[0])) == 1) == (BATCH % strategy.num_replicas_in_sync == 0)
    assert strategy.num_replicas_in_sync == 1 or sizes[-1][-1] == 0


@pytest.mark.core
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every_case
@every_strategy
def test_replicas_equal_one_replica(strategy, optimizer, rule, options, dtype):
    found = train(strategy, optimizer(0.05, **options), every(dtype), dtype)
    assert {value.dtype.name for value in found.values()} == {dtype}
    assert_close(found, expected(rule, 0.05, options, every(dtype), dtype), TOLERANCE[dtype])
    for name, value in initial(every(dtype)).items():
        assert np.all(found[name] != value)


@few_cases
@every_strategy
def test_a_second_run_gives_the_same_bits(strategy, optimizer, rule, options):
    first, second = (
        train(strategy, optimizer(0.05, **options), every("float32"), "float32") for _ in range(2)
    )
    assert bits(first) == bits(second)


@few_cases
@every_strategy
def test_variables_may_be_made_in_another_order_than_they_are_passed(
    strategy, optimizer, rule, options
):
    wanted = expected(rule, 0.05, options, every("float64"), "float64")
    for created in ("bsw", "swb"):
        for passed in (["wbs"], ["sbw", "wbs", "bws"]):  # the same in each step, or not
            found = train(
                strategy, optimizer(0.05, **options), every("float64"), "float64", created, passed
            )
            assert_close(found, wanted, TOLERANCE["float64"])


@pytest.mark.core
@few_cases
@every_strategy
def test_variables_of_different_dtypes_in_one_call(strategy, optimizer, rule, options):
    for odd_one, dtype, other in (
        ("w", "float32", "float64"),
        ("b", "float64", "float32"),
        ("s", "float64", "float32"),
    ):
        dtypes = {**every(dtype), odd_one: other}
        found = train(strategy, optimizer(0.05, **options), dtypes, dtype)
        assert {name: value.dtype.name for name, value in found.items()} == dtypes
        # Each variable's gradient depends on all variables: the coarsest rounding counts for all.
        assert_close(found, expected(rule, 0.05, options, dtypes, dtype), TOLERANCE["float32"])


@pytest.mark.core
@few_cases
@every_strategy
def test_the_ranks_share_the_work_of_many_elements(strategy, optimizer, rule, options):
    """More than one chunk of an update, on gradients that differ by rank; some ranks' are 0."""
    size, n = 150_001, strategy.num_replicas_in_sync
    options = dict(options)
    start = np.linspace(-1, 1, size)
    slots, wanted = {}, start
    optimizer = optimizer(0.01, **options)
    clipnorm = options.pop("global_clipnorm", None)
    with strategy.scope():
        variable = hs.Variable(start)

    def step(t):
        rank = MPI.COMM_WORLD.rank
        optimizer.apply_gradients([(strategy.xp.asarray(gradient(rank, t, n, start)), variable)])

    for t in range(1, 4):
        strategy.run(step, args=(t,))
        total = sum(gradient(rank, t, n, start) for rank in range(n))
        if clipnorm is not None:
            total = total * clipnorm / max(np.linalg.norm(total), clipnorm)
        wanted = rule(0.01, t, wanted, total, slots, **options)
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-12, atol=1e-12)
    assert_same_on_all_ranks({"variable": variable.numpy()})


def gradient(rank, step, count, like):
    """The replica's part; one replica, another one in each step, has none.

    Sums of parts are exact: optimizers enlarge what is wrong in those that are almost 0.
    """
    part = np.round(((like + 0.5 * rank + 0.1 * step) ** 2 - 0.3) * 2**20) / 2**20
    return part * 0 if count > 1 and rank == step % count else part


@pytest.mark.core
@some_cases
@every_strategy
def test_rows_of_a_table(strategy, optimizer, rule, options):
    """The gradient of an embedding: some replicas name rows, even twice; other rows stay."""
    random = np.random.default_rng(9)
    table, rows, targets = (
        random.normal(size=(9, 2)),
        random.integers(0, 6, ROWS),
        random.normal(size=(ROWS, 2)),
    )
    dataset = hs.data.Dataset.from_tensor_slices((rows, targets)).batch(BATCH)
    options = dict(options)
    with strategy.scope():
        variable, optimizer = hs.Variable(table), optimizer(0.05, **options)

    def step(rows, targets):
        optimizer.apply_gradients(
            [(hs.IndexedSlices(variable.value()[rows] - targets, rows), variable)]
        )

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=batch)

    wanted, clipnorm = table.copy(), options.pop("global_clipnorm", np.inf)
    slots = [{} for _ in table]
    for t, (ids, goals) in enumerate(dataset, start=1):
        gradients = {
            row: (wanted[row] - goals[ids == row]).sum(axis=0) for row in set(ids.tolist())
        }
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for row, g in gradients.items():
            wanted[row] = rule(
                0.05, t, wanted[row], g * min(1, clipnorm / norm), slots[row], **options
            )
    found = {"table": variable.numpy()}
    assert_close(found, {"table": wanted}, TOLERANCE["float64"])
    assert np.array_equal(found["table"][6:], table[6:])
    assert_same_on_all_ranks(found)


@pytest.mark.core
@every_strategy
def test_reducing_in_the_cross_replica_context_is_the_same(strategy, place):
    """Gradients that `reduce` summed, applied outside `run`, give the same bits as inside.

    On GPUs except for the last bits: NCCL adds up for one rank in another order than for all.
    """
    start = initial(every("float64"))
    x, y = data("float64")
    distributed = strategy.experimental_distribute_dataset(
        hs.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    )
    results = []
    for inside in (True, False):
        with strategy.scope():
            w, optimizer = hs.Variable(start["w"]), hs.optimizers.Adam(0.1)

        def step(batch, w=w, optimizer=optimizer, inside=inside):
            x, y = batch
            g = x.T @ (x @ w - y)
            if inside:
                optimizer.apply_gradients([(g, w)])
            return g

        for batch in distributed:
            parts = strategy.run(step, args=(batch,))
            if not inside:
                optimizer.apply_gradients([(strategy.reduce(hs.ReduceOp.SUM, parts, axis=None), w)])
        results.append({"w": w.numpy()})
        assert_same_on_all_ranks(results[-1])
    assert place.kind == "GPU" or bits(results[0]) == bits(results[1])
    assert_close(results[0], results[1], TOLERANCE["float64"])
