"""`python -m hpcstrat`."""

import json
import pathlib
from types import SimpleNamespace

import pytest
from internals import check, compiled, gpu, info
from slow import slow_but

import hpcstrat

MAIN = pathlib.Path(hpcstrat.__file__).with_name("__main__.py")
UPDATES = {
    "1": f"compiled by {compiled.compiler()}"
    if compiled.compiler()
    else "by NumPy: there is no C compiler",
    "0": "by NumPy: HPCSTRAT_COMPILE is 0",
    "7": "by NumPy: the environment variable HPCSTRAT_COMPILE is '7'; it must be 1 or 0",
}


@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 3]))
def test_info(launch, ranks):
    result = launch(MAIN, ranks, "info", "--json")
    found = json.loads(result.stdout)
    assert result.status == bool(found["faults"]), found["faults"]
    assert result.leftovers == []
    assert [one["rank"] for one in found["ranks"]] == list(range(ranks or 1))
    for one in found["ranks"]:
        assert one["versions"]["hpcstrat"] == hpcstrat.__version__
        assert one["versions"]["MPI"].startswith("Open MPI" if launch.open_mpi else "MPICH")
        assert one["cores"] and one["updates"] == UPDATES["1"]


@pytest.mark.parametrize("ranks", slow_but([None], [None, 1, 3]))
def test_info_as_tables(launch, ranks):
    result = launch(MAIN, ranks, "info")
    for words in ("Versions", "NumPy", "launcher", "Ranks", "CPU:0"):
        assert words in result.stdout
    assert ("Nothing is wrong." in result.stdout) == (result.status == 0)


@pytest.mark.parametrize("setting", UPDATES)
def test_how_large_variables_are_updated(monkeypatch, setting):
    monkeypatch.setenv("HPCSTRAT_COMPILE", setting)
    assert info._updates() == UPDATES[setting]


def test_info_under_another_mpis_launcher(launch):
    foreign = (
        {"PMI_SIZE": "2", "PMI_RANK": "0"} if launch.open_mpi else {"OMPI_COMM_WORLD_SIZE": "2"}
    )
    result = launch(MAIN, None, "info", env=foreign)
    assert result.status == 1
    assert "wrong: the ranks are not connected" in result.stdout
    assert "Start with the mpirun of" in " ".join(result.stdout.split())


@pytest.mark.parametrize(("ranks", "mebibytes"), slow_but([(2, 4)], [(None, 32), (2, 4), (3, 32)]))
def test_check(launch, ranks, mebibytes):
    program = f"""
    import runpy
    from hpcstrat._tools import check
    check._SIZES = (*check._SIZES[:2], {mebibytes} << 20)
    runpy.run_module("hpcstrat", run_name="__main__")
    """
    result = launch(program, ranks, "check")
    assert (result.status, result.leftovers) == (0, [])
    assert result.stdout.count(" right ") == 6
    assert "All data arrived." in result.stdout


def test_check_of_data_that_arrives_wrong(monkeypatch, capsys):
    monkeypatch.setattr(check, "_SIZES", (1 << 10, 1 << 13, 1 << 16))
    monkeypatch.setattr(check, "_all_gather", lambda strategy, count: count < 1000)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ())  # whatever the machine has
    assert check.check() == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 2 and "do not use this configuration" in printed


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


def rank_inventory(rank=0, **others) -> info.RankInventory:
    found: info.RankInventory = {
        "rank": rank,
        "host": "n1",
        "versions": {"NumPy": "2.0", "MPI": "MPICH 5.0.2", "CuPy": "14.2", "NCCL": "2.28.3"},
        "cores": [0, 1, 2, 3],
        "host_cores": 8,
        "gpus": [],
        "hidden_gpus": False,
        "driver_error": "",
        "gpu_error": "",
        "shared_memory": 8000,
        "updates": "by NumPy",
        "unknown": {},
    }
    found.update(others)  # pyright: ignore
    return found


def versions(**others):
    return rank_inventory()["versions"] | others


MPICH = ("/usr/bin/mpirun", "MPICH")


def test_nothing_is_wrong():
    assert info.find_faults([rank_inventory(0), rank_inventory(1)], MPICH, "") == []
    assert info.find_faults([rank_inventory(0, gpus=["H200"])], ("/usr/bin/mpirun", ""), "") == []


FAULTS = [
    (
        [rank_inventory()],
        MPICH,
        "two jobs of one",
        "not connected: two jobs of one",
        "message says",
    ),
    ([rank_inventory()], (None, ""), "", "no mpirun", "srun"),
    (
        [rank_inventory()],
        ("/bin/mpirun", "Open MPI"),
        "",
        "belongs to Open MPI, but mpi4py loads MPICH",
        "one MPI only",
    ),
    (
        [rank_inventory(versions=versions(MPI="not usable: no libmpi"))],
        MPICH,
        "",
        "not usable: no libmpi",
        "mpich",
    ),
    (
        [rank_inventory(), rank_inventory(1, versions=versions(NumPy="1.26"))],
        MPICH,
        "",
        "NumPy differs: 2.0 on rank 0; 1.26 on rank 1",
        "one environment",
    ),
    ([rank_inventory(shared_memory=3)], MPICH, "", "/dev/shm of n1 has 3 MiB left", "--shm-size"),
    (
        [rank_inventory(cores=[5]), rank_inventory(1, cores=[5])],
        MPICH,
        "",
        "2 ranks of n1 run on 1 core:",
        "--bind-to none",
    ),
    (
        [rank_inventory(rank, cores=[0, 1], host_cores=2) for rank in range(3)],
        MPICH,
        "",
        "3 ranks of n1 run on 2 cores:",
        "start 2 ranks or fewer there",
    ),
    (
        [rank_inventory(hidden_gpus=True)],
        MPICH,
        "",
        "GPUs that its ranks do not see: rank 0",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        [rank_inventory(driver_error="cuInit fails; see dmesg")],
        MPICH,
        "",
        "cuInit fails, on rank 0",
        "see dmesg",
    ),
    (
        [rank_inventory(gpus=["H200"], versions=versions(CuPy="not installed"))],
        MPICH,
        "",
        "no CuPy",
        "cuda12",
    ),
    (
        [
            rank_inventory(rank, gpus=["H200"] * 2, versions=versions(NCCL="not found by CuPy"))
            for rank in range(2)
        ],
        MPICH,
        "",
        "no NCCL",
        "nvidia-nccl",
    ),
    (
        [rank_inventory(rank, gpus=["H200"] * 2, gpu_error="no headers") for rank in range(2)],
        MPICH,
        "",
        "GPU of ranks 0, 1: no headers",
        "cuda12",
    ),
    (
        [rank_inventory(rank, gpus=["H200"] * 2) for rank in range(3)],
        MPICH,
        "",
        "3 ranks run on n1 with 2",
        "share-gpu",
    ),
    (
        [rank_inventory(unknown={"HPCSTRAT_CHEK": "HPCSTRAT_CHECK"})],
        MPICH,
        "",
        "unknown environment variable HPCSTRAT_CHEK",
        "HPCSTRAT_CHECK?",
    ),
]


@pytest.mark.parametrize(
    "ranks, mpirun, error, what, remedy", FAULTS, ids=[what for *_, what, _ in FAULTS]
)
def test_each_fault_is_named_with_its_remedy(ranks, mpirun, error, what, remedy):
    (fault,) = info.find_faults(ranks, mpirun, error)
    assert what in fault.what
    assert remedy in fault.remedy


def test_hosts_with_the_same_fault_share_it():
    ranks = [rank_inventory(rank, host=f"n{rank // 8}", cores=[0]) for rank in range(512)]
    (fault,) = info.find_faults(ranks, MPICH, "")
    assert (
        fault.what
        == "8 ranks of each of n0, n1, n2 and 61 more hosts run on 1 core: they take turns"
    )


H100 = ["H100"] * 8
NAMES = "n0, n1, n2 and 60 more hosts"


@pytest.mark.parametrize(
    ("hosts", "of_each", "others", "rows"),
    [
        (1, 4, {}, [["0-3", "n0", "CPU:0", "0-3", "4", "8000"]]),
        (
            2,
            2,
            {"gpus": H100},
            [
                ["0, 1", "n0", "GPU:0, 1 (H100)", "0-3", "4", "8000"],
                ["2, 3", "n1", "GPU:0, 1 (H100)", "0-3", "4", "8000"],
            ],
        ),
        (
            64,
            8,
            {"gpus": H100},
            [
                ["0-255, 264-511", NAMES, "GPU:0-7 (H100)", "0-3", "4", "8000"],
                ["256-263", "n32", "CPU:0", "0-3", "4", "8000"],
            ],
        ),
    ],
    ids=["cores", "GPUs", "many hosts, one without GPUs"],
)
def test_a_row_for_ranks_that_are_equal(hosts, of_each, others, rows):
    inventories = [
        rank_inventory(rank, host=f"n{rank // of_each}", **others)
        for rank in range(hosts * of_each)
    ]
    for rank in inventories:
        if rank["host"] == "n32":
            rank["gpus"] = []
    assert info._rows(inventories) == rows


def test_each_ranks_share_of_the_cores():
    inventories = [rank_inventory(rank, cores=[rank], shared_memory=9 - rank) for rank in range(4)]
    assert info._rows(inventories) == [["0-3", "n1", "CPU:0", "0-3", "1", "6"]]


def test_what_is_printed_keeps_its_brackets(capsys):
    facts_of_one = rank_inventory(host="[red]n1:ok:", versions=versions(MPI="not usable: [blue]"))
    found = [info.Fault("a [bold]fault", "`pip install '.[mpich]'`")]
    info._show([facts_of_one], ("/opt/[x]/mpirun", "MPICH"), found)
    printed = capsys.readouterr().out
    for text in (
        "[red]n1:ok:",
        "not usable: [blue]",
        "/opt/[x]/mpirun",
        "wrong: a [bold]fault",
        "'.[mpich]'",
    ):
        assert text in printed


def test_info_without_an_mpi_library(launch):
    result = launch(MAIN, None, "info", env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert result.status == 1
    assert "remedy: `pip install '.[mpich]'`" in " ".join(result.stdout.split())


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

    cuda = SimpleNamespace(Device=lambda i: SimpleNamespace(use=lambda: used.append(i)))
    monkeypatch.setattr(gpu, "has_cupy", lambda: True)
    monkeypatch.setattr(gpu, "visible_gpus", lambda: ("a", "b"))
    monkeypatch.setattr(
        gpu, "load_cupy", lambda wanted_by: SimpleNamespace(arange=arange, cuda=cuda)
    )
    error = "RuntimeError: Failed to find CUDA headers. Please install"
    assert info._gpu_error(local_rank=3) == (error if fails else "")
    assert used == [1]


@pytest.mark.parametrize(
    ("host", "cores"), [("n1", [1]), ("n2", [0])], ids=["of one host", "of two hosts"]
)
def test_ranks_on_cores_of_their_own(host, cores):
    ranks = [rank_inventory(0, cores=[0]), rank_inventory(1, host=host, cores=cores)]
    assert info.find_faults(ranks, MPICH, "") == []
