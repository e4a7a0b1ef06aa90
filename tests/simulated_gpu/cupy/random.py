"""`cupy.random` of the simulated GPU: NumPy's generators, with other numbers than CuPy's."""

import functools

import numpy as np
from cupy._arrays import ndarray
from cupy._faults import Partial
from cupy._launch import launch

_STATE = 0x5EED


class BitGenerator:
    """CuPy's. Its state is in the GPU's memory; here NumPy has it, and that memory is a mark."""

    def __init__(self, seed):
        self._numpy = np.random.default_rng(seed)
        self._state = ndarray(1, np.int64)
        self._state.fill(_STATE)

    def fill(self, out, draw):
        """Writes `draw(numpy_generator)` to an array whenever the work is done. Not in CuPy."""

        def work(state, out):
            drawn = draw(self._numpy)  # not the state of another array
            out[...] = drawn if state[0] == _STATE else np.zeros_like(drawn)
            state[0] += 0

        return launch(work, self._state, out=out, also_writes=(self._state,))


class Generator(Partial):
    def __init__(self, bit_generator):
        self.bit_generator = bit_generator

    def _drawn(self, size, dtype, draw):
        return self.bit_generator.fill(ndarray(() if size is None else size, dtype), draw)

    def random(self, size=None, dtype=np.float64, out=None):
        return self._drawn(size, dtype, lambda numpy: numpy.random(size, dtype))

    def standard_normal(self, size=None, dtype=np.float64, out=None):
        return self._drawn(size, dtype, lambda numpy: numpy.standard_normal(size, dtype))

    def integers(self, low, high=None, size=None, dtype=np.int64, endpoint=False):
        return self._drawn(
            size, dtype, lambda numpy: numpy.integers(low, high, size, dtype, endpoint)
        )


def default_rng(seed=None):
    """CuPy's, which accepts a number."""
    if seed is not None and not isinstance(seed, (int, np.integer)):
        raise TypeError(
            f"the simulated GPU: cupy.random.default_rng takes a number, not {type(seed).__name__}"
        )
    return Generator(BitGenerator(seed))


class RandomState(Partial):
    """CuPy's: a kernel draws the numbers, and gets a seed from the host."""

    def __init__(self, seed=None):
        self._rk_seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

    def _get_seed(self, size):
        seed = self._rk_seed
        self._rk_seed += size
        return seed

    def binomial(self, n, p, size=None, dtype=int):
        out = ndarray(() if size is None else size, dtype)
        seed = self._get_seed(out.host.size)

        def work(out):
            out[...] = np.random.default_rng(seed).binomial(n, p, size)

        return launch(work, out=out)


@functools.cache
def get_random_state():
    return RandomState()


def binomial(n, p, size=None, dtype=int):
    return get_random_state().binomial(n, p, size, dtype)


def __getattr__(name):
    raise AttributeError(f"the simulated GPU does not have cupy.random.{name}")
