"""What kernels must not do."""

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from internals import layout, packing

x, totals, stream = cupy.arange(8.0), cupy.zeros(2), cupy.cuda.Stream(non_blocking=True)
with cupy.cuda.Device(1):
    there = cupy.zeros(8)
shifted = cupy.zeros(72, np.uint8)[4:68].view(np.float64)


def summed(operation):
    return cupy.ElementwiseKernel("T x", "raw T sums", operation, "summed", no_return=True)


def packed(array, message):
    places = layout.layout_of((array.shape,), (array.dtype,))
    packing.PackKernel(places, places.groups[0])([array], message)


def packed_unordered():
    with stream:
        x[7:] += 1
    packed(x, cupy.zeros(64, np.uint8))


summed("atomicAdd(&sums[0], x)")(x, totals)
packed(x, cupy.zeros(64, np.uint8))
for wrong in (
    lambda: summed("sums[0] += x")(x, totals),
    lambda: summed("sums[i] = x")(x, totals),
    lambda: cupy.ElementwiseKernel("T x", "T y", "y = x")(shifted, x),
    lambda: packed(x.view(np.complex128), cupy.zeros(72, np.uint8)[4:]),
    packed_unordered,
    lambda: there + 1,
):
    try:
        wrong()
    except AssertionError as error:
        print(error)
