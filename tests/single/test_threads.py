"""Variables made outside every scope, written by several threads at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import hpcstrat as hs


def test_threads_do_not_meet_in_each_others_variables():
    variables = [hs.Variable(np.zeros(100_000)) for _ in range(4)]

    def write(own):
        number, variable = own
        for i in range(50):
            variable.assign(np.full(100_000, 100 * number + i))
            if set(np.unique(variable.numpy())) != {100 * number + i}:
                return i
        return None

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(write, enumerate(variables))) == [None] * 4
