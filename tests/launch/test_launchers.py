"""Who started the ranks: the launcher and MPI must agree, and one rank needs no MPI."""

import sys

import pytest

slow = pytest.mark.slow
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


@pytest.mark.parametrize(
    "local, hosts",
    [
        (["0/3", "1/3", "2/3"], (0, 0, 0)),
        pytest.param(["0/2", "0/1", "1/2"], (0, 1, 0), marks=slow),
    ],
)
def test_the_world(launch, local, hosts):
    """Also in a batch script, which is no launch."""
    if launch.open_mpi and any(hosts):
        pytest.skip("only MPICH can pose as several hosts")
    env = {"SLURM_JOB_ID": None, "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    env["MPIR_CVAR_NUM_CLIQUES"] = str(len({*hosts}))
    result = launch(WORLD, 3, env=env)
    assert (result.status, result.leftovers) == (0, [])
    facts, seeds = zip(*(line.rsplit(" ", 1) for line in result.out.splitlines()), strict=True)
    assert list(facts) == [f"{rank}/3 {local[rank]} {hosts}" for rank in range(3)]
    assert len({*seeds}) == 1


@slow
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
    assert (result.status, result.out) == (0, "inner 2\n  0\n")


PROGRAM = "import hpcstrat as hs\nhs.CentralStorageStrategy()\nprint(hs.size())\n"


def test_a_program_that_only_rank_0_has(launch):
    """Otherwise MPI would wait for the others for ever."""
    if launch.open_mpi:
        pytest.skip("Open MPI's mpirun never tells rank 0 that its input has ended: nothing runs")
    result = launch([*launch.mpirun, "-n", 2, sys.executable, "-"], stdin=PROGRAM)
    assert result.status and result.out == ""
    assert "the program comes from standard input, which mpirun of MPICH gives to" in result.err


@slow
def test_a_program_from_input_that_each_rank_has(launch):
    (launch.folder / "program.py").write_text(PROGRAM)
    given = f"{sys.executable} - < program.py"
    result = launch([*launch.mpirun, "-n", 2, "sh", "-c", given])
    assert (result.status, result.out) == (0, "2\n")


def test_without_mpirun(launch):
    result = launch(WORLD)
    assert (result.status, result.err, result.leftovers) == (0, "", [])
    assert result.out.startswith("0/1 0/1 (0,) ")


def test_another_mpis_launcher_is_refused(launch):
    hydra = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    result = launch(WORLD, env=hydra if launch.open_mpi else {"OMPI_COMM_WORLD_SIZE": "2"})
    assert result.status != 0 and "RuntimeError" in result.err
    assert "started 2 processes, but MPI (" in result.err
    assert ", which mpi4py loads) is another: the launcher belongs to another MPI" in result.err
    assert "Start with the mpirun of " + ("Open MPI" if launch.open_mpi else "MPICH") in result.err


def test_a_launcher_that_mpi_does_not_know_is_refused_by_its_number_of_ranks(launch):
    # Of the other launcher each MPI takes the variables for a real one's, and does not start.
    if launch.open_mpi:
        env, named = {"PMI_SIZE": "4", "PMI_RANK": "1"}, "a PMI launcher"
    else:
        env = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
        named = "srun"
    result = launch(WORLD, env=env)
    assert result.status != 0 and result.leftovers == []
    assert f"{named} started 4 processes, but MPI (" in result.err


NO_MPI4PY, NO_LIBRARY = MISSING


@pytest.mark.parametrize("missing", [NO_MPI4PY, pytest.param(NO_LIBRARY, marks=slow)])
def test_one_rank_works_without_it_and_says_nothing(launch, missing):
    result = launch(MISSING[missing] + WORLD)
    assert (result.status, result.out, result.err) == (0, "alone 0/1 None (0,)\n", "")


@pytest.mark.parametrize("missing", [NO_LIBRARY, pytest.param(NO_MPI4PY, marks=slow)])
def test_several_ranks_do_not_work_without_it(launch, missing):
    result = launch(MISSING[missing] + WORLD, 2)
    assert result.status != 0 and result.out == ""
    assert f"RuntimeError: hpcstrat cannot connect the ranks: {missing} is missing" in result.err


FINALISE = """
    from mpi4py import MPI
    MPI.Finalize()
"""


def test_the_users_own_start_of_mpi(launch):
    begin = """
    import mpi4py
    mpi4py.rc.initialize = False
    from mpi4py import MPI
    MPI.Init_thread(MPI.THREAD_SERIALIZED)
"""
    result = launch(begin + WORLD + FINALISE, 2)
    assert result.status == 0 and len(result.out.splitlines()) == 2


def test_mpi_finalised_already(launch):
    assert launch(FINALISE + WORLD).out == "alone 0/1 None (0,)\n"
    result = launch(FINALISE + WORLD, 2)
    assert result.status != 0 and "MPI was finalised already" in result.err
