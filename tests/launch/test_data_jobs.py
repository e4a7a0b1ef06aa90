"""Datasets of jobs: ranks that are killed, functions that fail, end a rank or block."""

import pytest

pytestmark = pytest.mark.slow
PROGRAM = "data_failures.py"
ENDS = ["sys.exit(0)", "os._exit(0)", "raise KeyboardInterrupt", "raise GeneratorExit"]


@pytest.mark.parametrize("seed", range(4))
def test_no_element_is_lost_or_seen_twice_where_ranks_are_killed(launch, seed):
    options = {"launcher": "run", "options": ["--restarts", 3]}
    result = launch(PROGRAM, 2, "killed", seed, **options)
    assert (result.status, result.leftovers) == (0, []) and len(result.restarts) == 3
    assert result.out.splitlines()[-2:] == ["True 40", "end"]


@pytest.mark.parametrize("threads", ["none", 2])
def test_whatever_a_function_raises_on_one_rank_all_ranks_raise(launch, threads):
    result = launch(PROGRAM, 2, "raises", threads)
    assert (result.status, result.out) == (0, "end\n")


@pytest.mark.parametrize("how, threads", [(how, 2) for how in ENDS] + [(ENDS[0], "none")])
def test_a_function_that_ends_one_rank_ends_all(launch, how, threads):
    result = launch(PROGRAM, 2, "ends", threads, how)
    assert result.status != 0 and "end" not in result.out and result.leftovers == []


@pytest.mark.parametrize("source", ["generator", "function", "threads"])
def test_what_blocks_on_one_rank_ends_the_job_and_is_named(launch, source):
    limits = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}
    result = launch(PROGRAM, 2, "blocks", source, env=limits)
    assert result.status != 0 and PROGRAM in result.err and "rank 1" in result.err
