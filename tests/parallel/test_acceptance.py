"""N replicas on a global batch equal one replica on it, for every optimizer and strategy.

The one replica is a closed form here: the gradients of a linear model on the whole batch, and
TensorFlow's update rules written in NumPy. None of it is the library's own code.
"""

import itertools

import numpy as np
import pytest
from adamax import Adamax
from mpi4py import MPI
from strategies import STRATEGIES, strategies_for

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint
from hpcstrat.optimizers import SGD, Adagrad, Adam, AdamW, Lion, RMSprop

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")

# Some replicas get more of a batch of 7 than others; only one gets the last of an epoch, 1 element.
ROWS, BATCH, EPOCHS = 22, 7, 2
N = MPI.COMM_WORLD.size
SHAPES = {"w": (5, 3), "b": (3,), "s": ()}
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


# ---- TensorFlow's rules: functions of learning rate, step (from 1), gradient and, by name, the
# slots, which return what is subtracted


def sgd(rate, t, g, slots, momentum=0.0, nesterov=False):
    if not momentum:
        return rate * g
    slots["momentum"] = momentum * slots.get("momentum", 0) - rate * g
    return rate * g - momentum * slots["momentum"] if nesterov else -slots["momentum"]


def adam(rate, t, g, slots, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    slots["m"] = beta_1 * slots.get("m", 0) + (1 - beta_1) * g
    slots["v"] = beta_2 * slots.get("v", 0) + (1 - beta_2) * g**2
    corrected = rate * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
    return corrected * slots["m"] / (np.sqrt(slots["v"]) + epsilon)


def adagrad(rate, t, g, slots, initial_accumulator_value=0.1, epsilon=1e-7):
    slots["accumulator"] = slots.get("accumulator", initial_accumulator_value) + g**2
    return rate * g / np.sqrt(slots["accumulator"] + epsilon)


def rmsprop(rate, t, g, slots, rho=0.9, momentum=0.0, epsilon=1e-7, centered=False):
    slots["rms"] = rho * slots.get("rms", 0) + (1 - rho) * g**2
    variance = slots["rms"]
    if centered:
        slots["average"] = rho * slots.get("average", 0) + (1 - rho) * g
        variance = variance - slots["average"] ** 2
    change = rate * g / np.sqrt(variance + epsilon)
    if momentum:
        change = slots["momentum"] = momentum * slots.get("momentum", 0) + change
    return change


def lion(rate, t, g, slots, beta_1=0.9, beta_2=0.99):
    change = rate * np.sign(beta_1 * slots.get("m", 0) + (1 - beta_1) * g)
    slots["m"] = beta_2 * slots.get("m", 0) + (1 - beta_2) * g
    return change


def adamax(rate, t, g, slots, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
    slots["m"] = beta_1 * slots.get("m", 0) + (1 - beta_1) * g
    slots["u"] = np.maximum(beta_2 * slots.get("u", 0), np.abs(g))
    return rate / (1 - beta_1**t) * slots["m"] / (slots["u"] + epsilon)


RULES = {SGD: sgd, Adam: adam, AdamW: adam, Adagrad: adagrad, RMSprop: rmsprop, Lion: lion}
RULES |= {Adamax: adamax}
DECAY = {AdamW: 0.004}
"""The weight decay of those that have one by default."""

# Gradients' norms are about 1 to 10, and sparse ones' of rows less; some clips bind, others do not.
CASES = [
    (SGD, {}),
    (SGD, {"momentum": 0.9}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.5, "global_clipnorm": 3.0}),
    (SGD, {"clipnorm": 0.5}),
    (SGD, {"momentum": 0.5, "clipvalue": 0.25, "weight_decay": 0.1}),
    (Adam, {}),
    (Adam, {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-3}),
    (Adam, {"global_clipnorm": 2.0}),
    (Adam, {"clipnorm": 1.0, "weight_decay": 0.2}),
    (AdamW, {}),
    (AdamW, {"weight_decay": 0.3, "global_clipnorm": 100.0}),
    (Adagrad, {}),
    (Adagrad, {"initial_accumulator_value": 1.0, "epsilon": 1e-2, "clipvalue": 0.1}),
    (Adagrad, {"global_clipnorm": 0.5}),
    (RMSprop, {}),
    (RMSprop, {"rho": 0.5, "epsilon": 1e-2}),
    (RMSprop, {"momentum": 0.8}),
    (RMSprop, {"centered": True}),
    (RMSprop, {"centered": True, "momentum": 0.8, "global_clipnorm": 1.0}),
    (Lion, {}),
    (Lion, {"beta_1": 0.5, "beta_2": 0.75, "weight_decay": 0.1}),
    (Adamax, {}),
    (Adamax, {"beta_1": 0.5, "global_clipnorm": 2.0}),
]
OF_ROWS = [
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {"momentum": 0.5, "clipvalue": 0.25, "weight_decay": 0.1}),
    (SGD, {"clipnorm": 0.5}),
    (AdamW, {}),
    (Adagrad, {"global_clipnorm": 0.5}),
    (Lion, {"beta_1": 0.5, "beta_2": 0.75, "weight_decay": 0.1}),
    (Adamax, {}),
    (Adam, {"clipnorm": 1.0, "weight_decay": 0.2}),
    (RMSprop, {"centered": True, "momentum": 0.8, "global_clipnorm": 1.0}),
]
RATE = 0.05


def stepped(kind, options, rate, t, values, gradients, slots):
    """The values by name after a step of one replica."""
    options = {"weight_decay": DECAY.get(kind, 0.0), **options}
    decay, bound = options.pop("weight_decay"), options.pop("clipvalue", np.inf)
    most, of_each = options.pop("global_clipnorm", np.inf), options.pop("clipnorm", np.inf)
    norms = {name: np.sqrt((g**2).sum()) for name, g in gradients.items()}
    scale = min(1, most / np.sqrt(sum(norm**2 for norm in norms.values())))
    found = dict(values)
    for name, g in gradients.items():
        g = np.clip(g * scale * min(1, of_each / norms[name]), -bound, bound)
        change = RULES[kind](rate, t, g, slots[name], **options)
        found[name] = values[name] - rate * decay * values[name] - change
    return found


def name_of(argument):
    if isinstance(argument, dict):
        return ",".join(f"{name}={value}" for name, value in argument.items()) or "defaults"
    return argument.__name__


def cases(every):
    """The cases, each on one strategy; the last on all of them."""
    made = [(kind, options, STRATEGIES[i // 2 % 2]) for i, (kind, options) in enumerate(every)]
    made += [(*every[-1], one) for one in strategies_for(N) if one is not made[-1][-1]]
    return pytest.mark.parametrize(
        ("kind", "options", "strategy"), made, ids=name_of, indirect=["strategy"]
    )


# ---- the model: y = x w + b + s, half the squared error


def data(dtype):
    random = np.random.default_rng(7)
    x, y = random.normal(size=(ROWS, 5)), random.normal(size=(ROWS, 3))
    return x.astype(dtype), y.astype(dtype)


def initial(dtype):
    random = np.random.default_rng(8)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients_of(values, x, y):
    """The losses' sum over the global batch size: right on a whole batch and on a part."""
    error = x @ values["w"] + values["b"] + values["s"] - y
    sums = {"w": x.T @ error, "b": error.sum(axis=0), "s": error.sum()}
    return {name: g / BATCH for name, g in sums.items()}


def expected(kind, options, dtype):
    """The values and slots of one replica."""
    values = {name: value.astype(np.float64) for name, value in initial(dtype).items()}
    slots = {name: {} for name in values}
    x, y = (one.astype(np.float64) for one in data(dtype))
    starts = EPOCHS * [*range(0, ROWS, BATCH)]
    for t, i in enumerate(starts, 1):
        gradients = gradients_of(values, x[i : i + BATCH], y[i : i + BATCH])
        values = stepped(kind, options, RATE, t, values, gradients, slots)
    return values, slots


class Program:
    """Trains a linear model.

    Args:
        created: the order in which variables are made.
        passed: the orders in which they are passed to the optimizer, in turn.
    """

    def __init__(self, strategy, kind, options, dtype, created, passed):
        start = initial(dtype)
        with strategy.scope():
            self.variables = {name: hs.Variable(start[name], name=name) for name in created}
            self.optimizer = kind(RATE, **options)
        dataset = hs.data.Dataset.from_tensor_slices(data(dtype)).batch(BATCH)
        self.strategy = strategy
        self.batches = strategy.experimental_distribute_dataset(dataset)
        self.orders = itertools.cycle(passed)
        self.checkpoint = Checkpoint(model=self.variables, optimizer=self.optimizer)

    def train(self, epochs=1):
        for _ in range(epochs):
            for batch in self.batches:
                self.strategy.run(self.step, args=(batch, next(self.orders)))
        return self

    def step(self, batch, order):
        values = {name: variable.value() for name, variable in self.variables.items()}
        gradients = gradients_of(values, *batch)
        self.optimizer.apply_gradients([(gradients[name], self.variables[name]) for name in order])

    def values(self):
        """The variables' values, which all ranks and replicas see."""
        found = {name: variable.numpy() for name, variable in self.variables.items()}
        assert_same_on_all_ranks(found)
        in_replicas = self.strategy.run(
            lambda: {name: variable.read_value() for name, variable in self.variables.items()}
        )
        for replica in self.strategy.experimental_local_results(in_replicas):
            assert bits(replica) == bits(found)
        return found


def bits(values):
    return {name: (value.dtype.str, value.shape, value.tobytes()) for name, value in values.items()}


def assert_same_on_all_ranks(values):
    assert MPI.COMM_WORLD.allgather(bits(values)) == [bits(values)] * MPI.COMM_WORLD.size


def assert_close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(
            value, wanted[name], rtol=tolerance, atol=tolerance, err_msg=name
        )


# ---- the tests


@cases(CASES)
def test_replicas_equal_one_replica_and_go_on_from_a_checkpoint(
    strategy, kind, options, mpi_tmp_path
):
    """The restored program's bits are those of the first one.

    Variables are made and passed in any order; the same in each step, or not.
    """
    i = CASES.index((kind, options))
    dtype, created = ("float32", "float64")[i % 2], ("wbs", "bsw", "swb")[i // 2 % 3]
    passed = (["wbs"], ["sbw", "bws"])[i // 3 % 2]
    program, restored = (Program(strategy, kind, options, dtype, created, passed) for _ in range(2))
    program.train().checkpoint.save(mpi_tmp_path / "file")
    found = program.train().values()
    values, slots = expected(kind, options, dtype)
    assert {value.dtype.name for value in found.values()} == {dtype}
    assert_close(found, values, TOLERANCE[dtype])
    iterations, rate, *own = program.optimizer.variables
    assert (iterations.numpy(), rate.numpy()) == (8, pytest.approx(RATE))
    wanted = {
        f"{kind.__name__}/{slot}/{name}": value
        for name, of_variable in slots.items()
        for slot, value in of_variable.items()
    }
    assert_close({one.name: one.numpy() for one in own}, wanted, TOLERANCE[dtype])

    restored.checkpoint.restore(mpi_tmp_path / "file")
    assert restored.optimizer.iterations == 4
    assert bits(restored.train().values()) == bits(found)


@cases(OF_ROWS)
def test_rows_of_a_table(strategy, kind, options):
    """The gradient of an embedding: some replicas name rows, even twice; other rows stay."""
    random = np.random.default_rng(9)
    table, rows, targets = (
        random.normal(size=(9, 2)),
        random.integers(0, 6, ROWS),
        random.normal(size=(ROWS, 2)),
    )
    dataset = hs.data.Dataset.from_tensor_slices((rows, targets)).batch(BATCH)
    with strategy.scope():
        variable, optimizer = hs.Variable(table), kind(RATE, **options)

    def step(rows, targets):
        optimizer.apply_gradients(
            [(hs.IndexedSlices(variable.value()[rows] - targets, rows), variable)]
        )

    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=batch)

    if most := options.get("clipnorm"):  # of all rows that have a gradient, one variable's
        options = {**options, "global_clipnorm": most}
        del options["clipnorm"]
    wanted, slots = dict(enumerate(table)), [{} for _ in table]
    for t, (ids, goals) in enumerate(dataset, start=1):
        gradients = {
            row: (wanted[row] - goals[ids == row]).sum(axis=0) for row in set(ids.tolist())
        }
        wanted = stepped(kind, options, RATE, t, wanted, gradients, slots)
    found = variable.numpy()
    assert_close(dict(enumerate(found)), wanted, TOLERANCE["float64"])
    assert np.array_equal(found[6:], table[6:])
    assert_same_on_all_ranks({"table": found})
