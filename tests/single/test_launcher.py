"""Which launcher started this process, told from its environment alone."""

import os
from typing import Any

import pytest
from internals import launchers, worlds

import hpcstrat as hs

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
OF_PRRTE = {"PMIX_RANK": "3", "PRTE_LAUNCHED": "1"}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "3"}
HYDRA = PMI | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)",
}
TASKS = "SLURM_STEP_TASKS_PER_NODE"
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}


@pytest.fixture
def environment(monkeypatch):
    """Replaces the environment."""

    def replace(variables):
        for name in list(os.environ):
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return replace


# The variables, and the launcher with its rank, size, local rank and local size.
LAUNCHERS = {
    "none": ({}, None),
    "a batch script": (BATCH_SCRIPT, None),
    "the step of a batch script": (STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, None),
    "no values": ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": ""}, None),
    "Open MPI": (OPEN_MPI | OF_PRRTE, ("mpirun of Open MPI", 3, 4, 1, 2)),
    "Open MPI, the size alone": ({"OMPI_COMM_WORLD_SIZE": "2"}, ("mpirun of Open MPI", 0, 2)),
    "MPICH": (HYDRA | {"PMI_FD": "9"}, ("mpirun of MPICH", 2, 3, 0, 1)),
    "Intel MPI": (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, ("mpirun of Intel MPI", 2, 3, 0, 1)),
    "srun": (STEP, ("srun", 5, 8, 1, 2)),
    "srun, a node of one": (STEP | {"SLURM_NODEID": "3"}, ("srun", 5, 8, 1, 1)),
    "srun, a number for each node": (STEP | {TASKS: "4,1,2"}, ("srun", 5, 8, 1, 2)),
    "srun, PMI": (STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}, ("srun", 5, 8, 1, 2)),
    "srun, PMIx": (STEP | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "s.7"}, ("srun", 5, 8, 1, 2)),
    "srun that started Open MPI's daemons": (
        STEP | OPEN_MPI | OF_PRRTE,
        ("mpirun of Open MPI", 3, 4, 1, 2),
    ),
    "srun that started MPICH's daemons": (STEP | HYDRA, ("mpirun of MPICH", 2, 3, 0, 1)),
    "PMI": (PMI | {"PMI_LOCAL_RANK": "0"}, ("a PMI launcher", 2, 3, 0)),
    "PMI, the size alone": ({"PMI_SIZE": "2"}, ("a PMI launcher", 0, 2)),
    "prterun": (OF_PRRTE, ("prterun (PMIx)", 3)),
    "PMIx": ({"PMIX_RANK": "1"}, ("a PMIx launcher", 1)),
}


@pytest.mark.parametrize(("variables", "expected"), LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_launcher_is_told_by_its_variables(environment, variables, expected):
    environment(variables)
    assert launchers.find() == (None if expected is None else launchers.Launcher(*expected))


@pytest.mark.parametrize(
    ("variables", "name", "values"),
    [
        *((OPEN_MPI, name, ["x"]) for name in OPEN_MPI),
        *((HYDRA, name, ["-1"]) for name in HYDRA),
        *((STEP, name, ["9" * 5000]) for name in STEP),
        (STEP, TASKS, ["x", "2(x)", "2(x3)1", "2,", "-1", "1(x99999999999)", "99999999(x9)"]),
        (STEP, TASKS, ["9" * 12, "1(x999999),1(x999999)"]),
        (PMI, "PMI_RANK", ["x", "3", "\u0661"]),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", ["4", "1e400", " 1"]),
        (OF_PRRTE, "PMIX_RANK", ["all"]),
        ({"PMI_RANK": "0"}, "PMI_SIZE", ["many"]),
        ({"PMI_SIZE": "0"}, "PMI_RANK", ["0"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_no_launcher_sets_is_named(environment, variables, name, values):
    """No process becomes a second rank 0."""
    for value in values:
        environment({**variables, name: value})
        with pytest.raises(
            RuntimeError, match=f"^the environment variable {name}(:| is) "
        ) as caught:
            launchers.find()
        assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_before_the_ranks_are_connected_nothing_is_reduced_over_them(environment, monkeypatch):
    """`get_replica_context().all_reduce` returns this rank's value if there is no other rank."""
    monkeypatch.setattr(worlds, "_world", None)
    context: Any = hs.get_replica_context()
    environment(OPEN_MPI)
    facts = r"^ReplicaContext.all_reduce .* outside of Strategy.run, .* the 4 ranks is"
    with pytest.raises(RuntimeError, match=facts):
        context.all_reduce("SUM", 1.5)
    assert hs.get_strategy().run(lambda: context.all_reduce("SUM", 1.5)) == 1.5
    for alone in ({}, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}):
        environment(alone)
        assert context.all_reduce("SUM", 1.5) == 1.5
    assert worlds.find() is None
