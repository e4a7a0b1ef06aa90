"""`cupy.fft` of the simulated GPU: NumPy's transforms, with CuPy's cache of plans."""

import threading
import types

import numpy as np
from cupy._arrays import ndarray
from cupy._faults import Partial
from cupy._launch import launch
from cupy._memory import MemoryPointer

_thread = threading.local()


class _PlanCache(Partial):
    """CuPy's, with the memory in which each plan works: cuFFT's own, to which no array refers."""

    def __init__(self):
        self._plans = {}

    def __iter__(self):
        return iter(self._plans.items())

    def memory_of(self, a):
        """Not in CuPy."""
        key = a.shape, a.dtype
        if key not in self._plans:
            self._plans[key] = ndarray(a.shape, np.complex128).data.mem
        return ndarray(a.shape, np.complex128, MemoryPointer(self._plans[key], 0))

    def clear(self):
        self._plans.clear()


def _get_plan_cache():
    if not hasattr(_thread, "plans"):
        _thread.plans = _PlanCache()
    return _thread.plans


config = types.SimpleNamespace(get_plan_cache=_get_plan_cache)


def fft(a, n=None, axis=-1, norm=None):
    if (n, axis, norm) != (None, -1, None):
        raise TypeError("the simulated GPU: cupy.fft.fft takes an array only")
    memory = _get_plan_cache().memory_of(a)
    out = ndarray(a.shape, np.result_type(a.dtype, np.complex64))

    def work(a, memory, out):
        memory[...] = np.fft.fft(a)
        out[...] = memory

    return launch(work, a, memory, out=out, also_writes=(memory,))


def __getattr__(name):
    raise AttributeError(f"the simulated GPU does not have cupy.fft.{name}")
