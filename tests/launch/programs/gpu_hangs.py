"""Trains for ever, in one way of several, until rank 1's GPU or its context is lost."""

import sys

import cupy  # pyright: ignore[reportMissingImports]

import hpcstrat as hs

way = sys.argv[1]
strategy = hs.MirroredStrategy() if way == "graph" else hs.CentralStorageStrategy()
with strategy.scope():
    weights = hs.Variable(cupy.zeros(8))
    optimizer = hs.optimizers.SGD(0.1)


def step(number):
    gradient = strategy.xp.ones(8)
    for _ in range(200 if way == "many launches" else 5):
        gradient = gradient * 1.0
    if number == 20 and way == "own kernel" and hs.rank() == 1:
        cupy._streams.current_queue().put(lambda: False)  # a kernel that never ends
    if number == 100 and way == "lost context" and hs.rank() == 1:
        cupy._faults.lose_context()
    optimizer.apply_gradients([(gradient, weights)])
    if way == "reads":
        gradient.get()


@hs.function
def graph(gradient):
    for _ in range(20):
        gradient = gradient * 1.0
    optimizer.apply_gradients([(gradient, weights)])


ones = cupy.ones(8)
for number in range(5000):
    if way == "graph":
        strategy.run(graph, args=(ones,))
    else:
        strategy.run(step, args=(number,))
