import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import types

import pytest
from internals import Launcher, guard, launchers, output, worlds


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


def launched(monkeypatch, size, rank=0, name="mpirun of Open MPI"):
    launcher = Launcher(name, rank, size, None, None)
    monkeypatch.setattr(launchers, "find", lambda: launcher)
    # The mark of a rank's processes, which is set then; later tests start processes too.
    monkeypatch.setenv("_HPCSTRAT_PROCESS", "")


def test_a_world_is_started_once():
    world = worlds.start()
    assert worlds.start() is world
    assert worlds.find() is world
    assert (world.rank, world.size, world.local_rank, world.local_size, world.hosts) == (
        0,
        1,
        0,
        1,
        (0,),
    )
    assert 0 <= world.seed < 1 << 64


def test_the_users_setting_of_open_mpi_stays(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl", "self,sm")
    monkeypatch.delenv("OMPI_MCA_osc", raising=False)
    worlds._load_mpi(None)
    assert os.environ["OMPI_MCA_btl"] == "self,sm"
    assert os.environ["OMPI_MCA_osc"] == "^ucx"


def test_another_mpis_launcher_is_refused(fake, monkeypatch):
    launched(monkeypatch, 4)
    with pytest.raises(
        RuntimeError, match=r"mpirun of Open MPI started 4 processes, but MPI \(MPICH 5\.0\.2"
    ):
        worlds._connect()


def test_a_launcher_without_a_size_is_refused_where_the_rank_shows_it(fake, monkeypatch):
    launched(monkeypatch, None, rank=1, name="a PMIx launcher")
    with pytest.raises(
        RuntimeError, match="a PMIx launcher started this process as rank 1, but MPI"
    ):
        worlds._connect()


@pytest.mark.parametrize(
    ("launcher", "size", "vendor", "refused"),
    [
        ("mpirun of Open MPI", 2, "MPICH", True),
        ("mpirun of Open MPI", 1, "MPICH", True),  # MPI would end it
        ("prterun (PMIx)", None, "Intel MPI", True),
        ("mpirun of Open MPI", 2, "Open MPI", False),
        ("mpirun of Open MPI", 2, "unknown", False),  # such as a vendor's, derived from Open MPI
        ("mpirun of MPICH", 2, "Open MPI", True),
        ("mpirun of MPICH", 1, "Open MPI", False),  # works
        ("mpirun of Intel MPI", 2, "MPICH", False),
        ("srun", 2, "Open MPI", False),
        ("a PMI launcher", 2, "Open MPI", False),
    ],
)
def test_another_mpis_launcher_is_known_before_mpi_starts(
    fake, monkeypatch, launcher, size, vendor, refused
):
    started = []
    fake.Is_initialized = lambda: False
    fake.THREAD_MULTIPLE, fake.Init_thread, fake.get_vendor = (
        3,
        started.append,
        lambda: (vendor, (5, 0)),
    )
    monkeypatch.setattr(
        worlds, "_speaks_pmix", lambda: False
    )  # of the library that is really loaded
    launched(monkeypatch, size, name=launcher)
    if refused:
        with pytest.raises(
            RuntimeError, match=r"which mpi4py loads\) is another: .* Start with the mpirun of"
        ):
            worlds._start_mpi(fake)
    else:
        worlds._start_mpi(fake)
    assert started == ([] if refused else [3])


def test_mpich_that_speaks_pmix_may_be_started_by_it(fake, monkeypatch):
    fake.Is_initialized, fake.THREAD_MULTIPLE, fake.Init_thread = (
        (lambda: False),
        3,
        lambda level: None,
    )
    launched(monkeypatch, 2)
    monkeypatch.setattr(worlds, "_speaks_pmix", lambda: True)
    worlds._start_mpi(fake)


@pytest.mark.parametrize(
    ("vendor", "version", "refused"),
    [("MPICH", (5, 0, 2), True), ("MPICH", (4, 3, 2), False), ("Open MPI", (5, 0, 8), False)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_without_shared_memory(fake, monkeypatch, tmp_path, vendor, version, refused, size):
    started = []
    fake.Is_initialized, fake.THREAD_MULTIPLE, fake.Init_thread = (lambda: False), 3, started.append
    fake.get_vendor = lambda: (vendor, version)
    monkeypatch.setattr(guard, "FOLDER", str(tmp_path / "shm"))
    monkeypatch.setattr(launchers, "find", lambda: Launcher("a PMI launcher", 0, size, 0, size))
    if refused:
        with pytest.raises(
            RuntimeError,
            match=r"shm does not exist, and MPI \(MPICH 5\.0\.2\) does not start .*shm-size",
        ):
            worlds._start_mpi(fake)
    else:
        worlds._start_mpi(fake)
    assert started == ([] if refused else [3])


def test_the_users_thread_level_of_mpi4py_stays(fake, monkeypatch):
    import mpi4py

    started = []
    fake.Is_initialized = lambda: False
    fake.Init, fake.Init_thread = (lambda: started.append("alone")), started.append
    fake.THREAD_SERIALIZED, fake.THREAD_MULTIPLE = "serialized", "multiple"
    monkeypatch.setattr(launchers, "find", lambda: None)
    monkeypatch.setattr(mpi4py.rc, "initialize", True)
    monkeypatch.setattr(mpi4py.rc, "thread_level", "serialized")
    worlds._start_mpi(fake)
    monkeypatch.setattr(mpi4py.rc, "threads", False)
    worlds._start_mpi(fake)
    assert started == ["serialized", "alone"]


def test_srun_has_a_remedy_of_its_own(fake, monkeypatch):
    launched(monkeypatch, 4, name="srun")
    with pytest.raises(RuntimeError, match="srun --mpi=pmi2"):
        worlds._connect()


def test_mpi_finalised_already(fake, monkeypatch):
    fake.Is_finalized = lambda: True
    launched(monkeypatch, 2)
    with pytest.raises(RuntimeError, match=r"MPI was finalised already .* before MPI\.Finalize"):
        worlds._connect()
    launched(monkeypatch, 1)
    world = worlds._connect()
    assert (world.size, world.comm, world.host_comm) == (1, None, None)


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        (ModuleNotFoundError("No module named 'mpi4py'"), "mpi4py is missing"),
        (
            ImportError("libmpi.so.12: cannot open shared object file"),
            "an MPI library that mpi4py can load is missing",
        ),
        (RuntimeError("cannot load MPI library"), "an MPI library that mpi4py can load is missing"),
    ],
    ids=["no mpi4py", "no library", "another library"],
)
def test_without_mpi(monkeypatch, error, missing, capfd):
    def importing(name, *arguments, **options):
        if name == "mpi4py":
            raise error
        return real(name, *arguments, **options)

    import builtins

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", importing)
    for size, rank in ((1, 0), (None, 0)):
        launched(monkeypatch, size, rank)
        assert worlds._connect().size == 1
    monkeypatch.setattr(launchers, "find", lambda: None)
    world = worlds._connect()
    assert (world.size, world.comm) == (1, None)
    assert capfd.readouterr() == ("", "")
    for size, rank in ((2, 0), (None, 1)):
        launched(monkeypatch, size, rank)
        with pytest.raises(RuntimeError, match=missing):
            worlds._connect()


@pytest.fixture
def shared_memory(monkeypatch):
    """A folder in place of /dev/shm, so that other tests and jobs do not interfere."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as folder:
        monkeypatch.setattr(guard, "FOLDER", folder)
        yield folder


def test_only_this_jobs_segment_is_unlinked(monkeypatch, shared_memory, tmp_path):
    import builtins

    path = f"{shared_memory}/mpich_shm_of_no_job"
    with open(path, "w") as file:
        inode = os.stat(path).st_ino
        assert file
    maps = tmp_path / "maps"
    real = builtins.open
    monkeypatch.setattr(
        builtins,
        "open",
        lambda name, *rest: real(maps if name == f"/proc/{os.getpid()}/maps" else name, *rest),
    )
    for line in (
        f"7f-80 rw-s 00000000 00:1b {inode + 1}      {path}",  # a name reused by another job
        f"7f-80 rw-s 00000000 00:1b {inode}      {path} (deleted)",
        f"7f-80 rw-s 00000000 00:1b {inode}      {shared_memory}/ucx_shm_posix_1",
    ):
        maps.write_text(line + "\n")
        guard.unlink_segments(os.getpid())
        guard.unlink_segments(os.getpid(), guard.OPEN_MPI)
        assert os.path.exists(path)
    maps.write_text(f"7f-80 rw-s 00000000 00:1b {inode}      {path}\n")
    guard.unlink_segments(os.getpid())
    assert not os.path.exists(path)


def test_a_process_that_is_killed_in_a_guarded_block_leaves_no_segment():
    """Its guard has looked since it made the segment."""
    program = """if True:
    import fcntl, mmap, os, signal, sys, termios, time
    from hpcstrat._process import guard

    block = guard.watch([(600.0, "")])
    with block:
        pipe = block.gen.gi_frame.f_locals["guard"].stdin
        while any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))):  # until the guard has read what to do
            time.sleep(0.001)
        with open(sys.argv[1], "w+b") as file:
            file.truncate(mmap.PAGESIZE)
            mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        time.sleep(5 * guard._LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = f"/dev/shm/mpich_shm_test_{os.getpid()}"
    try:
        assert subprocess.run([sys.executable, "-c", program, path]).returncode == -9
        deadline = time.monotonic() + 20
        while os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not os.path.exists(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def test_messages_are_tagged_under_several_ranks_only(monkeypatch, capsys):
    output.say("one\ntwo")
    monkeypatch.setattr(output, "_tag", "[rank 3] ")
    output.say("one\ntwo\n")
    assert capsys.readouterr().err == "one\ntwo\n[rank 3] one\n[rank 3] two\n"


def test_a_stream_that_nobody_reads_keeps_no_rank_from_its_end(monkeypatch):
    class Full:
        def write(self, text):
            threading.Event().wait()

    monkeypatch.setattr(sys, "stderr", Full())
    monkeypatch.setattr(output, "_PRINT_SECONDS", 0.1)
    printing = threading.Thread(target=output.say, args=("it ends",), daemon=True)
    printing.start()
    printing.join(20)
    assert not printing.is_alive()


def test_a_hook_that_prints_nothing_leaves_the_traceback(monkeypatch, capsys):
    assert "ValueError: lost?" in output.capture(lambda: None, ValueError("lost?"))
    assert capsys.readouterr().err == ""
