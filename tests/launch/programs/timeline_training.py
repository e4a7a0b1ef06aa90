"""Trains, and saves; what each of the 6 steps moves is known, and the last rank works longest."""

import time

import numpy as np

import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(1000, np.float32))
    optimizer = hs.optimizers.SGD(0.5)


def step(x):
    time.sleep(0.01 * hs.rank())
    optimizer.apply_gradients([(np.full(1000, x.sum(), np.float32), w)])
    return x


total = None
dataset = hs.data.Dataset.range(24).batch(4)
for x in strategy.experimental_distribute_dataset(dataset):
    total = strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=0)
hs.checkpoint.Checkpoint(w=w).save("weights")
print(w.numpy()[0], total)
for turn in range(3):
    if hs.rank() == turn:
        time.sleep(0.1)
    hs.barrier()
