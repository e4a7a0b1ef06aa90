"""What one replica gets wrong, values and steps of any kind, damaged files, and a long run."""

import pathlib
import re

import pytest

slow = pytest.mark.slow
SOAK = pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_odd_values(launch):
    names = ["wrong_calls", "writes"]
    result = launch("odd_values.py", 3, *names)
    assert (result.status, result.out.split()) == (0, names)


@slow
def test_odd_layouts_and_dtypes_have_numpys_results(launch):
    result = launch("odd_values.py", 3, "layouts")
    assert (result.status, result.out.split()) == (0, ["layouts"])


@pytest.mark.parametrize(
    "ranks, seeds",
    [(2, [0]), *(pytest.param(n, range(n, 12, 3), marks=slow) for n in (2, 3, 4))],
    ids=str,
)
def test_any_steps_have_the_same_bits_with_each_strategy(launch, ranks, seeds):
    result = launch("any_steps.py", ranks, *seeds)
    assert (result.status, result.out, result.err) == (0, "the same\n", "")


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=slow)])
def test_a_damaged_checkpoint_changes_nothing(launch, count):
    result = launch("damaged.py", 2, count)
    assert (result.status, result.out) == (0, "as it was\n")


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
