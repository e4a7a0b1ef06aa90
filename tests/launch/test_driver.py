"""GPUs that cannot be used, for their driver or for want of CuPy, are an error on all ranks."""

import pathlib

import pytest
import simulated_gpu
from slow import slow_but

pytestmark = pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")

PLACES = """
import hpcstrat as hs

print(hs.{strategy})
"""
MODULE = pathlib.Path("-m")
NAMES = {
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "nvidia-smi"),
    802: ("CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
    805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", "nvidia-cuda-mps-control"),
    807: ("CUDA_ERROR_MPS_SERVER_NOT_READY", "nvidia-cuda-mps-control"),
    808: ("an error without a name", "CUDA_MPS_LOG_DIRECTORY"),
    999: ("CUDA_ERROR_UNKNOWN", "dmesg"),
}


@pytest.mark.parametrize(
    "where", slow_but(["802@1"], ["802", "802@0", *(f"{one}@1" for one in NAMES)])
)
def test_no_rank_computes_on_the_cpu_unasked(simulated, where):
    status = int(where.partition("@")[0])
    result = simulated(
        PLACES.format(strategy="CentralStorageStrategy()"), 2, env={"SIMULATED_CUINIT": where}
    )
    assert result.status != 0 and result.stdout == "" and result.leftovers == []
    name, remedy = NAMES[status]
    assert f"NVIDIA's driver does not start: cuInit fails with {name} ({status}); " in result.stderr
    assert remedy in result.stderr and "compute_devices=['CPU:0', ...]" in result.stderr


@pytest.mark.parametrize(
    "strategy",
    ["MirroredStrategy()", "MultiWorkerMirroredStrategy()", "OneDeviceStrategy('GPU:0')"],
)
def test_other_strategies_say_so_too(simulated, strategy):
    result = simulated(PLACES.format(strategy=strategy), None, env={"SIMULATED_CUINIT": "802"})
    assert (
        result.status == 1
        and f"{strategy.partition('(')[0]}: NVIDIA's driver does not start: " in result.stderr
    )


NO_GPU = {
    "there is no device": ({"SIMULATED_CUINIT": "100"}, ""),
    "the library is a stub": ({"SIMULATED_CUINIT": "34"}, ""),
    "the CPU is named": ({"SIMULATED_CUINIT": "802"}, "['CPU:0', 'CPU:0']"),
    "all GPUs are hidden": ({"SIMULATED_CUINIT": "802", "CUDA_VISIBLE_DEVICES": ""}, ""),
}


@pytest.mark.parametrize("why", slow_but(["there is no device", "the CPU is named"], NO_GPU))
def test_without_a_gpu_replicas_are_on_the_cpu(simulated, why):
    env, devices = NO_GPU[why]
    result = simulated(PLACES.format(strategy=f"CentralStorageStrategy({devices})"), 2, env=env)
    assert (result.status, result.stdout) == (
        0,
        "CentralStorageStrategy(2 replicas on CPU:0, variables on CPU:0)\n",
    )


WITHOUT_CUPY = """
import importlib.util

import numpy as np
import hpcstrat as hs

find_spec = importlib.util.find_spec
if hs.rank() in {missing}:
    importlib.util.find_spec = lambda name, *rest: None if name == "cupy" else find_spec(name, *rest)
"""
REFUSED = """
try:
    hs.{strategy}()
except RuntimeError as error:
    print(error)
else:
    print("made")
strategy = hs.CentralStorageStrategy(compute_devices=["CPU:0"] * hs.size())
print(float(strategy.reduce("SUM", strategy.run(lambda: 10.0 ** hs.rank()), axis=None)))
"""


@pytest.mark.parametrize(
    ("strategy", "missing", "ranks"),
    [
        pytest.param("MirroredStrategy", (0, 1), "ranks 0, 1", id="on all ranks"),
        pytest.param("MultiWorkerMirroredStrategy", (1,), "rank 1", id="on one"),
    ],
)
def test_gpus_without_cupy_are_an_error_on_all_ranks(simulated, strategy, missing, ranks):
    program = WITHOUT_CUPY.format(missing=missing)
    result = simulated(
        program + REFUSED.format(strategy=strategy), 2, env={"HPCSTRAT_OUTPUT": "all"}
    )
    assert (result.status, result.stderr) == (0, "")
    errors = [line for line in result.stdout.splitlines() if "CuPy" in line]
    assert len(errors) == 2 and result.stdout.count("11.0") == 2
    for error in errors:
        assert f"{strategy}: there are GPUs, and CuPy, " in error
        assert f"is not installed for {ranks}: `pip install '.[cuda12]'`" in error
        assert "(compute_devices=['CPU:0', ...]), or set CUDA_VISIBLE_DEVICES to nothing" in error


ON_THE_CPU = """
v = hs.Variable(np.ones(3, np.float32))
optimizer = hs.optimizers.SGD(0.5)
optimizer.apply_gradients([(np.ones(3, np.float32), v)])
total = sum(int(x) for x in hs.data.Dataset.range(8).map(lambda x: x + 1))
print(hs.get_strategy().extended.worker_devices[0][-5:], v.numpy(), total)
"""


def test_without_a_strategy_nothing_needs_cupy(simulated):
    result = simulated(WITHOUT_CUPY.format(missing=(0,)) + ON_THE_CPU)
    assert (result.status, result.stdout, result.stderr) == (0, "CPU:0 [0.5 0.5 0.5] 36\n", "")


DATA = """
import cupy
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy(["CPU:0"])
numbers = hs.data.Dataset.range(8).map(lambda x: x + 1, num_parallel_calls=2)
print(sum(int(x) for x in numbers))
"""


def test_a_dataset_on_the_cpu_does_not_ask_the_driver(simulated):
    result = simulated(DATA, None, env={"SIMULATED_CUINIT": "802"})
    assert (result.status, result.stdout) == (0, "36\n")


def test_info_names_the_driver_s_error_and_a_remedy(simulated):
    result = simulated(MODULE, 2, "hpcstrat", "info", env={"SIMULATED_CUINIT": "802@1"})
    assert result.status == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("wrong: ")]
    assert "cuInit fails with CUDA_ERROR_SYSTEM_NOT_READY (802)" in line
    assert "start the fabric manager" in line and line.endswith(" (rank 1)")
