"""Variables made outside every scope, made and written by several threads at once."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import hpcstrat as hs


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_do_not_meet_in_each_others_variables(many_switches):
    kept = [hs.Variable(0.0).assign(1.0) for _ in range(300)]

    def make(number):
        large = hs.Variable(np.zeros(100_000))
        made = [hs.Variable(0.0).assign(number) for _ in range(100)]
        seen = {float(one) for one in made}
        for i in range(10):
            large.assign(np.full(100_000, number + i))
            seen |= {one - i for one in (large.numpy().min(), large.numpy().max())}
        return seen

    def write_larger(number):
        seen = set()
        for i in range(30):
            size = (4 << 20) + 64 * i  # larger than any other message, which all plans share
            variable = hs.Variable(np.zeros(size, np.uint8)).assign(np.full(size, number, np.uint8))
            seen |= {int(variable.min()), int(variable.max())}
        return seen

    with ThreadPoolExecutor(4) as threads:
        makers = threads.map(make, (100, 200, 300))
        assert threads.submit(write_larger, 4).result() == {4}
        assert list(makers) == [{100}, {200}, {300}]
    assert {float(one) for one in kept} == {1.0}
