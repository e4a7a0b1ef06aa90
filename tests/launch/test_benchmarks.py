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
from slow import slow_but

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "host_step.py": ([1, 2], "--rounds 1"),
    "calls.py": ([1, 2], "--rounds 1 --calls 10"),
    "checkpoint.py": ([1, 3], "--rounds 1 --elements 30000"),
    "memory.py": ([2], "--parameters 10000 --steps 2"),
    "input.py": ([1, 2], "--rounds 1 --rows 1000"),
    "hosts_step.py": ([2], "--rounds 1 --link lo"),
}
START_MPIRUN = {
    "startup.py": "--rounds 1 --ranks 2",
    "many_ranks.py": "--rounds 1 --calls 2 --ranks 2 --hosts 1",
    "growth.py": "--largest 10000 --most-ranks 2 --rounds 1",
}


@pytest.fixture
def rows(launch):
    """Runs a program and returns the rows of its table, each with a cell for each heading."""

    def run(program, ranks, *options):
        env = {"OMP_NUM_THREADS": "1"}
        result = launch(BENCHMARKS / program, ranks, *options, timeout=90, env=env)
        assert (result.status, result.leftovers) == (0, []), result.stderr
        return rows_of(result.stdout)

    return run


def rows_of(text):
    """The cells of the table in a text."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len(lines) > 2 and {len(cells) for cells in lines} == {len(lines[0])}
    return [[cell.strip() for cell in cells] for cells in lines[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, ranks", [(program, ranks) for program, (runs, _) in SMALL.items() for ranks in runs]
)
def test_under_mpirun(rows, program, ranks):
    rows(program, ranks, *SMALL[program][1].split())


@pytest.mark.slow
@pytest.mark.parametrize("program", START_MPIRUN)
def test_that_starts_mpirun(launch, rows, program, tmp_path):
    plot = tmp_path / "growth.png"
    options = ["--plot", plot] if program == "growth.py" else []
    if options and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    rows(
        program, None, *START_MPIRUN[program].split(), "--mpirun", " ".join(launch.mpirun), *options
    )
    assert not options or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_on_emulated_hosts(launch, rows):
    """In network namespaces, which know only each other's addresses."""
    if launch.open_mpi or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("it takes MPICH, root, and iproute2")
    options = "--hosts 2 --ranks 3", sys.executable, BENCHMARKS / "hosts_step.py", "--rounds 1"
    found = rows("emulated_hosts.py", None, *" ".join(map(str, options)).split())
    megabytes = {row[0]: float(row[3]) for row in found}
    # Each host sends what its ranks need of the other's sum, and then the results of its own
    # ranks: together once the whole.
    assert 33.5 < megabytes["ours"] < 34.5
    assert "10.77.0." not in subprocess.check_output(["ip", "netns"], text=True)


@pytest.mark.slow
def test_a_step_beside_tensorflow(rows):
    python = os.environ.get("HPCSTRAT_TEST_TENSORFLOW")
    if python is None:
        pytest.skip("HPCSTRAT_TEST_TENSORFLOW does not name a Python that has TensorFlow")
    found = rows("host_step.py", 2, "--rounds", "1", "--tensorflow", python)
    assert "TensorFlow" in {row[1] for row in found}


# ---- on GPUs


@pytest.mark.gpu
@pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")
def test_the_counts_of_a_step(simulated):
    """They do not depend on the machine, so the goals are bounds."""
    result = simulated(BENCHMARKS / "calls.py", 2, "--simulated-gpu")
    assert (result.status, result.leftovers) == (0, []), result.stderr
    found = rows_of(result.stdout)
    # Gradients are packed, summed, and applied, and new values are sent. Or they are packed, and
    # copied to the host, and new values are copied from there.
    expected = {"central": 4, "in host memory": 3, "mirrored": 3}
    assert {row[0] for row in found} == expected.keys()
    for strategy, optimizer, arrays, calls, goal, launches, *_ in found:
        what, of_norms = (strategy, optimizer, arrays), 0
        if optimizer == "clipped" and strategy != "in host memory":
            of_norms = 3
        assert int(launches) == expected[strategy] + of_norms, what
        assert int(calls) <= int(goal or sys.maxsize), what


HANGS = r"report after [\d.]+ s, end after [\d.]+ s; status [1-9]\d*, no process stayed"


@pytest.mark.gpu
@pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    "parts", slow_but(["queue events calls"], ["queue events calls", "hangs", "kills"])
)
def test_hazards_of_gpus(launch, simulated, parts, tmp_path):
    env, log = {"MPIRUN": " ".join(launch.mpirun)}, tmp_path / "log"
    result = simulated(
        BENCHMARKS / "gpu_hazards.py", None, "--parts", *parts.split(), "--log", log, env=env
    )
    assert (result.status, result.leftovers) == (0, []), result.stdout
    seen = {(part, case): text for part, case, text, _ in rows_of(result.stdout)}
    assert " ".join(dict.fromkeys(part for part, _ in seen)) == parts
    if parts == "hangs":
        assert len(seen) == 3 and all(re.fullmatch(HANGS, text) for text in seen.values()), seen
    elif parts == "kills":
        assert seen["kills", "SIGKILL of rank 2"].startswith("the launcher ends after ")
        assert seen["kills", "hpcstrat run --restarts 2"].startswith("1 restarts, trains after ")
    else:
        assert "cannot be simulated" in seen["queue", "all"]
        assert {f"connect={connect}, allReduce" for connect in "01"} <= {case for _, case in seen}
    assert all(path.read_text() for path in log.glob("*.log"))
