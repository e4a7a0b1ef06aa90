"""A program that uses every part of the GPU path once.

It is run unchanged, and with bugs planted in the package.
"""

import contextlib
import pathlib

import numpy as np

import hpcstrat as hs

N = hs.size()
GPUS = [f"GPU:{rank}" for rank in range(N)]


def train(strategy, folder):
    """Trains over a dataset, with buffers, a metric, reductions, uneven parts, a checkpoint.

    All on the user's own stream.
    """
    xp = strategy.xp
    stream = contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)
    with strategy.scope(), stream:
        shapes = (6, 3), (401, 3)  # the last one ends off 16 bytes
        weights = [hs.Variable(np.zeros(shape, np.float32)) for shape in shapes]
        weights.insert(1, hs.Variable(np.zeros(4)))
        counter = hs.Variable(0, aggregation="SUM")
        optimizer, momentum = hs.optimizers.Adam(0.1), hs.optimizers.SGD(0.1, momentum=0.5)
        buffered = [hs.Variable(np.zeros(size)) for size in (1100, 5)]
        buffers = momentum.gradient_buffers(buffered)
        error = hs.metrics.MeanSquaredError()

        def step(x):
            gradient = (x * 1.0).T[:6, :3].astype(np.float32)  # in Fortran order
            tall = gradient[0] + xp.zeros((401, 3), np.float32)
            gradients = gradient, x.sum(axis=0)[:4], tall
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            for buffer in buffers:
                buffer[...] = 1 / N
            momentum.apply_gradients(zip(buffers, buffered, strict=True))
            error.update_state(x, x + 3)
            counter.assign_add(1)
            with contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True):
                pass  # its end must not leave the rest of the function on another stream
            return {"sum": (x * 2).sum(), "part": x[: hs.rank() + 1]}

        rows = np.arange(40.0 * 4 * N * 8).reshape(-1, 8)
        dataset = hs.data.Dataset.from_tensor_slices(rows).batch(4 * N)
        sums = []
        for x in strategy.experimental_distribute_dataset(dataset):
            found = strategy.run(step, args=(x,))
            # The host waits for nothing.
            sums.append(strategy.reduce("SUM", found["sum"], axis=None))
            strategy.gather(found["part"], axis=0)
        velocity = np.cumsum(0.5 ** np.arange(40))  # of each step, divided by the learning rate
        for w in buffered:
            np.testing.assert_allclose(w.numpy(), -0.1 * velocity.sum())
        assert float(sum(sums)) == 2 * rows.sum()
        assert counter.numpy() == 40 * N and error.result() == 9
        kept = [w.numpy() for w in weights]
        checkpoint = hs.checkpoint.Checkpoint(weights=weights, optimizer=optimizer)
        checkpoint.save(folder / "saved")
        for w in weights:
            w.assign(xp.zeros(w.shape, w.dtype))
            for _ in range(2):
                strategy.extended.update(w, lambda v: v.assign_add(np.ones(v.shape, v.dtype)))
        checkpoint.restore(folder / "saved")
        for w, before in zip(weights, kept, strict=True):
            assert np.array_equal(w.numpy(), before)


PLACES = {
    "central": lambda: hs.CentralStorageStrategy(GPUS),
    "parameters of the last": lambda: hs.CentralStorageStrategy(GPUS, GPUS[-1]),
    "parameters of the host": lambda: hs.CentralStorageStrategy(GPUS, "CPU:0"),
    "mirrored": lambda: hs.MirroredStrategy(GPUS),
}
for name, make in PLACES.items():
    with make() as strategy:
        folder = pathlib.Path(name)
        folder.mkdir(exist_ok=True)
        train(strategy, folder)
if hs.is_lead():
    print("trained")
