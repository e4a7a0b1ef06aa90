"""A stand-in for NVIDIA's: finds the simulated cuBLAS."""

import functools
import types


@functools.cache
def load_nvidia_dynamic_lib(name):
    if name != "cublas":
        raise AttributeError(f"the simulated GPU does not have the library {name}")
    from cupy import _cublas

    return types.SimpleNamespace(abs_path=_cublas.load())
