"""An error on one rank ends all ranks: traceback first, tagged, non-zero status, nothing left."""

import os
import shlex
import subprocess
import sys
import textwrap

import pytest
from internals import mpi_library
from slow import slow_but

START = """
    import os, signal, sys, threading, time
    import hpcstrat as hs
    from hpcstrat._process import failure, worlds

    hs.barrier()
    world = worlds.start()
    last = world.rank == world.size - 1
"""
WAIT = """
    world.comm.Barrier()
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_good_run_ends_well(launch):
    result = launch(START + "    world.comm.Barrier()", 3)
    assert result.status == 0
    assert result.stderr == ""
    assert result.leftovers == []


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3, 4]))
@pytest.mark.parametrize("thread", slow_but(["main"], ["main", "other"]))
def test_an_uncaught_exception_ends_all_ranks(launch, ranks, thread):
    result = launch(
        START
        + """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        failure._FORWARD_DELAY = 2  # its mpirun says "MPI_ABORT" itself, and on a busy machine reads late

    def fail():
        raise ValueError("the cause\\nin two lines")

    if last and sys.argv[1] == "main":
        fail()
    elif last:
        threading.Thread(target=fail, name="worker").start()
    """
        + WAIT,
        ranks,
        thread,
    )
    assert result.status != 0
    lines = result.tagged(ranks - 1)
    assert "Traceback (most recent call last):" in lines
    assert lines[-2:] == ["ValueError: the cause", "in two lines"]
    first = result.stderr.index("ValueError: the cause")
    assert "Abort(" not in result.stderr[:first] and "MPI_ABORT" not in result.stderr[:first]
    assert not any(result.tagged(rank) for rank in range(ranks - 1))
    assert result.leftovers == []


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
def test_an_error_of_all_ranks_reads_as_one(launch, ranks):
    result = launch(
        START
        + """
    failure._LEAD_DELAY = 30
    sys.stdout.write("an unfinished line")
    raise ValueError("everywhere")
    """,
        ranks,
    )
    assert result.status != 0
    assert "an unfinished line" in result.stdout  # is not lost
    assert "ValueError: everywhere" in result.tagged(0)
    assert not any(result.tagged(rank) for rank in range(1, ranks))


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
def test_the_cause_is_reported_before_its_consequence(launch, ranks):
    result = launch(
        START
        + """
    failure._CONSEQUENCE_DELAY = 30
    world.comm.Barrier()
    if last:
        time.sleep(0.3)
        raise ValueError("the cause")
    error = RuntimeError("a peer has gone")
    failure.mark_as_consequence(error)
    raise error
    """,
        ranks,
    )
    assert result.status != 0
    assert "ValueError: the cause" in result.tagged(ranks - 1)
    assert "a peer has gone" not in result.stderr


@pytest.mark.slow
def test_keyboard_interrupt(launch):
    result = launch(START + "    if last: raise KeyboardInterrupt\n" + WAIT, 2)
    assert result.status != 0
    assert result.tagged(1)[-1] == "KeyboardInterrupt"


@pytest.mark.parametrize("thread", slow_but(["other"], ["main", "other"]))
def test_end_job(launch, thread):
    result = launch(
        START
        + """
    def end():
        failure.end_job("rank 0 waits for rank 1\\nsince a minute")

    world.comm.Barrier()
    if last and sys.argv[1] == "main":
        end()
    elif last:
        threading.Thread(target=end).start()
    """
        + WAIT,
        2,
        thread,
    )
    assert result.status == 1
    assert result.tagged(1) == ["rank 0 waits for rank 1", "since a minute"]
    assert result.leftovers == []


@pytest.mark.parametrize("ranks", slow_but([1], [None, 1]))
def test_end_job_of_one_rank(launch, ranks):
    result = launch(
        "import hpcstrat as hs\nfrom hpcstrat._process import failure\nhs.barrier()\nprint('before')\n"
        "failure.end_job('it ends')",
        ranks,
    )
    assert result.status == 1
    assert result.stdout == "before\n"
    assert result.stderr.startswith("it ends\n")
    assert result.leftovers == []


@pytest.mark.slow
def test_end_job_before_the_start(launch):
    result = launch("from hpcstrat._process import failure\nfailure.end_job('it ends')")
    assert (result.status, result.stderr) == (1, "it ends\n")


def test_hooks_that_were_there_still_print(launch):
    result = launch(
        """
    import sys
    sys.excepthook = lambda kind, error, trace: print("pretty", kind.__name__, file=sys.stderr)
    """
        + START
        + "    if last: raise ValueError\n"
        + WAIT,
        2,
    )
    assert result.status != 0
    assert result.tagged(1) == ["pretty ValueError"]


def test_a_forked_child_does_not_end_the_job(launch):
    result = launch(
        START
        + """
    world.comm.Barrier()
    if last:
        child = os.fork()
        if child == 0:
            try:
                raise ValueError("in the child")
            except ValueError:
                sys.excepthook(*sys.exc_info())
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    world.comm.Barrier()
    """,
        2,
    )
    assert result.status == 0
    assert "ValueError: in the child" in result.stderr


def test_an_error_after_the_end_of_mpi(launch):
    result = launch(
        START
        + "    from mpi4py import MPI\n    MPI.Finalize()\n    if last: raise ValueError('late')",
        2,
    )
    assert result.status != 0
    assert "ValueError: late" in result.stderr


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing(launch):
    result = launch(
        START
        + "    world.comm.Barrier()\n    if last: os.kill(os.getpid(), signal.SIGKILL)\n"
        + WAIT,
        3,
    )
    assert result.status != 0
    assert result.leftovers == []


@pytest.fixture
def launch_on_tmpfs(launch, tmp_path):
    """`launch_on_tmpfs(program, ranks, options)`: runs it with its own, so mounted, `/dev/shm`.

    With `also`, another folder is empty.
    """
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a /dev/shm of its own needs root")

    def run(program, ranks, options, also=None):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        mount = f"mount -t tmpfs -o {options} none /dev/shm"
        if also is not None:
            mount += f" && mount -t tmpfs none {also}"
        mpirun = shlex.join([*launch.mpirun, "-n", str(ranks), sys.executable, str(path)])
        return subprocess.run(
            [
                "unshare",
                "-m",
                "sh",
                "-c",
                f"{mount} && {mpirun}; status=$?; sleep 0.5; echo left: `ls /dev/shm`; exit "
                "$status",
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    "ranks, options", slow_but([(2, "size=4m"), (1, "ro")], [(2, "size=4m"), (2, "ro"), (1, "ro")])
)
def test_too_little_shared_memory(launch, launch_on_tmpfs, ranks, options):
    """MPI would end in a bus error.

    Mounting a private `/dev/shm` needs a mount namespace, which root may have.
    """
    if options == "ro" and mpi_library.load().get_vendor() < ("MPICH", (5,)):
        pytest.skip("MPICH before 5 may use another folder, or not, by how it was built")
    result = launch_on_tmpfs(
        "import hpcstrat as hs\nhs.CentralStorageStrategy()\nhs.barrier()\n", ranks, options
    )
    if options == "ro" and launch.open_mpi:
        assert result.returncode == 0
        return
    assert result.returncode not in (0, 7)
    problems = {
        "ro": "cannot be written to, and MPI (MPICH ",
        "size=4m": "has 4 MiB left, and MPI takes up to 24 MiB",
    }
    assert f"RuntimeError: /dev/shm {problems[options]}" in result.stderr
    assert "--shm-size=1g" in result.stderr


@pytest.mark.parametrize("ranks", slow_but([2], [1, 2]))
def test_no_proc(launch, launch_on_tmpfs, ranks):
    """One line on all ranks, or only the first one's, which ends the job; nothing is left."""
    if launch.open_mpi:
        pytest.skip("the mpirun of Open MPI needs /proc itself")
    result = launch_on_tmpfs(
        "import hpcstrat as hs\nhs.CentralStorageStrategy()\n", ranks, "size=64m", also="/proc"
    )
    assert result.returncode != 0 and result.stdout.endswith("left:\n")
    assert (
        "RuntimeError: /proc is not mounted, and neither MPI nor hpcstrat starts without it"
        in result.stderr
    )


@pytest.mark.parametrize("ranks, options", [(2, "size=27m"), (8, "size=64m")])
@pytest.mark.slow
def test_enough_shared_memory_for_a_rank_that_comes_late(launch_on_tmpfs, ranks, options):
    program = """
        import sys, time
        import hpcstrat as hs

        if hs.rank() == 1:
            time.sleep(1)
        hs.CentralStorageStrategy()
        hs.barrier()
        print(f"{hs.size()} ranks")
    """
    result = launch_on_tmpfs(program, ranks, options)
    assert (result.returncode, result.stdout) == (0, f"{ranks} ranks\nleft:\n"), result.stderr


@pytest.mark.slow
def test_shared_memory_that_becomes_too_little_for_a_rank_ends_the_job(launch, launch_on_tmpfs):
    """The others wait in the start of MPI, which this rank does not start."""
    if launch.open_mpi:
        pytest.skip("Open MPI starts without /dev/shm")
    program = """
        import os, sys, time
        import hpcstrat as hs
        from hpcstrat._process import mpi_library

        if hs.rank() == 1:
            time.sleep(1)
            mpi_library._is_mpi_starting = lambda: False  # as where the system shows no other process
        hs.CentralStorageStrategy()
    """
    result = launch_on_tmpfs(program, 2, "size=26m")
    assert result.returncode != 0 and result.stdout.endswith("left:\n")
    assert "[rank 1] RuntimeError: /dev/shm has 2" in result.stderr


@pytest.mark.slow
def test_an_error_before_the_start_where_shared_memory_is_too_little(launch, launch_on_tmpfs):
    if launch.open_mpi:
        pytest.skip("Open MPI starts without /dev/shm")
    program = """
        import time
        import hpcstrat as hs

        if hs.rank() == 1:
            raise ValueError("the cause")
        time.sleep(60)
    """
    result = launch_on_tmpfs(program, 3, "size=4m")
    assert result.returncode != 0 and result.stdout.endswith("left:\n")
    assert "[rank 1] ValueError: the cause" in result.stderr


ATTEMPT = """
    import os, sys
    import numpy as np
    import hpcstrat as hs
    from hpcstrat._memory import host_limits

    def gather(x): strategy.gather(x, axis=0)
    def reduce(x): strategy.reduce("SUM", x, axis=None)

    call, mebibytes, left = sys.argv[1:]
    strategy = hs.CentralStorageStrategy()
    x = strategy.run(lambda: np.ones(int(mebibytes) << 17))
    available = host_limits.available_memory
    host_limits.available_memory = lambda: int(left) << 20
    try:
        globals()[call](x)
    except MemoryError as error:
        assert "for 2 ranks, " in str(error), error
        os.write(1, b"refused ")
    else:
        os.write(1, b"done ")
    host_limits.available_memory = available
    assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == 2
"""


@pytest.mark.parametrize("call", slow_but(["reduce"], ["gather", "reduce"]))
def test_too_little_memory_for_all_ranks_together(launch, call):
    """An error on all ranks, though each alone has enough memory: the kernel would kill them."""
    for left, outcome in ((127, "refused "), (1000, "done ")):
        result = launch(ATTEMPT, 2, call, "64", str(left), env={"OMP_NUM_THREADS": "1"})
        assert (result.status, result.stdout) == (0, 2 * outcome)


@pytest.mark.parametrize("limited", ["range(2)", "[1]"], ids=["all ranks", "one rank"])
def test_little_address_space(launch, limited):
    """As if a batch system sets `ulimit -v`: no rank makes what one cannot map."""
    result = launch(
        f"""
        import os, resource
        import numpy as np
        import hpcstrat as hs

        if hs.rank() in {limited}:
            resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
        strategy = hs.CentralStorageStrategy()
        with strategy.scope():
            w = hs.Variable(np.arange(3.0))
        w.assign_add([1.0, 2.0, 3.0])
        total = strategy.reduce("SUM", strategy.run(lambda: np.full(10**6, hs.rank() + w[2])), axis=None)
        text = f"{{w.numpy()}} {{total[0]}} {{total[-1]}}"
        try:
            with strategy.scope():
                hs.Variable(np.broadcast_to(0.0, (250_000_000,)))
        except MemoryError as error:
            os.write(2, f"{{text}} {{error}}\\n".encode())
        """,
        2,
        env={"OMP_NUM_THREADS": "1"},
    )
    assert result.status == 0
    message = (
        "[1. 3. 5.] 11.0 11.0 the ranks of this host cannot share 2,000,027,648 bytes of memory"
    )
    assert result.stderr.count(message) == 2
    assert result.stderr.count("`ulimit -f` and `ulimit -n` limit what they can share") == 2
