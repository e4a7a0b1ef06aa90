"""Copies from pinned memory and between GPUs, and streams with two GPUs, as CuPy has them."""

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np

stream = cupy.cuda.Stream(non_blocking=True)


def pinned():
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4096), np.float64).reshape(16, 32)


def copied(array, **options):
    array[...] = 1
    with stream:
        made = cupy.asarray(array, **options)
    array[...] = 2
    stream.synchronize()
    assert made.get().tolist() == np.ones_like(array).tolist()


copied(np.empty((16, 32)))
copied(pinned(), blocking=True)
# By way of pinned memory of CuPy's own:
copied(pinned()[:, ::2])
copied(pinned(), order="F")
copied(pinned(), dtype=np.float32)
copied(pinned()[0, 0, ...])
with stream:
    kept = cupy.asarray(pinned())  # CuPy keeps the memory
    stream.synchronize()
for array in pinned(), pinned().T, pinned()[3:5]:
    try:
        copied(array)
        raise SystemExit("it is not found")
    except AssertionError as error:
        print(error)
    stream.synchronize()
    array[...] = 2

here, there = cupy.cuda.Device(0), cupy.cuda.Device(1)
with there:
    grid = cupy.arange(12.0).reshape(3, 4)
    there.synchronize()
copies = [cupy.asarray(grid), cupy.asarray(grid.T), cupy.array(grid[:2]), grid.copy()]
assert [one.device for one in copies] == [here] * 4
assert [float(one.sum()) for one in copies] == [66, 66, 28, 66]
for wrong in (
    lambda: cupy.asarray(grid[:, ::2]),
    lambda: cupy.asarray(grid[:, ::2], order="C"),
    lambda: grid + 1,
):
    try:
        wrong()
    except (AssertionError, NotImplementedError) as error:
        print(error)

# The stream below becomes its own GPU's; the null stream, without one, the current GPU's.
null, current = cupy.cuda.Stream.null, cupy.cuda.get_current_stream
inner, outer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
with there:
    other = cupy.cuda.Stream(non_blocking=True).use()
for below in (null, outer):
    with below:
        with inner:
            there.use()
        print(current(0) == inner, current(0) == outer, current(1) == other, current(1) == null)
        here.use()
        with there:
            other.use()
