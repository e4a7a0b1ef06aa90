"""The kernels that the package can ask a GPU for, as optimizers and dtypes make them."""

import ml_dtypes
import numpy as np

from hpcstrat import optimizers

DTYPES = [*map(np.dtype, ("float32", "float64", "float16", "complex64", "complex128")), np.dtype(ml_dtypes.bfloat16)]
OPTIMIZERS = {
    "SGD": optimizers.SGD(0.1),
    "SGD with momentum": optimizers.SGD(0.1, 0.9),
    "SGD with Nesterov's momentum": optimizers.SGD(0.1, 0.9, nesterov=True),
    "Adam": optimizers.Adam(0.1),
    "AdamW": optimizers.AdamW(0.1),
    "Adagrad": optimizers.Adagrad(0.1),
    "RMSprop": optimizers.RMSprop(0.1),
    "RMSprop with momentum": optimizers.RMSprop(0.1, momentum=0.5),
    "RMSprop, centered": optimizers.RMSprop(0.1, centered=True),
    "RMSprop, centered, with momentum": optimizers.RMSprop(0.1, momentum=0.5, centered=True),
}
"""One of each form that an optimizer's kernel has."""
