"""GPUs that fail, hang or cannot be used: the job ends and says why, and no rank goes on alone."""

import re

import pytest
import simulated_gpu

pytestmark = pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")

HANGS_SOON = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}


@pytest.fixture
def failing(simulated):
    """Runs a program that must end with an error, and returns what it says."""

    def run(faults, program, ranks=2, *arguments, **env):
        env |= HANGS_SOON | {"SIMULATED_GPU_FAULTS": faults}
        result = simulated(program, ranks, *arguments, env=env)
        assert result.status != 0 and result.out == "" and result.leftovers == []
        return result.err

    return run


# ---- a fault on one rank

FAULTS = {
    "nccl-fails@1:30:2": "NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_SYSTEM_ERROR: ",
    "nccl-fails:1:1": "NCCL_ERROR_UNHANDLED_CUDA_ERROR: ",
    "nccl-fails@0:30:7": "NCCL failed on rank 0 of 2: KeyError(7)",
    "nccl-breaks@1:30:6": "the job ends: NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_REMOTE_ERROR: ",
    "nccl-breaks@0:30:8": "the job ends: NCCL failed on rank 0 of 2: KeyError(8)",
    "nccl-start-fails@0:1:8": "NCCL failed on rank 0 of 2: KeyError(8)",
    **{f"out-of-memory@{n % 2}:{n}": "MemoryError: " for n in (1, 4, 30, 151, 400)},
    "out-of-memory:30": "MemoryError: ",
    "out-of-pinned@1:1": "bytes of pinned host memory: ",
    "out-of-pinned@0:5": "bytes of pinned host memory: ",
    "compile@1:1": "CompileException: ",
    "compile@0:3": "CompileException: ",
    "context@1:3": "cudaErrorIllegalAddress: ",
    "context@0:40": "cudaErrorIllegalAddress: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_any_rank_ends_all_of_them_and_is_named(failing, fault):
    said = failing(fault, "gpu_training.py")
    assert FAULTS[fault] in said and "waiting for each other" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["nccl-start-fails@1:1:2", "nccl-fails@1:4:2"])
def test_nccl_that_fails_on_one_rank_at_its_start(failing, fault):
    """The other may never return from it."""
    said = failing(fault, "gpu_starts.py")
    assert "[rank 1] cupy.cuda.nccl.NcclError: NCCL_ERROR_SYSTEM_ERROR" in said
    assert re.search(r"the job ends: NCCL failed on rank 1 of 2: .*NCCL_P2P_DISABLE=1", said)
    assert "waiting for each other" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("rank", ["", "@1"], ids=["on all ranks", "on one rank"])
def test_a_program_cannot_go_on_after_a_failure_of_nccl(failing, rank):
    """In a call that the ranks had agreed on: the others may be in it for good."""
    program = """
        import cupy
        import hpcstrat as hs

        strategy = hs.MirroredStrategy()
        for _ in range(100):
            try:
                strategy.reduce("SUM", strategy.run(lambda: cupy.ones(3)), axis=None)
            except Exception:
                print("caught")
    """
    said = failing(f"nccl-fails{rank}:30:2", program)
    assert "the job ends: NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_SYSTEM_ERROR" in said


@pytest.mark.gpu
def test_a_context_that_is_lost_where_no_step_waits_for_the_gpu(failing):
    """The host looks at the GPU from time to time, and raises what is wrong; also at the end."""
    said = failing("", "gpu_hangs.py", 2, "lost context")
    assert "cudaErrorIllegalAddress: " in said and "apply_gradients" in said
    at_the_end = """
        import cupy
        import hpcstrat as hs

        strategy = hs.MirroredStrategy()
        strategy.run(lambda: strategy.xp.ones(3) * 2)
        if hs.rank() == 1:
            cupy._faults.lose_context()
    """
    assert "cudaErrorIllegalAddress: " in failing("", at_the_end, 3)


# ---- GPUs that hang, and hosts that wait for them: in NCCL, in the program, in the driver

FEW_LAUNCHES = {"SIMULATED_GPU_LAUNCHES": "100"}
HANGS = {
    "a kernel of the program": ("own kernel", "", {}),
    "a kernel of NCCL on one rank": ("steps", "nccl-hangs@1:40", {}),
    "a kernel of NCCL on all ranks": ("steps", "nccl-hangs:40", {}),
    "a host in NCCL": ("steps", "nccl-blocks@1:40", {}),
    "all hosts in NCCL": ("steps", "nccl-blocks:40", {}),
    "all hosts in a launch": ("many launches", "nccl-hangs:9", FEW_LAUNCHES),
    "a graph on one rank": ("graph", "nccl-hangs@1:40", {}),
    "a graph in a launch": ("graph", "nccl-hangs:40", FEW_LAUNCHES),
    "a kernel of NCCL whose result hosts read": ("reads", "nccl-hangs:40", {}),
}


def check_that_a_hang_was_reported(said):
    waiting = "the ranks have been waiting for each other for"
    assert f"hpcstrat: {waiting} 1 s" in said and f"hpcstrat: the job ends: {waiting} 3 s" in said
    assert "Python's lock" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_is_reported_and_ended(failing, hang):
    way, faults, env = HANGS[hang]
    said = failing(faults, "gpu_hangs.py", 2, way, **env)
    check_that_a_hang_was_reported(said)
    assert "without a CUDA graph" not in said


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nccl-hangs:30", "nccl-hangs@1:30"])
def test_a_hang_while_the_host_is_in_none_of_the_librarys_calls(failing, fault):
    check_that_a_hang_was_reported(failing(fault, "gpu_training.py"))


AT_THE_START = "nccl-start-hangs@1:1", "nccl-start-hangs:1", "nccl-blocks@0:2", "nccl-hangs@1:3"


@pytest.mark.gpu
@pytest.mark.parametrize("fault", AT_THE_START)
def test_nccl_that_hangs_at_its_start(failing, fault):
    said = failing(fault, "gpu_starts.py")
    assert "the job ends: the ranks have been waiting for each other for 3 s" in said
    where = r"ranks? [01].*: waiting in .*, starting NCCL\(.*NCCL_P2P_DISABLE=1"
    assert re.search(where, said)


# ---- GPUs that cannot be used


@pytest.mark.gpu
def test_nccl_that_is_too_old(simulated):
    """An error of several ranks, which may go on without GPUs; one rank needs no NCCL."""
    old = {"SIMULATED_NCCL_VERSION": "20906", "HPCSTRAT_OUTPUT": "all"}
    result = simulated("gpu_starts.py", 2, env=old)
    assert (result.status, result.err, result.leftovers) == (0, "", [])
    assert result.out.count("  ranks 0, 1: NCCL is 2.9.6, and hpcstrat needs 2.10.0") == 2
    assert result.out.count("Or start one rank, or name 'CPU:0' for each rank") == 2
    assert result.out.count("MirroredStrategy(2 replicas on CPU:0)") == 2
    result = simulated("gpu_training.py", 1, env=old)
    assert (result.status, result.out, result.leftovers) == (0, "trained\n", [])


REMEDIES = {
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "nvidia-smi"),
    802: ("CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
    805: ("CUDA_ERROR_MPS_CONNECTION_FAILED", "nvidia-cuda-mps-control"),
    807: ("CUDA_ERROR_MPS_SERVER_NOT_READY", "nvidia-cuda-mps-control"),
    808: ("an error without a name", "CUDA_MPS_LOG_DIRECTORY"),
    999: ("CUDA_ERROR_UNKNOWN", "dmesg"),
}


@pytest.fixture
def refusals(simulated):
    """What strategies say of GPUs that none can use: on every rank the same, of each strategy."""

    def run(ranks=2, without_cupy="none", **env):
        env["HPCSTRAT_OUTPUT"] = "all"
        result = simulated("gpu_devices.py", ranks, without_cupy, env=env)
        assert (result.status, result.err, result.leftovers) == (0, "", [])
        *others, last = sorted(result.out.splitlines())
        assert last == f"on the CPU: {sum(10.0**rank for rank in range(ranks or 1))} 36"
        found = re.findall(r"^(\w+)\(\): \1: (.*?)(?: \(found by rank 1\))?$", result.out, re.M)
        names = {"CentralStorageStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"}
        assert len(found) == 3 * (ranks or 1) and {name for name, _ in found} == names, found
        (said,) = {text for _, text in found}
        assert "(compute_devices=['CPU:0', ...])" in said
        return said, others

    return run


def check_that_the_driver_is_named(text, status):
    name, remedy = REMEDIES[status]
    assert f"NVIDIA's driver does not start: cuInit fails with {name} ({status}); " in text
    assert remedy in text


def test_no_rank_computes_on_the_cpu_unasked(refusals):
    said, _ = refusals(SIMULATED_CUINIT="802@1")
    check_that_the_driver_is_named(said, 802)


def test_gpus_without_cupy_on_one_rank_are_an_error_on_all(refusals):
    said, _ = refusals(without_cupy="1")
    assert "there are GPUs, and CuPy, " in said
    assert "is not installed for rank 1: `pip install '.[cuda12]'`" in said
    assert "or set CUDA_VISIBLE_DEVICES to nothing" in said


def test_without_a_strategy_nothing_asks_for_gpus(refusals):
    said, lines = refusals(None, SIMULATED_CUINIT="802")
    assert "[0.5 0.5 0.5] 36" in lines
    assert f"OneDeviceStrategy('GPU:0',): OneDeviceStrategy: {said[:40]}" in "\n".join(lines)


@pytest.mark.slow
def test_each_error_of_the_driver_has_a_remedy(refusals):
    for number, status in enumerate(REMEDIES):
        said, _ = refusals(SIMULATED_CUINIT=f"{status}{('', '@0')[number % 2]}")
        check_that_the_driver_is_named(said, status)
    said, _ = refusals(without_cupy="01")
    assert "is not installed for ranks 0, 1: `pip" in said


NONE = {
    "no device": {"SIMULATED_CUINIT": "100"},
    "a stub": {"SIMULATED_CUINIT": "34"},
    "all are hidden": {"SIMULATED_CUINIT": "802", "CUDA_VISIBLE_DEVICES": ""},
}


@pytest.mark.parametrize("why", NONE)
def test_where_there_is_no_gpu_replicas_are_on_the_cpu(simulated, why):
    made = "CentralStorageStrategy(1 replica on CPU:0)"
    result = simulated("gpu_devices.py", None, "none", env=NONE[why])
    assert (result.status, result.out.count(made)) == (0, 2), result.err
