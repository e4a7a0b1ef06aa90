"""Fixtures of the tests that run on any number of ranks, on the CPU and on GPUs."""

import os
import sys

import numpy as np
import pytest
import simulated_gpu
from internals import function, gpu
from strategies import STRATEGIES

import hpcstrat as hs

if simulated_gpu.is_wanted():
    simulated_gpu.enter()


class Place:
    """Where the replicas of a test compute: all on the CPU, or each on a GPU.

    Attributes:
        kind: "CPU" or "GPU".
        xp: numpy or cupy.
        devices: the device string of each rank.
    """

    def __init__(self, kind, xp, devices):
        self.kind = kind
        self.xp = xp
        self.devices = devices

    def make(self, strategy, *arguments):
        """A strategy of this class on these devices."""
        if issubclass(strategy, hs.OneDeviceStrategy):
            return strategy(self.devices[0])
        return strategy(self.devices, *arguments)

    def __repr__(self):
        return self.kind


@pytest.fixture(scope="session", params=["CPU", pytest.param("GPU", marks=pytest.mark.gpu)])
def place(request):
    """Runs a test on the CPU, and again on GPUs, with the same lines.

    A missing GPU skips; under HPCSTRAT_TEST_GPU=1, which a run on a machine with GPUs sets, it
    fails. Under HPCSTRAT_TEST_GPU=simulated there are simulated ones, whatever the machine has.
    """
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    if request.param == "CPU":
        yield Place("CPU", np, ["CPU:0"] * size)
        return
    # A launcher may show each rank only its own GPU.
    count = len(set().union(*MPI.COMM_WORLD.allgather(gpu.visible_gpus())))
    is_shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if count == 0:
        missing = "there is no GPU"
    elif not gpu.has_cupy():
        missing = "CuPy is not installed"
    elif count < size and not is_shared:
        gpus = f"{count} GPU{'s' * (count > 1)}"
        missing = f"{size} ranks and {gpus}; launch/share-gpu lets ranks share one"
    else:
        found = Place(
            "GPU", gpu.load_cupy("a test"), [f"GPU:{rank % count}" for rank in range(size)]
        )
        with found.make(hs.MirroredStrategy):  # keeps the GPUs connected from test to test
            yield found
        return
    if os.environ.get("HPCSTRAT_TEST_GPU") == "1":
        pytest.fail(f"HPCSTRAT_TEST_GPU=1: {missing}")
    pytest.skip(missing)


@pytest.fixture(autouse=True)
def _gpus_only_where_they_are_wanted(request, monkeypatch):
    """Hides GPUs from tests on the CPU: there may be fewer than ranks, or no CuPy for them.

    In the package only: CUDA reads CUDA_VISIBLE_DEVICES once, for later tests too.
    """
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(gpu, "visible_gpus", lambda: ())


if simulated_gpu.is_wanted():

    @pytest.fixture(autouse=True)
    def _nothing_went_wrong_on_the_simulated_gpu():
        """Fails a test in which the simulation found an error that something caught."""
        yield
        checker = sys.modules.get("cupy._checker")
        if checker is not None and checker.found:
            found = checker.found.copy()
            checker.found.clear()
            raise found[0]


@pytest.fixture(params=STRATEGIES)
def strategy(request, place):
    """One of each kind for several replicas, closed after the test."""
    with place.make(request.param) as made:
        yield made


@pytest.fixture
def mirrored(place):
    """A `MirroredStrategy`, closed after the test."""
    with place.make(hs.MirroredStrategy) as made:
        yield made


@pytest.fixture
def no_foreign_module(monkeypatch):
    """Lets hs.function make graphs, though another test has imported PyTorch or JAX."""
    monkeypatch.setattr(function, "FOREIGN", ())


@pytest.fixture
def xp(place):
    """The array module of the replicas."""
    return place.xp
