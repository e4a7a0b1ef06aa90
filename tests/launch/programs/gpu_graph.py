"""Steps as one graph; the first argument says what happens at the end."""

import sys

import numpy as np

import hpcstrat as hs

strategy = hs.MirroredStrategy()
xp = strategy.xp
with strategy.scope():
    w, optimizer = hs.Variable(np.ones((3, 2), np.float32)), hs.optimizers.SGD(0.5)


@hs.function
def step(x):
    optimizer.apply_gradients([(x.T @ (x @ w) / strategy.num_replicas_in_sync, w)])


x = xp.full((1, 3), 0.5, np.float32)
zeros = None
for i in range(200):
    if i == 100 and sys.argv[1] == "hangs" and hs.rank() == 1:
        hs.barrier()
    if i == 50:
        zeros = strategy.run(lambda: [xp.zeros(3 << k, np.float32) for k in range(4)])
    strategy.run(step, args=(x,))
written = strategy.run(lambda arrays: sum(float(a.sum()) for a in arrays), args=(zeros,))
assert strategy.reduce("SUM", written, axis=None) == 0, "the graph wrote to them"
hs.on_lead(lambda: print(optimizer.iterations, w.numpy().sum().round(3), flush=True))
if sys.argv[1] == "closes":
    strategy.close()
