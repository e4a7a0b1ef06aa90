import numpy as np
import pytest
from internals import worlds
from threadpoolctl import threadpool_info, threadpool_limits

SHARES = {  # the cores that each rank may run on, and how many of them it uses
    "one rank": ([0b1111], [4]),
    "two ranks": ([0b1111] * 2, [2, 2]),
    "three on four cores": ([0b1111] * 3, [1, 1, 1]),
    "four on two cores": ([0b11] * 4, [1, 1, 1, 1]),
    "two cores of their own": ([0b0011, 0b1100], [2, 2]),
    "a core of their own": ([0b01, 0b10], [1, 1]),
    "one where the other runs, and beyond": ([0b1111_1111, 0b1111], [6, 2]),
    "many cores": ([(1 << 192) - 1] * 3, [64, 64, 64]),
    "1/3 + 1/3 + 1/3": ([0b111] * 3, [1, 1, 1]),
}


@pytest.mark.parametrize("case", SHARES)
def test_share(case):
    masks, shares = SHARES[case]
    assert [worlds.share_of_cores(masks, rank) for rank in range(len(masks))] == shares


def test_cores_are_those_this_process_may_run_on():
    assert worlds.own_cores() > 0


@pytest.fixture
def no_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that the end of the test undoes what the test sets


def blas_threads():
    assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # loads BLAS
    return [
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    ]


def test_limit_lowers_only(no_variables):
    with threadpool_limits(2, "blas"):
        before = blas_threads()
        worlds.limit_blas_threads(3)
        assert blas_threads() == before


def test_limit_lowers(no_variables):
    with threadpool_limits(2, "blas"):
        worlds.limit_blas_threads(1)
        assert blas_threads() and set(blas_threads()) == {1}


def test_the_users_variable_wins(no_variables, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    with threadpool_limits(2, "blas"):
        before = blas_threads()
        worlds.limit_blas_threads(1)
        assert blas_threads() == before
