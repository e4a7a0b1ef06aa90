"""How a process becomes a rank: MPI's start and its refusals, the cores of BLAS, what is left."""

import atexit
import builtins
import os
import sys
import tempfile
import types

import mpi4py
import numpy as np
import pytest
from internals import blas_threads, failure, launchers, mpi_library, reports, segments, worlds
from threadpoolctl import threadpool_info, threadpool_limits


@pytest.fixture
def fake(monkeypatch):
    """A stand-in for mpi4py.MPI: a world of one rank."""
    module = types.SimpleNamespace(
        Is_finalized=lambda: False,
        Is_initialized=lambda: True,
        COMM_WORLD=types.SimpleNamespace(size=1, rank=0),
        get_vendor=lambda: ("MPICH", (5, 0, 2)),
    )
    monkeypatch.setattr(worlds, "_load_mpi", lambda launcher: module)
    return module


@pytest.fixture
def starts(fake, monkeypatch):
    """The levels of threads with which the stand-in was started; with an entry first, it fails."""
    levels = []

    def start(argc, argv, level, provided):
        levels.append(level)
        return 16 if len(levels) > 1 else 0

    errors = types.SimpleNamespace(Set_errhandler=lambda handler: None)
    fake.Is_initialized, fake.ERRORS_RETURN, fake.__file__ = (lambda: False), None, ""
    fake.COMM_WORLD, fake.COMM_SELF = errors, errors
    fake.THREAD_SINGLE, fake.THREAD_SERIALIZED, fake.THREAD_MULTIPLE = 0, 2, 3
    library = types.SimpleNamespace(MPI_Init_thread=start)
    monkeypatch.setattr(mpi_library.ctypes, "CDLL", lambda path: library)
    monkeypatch.setattr(launchers, "find", lambda: None)
    return levels


def launched(monkeypatch, size, rank=0, name="mpirun of Open MPI", **others):
    launcher = launchers.Launcher(name, rank, size, **others)
    monkeypatch.setattr(launchers, "find", lambda: launcher)
    # The mark of a rank's processes, which is set then; later tests start processes too.
    monkeypatch.setenv("_HPCSTRAT_PROCESS", "")


def test_the_users_setting_of_open_mpi_stays(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    monkeypatch.delenv("OMPI_MCA_osc", raising=False)
    worlds._load_mpi(None)
    assert os.environ["OMPI_MCA_btl"] == "self,sm"
    assert os.environ["OMPI_MCA_osc"] == "^ucx"


@pytest.mark.parametrize(
    ("launcher", "size", "vendor", "refused"),
    [
        ("mpirun of Open MPI", 2, "MPICH", True),
        ("mpirun of Open MPI", 1, "MPICH", True),  # MPI would end it
        ("mpirun of Open MPI", 2, "MPICH with PMIx", False),
        ("prterun (PMIx)", None, "Intel MPI", True),
        ("mpirun of Open MPI", 2, "Open MPI", False),
        ("mpirun of Open MPI", 2, "unknown", False),  # such as a vendor's, derived from Open MPI
        ("mpirun of MPICH", 2, "Open MPI", True),
        ("mpirun of MPICH", 1, "Open MPI", False),  # works
        ("a PMI launcher", 2, "Open MPI", False),
    ],
)
def test_another_mpis_launcher_is_known_before_mpi_starts(
    fake, starts, monkeypatch, launcher, size, vendor, refused
):
    vendor, *pmix = vendor.split(" with ")
    fake.get_vendor = lambda: (vendor, (5, 0))
    # Of the library that is really loaded.
    monkeypatch.setattr(mpi_library, "_speaks_pmix", lambda: bool(pmix))
    launched(monkeypatch, size, name=launcher)
    if refused:
        with pytest.raises(RuntimeError, match="mpi4py loads.* is another: .*with the mpirun of"):
            mpi_library.start(fake)
    else:
        mpi_library.start(fake)
    assert starts == ([] if refused else [3])


def test_mpich_5_alone_needs_shared_memory(fake, starts, monkeypatch, tmp_path):
    monkeypatch.setattr(segments, "FOLDER", str(tmp_path / "shm"))
    launched(monkeypatch, 2, name="a PMI launcher", local_rank=0, local_size=2)
    with pytest.raises(RuntimeError, match=r"shm does not exist.*MPICH 5\.0\.2.*shm-size"):
        mpi_library.start(fake)
    assert starts == []
    fake.get_vendor = lambda: ("MPICH", (4, 3, 2))
    mpi_library.start(fake)
    assert starts == [3]


@pytest.mark.parametrize(
    ("initialize", "threads", "level"),
    [(True, True, 2), (True, False, 0), (False, True, 3)],
    ids=["a level", "no threads", "not started by mpi4py"],
)
def test_the_users_thread_level_of_mpi4py_stays(
    fake, starts, monkeypatch, initialize, threads, level
):
    monkeypatch.setattr(atexit, "register", lambda call: None)
    monkeypatch.setattr(mpi4py.rc, "initialize", initialize)
    monkeypatch.setattr(mpi4py.rc, "threads", threads)
    monkeypatch.setattr(mpi4py.rc, "thread_level", "serialized")
    mpi_library.start(fake)
    assert starts == [level]
    with pytest.raises(RuntimeError, match="MPI_Init_thread returned 16"):
        mpi_library.start(fake)


def test_only_this_jobs_segment_is_unlinked(monkeypatch, tmp_path):
    maps, real = tmp_path / "maps", open
    own = f"/proc/{os.getpid()}/maps"
    monkeypatch.setattr(
        builtins, "open", lambda name, *rest: real(maps if name == own else name, *rest)
    )
    # In place of /dev/shm, so that other jobs do not interfere.
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as folder:
        monkeypatch.setattr(segments, "FOLDER", folder)
        path = f"{folder}/mpich_shm_of_no_job"
        real(path, "w").close()
        inode = os.stat(path).st_ino
        for number, name in [
            (inode + 1, path),  # a name reused by another job
            (inode, f"{path} (deleted)"),
            (inode, f"{folder}/ucx_shm_posix_1"),
        ]:
            maps.write_text(f"7f-80 rw-s 00000000 00:1b {number}      {name}\n")
            segments.unlink()
            segments.unlink(segments.OPEN_MPI)
            assert os.path.exists(path)
        maps.write_text(f"7f-80 rw-s 00000000 00:1b {inode}      {path}\n")
        segments.unlink()
        assert not os.path.exists(path)


# ---- the cores of BLAS


@pytest.mark.parametrize(
    ("cores", "shares"),
    [  # the cores that each rank may run on, and how many of them it uses
        ([range(4)], [4]),
        ([range(4)] * 2, [2, 2]),
        ([range(4)] * 3, [1, 1, 1]),
        ([range(2), range(2, 4)], [2, 2]),
        ([range(8), range(4)], [6, 2]),
        ([range(192)] * 3, [64, 64, 64]),
        ([range(3)] * 3, [1, 1, 1]),  # 1/3 + 1/3 + 1/3
    ],
    ids=str,
)
def test_each_rank_takes_its_share_of_the_cores(cores, shares):
    sets = [set(one) for one in cores]
    assert [blas_threads.share_of_cores(sets, rank) for rank in range(len(sets))] == shares


@pytest.mark.parametrize(
    ("limit", "users", "lowers"), [(1, "", True), (3, "", False), (1, "2", False)]
)
def test_a_limit_lowers_only_unless_the_user_has_set_one(monkeypatch, limit, users, lowers):
    def threads():
        found = [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]
        assert found
        return found

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that the end of the test undoes what the call sets
    monkeypatch.setenv("MKL_NUM_THREADS", users)
    assert (np.ones((2, 2)) @ np.ones((2, 2))).sum() == 8  # loads BLAS
    with threadpool_limits(2, "blas"):
        before = threads()
        blas_threads.limit(limit)
        assert threads() == ([1] * len(before) if lowers else before)


# ---- a rank's end


def test_mpi_has_not_started_while_it_is_imported(monkeypatch):
    spec = types.SimpleNamespace(_initializing=True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.SimpleNamespace(__spec__=spec))
    assert failure._started_mpi() is None


def test_reports_are_tagged_under_several_ranks_only(monkeypatch, capsys):
    reports.say("one\ntwo")
    monkeypatch.setattr(reports, "_tag", "[rank 3] ")
    reports.say("one\ntwo\n")
    assert capsys.readouterr().err == "one\ntwo\n[rank 3] one\n[rank 3] two\n"
    # A hook that prints nothing leaves the traceback.
    assert "ValueError: lost?" in reports.capture(lambda: None, ValueError("lost?"))
    assert capsys.readouterr().err == ""


def test_notes_show_with_the_error_that_ends_the_job():
    """In Python 3.10 too, which has no notes."""
    error = ValueError("wrong")
    for note in ("the first", "the second", "the first"):
        reports.add_note(error, note)
    assert getattr(error, "__notes__", None) == ["the first", "the second"]
    shown = reports.capture(lambda: None, error)
    assert shown.count("the first\n") == shown.count("the second\n") == 1
