"""The benchmarks run to their end on small sizes and print a table.

What they measure is not checked. They themselves assert that the alternatives which they compare
have equal results.
"""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import simulated_gpu

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
# On these numbers of ranks; None: it starts mpirun itself.
SMALL = {
    "host_step.py": ([1, 2], "--rounds 1"),
    "calls.py": ([1, 2], "--rounds 1 --calls 10"),
    "checkpoint.py": ([1, 3], "--rounds 1 --elements 30000"),
    "memory.py": ([2], "--parameters 10000 --steps 2"),
    "input.py": ([1, 2], "--rounds 1 --rows 1000"),
    "hosts_step.py": ([2], "--rounds 1 --link lo"),
    "startup.py": ([None], "--rounds 1 --ranks 2"),
    "many_ranks.py": ([None], "--rounds 1 --calls 2 --ranks 2 --hosts 1"),
    "growth.py": ([None], "--largest 10000 --most-ranks 2 --rounds 1"),
}
on_simulated_gpus = pytest.mark.skipif(
    not simulated_gpu.is_available(), reason="there is no C++ compiler"
)


def rows_of(result):
    """The rows of the table that a program prints, each with a cell for each heading."""
    assert (result.status, result.leftovers) == (0, []), result.err
    lines = re.findall(r"^\|(.*)\|$", result.out, re.MULTILINE)
    lines = [line.split("|") for line in lines]
    assert len(lines) > 2 and {len(cells) for cells in lines} == {len(lines[0])}
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


def rows(launch, program, ranks, *options):
    return rows_of(launch(BENCHMARKS / program, ranks, *options, env={"OMP_NUM_THREADS": "1"}))


@pytest.mark.slow
@pytest.mark.parametrize("program", SMALL)
def test_on_small_sizes(launch, tmp_path, program):
    numbers, options = SMALL[program]
    options = options.split()
    if numbers == [None]:
        options += ["--mpirun", " ".join(launch.mpirun)]
    if program == "host_step.py" and "HPCSTRAT_TEST_TENSORFLOW" in os.environ:
        options += ["--tensorflow", os.environ["HPCSTRAT_TEST_TENSORFLOW"]]
    plot = tmp_path / "growth.png"
    draws = program == "growth.py" and importlib.util.find_spec("matplotlib") is not None
    if draws:
        options += ["--plot", plot]
    for ranks in numbers:
        rows(launch, program, ranks, *options)
    assert not draws or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_on_emulated_hosts(launch):
    """In network namespaces, which know only each other's addresses."""
    if launch.open_mpi or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("it takes MPICH, root, and iproute2")
    program = sys.executable, BENCHMARKS / "hosts_step.py", "--rounds", 1
    found = rows(launch, "emulated_hosts.py", None, "--hosts", 2, "--ranks", 3, *program)
    megabytes = {row[0]: float(row[3]) for row in found}
    # Each host sends what its ranks need of the other's sum, and then the results of its own
    # ranks: together once the whole.
    assert 33.5 < megabytes["ours"] < 34.5
    assert "10.77.0." not in subprocess.check_output(["ip", "netns"], text=True)


# ---- on GPUs


@pytest.mark.gpu
@on_simulated_gpus
def test_the_counts_of_a_step(simulated):
    """They do not depend on the machine, so the goals are bounds."""
    found = rows_of(simulated(BENCHMARKS / "calls.py", 2, "--simulated-gpu"))
    # Gradients are packed, summed, and applied, and new values are sent; or packed and copied.
    expected = {"central": 4, "in host memory": 3, "mirrored": 3}
    assert {row[0] for row in found} == expected.keys()
    for strategy, optimizer, _, calls, goal, launches, *_ in found:
        of_norms = 3 * (optimizer == "clipped" and strategy != "in host memory")
        assert int(launches) == expected[strategy] + of_norms, (strategy, optimizer)
        assert int(calls) <= int(goal or sys.maxsize), (strategy, optimizer)


def hazards(launch, simulated, *parts):
    """What benchmarks/gpu_hazards.py shows in some of its parts: (part, case) -> text."""
    log = launch.folder / "log"
    words = "--parts", *parts, "--log", log
    env = {"MPIRUN": " ".join(launch.mpirun)}
    found = rows_of(simulated(BENCHMARKS / "gpu_hazards.py", None, *words, env=env))
    assert tuple(dict.fromkeys(part for part, *_ in found)) == parts
    assert all(path.read_text() for path in log.glob("*.log"))
    return {(part, case): text for part, case, text, _ in found}


@pytest.mark.gpu
@on_simulated_gpus
def test_hazards_of_gpus(launch, simulated):
    seen = hazards(launch, simulated, "queue", "events", "calls")
    assert "cannot be simulated" in seen["queue", "all"]
    assert {f"connect={connect}, allReduce" for connect in "01"} <= {case for _, case in seen}


@pytest.mark.slow
@pytest.mark.gpu
@on_simulated_gpus
def test_hazards_that_end_jobs(launch, simulated):
    seen = hazards(launch, simulated, "hangs", "kills")
    assert seen.pop(("kills", "SIGKILL of rank 2")).startswith("the launcher ends after ")
    restarts = seen.pop(("kills", "hpcstrat run --restarts 2"))
    assert restarts.startswith("1 restarts, trains after ")
    hangs = r"report after [\d.]+ s, end after [\d.]+ s; status [1-9]\d*, no process stayed"
    found = [text for (part, _), text in seen.items() if part == "hangs"]
    assert len(found) == 3 and all(re.fullmatch(hangs, text) for text in found), seen
