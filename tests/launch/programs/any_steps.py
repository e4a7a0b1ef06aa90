"""Random steps, the same on all ranks, have the same bits with each strategy: `any_steps.py SEED ...`."""

import hashlib
import sys

import numpy as np

import hpcstrat as hs

STEPS = 30
OPTIONS = [{}, {"clipvalue": 0.1}, {"weight_decay": 0.1}]  # norms add up in another order
KINDS = [hs.optimizers.Adam, hs.optimizers.RMSprop, hs.optimizers.Lion, hs.optimizers.SGD]
SHAPES = [(), (0, 3), (1,), (7, 5), (1009,), (300, 401), (2, 3, 4)]
rank = hs.rank()


def drawn(random, variables):
    """Makes, removes and doubles variables now and then; returns some of them."""
    if random.random() < 0.4:
        dtype = ["float32", "float64", "float16"][random.integers(3)]
        value = random.standard_normal(SHAPES[random.integers(7)]).astype(dtype)
        variables.append(hs.Variable(value))
    if random.random() < 0.2 and len(variables) > 1:
        del variables[random.integers(len(variables))]
    if random.random() < 0.1:
        one = variables[random.integers(len(variables))]
        one.assign(one.numpy() * 2)
    some = random.permutation(len(variables))[: random.integers(1, len(variables) + 1)]
    return [variables[number] for number in some]


def gradients(some, rows, own):
    for v in some:
        gradient = own.standard_normal(v.shape).astype(v.dtype)
        if rows and v.shape and v.shape[0] > 1:
            at = own.integers(v.shape[0], size=3)
            gradient = hs.IndexedSlices(gradient[at], at)
        yield gradient, v


def digests(strategy, seed):
    random = np.random.default_rng(seed)
    found = []
    with strategy.scope():
        optimizer = KINDS[random.integers(4)](0.1, **OPTIONS[random.integers(len(OPTIONS))])
        variables = [hs.Variable(np.ones((2, 3), np.float32))]
        for step in range(STEPS):
            some, rows = drawn(random, variables), random.random() < 0.3
            pairs = list(gradients(some, rows, np.random.default_rng([seed, step, rank])))
            strategy.run(optimizer.apply_gradients, args=(pairs,))
            read = [v.numpy().tobytes() for v in (*variables, *optimizer.variables)]
            found.append(hashlib.sha256(b"|".join(read)).hexdigest())
    return found


for seed in map(int, sys.argv[1:]):
    with hs.MirroredStrategy() as strategy:
        mirrored = digests(strategy, seed)
    with hs.CentralStorageStrategy() as strategy:
        central = digests(strategy, seed)
    differ = [step for step in range(STEPS) if mirrored[step] != central[step]]
    assert not hs.any_rank(bool(differ)), (seed, differ)
    assert len(set(mirrored)) > STEPS // 2
print("the same")
