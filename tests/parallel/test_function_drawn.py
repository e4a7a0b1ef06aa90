"""hs.function on GPUs: programs drawn at random, with and without it, to the bit."""

import gc

import graphs
import numpy as np
import pytest
from graphs import MARKS, OPTIMIZERS, RANK, SHAPES, Model, Momentum, N, captured, own
from internals import nests
from strategies import strategies_for

import hpcstrat as hs

pytestmark = MARKS
CALLS = 60


class Program:
    """What it draws does not depend on `decorate`, nor, apart from data and sizes, on the rank."""

    def __init__(self, strategy, other, decorate, seed):
        self.strategy, self.other, self.seed = strategy, other, seed
        self.shared, alone = np.random.default_rng(seed), np.random.default_rng([seed, RANK])
        self.sizes = self.shared if self.shared.random() < 0.5 else alone
        xp, drawn = strategy.xp, [*OPTIMIZERS.values(), lambda: Momentum(0.1, clipnorm=0.05)]
        makers = [drawn[self.shared.integers(len(drawn))] for _ in range(3)]
        self.models = one, two, three = [
            Model(made, maker)
            for made, maker in zip((strategy, strategy, other), makers, strict=True)
        ]
        self.total, self.random = xp.zeros(3), xp.random.default_rng(RANK)
        self.kept, self.results = [], []
        with strategy.scope():
            self.average = hs.Variable(np.zeros(6, np.float32), aggregation="MEAN")
            self.seen = hs.Variable(np.zeros(3), synchronization="ON_READ", aggregation="SUM")
            self.count = hs.Variable(0, aggregation="ONLY_FIRST_REPLICA", dtype=np.int64)
            self.flags = hs.Variable(np.zeros(3, bool), aggregation="ONLY_FIRST_REPLICA")
            (buffer,) = one.optimizer.gradient_buffers(one.weights[:1])

        class Trainer:
            def __init__(self, scale):
                self.scale = scale

            @decorate
            def step(self, batch):
                return two.step(batch) * self.scale

        self.trainers = [Trainer(2.0), Trainer(3.0)]

        @decorate
        def simple(batch, number):
            if number < 0:
                raise ValueError("drawn")
            return one.step(batch) * number

        @decorate
        def add(amount):  # a part of the function that calls it
            self.seen.assign_add(amount)

        def across(strategy):
            strategy.extended.update(self.seen, lambda v: v.assign_add(xp.ones(3)))
            strategy.run(add, args=(xp.full(3, 10.0),))

        @decorate
        def around(batch, number):
            def replica_step(batch):  # another function in each call
                loss = two.step(batch) + one.step(batch)
                self.total[...] += loss * number
                self.average.assign(0.5 * self.average + 0.5 * batch[0].sum(axis=0))
                self.seen.assign_add(self.total)
                self.count.assign_add(1)  # numbers of the host, which a graph has as parameters
                self.flags.assign(np.broadcast_to(True, 3))
                one.mean.update_state(self.total, sample_weight=2.0)
                context = hs.get_replica_context()
                context.merge_call(across)
                return context.all_reduce("MEAN", {"a": loss, "b": batch[0].sum()}), self.total + 1

            means, total = strategy.run(replica_step, args=(batch,))
            return strategy.reduce("SUM", means["a"], axis=None), means["b"], total

        @decorate
        def from_buffers(batch, number):
            """And from a gradient that is summed already; one variable has none."""
            x, (w, other, _, _) = batch[0], one.weights
            xp.matmul(x.T, xp.tanh(x @ w), out=buffer)
            one.optimizer.apply_gradients([(buffer, w)])
            gradient = hs.get_replica_context().all_reduce("SUM", x.T @ (x @ two.weights[0]))
            gradient = number * gradient / xp.sqrt((gradient * gradient).sum() + 1)
            pairs = [(None, two.weights[1]), (gradient, two.weights[0])]
            two.optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
            return [v + 0 for v in two.weights], other.value(), 3, "text", None

        @decorate
        def draws(x, number):
            return {"x": (x * self.random.random(x.shape)).sum(axis=0) + number, "same": x}

        self.simple, self.around, self.draws = simple, around, draws
        self.from_buffers, self.elsewhere = from_buffers, decorate(three.step)

    def change(self):
        """Does something between two steps."""
        xp, shared, (one, two, three) = self.strategy.xp, self.shared, self.models

        def add_variable():
            with self.strategy.scope():
                extra = hs.Variable(np.zeros((int(shared.integers(1, 400)), 7), np.float32))
            gradient = xp.ones(extra.shape, np.float32)
            self.strategy.run(lambda: one.optimizer.apply_gradients([(gradient, extra)]))

        def free():
            self.kept = [graphs.poison(self.strategy)]
            xp.get_default_memory_pool().free_all_blocks()

        changes = [
            lambda: setattr(one.optimizer, "learning_rate", float(shared.random()) / 10),
            lambda: setattr(two.optimizer, "learning_rate", lambda step: 0.1 / (1 + step)),
            lambda: setattr(
                three.optimizer, "learning_rate", hs.optimizers.schedules.CosineDecay(0.1, 20)
            ),
            lambda: [
                setattr(m.optimizer, "is_signed", bool(shared.integers(2))) for m in (one, two)
            ],
            lambda: two.weights[1].assign(np.full(SHAPES[1], shared.random(), np.float32)),
            lambda: self.average.assign_add(np.ones(6, np.float32)),
            lambda: one.mean.reset_state(),
            add_variable,
            free,
            gc.collect,
        ]
        changes[shared.integers(len(changes))]()

    def play(self):
        """The results of all steps, and the state after them."""
        xp, shared, strategy = self.strategy.xp, self.shared, self.strategy
        for i in range(CALLS):
            if shared.random() < 0.25:
                self.change()
            size, data = int(self.sizes.choice([4] * 6 + [2, 0])), np.random.default_rng([i, RANK])
            pairs = [data.random((size, columns), np.float32) for columns in (6, 3)]
            batch = tuple(map(xp.asarray, pairs))
            number, which = int(shared.choice([1, 1, 1, 1, 2])), shared.integers(7)
            if which == 0:
                if shared.random() < 0.2:
                    with pytest.raises(ValueError, match="drawn"):
                        strategy.run(self.simple, args=(batch, -1))
                self.results.append(strategy.run(self.simple, args=(batch, number)))
            elif which == 1:
                self.results.append(self.around(batch, float(number)))
            elif which == 2:
                trainer = self.trainers[int(number == 2)]
                self.results.append(strategy.run(trainer.step, args=(batch,)))
            elif which == 3:  # more kinds than are kept
                many = int(shared.choice(12, p=[0.4, *[0.6 / 11] * 11]))
                self.results.append(strategy.run(self.draws, args=(batch[0], many)))
            elif which == 4:
                self.results.append(strategy.run(self.from_buffers, args=(batch, float(number))))
            elif which == 5:
                self.results.append(self.other.run(self.elsewhere, args=(batch,)))
            else:
                mixed = batch[0].T.copy().T if number == 2 else batch[0]
                self.results.append(strategy.run(self.simple, args=((mixed, batch[1]), 1.0)))
            if shared.random() < 0.3:
                self.results = [hs.asnumpy(own_leaves(one)) for one in self.results]
        found = [leaf for one in self.results for leaf in own_leaves(one)]
        variables = [self.average, self.seen, self.count, self.flags]
        states = [hs.asnumpy([*variables, *model.state()]) for model in self.models]
        return [*found, self.total.get(), *nests.flatten(states)[0]]


def own_leaves(nest):
    return [own(leaf) for leaf in nests.flatten(nest)[0]]


@pytest.mark.parametrize("seed", range(3))
def test_with_and_without(place, seed):
    kinds = strategies_for(N)
    with place.make(kinds[seed % len(kinds)]) as strategy, place.make(hs.MirroredStrategy) as other:
        eager, found, count = Program(strategy, other, lambda fn: fn, seed).play(), [], []

        def run():
            program = Program(strategy, other, hs.function, seed)
            found.extend(program.play())
            names = ("simple", "around", "draws", "from_buffers", "elsewhere")
            steps = [getattr(program, name) for name in names]
            count.extend(map(captured, steps))

        texts = graphs.warned(run)
        graphs.check_equal(eager, found)
        assert sum(count) > 0
        assert all("more than 8 kinds" in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 30))
def test_more_with_and_without(place, seed):
    test_with_and_without(place, seed)
