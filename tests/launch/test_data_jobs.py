"""Datasets of jobs: ranks that are killed, functions that fail."""

import pytest

pytestmark = pytest.mark.slow
PROGRAM = "data_failures.py"


@pytest.mark.parametrize("seed", range(4))
def test_no_element_is_lost_or_seen_twice_where_ranks_are_killed(launch, seed):
    options = {"launcher": "run", "options": ["--restarts", 3]}
    result = launch(PROGRAM, 2, "killed", seed, **options)
    assert (result.status, result.leftovers) == (0, []) and len(result.restarts) == 3
    assert result.out.splitlines()[-2:] == ["True 40", "end"]


@pytest.mark.parametrize("threads", [[], [2]], ids=["one thread", "two threads"])
def test_whatever_a_function_raises_on_one_rank_all_ranks_raise(launch, threads):
    result = launch(PROGRAM, 2, "raises", *threads)
    assert (result.status, result.out) == (0, "end\n")
