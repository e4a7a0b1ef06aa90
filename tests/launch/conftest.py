"""Fixtures of the tests that start programs under `mpirun`."""

import os

import pytest
import simulated_gpu
from internals import gpu
from job import Launch, version

_RANKS = [None, 1, 2, 3, 4]  # None: without mpirun
_SIMULATED_SECONDS = 120


def pytest_collection_modifyitems(items):
    for item in items:
        if "timeout" not in item.keywords:  # several jobs, on a machine that may do other work
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def launch(tmp_path):
    """Runs programs: `launch("training.py", 3)`, or `launch.start(...)`; see `job.Job`."""
    if not version():
        pytest.skip("there is no mpirun here")
    launch = Launch(tmp_path)
    yield launch
    launch.kill()


@pytest.fixture
def simulated(launch):
    """Starts programs that see simulated GPUs, with another copy of the package if given."""

    def start(program, ranks=None, *arguments, package=None, env=None, **options):
        changes = simulated_gpu.environment()
        if package is not None:
            changes["PYTHONPATH"] = f"{package}:{changes['PYTHONPATH']}"
        changes |= env or {}
        return launch(
            program,
            ranks,
            *arguments,
            env=changes,
            gpus=True,
            timeout=_SIMULATED_SECONDS,
            **options,
        )

    return start


@pytest.fixture(params=["CPU", "GPU"])
def gpus(request):
    """Whether programs see GPUs, and their numbers of ranks then (`None`: without mpirun).

    Under HPCSTRAT_TEST_GPU=simulated the GPUs are simulated.
    """
    if request.param == "CPU":
        return False, _RANKS
    if simulated_gpu.is_wanted():
        return True, _RANKS
    count = len(gpu.visible_gpus()) if gpu.has_cupy() else 0
    if count == 0:
        missing = "there is no GPU, or no CuPy"
        if os.environ.get("HPCSTRAT_TEST_GPU") == "1":
            pytest.fail(f"HPCSTRAT_TEST_GPU=1: {missing}")
        pytest.skip(missing)
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return True, [ranks for ranks in _RANKS if is_shared or (ranks or 1) <= count]
