"""The programs of the host's benchmarks run to their end on small sizes. What they measure is not looked at.

They assert themselves that the ways which they compare have equal results.
"""

import importlib.util
import os
import pathlib
import re

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
NUMBER = re.compile(r"-?[\d,]+(\.\d+)?")


@pytest.fixture
def table(launch):
    """Runs a program and gives its table: the names of the columns, and rows of cells."""

    def run(program, ranks, *options):
        result = launch(BENCHMARKS / program, ranks, *options, timeout=90, env={"OMP_NUM_THREADS": "1"})
        assert (result.status, result.leftovers) == (0, []), result.stderr
        lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
        assert set(lines.pop(1)) == set("| -")
        head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert all(len(row) == len(head) for row in rows)
        return head, rows

    return run


@pytest.fixture
def mpirun(launch):
    """Options for a program that runs mpirun itself."""
    return "--mpirun", " ".join(launch.mpirun)


def check_numbers(cells):
    assert all(NUMBER.fullmatch(cell) for cell in cells), cells


def check_steps(table, ways):
    head, rows = table
    assert head[1:] == ["way", "microseconds", "ours / that", "goal"]
    assert [row[1] for row in rows] == 3 * ways
    assert [row[0] for row in rows if row[0]] == ["64-32-10, 32", "64-128-64-10, 64", "1024-2048-2048-1024, 16"]
    for row in rows:
        check_numbers(row[2:4])
        assert float(row[4] or 1) > 0


def ways_to_a_step():
    return ["ours", "in buffers", "allreduce", "window"] + ["DDP"] * (importlib.util.find_spec("torch") is not None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step(table, ranks):
    check_steps(table("host_step.py", ranks, "--rounds", "1"), ways_to_a_step())


def test_a_step_beside_tensorflow(table):
    python = os.environ.get("HPCSTRAT_TEST_TENSORFLOW")
    if python is None:
        pytest.skip("HPCSTRAT_TEST_TENSORFLOW does not name a Python that has TensorFlow")
    options = ["--rounds", "1", "--tensorflow", python]
    check_steps(table("host_step.py", 2, *options), [*ways_to_a_step(), "TensorFlow"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_single_calls(table, ranks):
    head, rows = table("calls.py", ranks, "--rounds", "1", "--calls", "10")
    assert head == ["call", "ours", "beside", "more", "goal of that"]
    assert [row[4] for row in rows] == ["10", "15", "0.5", "2", "12", "", "", ""]
    for row in rows[:5]:
        check_numbers([row[1], row[2] or "0", row[3]])
    for row in rows[5:]:
        check_numbers([row[2]])


def test_the_start(table, mpirun):
    head, rows = table("startup.py", None, "--rounds", "1", "--ranks", "2", *mpirun)
    assert head == ["until", "ours", "beside", "more", "goal of that"]
    assert [row[4] for row in rows] == ["60", "500"]
    for row in rows:
        check_numbers(row[1:])


def test_memory(table):
    head, rows = table("memory.py", 2, "--parameters", "10000", "--steps", "2")
    assert head == ["Pss of all ranks, MiB", "measured", "more than before", "expected", "unaccounted for"]
    assert [row[0].split()[0] for row in rows] == ["before", "with", "after", "peak"]
    for row in rows:
        check_numbers(row[1:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_input(table, ranks):
    head, rows = table("input.py", ranks, "--rounds", "1", "--rows", "1000")
    assert head == ["batch", "ours", "by hand", "ours of its speed", "goal"]
    assert [row[0] for row in rows] == ["128", "256"]
    for row in rows:
        check_numbers([*row[1:3], row[3].removesuffix(" %")])


def tables(output):
    """All tables of an output, each a head and rows of cells."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", output, re.MULTILINE):
        lines = block.splitlines()
        assert set(lines.pop(1)) == set("| -")
        head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        assert all(len(row) == len(head) for row in rows)
        found.append((head, rows))
    return found


def test_the_plan_for_scale(launch):
    result = launch(BENCHMARKS / "scale.py", None, "--gpus", "4")
    assert (result.status, result.leftovers) == (0, []), result.stderr
    simulation, volume, gpus, ratios, cpus, _, memory = tables(result.stdout)
    for row in simulation[1]:
        assert row[2::2] == row[3::2]
    assert {row[1] for row in volume[1]} == {"1", "2", "8", "32", "128", "1024"}
    for _, rows in (gpus, cpus, ratios):
        for row in rows:
            check_numbers(row[1:])
    assert memory[1][0][1:] == ["40.0", "20.0"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_links_are_measured(launch, ranks):
    result = launch(BENCHMARKS / "scale_links.py", ranks, "--rounds", "2", "--largest", "100000", timeout=60)
    assert (result.status, result.leftovers) == (0, []), result.stderr
    links, collectives = tables(result.stdout)
    check_numbers(links[1][0])
    assert [row[0] for row in collectives[1]] == ["1,024", "65,536", "100,000"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_growth(table, mpirun, tmp_path):
    plot = tmp_path / "growth.png"
    sizes = ["--largest", "10000", "--most-ranks", "2", "--rounds", "1"]
    head, rows = table("growth.py", None, *sizes, *mpirun, "--plot", plot)
    assert head[:3] == ["parameters", "variables", "ranks"]
    assert [row[:3] for row in rows[:2]] == [["1,000", "1", "2"], ["10,000", "1", "2"]]
    assert [row[1] for row in rows[2:-2]] == ["1", "3", "10", "30", "100", "300", "1,000"]
    assert [row[2] for row in rows[-2:]] == ["1", "2"]
    for row in rows:
        check_numbers(row)
    assert plot.read_bytes().startswith(b"\x89PNG")
