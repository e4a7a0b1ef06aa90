"""A stand-in for CuPy without a GPU: see ../README.md. It raises for what it does not have."""

import numpy as _np

from . import _functions, cuda, fft, random
from ._arrays import ndarray as ndarray
from ._kernels import ElementwiseKernel as ElementwiseKernel
from ._kernels import RawKernel as RawKernel
from ._memory import pool as _pool

__version__ = "14.2.0"
is_simulated = True


inf, nan, pi, e, newaxis = _np.inf, _np.nan, _np.pi, _np.e, None
for _name in "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp float16 float32 float64 complex64 complex128".split():
    globals()[_name] = getattr(_np, _name)
dtype, iinfo, finfo, issubdtype = _np.dtype, _np.iinfo, _np.finfo, _np.issubdtype
integer, floating, number = _np.integer, _np.floating, _np.number
globals().update(_functions.ufuncs | _functions.reductions)
for _name in (
    "matmul dot outer empty zeros ones full empty_like zeros_like ones_like "
    "full_like arange eye array asarray ascontiguousarray asfortranarray asnumpy copyto "
    "broadcast_to reshape transpose ravel concatenate stack "
    "repeat roll diff where clip nonzero flatnonzero argsort sort take "
    "may_share_memory shares_memory array_equal allclose size shape ndim from_dlpack"
).split():
    globals()[_name] = getattr(_functions, _name)


def get_default_memory_pool():
    return _pool


def __getattr__(name):
    raise AttributeError(f"the simulated GPU does not have cupy.{name}")


__all__ = ["cuda", "fft", "random"]
