r"""Times how much of the exchange of gradients between hosts is hidden behind the backward pass.

    mpirun -n 2 python benchmarks/overlap.py    # on real hosts
    sudo env PATH="$PATH" python benchmarks/emulated_hosts.py --hosts 2 --ranks 2 \
        python benchmarks/overlap.py

The largest network of networks.py, of 8.4 million parameters, is trained by SGD on
MultiWorkerMirroredStrategy:

    computing    forward and backward alone
    exchange     apply_gradients alone, with all gradients ready
    without      a step that exchanges when all gradients are ready
    with ready   the same, but each layer's gradients are marked as soon as they are written

They take turns, round by round, and the last two must end with the same bits. The hidden share is
`(without - with ready) / exchange`. Give --batch a size at which computing takes about as long as
the exchange. The first layer's gradients come last and can never be hidden: a quarter of this
network's exchange.
"""

import argparse

import numpy as np
from mpi4py import MPI
from networks import MOMENTUM, NETWORKS, RATE, data, initial
from rounds import header, interleaved, repeated, row

import hpcstrat as hs

COMM = MPI.COMM_WORLD


class Network:
    """A network, its optimizer, and the step that trains it."""

    def __init__(self, strategy, layers, batch):
        self.strategy = strategy
        self.batch = data(layers, batch, COMM.rank)
        with strategy.scope():
            self.weights = [hs.Variable(value) for value in initial(layers)]
            self.optimizer = hs.optimizers.SGD(RATE, MOMENTUM)
            self.buffers = self.optimizer.gradient_buffers(self.weights)

    def gradients(self, marks):
        """Writes `networks.gradients` to the buffers, from the last layer to the first."""
        x, y = self.batch
        values = [weight.value() for weight in self.weights]
        buffers = self.buffers
        inputs = [x]
        for w, b in zip(values[:-2:2], values[1:-2:2], strict=True):
            inputs.append(np.maximum(inputs[-1] @ w + b, 0))
        d = (inputs[-1] @ values[-2] + values[-1] - y) / len(x)
        for i in range(len(inputs) - 1, -1, -1):
            np.matmul(inputs[i].T, d, out=buffers[2 * i])
            np.sum(d, axis=0, out=buffers[2 * i + 1])
            if marks:
                buffers.ready(buffers[2 * i], buffers[2 * i + 1])
            if i:
                d = (d @ values[2 * i].T) * (inputs[i] > 0)

    def apply(self):
        self.optimizer.apply_gradients(zip(self.buffers, self.weights, strict=True))

    def step(self, computes=True, marks=False, applies=True):
        def replica_step():
            if computes:
                self.gradients(marks)
            if applies:
                self.apply()

        return lambda: self.strategy.run(replica_step)


def measure(layers, batch, rounds):
    strategy = hs.MultiWorkerMirroredStrategy()
    one, other = (Network(strategy, layers, batch) for _ in range(2))
    alone = Network(strategy, layers, batch)
    ways = {
        "computing": alone.step(applies=False),
        "exchange": alone.step(computes=False),
        "without": one.step(),
        "with ready": other.step(marks=True),
    }
    medians = interleaved({name: repeated(way) for name, way in ways.items()}, rounds, comm=COMM)
    for mine, theirs in zip(one.weights, other.weights, strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()
    return medians


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each way (%(default)s)")
    parser.add_argument("--batch", type=int, default=320, help="of each replica (%(default)s)")
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[*NETWORKS][-1],
        help="units of each layer (%(default)s)",
    )
    options = parser.parse_args()
    medians = measure(options.layers, options.batch, options.rounds)
    if COMM.rank == 0:
        hidden = (medians["without"] - medians["with ready"]) / medians["exchange"]
        print(
            f"{COMM.size} ranks, batch {options.batch}, milliseconds, medians of {options.rounds} "
            "rounds\n"
        )
        header(*medians, "hidden")
        row(*[f"{1e3 * seconds:.1f}" for seconds in medians.values()], f"{100 * hidden:.0f} %")


if __name__ == "__main__":
    main()
