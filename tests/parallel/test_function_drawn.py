"""hs.function on GPUs: programs drawn at random, with and without it, to the bit."""

import gc

import numpy as np
import pytest
from graphs import MARKS, OPTIMIZERS, RANK, SHAPES, Model, N, check_equal, own, warned
from slow import slow_but
from strategies import strategies_for

import hpcstrat as hs

pytestmark = MARKS
CALLS = 45


@pytest.fixture(params=strategies_for(N))
def strategy(request, place):
    with place.make(request.param) as made:
        yield made


def changes(strategy, models, shared):
    """What a program may do between two steps; the same on all ranks."""
    xp, (one, other) = strategy.xp, models
    rate = hs.optimizers.schedules.CosineDecay(0.1, 20)

    def add_variable():
        with strategy.scope():
            extra = hs.Variable(np.zeros((int(shared.integers(1, 400)), 7), np.float32))
        gradient = xp.ones(extra.shape, np.float32)
        strategy.run(lambda: one.optimizer.apply_gradients([(gradient, extra)]))

    def free():
        xp.get_default_memory_pool().free_all_blocks()
        gc.collect()

    return [
        lambda: setattr(one.optimizer, "learning_rate", float(shared.random())),
        lambda: setattr(other.optimizer, "learning_rate", rate),
        lambda: other.weights[1].assign(np.full(SHAPES[1], shared.random(), np.float32)),
        lambda: one.mean.reset_state(),
        add_variable,
        free,
    ]


def play(strategy, decorate, seed):
    """The results of all steps, and the state after them."""
    shared, own_random = np.random.default_rng(seed), np.random.default_rng([seed, RANK])
    xp, names = strategy.xp, [*OPTIMIZERS]
    models = [Model(strategy, OPTIMIZERS[str(shared.choice(names))]) for _ in range(2)]
    total, between = xp.zeros(3), changes(strategy, models, shared)
    sizes_of = shared if shared.random() < 0.5 else own_random  # the same on all ranks, or not

    @decorate
    def first(batch, number):
        return models[0].step(batch) * number

    def replica_step(batch, number):
        loss = models[1].step(batch)
        total[...] += loss
        if number < 0:
            raise ValueError("drawn")
        return hs.get_replica_context().all_reduce("MEAN", loss + batch[0].sum()), total

    @decorate
    def second(batch, number):
        return strategy.run(replica_step, args=(batch, number))

    found = []
    for i in range(CALLS):
        if shared.random() < 0.2:
            between[shared.integers(len(between))]()
        size, data = (
            int(sizes_of.choice([4, 4, 4, 4, 2, 0])),
            np.random.default_rng([seed, i, RANK]),
        )
        batch = tuple(xp.asarray(data.random((size, columns), np.float32)) for columns in (6, 3))
        number, is_first = int(shared.choice([1, 1, 1, 2])), shared.random() < 0.5
        if is_first:
            found.append(own(strategy.run(first, args=(batch, number))))
        elif shared.random() < 0.05:
            with pytest.raises(ValueError, match="drawn"):
                second(batch, -1)
        else:
            found += map(own, second(batch, float(number)))
    return [*found, *models[0].state(), *models[1].state()]


@pytest.mark.parametrize("seed", slow_but([0, 1], [*range(16)]))
def test_with_and_without(strategy, seed):
    eager, found = play(strategy, lambda fn: fn, seed), []
    warned(lambda: found.extend(play(strategy, hs.function, seed)))  # of the exception, where drawn
    check_equal(eager, found)
