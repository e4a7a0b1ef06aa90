"""`python -m hpcstrat info`."""

import pathlib
import re
from types import SimpleNamespace

import pytest
from internals import gpu, info, nccl_start
from slow import slow_but

import hpcstrat

MODULE = pathlib.Path("-m")


def rows(stdout):
    """What is printed for each name, and what is wrong."""
    lines = stdout.splitlines()
    faults = [line for line in lines if line.startswith("wrong: ")]
    return dict(re.findall(r"^(\S.*?) +(.*)$", stdout, re.MULTILINE)), faults


@pytest.mark.parametrize("ranks", slow_but([None, 2], [None, 1, 2, 3]))
def test_info(launch, ranks):
    result = launch(MODULE, ranks, "hpcstrat", "info")
    found, faults = rows(result.stdout)
    assert (result.status, result.leftovers) == (int(bool(faults)), [])
    assert faults or result.stderr == ""
    assert ("Nothing is wrong.\n" in result.stdout) == (faults == [])
    assert found["hpcstrat"] == hpcstrat.__version__
    assert found["MPI"].startswith("Open MPI " if launch.open_mpi else "MPICH ")
    assert found["device"] == "CPU"
    if ranks is None:
        assert found["launcher"] == "none: started by hand" and found["mpiexec"].startswith("/")
    else:
        assert found["launcher"].startswith("mpirun of ") and f" {ranks} " in found["launcher"]


def test_under_another_mpis_launcher(launch):
    foreign = (
        {"PMI_SIZE": "2", "PMI_RANK": "0"} if launch.open_mpi else {"OMPI_COMM_WORLD_SIZE": "2"}
    )
    result = launch(MODULE, None, "hpcstrat", "info", env=foreign)
    assert result.status == 1
    assert "wrong: the ranks are not connected: " in result.stdout
    assert "Start with the mpirun of" in result.stdout


def test_another_mpis_mpirun_comes_first(launch, tmp_path):
    other = tmp_path / "mpirun"
    other.write_text(f"#!/bin/sh\necho {'HYDRA' if launch.open_mpi else 'Open MPI'}\n")
    other.chmod(0o755)
    path = f"{tmp_path}:{pathlib.Path(launch.mpirun[0]).parent}:/usr/bin:/bin"
    result = launch(MODULE, None, "hpcstrat", "info", env={"PATH": path})
    owner = "MPICH" if launch.open_mpi else "Open MPI"
    assert result.status == 1 and f"wrong: {other} is that of {owner}, and each " in result.stdout


NO_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def test_without_an_mpi_library(launch):
    result = launch(MODULE, None, "hpcstrat", "info", env=NO_MPI)
    assert result.status == 1 and result.stderr == ""
    assert "\nwrong: " in result.stdout and "`pip install '.[mpich]'`" in result.stdout


def test_rank_0_has_its_say_where_ranks_are_not_connected(launch):
    program = """
        import os, runpy, time
        if "0" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
            time.sleep(1)
        runpy.run_module("hpcstrat", run_name="__main__")
    """
    result = launch(program, 2, "info", env=NO_MPI)
    assert result.status == 1
    assert "\nwrong: " in result.stdout and "`pip install '.[mpich]'`" in result.stdout
    # The mpirun of Open MPI ends rank 1 when rank 0 fails.
    assert launch.open_mpi or "wrong on rank 1: the ranks are not connected: " in result.stderr


def test_a_misspelt_variable_is_wrong(launch):
    result = launch(MODULE, 2, "hpcstrat", "info", env={"HPCSTRAT_STAL_SECONDS": "3"})
    fault = (
        "unknown environment variable HPCSTRAT_STAL_SECONDS; did you mean HPCSTRAT_STALL_SECONDS?"
    )
    assert result.status == 1 and f"wrong: {fault} (ranks 0, 1)\n" in result.stdout


def test_misspelt_variables(launch):
    meant = {
        "HPCSTRAT_STAL_SECONDS": "HPCSTRAT_STALL_SECONDS",
        "HPCSTRAT_TIMOUT": "HPCSTRAT_TIMEOUT_SECONDS",
        "HPCSTRAT_TIME_LINE": "HPCSTRAT_TIMELINE",
    }
    result = launch("import hpcstrat", 2, env=dict.fromkeys(meant, "3"))
    assert result.status == 0
    for name, known in meant.items():
        assert (
            result.stderr.count(f"unknown environment variable {name}; did you mean {known}?") == 1
        )


# ---- what is wrong with hosts


def inventory(host="n1", cores=(0, 1, 2, 3), gpus=(), faults=()):
    return info.Inventory({"host": host}, list(faults), set(cores), tuple(gpus))


def test_nothing_is_wrong():
    assert list(info.find_faults([inventory(), inventory()])) == []
    assert list(info.find_faults([inventory(gpus=["a", "b"])] * 2)) == []
    # A launcher may show each rank a GPU of its own, or bind it to a core of its own.
    assert list(info.find_faults([inventory(gpus=["a"]), inventory(gpus=["b"])])) == []
    assert list(info.find_faults([inventory(cores=[0]), inventory(cores=[1])])) == []
    assert list(info.find_faults([inventory(cores=[0]), inventory("n2", cores=[0])])) == []


def test_ranks_that_take_turns_on_cores():
    (fault,) = info.find_faults([inventory(cores=[0, 1])] * 3 + [inventory("n2", [0])])
    assert fault.startswith("3 ranks of n1 take turns on 2 cores; ") and "--bind-to none" in fault


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    (fault,) = info.find_faults([inventory(gpus=["a", "b"])] * 3)
    assert fault.startswith("3 ranks of n1 have 2 GPUs; ") and "launch/share-gpu" in fault
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert list(info.find_faults([inventory(gpus=["a", "b"])] * 3)) == []


def test_ranks_with_the_same_fault_share_it():
    ranks = [inventory(f"n{rank}", faults=["no CuPy"] * (rank != 3)) for rank in range(512)]
    assert list(info.find_faults(ranks)) == ["no CuPy (ranks 0-2, 4-511)"]
    assert list(info.find_faults([inventory(faults=["no CuPy"])])) == ["no CuPy"]


# ---- what a rank sees of its GPUs


class Array:
    """What can compute."""

    def __matmul__(self, other):
        return self

    def sum(self):
        return 14.0

    def reshape(self, *shape):
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_one_kernel_is_tried_on_the_ranks_gpu(monkeypatch, fails):
    used = []

    def arange(stop):
        if fails:
            raise RuntimeError("Failed to find CUDA headers.\n  Please install")
        return Array()

    runtime = SimpleNamespace(
        getDeviceProperties=lambda number: {"name": b"H100"},
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
    )
    cuda = SimpleNamespace(
        Device=lambda i: SimpleNamespace(use=lambda: used.append(i)), runtime=runtime
    )
    cupy = SimpleNamespace(__version__="14.2.0", arange=arange, cuda=cuda)
    nccl = SimpleNamespace(available=True, get_version=lambda: 22803)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ("a", "b"))
    monkeypatch.setattr(gpu, "has_cupy", lambda: True)
    monkeypatch.setattr(gpu, "load_cupy", lambda wanted_by: cupy)
    monkeypatch.setattr(nccl_start, "load_nccl", lambda: nccl)
    facts, faults = {}, []
    assert info._look_at_gpus(3, facts, faults) == ("a", "b")
    assert facts == {
        "device": "GPU 1 of 2, H100",
        "CuPy": "14.2.0",
        "CUDA": "13000, driver 13010",
        "NCCL": "2.28.3",
    }
    assert used == [1]
    if fails:
        (fault,) = faults
        said = "CuPy does not compute: Failed to find CUDA headers. Please install; `pip install "
        assert fault.startswith(said)
    else:
        assert faults == []


def test_a_gpu_without_cupy(monkeypatch):
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ("a",))
    monkeypatch.setattr(gpu, "has_cupy", lambda: False)
    facts, faults = {}, []
    info._look_at_gpus(0, facts, faults)
    (fault,) = faults
    assert facts["device"] == "GPU 0 of 1" and "no CuPy to use them: `pip " in fault
