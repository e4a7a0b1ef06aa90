"""Asks for strategies where GPUs cannot be used; the argument names ranks that have no CuPy."""

import importlib.util
import sys

import numpy as np

import hpcstrat as hs

find_spec = importlib.util.find_spec
if str(hs.rank()) in sys.argv[1]:
    importlib.util.find_spec = lambda name, *rest: (
        None if name == "cupy" else find_spec(name, *rest)
    )


def show(name, *devices):
    try:
        found = getattr(hs, name)(*devices)
    except RuntimeError as error:
        found = " ".join(str(error).split())
    print(f"{name}{devices}: {found}")


if hs.size() == 1:  # without a strategy nothing asks for GPUs
    v = hs.Variable(np.ones(3, np.float32))
    hs.optimizers.SGD(0.5).apply_gradients([(np.ones(3, np.float32), v)])
    print(v.numpy(), sum(int(x) for x in hs.data.Dataset.range(8).map(lambda x: x + 1)))
    show("OneDeviceStrategy", "GPU:0")
for name in ("CentralStorageStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"):
    show(name)
show("CentralStorageStrategy", ["CPU:0"] * hs.size())
strategy = hs.CentralStorageStrategy(["CPU:0"] * hs.size())
total = strategy.reduce("SUM", strategy.run(lambda: 10.0 ** hs.rank()), axis=None)
numbers = hs.data.Dataset.range(8).map(lambda x: x + 1, num_parallel_calls=2)
print("on the CPU:", total, sum(int(x) for x in numbers))
