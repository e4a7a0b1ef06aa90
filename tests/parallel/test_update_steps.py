"""Steps of optimizers, the options' and a program's own, compared with a few lines of NumPy."""

import copy
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from strategies import STRATEGIES, ShardedMirroredStrategy

import hpcstrat as hs

N = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25]])
RATE = 0.5


@pytest.fixture(params=[*STRATEGIES, ShardedMirroredStrategy])
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def own(step):
    """The gradient of this replica, and the sum over all of them."""
    every = [np.cos(np.arange(6.0).reshape(3, 2) + 3 * step + rank) for rank in range(N)]
    return every[RANK], np.sum(every, axis=0)


def model(strategy, *steps, make: Any = hs.optimizers.SGD, **options):
    with strategy.scope():
        return hs.Variable(START, name="w"), make(RATE, steps=steps, **options)


def apply(strategy, optimizer, v, step, gradient=None):
    gradient = own(step)[0] if gradient is None else gradient
    strategy.run(lambda: optimizer.apply_gradients([(strategy.xp.asarray(gradient), v)]))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


class L1(hs.optimizers.UpdateStep):
    """Adds a number's subgradient: a formula without slots."""

    def __init__(self, penalty: Any) -> None:
        self.penalty = penalty

    @staticmethod
    def formula(update, value, gradient, *, penalty):
        return update(value, gradient + penalty * np.sign(value))


class Lookahead(hs.optimizers.UpdateStep):
    """A formula with a slot, and with numbers of the optimizer and of the library."""

    def __init__(self, share):
        self.share = share

    @property
    def slots(self):
        return {"slow": None, "steps": 0.0}

    @staticmethod
    def formula(update, value, gradient, slow, steps, *, share, step, learning_rate):
        slow = slow + share * (update(value, gradient) - slow)
        return slow, slow, steps + learning_rate * step


class Centralize(hs.optimizers.UpdateStep):
    """Takes the mean of a whole gradient: what no formula can."""

    def transform(self, grads_and_vars, optimizer):
        return [
            (g if isinstance(g, hs.IndexedSlices) else g - g.mean(axis=0), v)
            for g, v in grads_and_vars
        ]


class EverySecond(hs.optimizers.UpdateStep):
    """Drops every second call."""

    def __init__(self):
        self.calls = 0

    def collect(self, grads_and_vars, optimizer):
        self.calls += 1
        return grads_and_vars if self.calls % 2 else None


@pytest.mark.core
def test_a_formula_around_the_optimizers(strategy):
    v, optimizer = model(strategy, L1(0.25), momentum=0.5)
    value, velocity = START, 0
    for step in range(3):
        apply(strategy, optimizer, v, step)
        velocity = 0.5 * velocity - RATE * (own(step)[1] + 0.25 * np.sign(value))
        value = value + velocity
    close(v.numpy(), value)


@pytest.mark.core
def test_a_number_of_a_step_may_change(strategy):
    penalty = L1(0.25)
    v, optimizer = model(strategy, penalty)
    apply(strategy, optimizer, v, 0)
    value = START - RATE * (own(0)[1] + 0.25 * np.sign(START))
    penalty.penalty = 1.0
    apply(strategy, optimizer, v, 1)
    close(v.numpy(), value - RATE * (own(1)[1] + np.sign(value)))


@pytest.mark.core
def test_slots_of_a_step(strategy, mpi_tmp_path):
    """They are in checkpoints, in copies, and in `variables`."""
    v, optimizer = model(strategy, Lookahead(0.25), momentum=0.5)
    for step in range(2):
        apply(strategy, optimizer, v, step)
    names = [each.name for each in optimizer.variables[2:]]
    assert names == ["SGD/momentum/w", "SGD/slow/w", "SGD/steps/w"]
    close(optimizer.variables[-1].numpy(), np.full_like(START, RATE * 3))
    hs.checkpoint.Checkpoint(w=v, optimizer=optimizer).save(mpi_tmp_path / "file")
    w, restored = model(strategy, Lookahead(0.25), momentum=0.5)
    hs.checkpoint.Checkpoint(w=w, optimizer=restored).restore(mpi_tmp_path / "file")
    u, copied = copy.deepcopy((v, optimizer))
    for of, one in ((v, optimizer), (w, restored), (u, copied)):
        for step in range(2, 4):
            apply(strategy, one, of, step)
    slow, value, velocity = START, START, 0
    for step in range(4):
        velocity = 0.5 * velocity - RATE * own(step)[1]
        value = slow = slow + 0.25 * (value + velocity - slow)
    for of in (v, w, u):
        close(of.numpy(), value)


@pytest.mark.core
def test_steps_see_gradients_in_their_order_and_before_the_options(strategy):
    v, optimizer = model(
        strategy, L1(0.25), Centralize(), L1(1.0), clipvalue=0.75, weight_decay=0.5, use_ema=True
    )
    apply(strategy, optimizer, v, 0)
    total = own(0)[1]
    gradient = total - total.mean(axis=0) + 1.25 * np.sign(START)
    expected = START * (1 - 0.5 * RATE) - RATE * np.clip(gradient, -0.75, 0.75)
    close(v.numpy(), expected)
    optimizer.finalize_variable_values([v])
    close(v.numpy(), 0.99 * START + 0.01 * expected)


@pytest.mark.core
def test_all_options_at_once_with_rows(strategy):
    """Two calls are added up; then clipping, decay and an average of all, by closed forms."""
    with strategy.scope():
        v, table = hs.Variable(START), hs.Variable(START)
        optimizer = hs.optimizers.SGD(
            RATE,
            steps=[Centralize()],
            global_clipnorm=0.5,
            weight_decay=0.25,
            use_ema=True,
            ema_momentum=0.5,
            ema_overwrite_frequency=1,
            gradient_accumulation_steps=2,
        )
    rows = np.array([2, 0, 2])

    def replica(step):
        gradient = strategy.xp.asarray(own(step)[0])
        slices = hs.IndexedSlices(gradient, strategy.xp.asarray(rows))
        optimizer.apply_gradients([(gradient, v), (slices, table)])

    for step in range(2):
        strategy.run(replica, args=(step,))
    dense = (own(0)[1] + own(1)[1]) / 2
    of_table = np.zeros_like(START)
    np.add.at(of_table, rows, dense)
    # What is added up is dense.
    gradients = [g - g.mean(axis=0) for g in (dense, of_table)]
    norm = np.sqrt(sum((g**2).sum() for g in gradients))
    for found, gradient in zip((v, table), gradients, strict=True):
        new = START * (1 - 0.25 * RATE) - RATE * gradient * min(1, 0.5 / norm)
        close(found.numpy(), (START + new) / 2)


def test_rows_pass_through_a_step(strategy):
    class Double(hs.optimizers.UpdateStep):
        def transform(self, grads_and_vars, optimizer):
            doubled = [(hs.IndexedSlices(2 * g.values, g.indices[:]), v) for g, v in grads_and_vars]
            assert [g.values.shape for g, _ in doubled] == [(2, 2)]
            assert optimizer.iterations == 0
            return doubled

    v, optimizer = model(strategy, Double(), clipnorm=100.0)
    slices = hs.IndexedSlices(strategy.xp.asarray(own(0)[0]), strategy.xp.asarray([2, 0, 2]))
    strategy.run(lambda: optimizer.apply_gradients([(slices, v)]))
    expected = START.copy()
    np.add.at(expected, [2, 0, 2], -2 * RATE * own(0)[1])
    close(v.numpy(), expected)


@pytest.mark.core
def test_a_step_decides_which_calls_count(strategy):
    v, optimizer = model(strategy, EverySecond(), gradient_accumulation_steps=2)
    for step in range(8):
        apply(strategy, optimizer, v, step)
    assert optimizer.iterations == 2
    close(v.numpy(), START - RATE * sum(own(step)[1] for step in (0, 2, 4, 6)) / 2)


def test_gradients_may_be_in_marked_buffers(strategy):
    v, optimizer = model(strategy, Centralize(), L1(0.25))
    (buffer,) = buffers = optimizer.gradient_buffers([v])

    def replica():
        buffer[...] = strategy.xp.asarray(own(0)[0])
        buffers.ready(buffer)
        optimizer.apply_gradients(zip(buffers, [v], strict=True))

    strategy.run(replica)
    total = own(0)[1]
    close(v.numpy(), START - RATE * (total - total.mean(axis=0) + 0.25 * np.sign(START)))


def test_a_step_in_the_cross_replica_context(strategy):
    v, optimizer = model(strategy, Centralize(), L1(0.25))
    total = own(0)[1]
    optimizer.apply_gradients([(strategy.xp.asarray(total), v)])
    close(v.numpy(), START - RATE * (total - total.mean(axis=0) + 0.25 * np.sign(START)))


class Noise(hs.optimizers.UpdateStep):
    numbers = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def transform(self, grads_and_vars, optimizer):
        return [(g * self.scale, v) for g, v in grads_and_vars]


@pytest.mark.core
@pytest.mark.mpi(min_size=2)  # one rank cannot differ from another
@pytest.mark.parametrize(
    "steps, names",
    [
        (lambda: [L1(0.5 if RANK else 0.25)], "L1_penalty=0.5"),
        (lambda: [Noise(0.5 if RANK else 0.25)], "Noise_scale=0.5"),
        (lambda: [L1(1.0), L1(0.5 if RANK else 0.25)], "L1_penalty__2=0.5"),
        (lambda: [L1(0.5)] if RANK else [], "L1_penalty=0.5"),
    ],
    ids=["a formula's number", "another number", "of the second of a kind", "missing"],
)
def test_steps_that_differ_are_refused(strategy, steps, names):
    v, optimizer = model(strategy, *steps())
    with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s)SGD\.apply_gradients.*{names}"):
        apply(strategy, optimizer, v, 0)
    assert np.array_equal(v.numpy(), START) and optimizer.iterations == 0


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.25 + RANK},
        {"global_clipnorm": 0.25 + RANK},
        {"clipvalue": 0.25 + RANK},
        {"weight_decay": 0.25 + RANK},
        {"use_ema": RANK > 0},
        {"use_ema": True, "ema_momentum": 0.25 if RANK else 0.5},
    ],
    ids=["clipnorm", "global_clipnorm", "clipvalue", "weight_decay", "use_ema", "ema_momentum"],
)
def test_options_that_differ_are_refused(strategy, options):
    v, optimizer = model(strategy, **options)
    with pytest.raises(hs.ReplicaMismatchError, match=r"SGD"):
        apply(strategy, optimizer, v, 0)


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
def test_replicas_that_add_up_different_numbers_of_calls_are_refused(strategy):
    v, optimizer = model(strategy, gradient_accumulation_steps=1 + RANK)

    def replica():
        for _ in range(1 + RANK):
            optimizer.apply_gradients([(strategy.xp.asarray(own(0)[0]), v)])

    with pytest.raises(hs.ReplicaMismatchError, match=r"(?s)gradient_accumulation_steps=1.*=2"):
        strategy.run(replica)
    assert np.array_equal(v.numpy(), START)


class Wrong(hs.optimizers.UpdateStep):
    def __init__(self, transformed):
        self.transformed = transformed

    def transform(self, grads_and_vars, optimizer):
        return self.transformed(grads_and_vars)


@pytest.mark.core
@pytest.mark.parametrize("everywhere", [True, False], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(
    "transformed, error, message",
    [
        (lambda pairs: 1 / 0, ZeroDivisionError, "division by zero"),
        (lambda pairs: [], ValueError, r"SGD\.apply_gradients, Wrong\.transform: it must return a"),
        (lambda pairs: [g for g, _ in pairs], ValueError, r"Wrong\.transform: it takes \(gradient"),
        (lambda pairs: [(g[:1], v) for g, v in pairs], ValueError, r"'w' has shape \(1, 2\)"),
        (lambda pairs: [(None, v) for _, v in pairs], ValueError, r"Wrong\.transform: it must ret"),
    ],
    ids=["raises", "no pairs", "no variables", "shape", "no gradients"],
)
def test_a_step_that_is_wrong_fails_on_all_ranks(strategy, transformed, error, message, everywhere):
    is_wrong = everywhere or RANK == N - 1
    v, optimizer = model(strategy, Wrong(transformed if is_wrong else list))
    with pytest.raises((error, RuntimeError), match=message):
        apply(strategy, optimizer, v, 0)
    assert np.array_equal(v.numpy(), START) and optimizer.iterations == 0
    other = hs.optimizers.SGD(RATE)
    apply(strategy, other, v, 0)  # the next call works
    close(v.numpy(), START - RATE * own(0)[1])


@pytest.mark.core
def test_a_step_that_fails_to_collect_fails_on_all_ranks(strategy):
    class Fails(hs.optimizers.UpdateStep):
        def collect(self, grads_and_vars, optimizer):
            if RANK == N - 1:
                raise ValueError("nothing to collect")
            return grads_and_vars

    v, optimizer = model(strategy, Fails())
    with pytest.raises((ValueError, RuntimeError), match="nothing to collect"):
        apply(strategy, optimizer, v, 0)
    assert np.array_equal(v.numpy(), START)


FORMULAS: Any = {
    "not called": lambda update, value, gradient: value,
    "called twice": lambda update, value, gradient: update(update(value, gradient), gradient),
    "a slot too many": lambda update, value, gradient: (update(value, gradient), value),
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_that_is_wrong(strategy, formula):
    class Own(hs.optimizers.UpdateStep):
        pass

    Own.formula = staticmethod(FORMULAS[formula])
    v, optimizer = model(strategy, Own())
    with pytest.raises(
        TypeError, match=r"Own\.formula called `update` \d times and returned \d val"
    ):
        apply(strategy, optimizer, v, 0)
    assert np.array_equal(v.numpy(), START)


def test_two_slots_of_one_name(strategy):
    v, optimizer = model(strategy, Lookahead(0.5), Lookahead(0.5))
    with pytest.raises(ValueError, match="SGD: Lookahead has the slot 'slow', and so has the opt"):
        apply(strategy, optimizer, v, 0)


class Overriding(hs.optimizers.Optimizer):
    @property
    def slots(self):
        return {}

    def update_rule(self, learning_rate, step):
        def apply(value, gradient, slots, scratch):
            value -= learning_rate * gradient

        return hs.optimizers.UpdateRule(apply, {"learning_rate": learning_rate})


def test_an_optimizer_with_its_own_rule_takes_steps_without_formulas(strategy):
    v, optimizer = model(strategy, Centralize(), make=Overriding)
    apply(strategy, optimizer, v, 0)
    total = own(0)[1]
    close(v.numpy(), START - RATE * (total - total.mean(axis=0)))
    with pytest.raises(ValueError, match="Overriding: L1 changes the formula, and update_rule is"):
        Overriding(RATE, steps=[L1(0.5)])


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm"])
def test_an_optimizer_with_its_own_rule_clips_norms(strategy, option):
    v, optimizer = model(strategy, make=Overriding, **{option: 0.25})
    apply(strategy, optimizer, v, 0)
    total = own(0)[1]
    close(v.numpy(), START - RATE * 0.25 * total / np.linalg.norm(total))


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "make, names",
    [
        (lambda: {"clipnorm": 0.25 + RANK}, r"clipnorm=0\.25.*clipnorm=1\.25"),
        (lambda: {"global_clipnorm": 0.25 + RANK}, r"global_clipnorm=1\.25"),
        (lambda: {"steps": [Noise(0.25 + RANK)]}, r"Noise_scale=1\.25"),
        (lambda: {"steps": [Centralize()], "clipnorm": 0.25 + RANK}, r"clipnorm=1\.25"),
    ],
    ids=["norms", "a norm of all", "of a step", "of two steps"],
)
def test_steps_of_an_optimizer_with_its_own_rule_that_differ_are_refused(strategy, make, names):
    with strategy.scope():
        v, optimizer = hs.Variable(START), Overriding(RATE, **make())
    with pytest.raises(hs.ReplicaMismatchError, match=rf"(?s)Overriding\.apply_grad.*{names}"):
        apply(strategy, optimizer, v, 0)
    assert np.array_equal(v.numpy(), START) and optimizer.iterations == 0


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
def test_an_optimizer_with_its_own_rule_adds_up_the_same_calls_on_all_ranks(strategy):
    with strategy.scope():
        v = hs.Variable(START)
        optimizer = Overriding(RATE, gradient_accumulation_steps=1 + RANK)

    def replica():
        for _ in range(1 + RANK):
            optimizer.apply_gradients([(strategy.xp.asarray(own(0)[0]), v)])

    with pytest.raises(hs.ReplicaMismatchError, match=r"(?s)gradient_accumulation_steps=1.*=2"):
        strategy.run(replica)
    assert np.array_equal(v.numpy(), START)


def test_wrong_steps():
    wrong: Any = [L1]
    with pytest.raises(TypeError, match=r"SGD: steps has <class .*; each must be an instance"):
        hs.optimizers.SGD(steps=wrong)
    optimizer: Any = hs.optimizers.SGD(steps=[L1(0.5)])
    with pytest.raises(
        AttributeError, match=r"SGD: steps is \(<.*L1 object.* and cannot change; pass"
    ):
        optimizer.steps = []
    with pytest.raises(ValueError, match="SGD: a config cannot hold steps"):
        optimizer.get_config()


def test_a_copy_has_attributes_and_steps_of_its_own(strategy):
    class Own(hs.optimizers.Optimizer):
        def __init__(self, steps):
            super().__init__(RATE, steps=steps)
            self.factors = [1.0]

        @property
        def slots(self):
            return {}

        @property
        def factor(self):
            return self.factors[0]

        @staticmethod
        def formula(value, gradient, *, learning_rate, factor):
            return value - learning_rate * factor * gradient

    with strategy.scope():
        v, optimizer = hs.Variable(START), Own([L1(0.0)])
    w, copied = copy.deepcopy((v, optimizer))
    penalty: Any = copied.steps[0]
    copied.factors[0], penalty.penalty = 2.0, 1.0
    apply(strategy, optimizer, v, 0)
    apply(strategy, copied, w, 0)
    close(v.numpy(), START - RATE * own(0)[1])
    close(w.numpy(), START - RATE * 2 * (own(0)[1] + np.sign(START)))
