"""Times `apply_gradients` of SGD with momentum for models of several sizes; growth.py starts it.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/growth_step.py --rounds 10 1000x1 1000000x10

An argument is a number of parameters and a number of variables of equal size; the gradients exist
already. It prints, as JSON, the median seconds per step for each: ours, and a hand-written
Allreduce with an update on every rank.
"""

import argparse
import json

import numpy as np
from by_hand import COMM, AllReduce
from networks import MOMENTUM, RATE
from rounds import interleaved, repeated

import hpcstrat as hs


def measure(strategy, parameters, variables, rounds):
    start = [np.ones(parameters // variables, np.float32) for _ in range(variables)]
    gradients = [np.full_like(value, COMM.rank) for value in start]
    with strategy.scope():
        weights = [hs.Variable(value) for value in start]
        optimizer = hs.optimizers.SGD(RATE, MOMENTUM)
    hand = AllReduce(start)

    def step():
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    ways = {
        "ours": repeated(lambda: strategy.run(step)),
        "by hand": repeated(lambda: hand.step(gradients)),
    }
    calls = max(2, min(200, 5_000_000 // parameters))
    medians = interleaved(ways, rounds, calls, COMM)
    for one, other in zip(weights, hand.weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-4, atol=1e-6)
    return list(medians.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=10, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument("sizes", nargs="+", metavar="PARAMETERSxVARIABLES", help="of a model")
    options = parser.parse_args()
    strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
    results = [
        measure(strategy, *map(int, size.split("x")), options.rounds) for size in options.sizes
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
