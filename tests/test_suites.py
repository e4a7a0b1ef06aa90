"""The suites that run on several ranks: tests/parallel and the conformance kit, under mpirun."""

import pathlib
import sys

import pytest
from job import Job, mpirun

HERE = pathlib.Path(__file__).parent
SECONDS = 600  # of a suite, on a machine that does other work too
pytestmark = pytest.mark.timeout(SECONDS + 60)


def run(folder, ranks, *words):
    """Its output if it passed; pytest shows the output if the test fails."""
    command = [*mpirun(), "-n", ranks, sys.executable, *words]
    result = Job(command, folder=folder, env={"OMP_NUM_THREADS": "1"}, gpus=True).run(SECONDS)
    assert (result.status, result.leftovers) == (0, [])
    return result.out


@pytest.mark.parametrize("ranks", [3, 2])
def test_parallel(tmp_path, ranks):
    run(tmp_path, ranks, "-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "parallel")


def test_conformance(tmp_path):
    kit = HERE / "conformance"
    run(tmp_path, 2, kit / "compare.py", kit / "golden.json", kit / "cases")
