import numpy as np
import pytest
from internals import blas_threads
from threadpoolctl import threadpool_info, threadpool_limits

SHARES = {  # the cores that each rank may run on, and how many of them it uses
    "one rank": ([range(4)], [4]),
    "two ranks": ([range(4)] * 2, [2, 2]),
    "three on four cores": ([range(4)] * 3, [1, 1, 1]),
    "four on two cores": ([range(2)] * 4, [1, 1, 1, 1]),
    "two cores of their own": ([range(2), range(2, 4)], [2, 2]),
    "a core of their own": ([range(1), range(1, 2)], [1, 1]),
    "one where the other runs, and beyond": ([range(8), range(4)], [6, 2]),
    "many cores": ([range(192)] * 3, [64, 64, 64]),
    "1/3 + 1/3 + 1/3": ([range(3)] * 3, [1, 1, 1]),
}


@pytest.mark.parametrize("case", SHARES)
def test_share(case):
    ranges, shares = SHARES[case]
    cores = [set(one) for one in ranges]
    assert [blas_threads.share_of_cores(cores, rank) for rank in range(len(cores))] == shares


@pytest.fixture
def no_variables(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that the end of the test undoes what the test sets


def threads_of_blas():
    assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # loads BLAS
    return [
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    ]


def test_limit_lowers_only(no_variables):
    with threadpool_limits(2, "blas"):
        before = threads_of_blas()
        blas_threads.limit(3)
        assert threads_of_blas() == before


def test_limit_lowers(no_variables):
    with threadpool_limits(2, "blas"):
        blas_threads.limit(1)
        assert threads_of_blas() and set(threads_of_blas()) == {1}


def test_the_users_variable_wins(no_variables, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    with threadpool_limits(2, "blas"):
        before = threads_of_blas()
        blas_threads.limit(1)
        assert threads_of_blas() == before
