"""`cupy.random` of the simulated GPU: NumPy's generators, with other numbers than CuPy's."""

import numpy as np
from cupy._launch import from_host


class Generator:
    """CuPy's."""

    def __init__(self, seed):
        self._numpy = np.random.default_rng(seed)

    def random(self, size=None, dtype=np.float64, out=None):
        """CuPy's."""
        return from_host(self._numpy.random(size, dtype))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        """CuPy's."""
        return from_host(self._numpy.standard_normal(size, dtype))

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        """CuPy's."""
        return from_host(self._numpy.integers(low, high, size, dtype, endpoint))

    def __getattr__(self, name):
        raise AttributeError(f"the simulated GPU does not have Generator.{name}")


def default_rng(seed=None):
    """CuPy's, which accepts a number."""
    if seed is not None and not isinstance(seed, (int, np.integer)):
        raise TypeError(
            f"the simulated GPU: cupy.random.default_rng takes a number, not {type(seed).__name__}"
        )
    return Generator(seed)


def __getattr__(name):
    raise AttributeError(f"the simulated GPU does not have cupy.random.{name}")
