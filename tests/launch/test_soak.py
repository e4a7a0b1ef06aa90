"""The soak program with few steps: it succeeds, and notices growth."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.slow
SOAK = pathlib.Path(__file__).parents[2] / "benchmarks" / "soak.py"
ROW = r"\| ([\d,]+) \| ([\d,.]+) \| (\d+) \|\n"


def test_nothing_grows(launch):
    result = launch(SOAK, 3, "--steps", "3000", timeout=60, env={"OMP_NUM_THREADS": "1"})
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    rows = re.findall(ROW, result.stdout)
    assert [steps for steps, _, _ in rows] == ["300", "1,500", "3,000"]
    assert len({files for _, _, files in rows}) == 1


def test_a_leak_is_noticed(launch):
    result = launch(
        SOAK, 2, "--steps", "2000", "--leak", "10000", timeout=60, env={"OMP_NUM_THREADS": "1"}
    )
    assert result.status == 1
    assert re.search(r"grown by [\d.]+ MiB", result.stdout)
    assert result.leftovers == []


def test_an_open_file_is_noticed(launch):
    result = launch(
        SOAK, 2, "--steps", "100", "--lose-files", timeout=60, env={"OMP_NUM_THREADS": "1"}
    )
    assert result.status == 1
    assert re.search(r"grown by [-\d.]+ MiB and \d+ open files", result.stdout)
    assert result.leftovers == []
