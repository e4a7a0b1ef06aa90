"""Fixtures of the tests that start programs under `mpirun`."""

import importlib.util
import os

import pytest
import simulated_gpu
from internals import gpu
from job import Launch, version

_RANKS = [None, 1, 2, 3, 4]  # None: without mpirun
_SIMULATED_SECONDS = 240


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


@pytest.fixture(params=["CPU", pytest.param("GPU", marks=pytest.mark.gpu)])
def place(request, launch):
    """Runs programs on the CPU, and on GPUs: `place("training.py", 3)`.

    Under HPCSTRAT_TEST_GPU=simulated the GPUs are simulated.
    """
    if request.param == "CPU":
        return _Place(launch, False, _RANKS)
    if simulated_gpu.is_wanted():
        return _Place(launch, True, _RANKS)
    count = len(gpu.visible_gpus()) if gpu.has_cupy() else 0
    if count == 0:
        missing = "there is no GPU, or no CuPy"
        if os.environ.get("HPCSTRAT_TEST_GPU") == "1":
            pytest.fail(f"HPCSTRAT_TEST_GPU=1: {missing}")
        pytest.skip(missing)
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return _Place(launch, True, [n for n in _RANKS if is_shared or (n or 1) <= count])


class _Place:
    """Where programs compute.

    Attributes:
        has_gpus: whether they see GPUs.
        ranks: the numbers of ranks that have one each. None: without mpirun.
    """

    def __init__(self, launch, has_gpus, ranks):
        self._launch = launch
        self.has_gpus = has_gpus
        self.ranks = ranks

    def __call__(self, program, ranks=None, *arguments, **options):
        return self._launch(program, ranks, *arguments, gpus=self.has_gpus, **options)

    def choose(self, *ranks):
        """Those of the numbers of ranks for which there are GPUs, at least 1."""
        return [n for n in ranks if n in self.ranks] or [1]

    def skip_unless_it_has(self, library):
        """Skips a test of `torch` or `jax`, or of neither, that cannot compute here."""
        if library not in ("torch", "jax"):
            return
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
        if self.has_gpus and simulated_gpu.is_wanted():
            pytest.skip(f"{library} does not know simulated GPUs")
        if self.has_gpus and not _has_cuda(library):
            pytest.skip(f"{library} is installed without CUDA")


def _has_cuda(library):
    # How it was built: CUDA must not start in the process of the tests.
    if library == "torch":
        import torch  # pyright: ignore[reportMissingImports]

        return torch.version.cuda is not None
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
