import os
import subprocess
import sys
from typing import Any

import pytest
from internals import Launcher, find, worlds

import hpcstrat as hs

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PRTE_LAUNCHED": "1",
}
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "3",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "1",
    "PMI_FD": "9",
}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
DAEMON_STEP = STEP | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.fixture
def environment(monkeypatch):
    """Replaces the environment."""

    def replace(variables):
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (OPEN_MPI, Launcher("mpirun of Open MPI", 3, 4, 1, 2)),
        (HYDRA, Launcher("mpirun of MPICH", 2, 3, 0, 1)),
        (HYDRA | {"I_MPI_ROOT": "/opt/intel"}, Launcher("mpirun of MPICH", 2, 3, 0, 1)),
        (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, Launcher("mpirun of Intel MPI", 2, 3, 0, 1)),
        (STEP, Launcher("srun", 5, 8, 1, 2)),
        (STEP | {"SLURM_NODEID": "3"}, Launcher("srun", 5, 8, 1, 1)),
        (STEP | {"SLURM_NODEID": "9"}, Launcher("srun", 5, 8, 1, None)),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "4,1,2"}, Launcher("srun", 5, 8, 1, 2)),
        (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"}, Launcher("srun", 5, 8, 1, 2)),
        (
            STEP | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
            Launcher("srun", 5, 8, 1, 2),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0"},
            Launcher("a PMI launcher", 1, 2, 0, None),
        ),
        ({"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}, Launcher("prterun (PMIx)", 1, None, None, None)),
        ({"PMIX_RANK": "1"}, Launcher("a PMIx launcher", 1, None, None, None)),
        ({"PMI_SIZE": "2"}, Launcher("a PMI launcher", 0, 2, None, None)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, Launcher("mpirun of Open MPI", 0, 2, None, None)),
    ],
    ids=[
        *(
            "none",
            "Open MPI",
            "MPICH",
            "MPICH, Intel MPI installed",
            "Intel MPI",
            "srun",
            "srun, a node of one",
        ),
        *(
            "srun, no such node",
            "srun, a number for each node",
            "srun, PMI",
            "srun, PMIx",
            "PMI",
            "prterun",
            "PMIx",
            "PMI, the size alone",
        ),
        "Open MPI, the size alone",
    ],
)
def test_launchers(environment, variables, expected):
    environment(variables)
    assert find() == expected


@pytest.mark.parametrize(
    "variables",
    [
        BATCH_SCRIPT,
        STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "1"},
        {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": ""},
    ],
    ids=["a batch script", "the step of a batch script", "no step", "no values"],
)
def test_what_is_no_launch(environment, variables):
    environment(variables)
    assert find() is None


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        *((OPEN_MPI, name, "x") for name in OPEN_MPI if name.startswith("OMPI")),
        *((HYDRA, name, "-1") for name in HYDRA if name != "PMI_FD"),
        *(
            (STEP, name, "9" * 5000)
            for name in STEP
            if name not in ("SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE")
        ),
        *(
            (STEP, "SLURM_STEP_TASKS_PER_NODE", tasks)
            for tasks in ("x", "2(x)", "2(x3)1", "2,", "-1", "1(x99999999999)", "99999999(x9)")
        ),
        *(
            (STEP, "SLURM_STEP_TASKS_PER_NODE", tasks)
            for tasks in ("9" * 12, "1(x999999),1(x999999)", "9" * 5000)
        ),
        *(({"PMI_SIZE": "2"}, "PMI_RANK", rank) for rank in ("x", "2", "\u0661")),
        *((OPEN_MPI, "OMPI_COMM_WORLD_RANK", rank) for rank in ("4", "1e400", " 1")),
        ({"PMIX_RANK": "1"}, "PMIX_RANK", "all"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE", "many"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "PMI_SIZE", "0"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_no_launcher_sets_is_named(environment, variables, name, value):
    """No process becomes a second rank 0."""
    environment({**variables, name: value})
    named = "PMI_RANK" if value == "0" else name  # no rank is negative
    with pytest.raises(RuntimeError, match=f"^the environment variable {named}(:| is) ") as caught:
        find()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_program_whose_rank_is_no_number_ends_at_the_import():
    found = subprocess.run(
        [sys.executable, "-c", "import hpcstrat"],
        env=os.environ | {"PMI_RANK": "x", "PMI_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "RuntimeError: the environment variable PMI_RANK is 'x'; it must be a number from 0 up, as "
        "the launcher sets it"
    )


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["Open MPI", "MPICH"])
def test_an_mpirun_comes_before_the_srun_that_started_its_daemons(environment, variables):
    environment(variables)
    expected = find()
    environment(DAEMON_STEP | variables)
    assert find() == expected


def test_before_the_ranks_are_connected_nothing_is_reduced_over_them(environment, monkeypatch):
    """`get_replica_context().all_reduce` returns this rank's value if there is no other rank."""
    monkeypatch.setattr(worlds, "_world", None)
    context: Any = hs.get_replica_context()
    environment(OPEN_MPI)
    with pytest.raises(
        RuntimeError,
        match=r"^ReplicaContext.all_reduce .* outside of Strategy.run, .* the 4 ranks is",
    ):
        context.all_reduce("SUM", 1.5)
    assert hs.get_strategy().run(lambda: context.all_reduce("SUM", 1.5)) == 1.5
    for alone in ({}, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}):
        environment(alone)
        assert context.all_reduce("SUM", 1.5) == 1.5
    assert worlds.find() is None
