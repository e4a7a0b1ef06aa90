"""What every optimizer takes by keyword, compared with a few lines of NumPy."""

import copy
import json
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def own(step):
    """The gradient of this replica, and the sum over all of them."""
    gradients = np.array(
        [np.cos(np.arange(6.0).reshape(3, 2) + 3 * step + rank) for rank in range(N)]
    )
    return gradients[RANK], gradients.sum(axis=0)


def model(strategy, make=hs.optimizers.SGD, **options):
    with strategy.scope():
        return hs.Variable(START, name="w"), make(0.5, **options)


def trained(strategy, steps=4, **options):
    v, optimizer = model(strategy, **options)
    for step in range(steps):
        strategy.run(
            lambda step=step: optimizer.apply_gradients([(strategy.xp.asarray(own(step)[0]), v)])
        )
    return v, optimizer


def by_hand(change, steps=4):
    """The values after each step of a gradient descent whose gradient is changed by `change`."""
    value, found = START.copy(), []
    for step in range(steps):
        value = value - 0.5 * change(own(step)[1], value)
        found.append(value)
    return found


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.core
def test_values_are_clipped_after_the_sum_over_replicas(strategy):
    v, _ = trained(strategy, clipvalue=0.3)
    close(v.numpy(), by_hand(lambda g, _: np.clip(g, -0.3, 0.3))[-1])


@pytest.mark.core
def test_each_gradient_is_clipped_to_a_norm_of_its_own(strategy):
    with strategy.scope():
        small, large, optimizer = (
            hs.Variable(START),
            hs.Variable(START),
            hs.optimizers.SGD(0.5, clipnorm=2.0),
        )

    def step():
        gradient = strategy.xp.asarray(own(0)[0])
        optimizer.apply_gradients([(gradient / 100, small), (100 * gradient, large)])

    strategy.run(step)
    total = own(0)[1]
    close(small.numpy(), START - 0.5 * total / 100)
    close(large.numpy(), START - 0.5 * total * (2 / np.linalg.norm(total)))


FORMS = {
    "of two dtypes, with one element or none": [
        ((3, 5), "float32"),
        ((0, 4), "float32"),
        ((), "float64"),
        ((1,), "float32"),
        ((20_000,), "float64"),
        ((7,), "float32"),
    ],
    "of many variables": [((1 + i % 5,), "float64") for i in range(150)],
}


OPTIONS: dict[str, Any] = {
    "clipnorm": lambda most: {"clipnorm": most},
    "global_clipnorm": lambda most: {"global_clipnorm": most},
}


@pytest.mark.core
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("forms", FORMS)
def test_norms_of_gradients_of_all_sizes(strategy, forms, option):
    random = np.random.default_rng(3)
    of_ranks = [
        [random.standard_normal(shape).astype(dtype) for shape, dtype in FORMS[forms]]
        for _ in range(N)
    ]
    totals = [np.sum(of_all, axis=0, dtype=np.float64) for of_all in zip(*of_ranks, strict=True)]
    norms = [np.sqrt((total**2).sum()) for total in totals]
    if option == "global_clipnorm":
        norms = [np.linalg.norm(norms)] * len(norms)
    most = float(np.median(norms)) * 0.9
    with strategy.scope():
        variables = [hs.Variable(np.zeros(shape, dtype)) for shape, dtype in FORMS[forms]]
        optimizer = hs.optimizers.SGD(1.0, **OPTIONS[option](most))
    gradients = [strategy.xp.asarray(gradient) for gradient in of_ranks[RANK]]
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    for v, total, norm in zip(variables, totals, norms, strict=True):
        rtol = 1e-9 if v.dtype == np.float64 else 1e-5  # norms are of float32 sums too
        np.testing.assert_allclose(
            v.numpy(), -total * min(1, most / norm if norm else 1), rtol=rtol, atol=rtol
        )


@pytest.mark.parametrize("harm", [np.inf, np.nan])
@pytest.mark.parametrize("option", OPTIONS)
def test_norms_that_are_not_finite_make_gradients_nan(strategy, option, harm):
    with strategy.scope():
        harmed, other = hs.Variable(START), hs.Variable(START)
        optimizer = hs.optimizers.SGD(0.5, **OPTIONS[option](1e6))
    gradient = np.ones_like(START)
    gradient[0, 0] = harm
    gradients = [strategy.xp.asarray(one) for one in (gradient, np.ones_like(START))]
    strategy.run(lambda: optimizer.apply_gradients(zip(gradients, (harmed, other), strict=True)))
    assert np.isnan(harmed.numpy()).all()
    if option == "clipnorm":
        close(other.numpy(), START - 0.5 * N)
    else:
        assert np.isnan(other.numpy()).all()


@pytest.mark.core
@pytest.mark.parametrize("option", OPTIONS)
def test_norms_of_a_formula_are_of_clipped_gradients(strategy, option):
    class Normalized(hs.optimizers.Optimizer):
        @property
        def slots(self):
            return {}

        @staticmethod
        def formula(value, gradient, *, learning_rate):
            lengths = np.linalg.norm(value) + np.linalg.norm(value + gradient)
            return value - learning_rate * gradient * lengths

    with strategy.scope():
        variables = [hs.Variable(START), hs.Variable(2 * START)]
        optimizer = Normalized(0.5, **OPTIONS[option](0.3))
    gradient = strategy.xp.asarray(own(0)[0])
    strategy.run(lambda: optimizer.apply_gradients([(gradient, v) for v in variables]))
    total = own(0)[1]
    count = 2 if option == "global_clipnorm" else 1
    clipped = total * 0.3 / np.sqrt(count * (total**2).sum())
    for v, start in zip(variables, (START, 2 * START), strict=True):
        lengths = np.linalg.norm(start) + np.linalg.norm(start + clipped)
        close(v.numpy(), start - 0.5 * clipped * lengths)


def test_rows_are_clipped_likewise(strategy):
    v, optimizer = model(strategy, clipnorm=0.5)
    rows = np.array([2, 0])
    strategy.run(
        lambda: optimizer.apply_gradients(
            [(hs.IndexedSlices(strategy.xp.asarray(own(0)[0][rows]), strategy.xp.asarray(rows)), v)]
        )
    )
    total = own(0)[1] * np.array([[1], [0], [1]])
    close(v.numpy(), START - 0.5 * total * min(1, 0.5 / np.linalg.norm(total)))


def test_the_norm_of_all_gradients_is_that_of_arrays_and_rows(strategy):
    with strategy.scope():
        v, table, optimizer = (
            hs.Variable(START),
            hs.Variable(START),
            hs.optimizers.SGD(0.5, global_clipnorm=1.0),
        )
    rows = np.array([2, 0])

    def step():
        gradient = strategy.xp.asarray(own(0)[0])
        optimizer.apply_gradients(
            [(gradient, v), (hs.IndexedSlices(gradient[:2], strategy.xp.asarray(rows)), table)]
        )

    strategy.run(step)
    total, of_table = own(0)[1], np.zeros_like(START)
    of_table[rows] = total[:2]
    norm = np.sqrt((total**2).sum() + (of_table**2).sum())
    assert norm > 1
    close(v.numpy(), START - 0.5 * total / norm)
    close(table.numpy(), START - 0.5 * of_table / norm)


def test_weights_decay_by_the_learning_rate(strategy):
    v, _ = trained(strategy, weight_decay=0.1)
    close(v.numpy(), by_hand(lambda g, value: g + 0.1 * value)[-1])


def test_a_variable_is_a_learning_rate_that_can_be_assigned(strategy):
    v, optimizer = model(strategy)
    with strategy.scope():
        rate = hs.Variable(0.0)
    optimizer.learning_rate = rate
    value = START
    for step in range(4):
        rate.assign(2.0**-step)
        strategy.run(
            lambda step=step: optimizer.apply_gradients([(strategy.xp.asarray(own(step)[0]), v)])
        )
        value = value - 2.0**-step * own(step)[1]
    close(v.numpy(), value)


def test_a_decay_can_be_set_later(strategy):
    v, optimizer = model(strategy)
    optimizer.weight_decay = 0.1
    for step in range(4):
        strategy.run(
            lambda step=step: optimizer.apply_gradients([(strategy.xp.asarray(own(step)[0]), v)])
        )
    close(v.numpy(), by_hand(lambda g, value: g + 0.1 * value)[-1])


@pytest.mark.core
@pytest.mark.parametrize("frequency", [None, 3])
def test_moving_averages(strategy, frequency):
    v, optimizer = trained(
        strategy, 7, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=frequency
    )
    value = average = START
    for step in range(7):
        value = value - 0.5 * own(step)[1]
        average = 0.75 * average + 0.25 * value
        if frequency is not None and (step + 1) % frequency == 0:
            value = average
    close(v.numpy(), value)
    optimizer.finalize_variable_values([v])
    close(v.numpy(), average)
    v.assign(START)  # the averages stay as they are
    optimizer.finalize_variable_values([v])
    close(v.numpy(), average)
    optimizer.finalize_variable_values([])


def test_averages_are_in_checkpoints(strategy, mpi_tmp_path):
    v, optimizer = trained(strategy, 3, use_ema=True, momentum=0.9)
    hs.checkpoint.Checkpoint(w=v, optimizer=optimizer).save(mpi_tmp_path / "file")
    other, restored = model(strategy, use_ema=True, momentum=0.9)
    hs.checkpoint.Checkpoint(w=other, optimizer=restored).restore(mpi_tmp_path / "file")
    for one, of in ((optimizer, v), (restored, other)):
        strategy.run(
            lambda one=one, of=of: one.apply_gradients([(strategy.xp.asarray(own(3)[0]), of)])
        )
        one.finalize_variable_values([of])
    assert np.array_equal(v.numpy(), other.numpy())


@pytest.mark.core
def test_gradients_of_several_calls(strategy):
    """Dense gradients and rows, of a variable that not every call has."""
    with strategy.scope():
        v, table = hs.Variable(START), hs.Variable(START)
        optimizer = hs.optimizers.SGD(0.5, gradient_accumulation_steps=3)
    rows = np.array([1, 1])
    for step in range(7):

        def replica(step=step):
            pairs = [(strategy.xp.asarray(own(step)[0]), v)]
            if step % 3:
                values = strategy.xp.asarray(own(step)[0][:2])
                pairs.append((hs.IndexedSlices(values, strategy.xp.asarray(rows)), table))
            optimizer.apply_gradients(pairs)

        strategy.run(replica)
    assert optimizer.iterations == 2
    close(v.numpy(), START - 0.5 * sum(own(step)[1] for step in range(6)) / 3)
    expected = START.copy()
    expected[1] -= 0.5 * sum(own(step)[1][:2].sum(axis=0) for step in (1, 2, 4, 5)) / 3
    close(table.numpy(), expected)


def test_gradients_that_are_added_up_stay_the_programs(strategy):
    """One array, which the program fills anew in each call."""
    v, optimizer = model(strategy, gradient_accumulation_steps=2)
    gradient = strategy.xp.zeros(START.shape)

    def replica(step):
        gradient[...] = strategy.xp.asarray(own(step)[0])
        optimizer.apply_gradients([(gradient, v)])
        assert (hs.asnumpy(gradient) == own(step)[0]).all()

    for step in range(4):
        strategy.run(replica, args=(step,))
    close(v.numpy(), START - 0.5 * sum(own(step)[1] for step in range(4)) / 2)


def test_a_call_without_pairs_does_not_count(strategy):
    v, optimizer = model(strategy, gradient_accumulation_steps=2)

    def replica(step):
        optimizer.apply_gradients([])
        optimizer.apply_gradients([(strategy.xp.asarray(own(step)[0]), v)])

    for step in range(2):
        strategy.run(replica, args=(step,))
    optimizer.apply_gradients([])
    assert optimizer.iterations == 1
    close(v.numpy(), START - 0.5 * (own(0)[1] + own(1)[1]) / 2)


def test_what_is_added_up_is_copied_but_not_saved(strategy, mpi_tmp_path):
    v, optimizer = trained(strategy, 1, gradient_accumulation_steps=2)
    with pytest.raises(
        ValueError, match=r"Checkpoint\.save: optimizer has the gradients of 1 of 2 calls"
    ):
        hs.checkpoint.Checkpoint(w=v, optimizer=optimizer).save(mpi_tmp_path / "file")
    other, copied = copy.deepcopy((v, optimizer))
    for one, of in ((optimizer, v), (copied, other)):
        strategy.run(
            lambda one=one, of=of: one.apply_gradients([(strategy.xp.asarray(own(1)[0]), of)])
        )
        close(of.numpy(), START - 0.5 * (own(0)[1] + own(1)[1]) / 2)
    hs.checkpoint.Checkpoint(w=v, optimizer=optimizer).save(mpi_tmp_path / "file")


@pytest.mark.core
def test_minimize_applies_the_gradients_of_a_function(strategy):
    v, optimizer = model(strategy)

    def loss_and_gradients():
        error = v.value() - strategy.xp.asarray(own(0)[0])
        return float((error**2).sum()) / 2, [error]

    losses = strategy.run(lambda: optimizer.minimize(loss_and_gradients, [v], tape=None))
    assert strategy.experimental_local_results(losses)[RANK] == pytest.approx(
        ((START - own(0)[0]) ** 2).sum() / 2
    )
    close(v.numpy(), START - 0.5 * (N * START - own(0)[1]))


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (3.0, TypeError, r"SGD\.minimize: loss is of type float; it must be a function"),
        (lambda: 3.0, TypeError, r"SGD\.minimize: loss\(\) returned float"),
        (lambda: (3.0, []), ValueError, r"SGD\.minimize: 0 gradients for 1 variables"),
    ],
    ids=["a number", "a function of a number", "no gradient"],
)
def test_minimize_refuses_what_is_no_loss_with_gradients(strategy, loss, error, message):
    v, optimizer = model(strategy)
    with pytest.raises(error, match=message):
        strategy.run(lambda: optimizer.minimize(loss, [v]))
    assert np.array_equal(v.numpy(), START)


@pytest.mark.parametrize(
    "optimizer",
    [
        hs.optimizers.SGD(0.1, 0.9, nesterov=True, clipvalue=0.5, name="mine"),
        hs.optimizers.AdamW(hs.optimizers.schedules.CosineDecay(0.1, 10), weight_decay=0.3),
        hs.optimizers.Nadam(
            beta_1=0.5, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=4
        ),
        hs.optimizers.Adadelta(global_clipnorm=1.0),
        hs.optimizers.Ftrl(learning_rate_power=0, l1_regularization_strength=0.5, beta=1),
    ],
    ids=repr,
)
def test_a_config_makes_the_same_optimizer(optimizer):
    config = json.loads(json.dumps(optimizer.get_config()))
    made = type(optimizer).from_config(config)
    assert repr(made) == repr(optimizer)
    assert made.name == optimizer.name


def test_a_config_has_no_functions():
    with pytest.raises(ValueError, match=r"Adam: learning_rate is .*, which a config cannot hold"):
        hs.optimizers.Adam(lambda: 0.1).get_config()


def test_what_an_optimizer_keeps(strategy):
    v, optimizer = trained(strategy, 2, momentum=0.5)
    found = {one.name: one.numpy() for one in optimizer.variables}
    assert list(found) == ["SGD/iterations", "SGD/learning_rate", "SGD/momentum/w"]
    assert found["SGD/iterations"] == 2
    assert found["SGD/learning_rate"] == 0.5
    close(found["SGD/momentum/w"], -0.25 * own(0)[1] - 0.5 * own(1)[1])
    assert [one.shape for one in optimizer.variables] == [(), (), v.shape]


class Overriding(hs.optimizers.Optimizer):
    @property
    def slots(self):
        return {}

    def update_rule(self, learning_rate, step):
        raise NotImplementedError


optimizers: Any = hs.optimizers  # for calls that no type checker would accept


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: optimizers.SGD(clip=1),
            TypeError,
            r"SGD: clip is not an argument; did you mean clipnorm\? It takes learning_rate, momentum, n",
        ),
        (lambda: optimizers.Lion(beta_1=0), ValueError, "Lion: beta_1 is 0; it must be above 0"),
        (
            lambda: optimizers.Adam(clipnorm=0),
            ValueError,
            "Adam: clipnorm is 0; it must be positive or None",
        ),
        (
            lambda: optimizers.SGD(clipnorm=1, clipvalue=1),
            ValueError,
            "SGD: clipnorm and clipvalue exclude each",
        ),
        (
            lambda: optimizers.SGD(weight_decay="a"),
            TypeError,
            "SGD: weight_decay is 'a'; it must be a number",
        ),
        (
            lambda: optimizers.SGD(ema_momentum=2),
            ValueError,
            "SGD: ema_momentum is 2; it must be from 0 to 1",
        ),
        (lambda: optimizers.SGD(ema_overwrite_frequency=2), ValueError, "pass use_ema=True too"),
        (
            lambda: optimizers.SGD(gradient_accumulation_steps=0),
            ValueError,
            "steps is 0; it must be an int of at",
        ),
        (
            lambda: Overriding(0.1, use_ema=True),
            ValueError,
            "Overriding: use_ema changes the formula, and update_rule",
        ),
    ],
    ids=[
        "SGD(clip=1)",
        "Lion(beta_1=0)",
        "Adam(clipnorm=0)",
        "SGD(clipnorm=1, clipvalue=1)",
        "SGD(weight_decay='a')",
        "SGD(ema_momentum=2)",
        "SGD(ema_overwrite_frequency=2)",
        "SGD(gradient_accumulation_steps=0)",
        "update_rule and use_ema",
    ],
)
def test_wrong_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_there_are_averages_only_with_use_ema(strategy):
    v, optimizer = model(strategy)
    with pytest.raises(
        ValueError,
        match=r"SGD\.finalize_variable_values: there are no moving averages; pass use_ema",
    ):
        optimizer.finalize_variable_values([v])


def test_numbers_that_change_between_steps(strategy):
    """`lr` is Keras 2's name of `learning_rate`."""
    v, optimizer = model(strategy, momentum=0.9)
    velocity, value = np.zeros_like(START), START
    for step, (rate, momentum) in enumerate([(0.5, 0.9), (0.25, 0.9), (2.0, 0.5)]):
        optimizer.lr, optimizer.momentum = rate, momentum
        assert optimizer.lr == optimizer.learning_rate == rate
        gradient, total = own(step)
        strategy.run(
            lambda gradient=gradient: optimizer.apply_gradients(
                [(strategy.xp.asarray(gradient), v)]
            )
        )
        velocity = momentum * velocity - rate * total
        value = value + velocity
    close(v.numpy(), value)
    with pytest.raises(ValueError, match="SGD: learning_rate is -1"):
        optimizer.lr = -1
    assert optimizer.lr == 2.0


@pytest.mark.parametrize(
    "name, value, message",
    [
        (
            "momentm",
            0.9,
            r"SGD: momentm is not an attribute; did you mean momentum\? It has clipnorm, .*learning_rate",
        ),
        ("learningrate", 0.9, r"did you mean learning_rate\?"),
        ("wd", 0.9, r"SGD: wd is not an attribute\. It has clipnorm, .*weight_decay"),
        (
            "momentum",
            0.9,
            r"SGD: momentum is 0\.0, and the slots are made: \[\]; .* \['momentum'\]",
        ),
        ("use_ema", True, r"SGD: use_ema is False and cannot change; pass use_ema=True"),
        ("ema_overwrite_frequency", 1, "SGD: ema_overwrite_frequency is None and cannot change"),
        ("gradient_accumulation_steps", 2, "gradient_accumulation_steps is None and cannot change"),
    ],
    ids=[
        "misspelt",
        "run together",
        "like none",
        "momentum",
        "averages",
        "overwriting",
        "accumulation",
    ],
)
def test_an_attribute_without_effect_is_refused(strategy, name, value, message):
    v, optimizer = trained(strategy, steps=1)
    before = repr(optimizer)
    with pytest.raises(AttributeError, match=message):
        setattr(optimizer, name, value)
    optimizer.use_ema = False  # as it is
    assert repr(optimizer) == before
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.asarray(own(1)[0]), v)]))
    close(v.numpy(), by_hand(lambda g, _: g, steps=2)[-1])


@pytest.mark.parametrize(
    "make, name, value, error, message",
    [
        (optimizers.SGD, "clipnorm", -1, ValueError, "SGD: clipnorm is -1; it must be positive or"),
        (optimizers.SGD, "clipvalue", "x", TypeError, "SGD: clipvalue is 'x'; it must be a number"),
        (optimizers.AdamW, "weight_decay", -1, ValueError, "AdamW: weight_decay is -1; it must be"),
        (optimizers.SGD, "ema_momentum", 2, ValueError, "SGD: ema_momentum is 2; it must be from"),
        (optimizers.SGD, "momentum", 1.5, ValueError, "SGD: momentum is 1.5; it must be from 0"),
        (optimizers.Adam, "beta_1", 1, ValueError, "Adam: beta_1 is 1; it must be at least 0 and"),
        (optimizers.Ftrl, "learning_rate_power", -2, ValueError, "power is -2.0; it must be -0.5,"),
        (
            lambda: optimizers.SGD(clipnorm=1),
            "clipvalue",
            1,
            ValueError,
            "SGD: clipnorm and clipvalue exclude each other; pass one of them",
        ),
        (
            lambda: Overriding(0.1),
            "clipvalue",
            1,
            ValueError,
            "Overriding: clipvalue changes the formula, and update_rule is overridden",
        ),
    ],
    ids=[
        "clipnorm",
        "clipvalue",
        "weight_decay",
        "ema_momentum",
        "momentum",
        "beta_1",
        "learning_rate_power",
        "two that exclude each other",
        "update_rule and clipvalue",
    ],
)
def test_an_attribute_takes_what_the_argument_takes(make, name, value, error, message):
    optimizer = make()
    before = repr(optimizer)
    with pytest.raises(error, match=message):
        setattr(optimizer, name, value)
    assert repr(optimizer) == before


class OwnDecay(Overriding):
    def __init__(self, weight_decay=None):
        super().__init__(0.1)
        self.weight_decay = weight_decay


def test_an_option_that_a_class_has_made_its_own_takes_any_value():
    class Decayed(hs.optimizers.Optimizer):
        def __init__(self):
            super().__init__(0.1)
            self.weight_decay = -0.5

        @property
        def slots(self):
            return {}

        @staticmethod
        def formula(value, gradient, *, learning_rate, weight_decay):
            return value - learning_rate * (gradient + weight_decay * value)

    for optimizer in OwnDecay(), OwnDecay(-0.5), Decayed():
        optimizer.weight_decay = -0.25
        assert optimizer.weight_decay == -0.25
        optimizer.clipnorm = 2
        with pytest.raises(ValueError, match="clipnorm is 0; it must be positive or None"):
            optimizer.clipnorm = 0
