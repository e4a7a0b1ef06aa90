"""Prints how often the host waits for the GPU in steps of one kind."""

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
classes, scores, weights = cupy.arange(4) % 2, cupy.ones((4, 2)), cupy.ones(4)
labels, chances = classes.astype(np.float64), cupy.full(4, 0.5)
with strategy.scope():
    table, optimizer = hs.Variable(np.ones((4, 2))), hs.optimizers.SGD(1.0)
    metrics = {
        hs.metrics.Mean(): (chances.sum(),),
        hs.metrics.Accuracy(): (classes, classes),
        hs.metrics.MeanSquaredError(): (labels, chances),
        hs.metrics.SparseCategoricalAccuracy(): (classes, scores, weights),
        hs.metrics.CategoricalAccuracy(): (scores, scores),
        hs.metrics.ConfusionMatrix(2): (classes, classes, weights),
        hs.metrics.MeanSquaredError(): (labels * 1j, chances),
    }
rows = hs.IndexedSlices(cupy.ones((2, 2)), cupy.array([1, 3]), (4, 2))


def show(step):
    strategy.run(step)  # which compiles
    before = cupy._faults.counted["waits"]
    strategy.run(step)
    print(cupy._faults.counted["waits"] - before)


show(lambda: optimizer.apply_gradients([(rows, table)]))
for metric, arrays in metrics.items():
    show(lambda metric=metric, arrays=arrays: metric.update_state(*arrays))
