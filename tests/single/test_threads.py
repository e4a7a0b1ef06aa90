"""Variables made outside every scope, written by several threads at once."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

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


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_make_variables_while_another_writes_larger_ones(many_switches):
    kept = [hs.Variable(0.0).assign(1.0) for _ in range(1000)]

    def make(number):
        made = [hs.Variable(0.0).assign(number) for _ in range(300)]
        return {float(one) for one in made}

    def write_larger(number):
        seen = set()
        for i in range(200):
            size = (4 << 20) + 64 * i  # larger than any other message, which all plans share
            variable = hs.Variable(np.zeros(size, np.uint8)).assign(np.full(size, number, np.uint8))
            seen |= {int(variable.min()), int(variable.max())}
        return seen

    with ThreadPoolExecutor(4) as threads:
        makers = threads.map(make, (1, 2, 3))
        assert threads.submit(write_larger, 4).result() == {4}
        assert list(makers) == [{1.0}, {2.0}, {3.0}]
    assert {float(one) for one in kept} == {1.0}
