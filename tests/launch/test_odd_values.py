"""Errors of any kind, steps of any kind, and a long run."""

import pathlib
import re

import pytest

slow = pytest.mark.slow
SOAK = pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py"


@slow
def test_whatever_a_function_raises_on_one_rank_all_ranks_raise(launch):
    result = launch("odd_exceptions.py", 2)
    assert (result.status, result.out) == (0, "all raised\n")


@pytest.mark.parametrize("ranks, seeds", [(2, [0]), pytest.param(3, range(1, 12), marks=slow)])
def test_any_steps_have_the_same_bits_with_each_strategy(launch, ranks, seeds):
    result = launch("any_steps.py", ranks, *seeds)
    assert (result.status, result.out, result.err) == (0, "the same\n", "")


@slow
@pytest.mark.parametrize(
    "ranks, options, status, said",
    [
        (3, ["--steps", 20_000], 0, r"\| 20,000 \| [\d,.]+ \| \d+ \|\n"),
        (2, ["--steps", 2000, "--leak", 10000], 1, r"grown by [\d.]+ MiB"),
        (2, ["--steps", 100, "--lose-files"], 1, r"grown by [-\d.]+ MiB and \d+ open files"),
    ],
    ids=["nothing grows", "a leak", "an open file"],
)
def test_a_long_run_grows_or_not(launch, ranks, options, status, said):
    """The soak program with few steps notices growth."""
    result = launch(SOAK, ranks, *options, env={"OMP_NUM_THREADS": "1"}, timeout=200)
    assert (result.status, result.leftovers) == (status, [])
    assert re.search(said, result.out) and (status or result.err == "")
