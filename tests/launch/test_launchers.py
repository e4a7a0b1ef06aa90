"""Who started the ranks: the launcher and MPI must agree, and one rank needs no MPI."""

import subprocess
import sys

import pytest
from slow import slow_but

WORLD = """
    import sys
    from hpcstrat._process import worlds

    world = worlds.start()
    if world.comm is not None:
        sys.stdout.write("".join(world.comm.gather(
            f"{world.rank}/{world.size} {world.local_rank}/{world.local_size} {world.hosts} {world.seed}\\n"
        ) or []))
    else:
        print(f"alone {world.rank}/{world.size} {world.host_comm} {world.hosts}")
"""
# What the program starts with if something is missing: mpi4py's wheels contain no MPI library.
MISSING = {
    "mpi4py": """
    import sys
    sys.modules["mpi4py"] = None
""",
    "an MPI library that mpi4py can load": """
    import os
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
""",
}


@pytest.mark.parametrize("ranks", slow_but([3], [1, 2, 3, 4]))
def test_the_world(launch, ranks):
    result = launch(WORLD, ranks)
    assert result.status == 0
    lines = [line.rsplit(" ", 1) for line in result.stdout.splitlines()]
    hosts = (0,) * ranks
    assert [facts for facts, _ in lines] == [
        f"{rank}/{ranks} {rank}/{ranks} {hosts}" for rank in range(ranks)
    ]
    assert len({seed for _, seed in lines}) == 1
    assert result.leftovers == []


@pytest.mark.slow
def test_two_hosts(launch):
    if launch.open_mpi:
        pytest.skip("only MPICH can pose as several hosts")
    result = launch(WORLD, 3, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert result.status == 0
    lines = [line.rsplit(" ", 1)[0] for line in result.stdout.splitlines()]
    hosts = (0, 1, 0)
    assert lines == [f"0/3 0/2 {hosts}", f"1/3 0/1 {hosts}", f"2/3 1/2 {hosts}"]
    assert result.leftovers == []


@pytest.mark.slow
def test_a_rank_may_start_a_job(launch):
    """The ranks of that job are none of this one's children, though they have its variables."""
    program = """
    import os, subprocess, sys
    import hpcstrat as hs

    if sys.argv[1:]:
        hs.barrier()
        print("inner", hs.size())
        sys.exit()
    hs.barrier()
    if hs.rank() == 0:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))}
        command = [*{mpirun}, "-n", "2", sys.executable, __file__, "inner"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=kept)
        print(result.stdout, result.stderr, result.returncode)
    hs.barrier()
    """
    result = launch(program.replace("{mpirun}", repr(launch.mpirun)), 2)
    assert (result.status, result.stdout) == (0, "inner 2\n  0\n")


def test_a_program_that_only_rank_0_has(launch):
    """Otherwise MPI would wait for the others for ever."""
    if launch.open_mpi:
        pytest.skip(
            "Open MPI's mpirun never tells rank 0 that its input has ended, so no program runs"
        )
    text = "import hpcstrat as hs\nhs.CentralStorageStrategy()\nprint('done')\n"
    command = [*launch.mpirun, "-n", "2", sys.executable, "-"]
    result = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode and "done" not in result.stdout
    assert (
        "the program comes from standard input, which mpirun of MPICH gives to rank 0 only; save it"
        in result.stderr
    )


@pytest.mark.slow
def test_a_program_from_input_that_each_rank_has(launch, tmp_path):
    (tmp_path / "program.py").write_text(
        "import hpcstrat as hs\nhs.CentralStorageStrategy()\nprint(hs.size())\n"
    )
    for given in (f"'{sys.executable}' - < program.py", f"cat program.py | '{sys.executable}'"):
        command = [*launch.mpirun, "-n", "2", "sh", "-c", given]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
        )
        assert (result.returncode, result.stdout) == (0, "2\n")


def test_without_mpirun(launch):
    result = launch(WORLD)
    assert result.status == 0
    assert result.stdout.startswith("0/1 0/1 (0,) ")
    assert result.stderr == ""
    assert result.leftovers == []


def test_another_mpis_launcher_is_refused(launch):
    hydra = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    result = launch(WORLD, env=hydra if launch.open_mpi else {"OMPI_COMM_WORLD_SIZE": "2"})
    assert result.status != 0
    assert "RuntimeError" in result.stderr
    assert "started 2 processes, but MPI (" in result.stderr
    assert ", which mpi4py loads) is another: the launcher belongs to another MPI" in result.stderr
    assert (
        "Start with the mpirun of " + ("Open MPI" if launch.open_mpi else "MPICH") in result.stderr
    )


def test_what_does_not_know_its_launcher_is_refused_by_its_number_of_ranks(launch):
    if not launch.open_mpi:
        pytest.skip("MPICH takes the variables for a real launcher's and does not start")
    result = launch(WORLD, env={"PMI_SIZE": "2", "PMI_RANK": "1"})
    assert result.status != 0
    assert (
        "a PMI launcher started 2 processes, but MPI (" in result.stderr
        and ") has 1 rank:" in result.stderr
    )
    assert result.leftovers == []


def test_a_step_of_srun_without_its_mpi_is_refused(launch):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
    if launch.open_mpi:
        pytest.skip("Open MPI takes the variables for a real Slurm's and does not start")
    result = launch(WORLD, env=step)
    assert result.status != 0
    assert "srun started 4 processes, but MPI (" in result.stderr


@pytest.mark.slow
def test_a_batch_script_is_no_launch(launch):
    result = launch(WORLD, 2, env={"SLURM_JOB_ID": None, "SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert result.status == 0


@pytest.mark.parametrize("missing", slow_but(["mpi4py"], MISSING))
def test_one_rank_works_without_it_and_says_nothing(launch, missing):
    result = launch(MISSING[missing] + WORLD)
    assert (result.status, result.stdout, result.stderr) == (0, "alone 0/1 None (0,)\n", "")


@pytest.mark.parametrize("missing", slow_but(["an MPI library that mpi4py can load"], MISSING))
def test_several_ranks_do_not_work_without_it(launch, missing):
    result = launch(MISSING[missing] + WORLD, 2)
    assert result.status != 0
    assert f"RuntimeError: hpcstrat cannot connect the ranks: {missing} is missing" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
@pytest.mark.parametrize("start", slow_but(["by hand"], ["by hand", "switched off"]))
def test_the_users_own_start_of_mpi(launch, ranks, start):
    before = """
    import mpi4py
    mpi4py.rc.initialize = False
"""
    by_hand = """
    from mpi4py import MPI
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
"""
    program = (
        before + by_hand + WORLD + "\n    MPI.Finalize()\n"
        if start == "by hand"
        else before + WORLD
    )
    result = launch(program, ranks)
    assert result.status == 0
    assert len(result.stdout.splitlines()) == ranks


FINALISED = """
    from mpi4py import MPI
    MPI.Finalize()
"""


@pytest.mark.slow
def test_mpi_finalised_already(launch):
    assert launch(FINALISED + WORLD).stdout == "alone 0/1 None (0,)\n"


def test_mpi_finalised_already_on_several_ranks(launch):
    result = launch(FINALISED + WORLD, 2)
    assert result.status != 0
    assert "MPI was finalised already" in result.stderr


def test_importing_starts_nothing(launch):
    program = """
    import sys
    import hpcstrat
    for name in ("mpi4py.MPI", "cupy", "tqdm", "torch"):
        assert name not in sys.modules, name
"""
    result = launch(program)
    assert (result.status, result.stdout, result.stderr) == (0, "", "")
