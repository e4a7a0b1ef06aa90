"""`python -m hpcstrat info`."""

import os
import pathlib
import re

import pytest
import simulated_gpu

import hpcstrat

MODULE = pathlib.Path("-m")
INFO = "hpcstrat", "info"


def found_in(result):
    """What is printed for each name, and what is wrong."""
    faults = re.findall("^wrong: (.*)$", result.out, re.MULTILINE)
    assert (result.status, result.leftovers) == (int(bool(faults)), [])
    assert ("Nothing is wrong.\n" in result.out) == (faults == [])
    return dict(re.findall(r"^(\S.*?) +(.*)$", result.out, re.MULTILINE)), faults


def test_a_process_that_is_started_by_hand(launch):
    result = launch(MODULE, None, *INFO)
    found, faults = found_in(result)
    assert (faults, result.err) == ([], "")
    assert found["hpcstrat"] == hpcstrat.__version__ and found["device"] == "CPU"
    assert found["MPI"].startswith("Open MPI " if launch.open_mpi else "MPICH ")
    assert found["launcher"] == "none: started by hand" and found["mpiexec"].startswith("/")


def test_ranks_tell_each_other_what_is_wrong(launch):
    misspelt = {
        "HPCSTRAT_STAL_SECONDS": "HPCSTRAT_STALL_SECONDS",
        "HPCSTRAT_TIMOUT": "HPCSTRAT_TIMEOUT_SECONDS",
        "HPCSTRAT_TIME_LINE": "HPCSTRAT_TIMELINE",
    }
    on_one_core = f"""
        import os, runpy, socket
        import hpcstrat as hs

        os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})
        if hs.rank() == 2:  # of another host, where it has its core to itself
            socket.gethostname = lambda: "another"
        runpy.run_module("hpcstrat", run_name="__main__")
    """
    result = launch(on_one_core, 3, "info", env=dict.fromkeys(misspelt, "3"))
    found, (*others, turns) = found_in(result)
    assert found["launcher"].startswith("mpirun of ") and " 3 " in found["launcher"]
    assert len(others) == len(misspelt)
    for name, meant in misspelt.items():
        said = f"unknown environment variable {name}; did you mean {meant}?"
        assert f"{said} (ranks 0-2)" in others
        assert result.err.count(said) == 1  # as every program says it
    assert re.match("2 ranks of .* take turns on 1 cores; .*--bind-to none", turns)


def test_under_another_mpis_launcher(launch):
    foreign = (
        {"PMI_SIZE": "2", "PMI_RANK": "0"} if launch.open_mpi else {"OMPI_COMM_WORLD_SIZE": "2"}
    )
    _, (fault,) = found_in(launch(MODULE, None, *INFO, env=foreign))
    assert fault.startswith("the ranks are not connected: ")
    assert "Start with the mpirun of" in fault


def test_another_mpis_mpirun_comes_first(launch, tmp_path):
    other = tmp_path / "mpirun"
    other.write_text(f"#!/bin/sh\necho {'HYDRA' if launch.open_mpi else 'Open MPI'}\n")
    other.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    _, (fault,) = found_in(launch(MODULE, None, *INFO, env=env))
    owner = "MPICH" if launch.open_mpi else "Open MPI"
    assert fault.startswith(f"{other} is that of {owner}, and each ")


def test_without_an_mpi_library_rank_0_has_its_say(launch):
    """The others wait a little; most launchers end all ranks when one fails."""
    result = launch(MODULE, 2, *INFO, env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert result.status == 1 and "`pip install '.[mpich]'`" in result.out
    assert "\nwrong: the ranks are not connected: " in result.out
    # The mpirun of Open MPI ends rank 1 when rank 0 fails.
    assert launch.open_mpi or "wrong on rank 1: the ranks are not connected: " in result.err


# ---- GPUs

needs_compiler = pytest.mark.skipif(
    not simulated_gpu.is_available(), reason="there is no C++ compiler"
)


@needs_compiler
def test_the_driver_s_error_has_a_remedy(simulated):
    _, (fault,) = found_in(simulated(MODULE, 2, *INFO, env={"SIMULATED_CUINIT": "802@1"}))
    said = r".*CUDA_ERROR_SYSTEM_NOT_READY \(802\).*start the fabric manager.* \(rank 1\)$"
    assert re.match(said, fault)


@needs_compiler
def test_gpus_without_cupy(simulated):
    program = """
        import importlib.util, runpy
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "cupy" else find_spec(name, *rest)
        runpy.run_module("hpcstrat", run_name="__main__")
    """
    found, (fault,) = found_in(simulated(program, None, "info"))
    assert found["device"] == "GPU 0 of 4" and "no CuPy to use them: `pip " in fault


@pytest.mark.gpu
@needs_compiler
def test_one_kernel_is_tried_on_each_ranks_gpu(simulated):
    result = simulated(MODULE, 2, *INFO)
    found, faults = found_in(result)
    assert faults == [] and found["NCCL"] == "2.32.3"
    assert re.fullmatch(r"\d+, driver \d+", found["CUDA"]) and "." in found["CuPy"]
    for rank in range(2):
        assert f"GPU {rank} of 4, simulated GPU (rank {rank})" in result.out


@pytest.mark.gpu
@needs_compiler
def test_what_is_wrong_with_gpus(simulated):
    env = {"SIMULATED_GPU_FAULTS": "out-of-memory@1:1"}
    _, (fault,) = found_in(simulated(MODULE, 2, *INFO, env=env))
    assert re.match(r"CuPy does not compute: .*; `pip install .* \(rank 1\)$", fault)
    env = {"SIMULATED_GPUS": "1", "NCCL_MULTI_RANK_GPU_ENABLE": None}
    _, (fault,) = found_in(simulated(MODULE, 2, *INFO, env=env))
    assert re.match("2 ranks of .* have 1 GPUs; .*launch/share-gpu", fault)
    env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    assert found_in(simulated(MODULE, 2, *INFO, env=env))[1] == []
