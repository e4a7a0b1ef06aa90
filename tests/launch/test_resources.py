"""Too little memory, too few rights, a system without its parts: errors that name it, nothing left."""

import random

import pytest
from internals import mpi_library
from trained import last_line, weight

slow = pytest.mark.slow
START = "import hpcstrat as hs\nhs.CentralStorageStrategy()\nhs.barrier()\nprint(hs.size())\n"
SHM = "mount -o remount,size={} /dev/shm"


def test_too_little_shared_memory_is_named_and_ends_all_ranks(launch):
    """MPI would end in a bus error."""
    result = launch(START, 2, namespaces=True, before=SHM.format("4m"))
    assert result.status not in (0, 7) and (result.out, result.leftovers) == ("", [])
    assert "RuntimeError: /dev/shm has " in result.err and "--shm-size=1g" in result.err


def test_shared_memory_that_cannot_be_written_to(launch):
    if mpi_library.load().get_vendor() < ("MPICH", (5,)):
        pytest.skip("MPICH before 5 may use another folder, or not, by how it was built")
    result = launch(START, 1, namespaces=True, before="mount -o remount,ro /dev/shm")
    if launch.open_mpi:
        assert result.status == 0
    else:
        assert result.status not in (0, 7)
        assert "RuntimeError: /dev/shm cannot be written to, and MPI (MPICH " in result.err


@slow
def test_enough_shared_memory_for_a_rank_that_comes_late(launch):
    late = ["--before", "time.sleep(1.5 * (rank == 1))"]
    result = launch("training.py", 2, *late, namespaces=True, before=SHM.format("27m"))
    assert (result.status, result.leftovers) == (0, []) and last_line(result) == weight(2)


@slow
def test_shared_memory_that_becomes_too_little_for_a_rank(launch):
    """Which alone does not start MPI."""
    if launch.open_mpi:
        pytest.skip("Open MPI starts without /dev/shm")
    program = """
        import time
        import hpcstrat as hs
        from hpcstrat._process import mpi_library

        if hs.rank() == 1:
            time.sleep(1)
            mpi_library._is_mpi_starting = lambda: False  # as where no other process shows
        hs.CentralStorageStrategy()
    """
    result = launch(program, 2, namespaces=True, before=SHM.format("26m"))
    assert result.status != 0 and result.leftovers == []
    assert "[rank 1] RuntimeError: /dev/shm has 2" in result.err


@slow
def test_without_proc_the_start_says_so(launch):
    if launch.open_mpi:
        pytest.skip("the mpirun of Open MPI needs /proc itself")
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /proc; exec "$@"', "sh"]
    result = launch(START, 2, namespaces=True, wrap=mount)
    assert result.status != 0 and result.leftovers == []
    assert "RuntimeError: /proc is not mounted, and neither MPI nor hpcstrat starts" in result.err


@slow
@pytest.mark.parametrize("limit", ["-n 64", "-v 4000000", "-f 20000", "-u 400"])
def test_limits_suffice_or_are_named(launch, limit):
    wrap = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash"]
    result = launch("training.py", 2, namespaces=True, wrap=wrap)
    if result.status:
        assert "ulimit" in result.err
    else:
        assert last_line(result) == weight(2)


@slow
@pytest.mark.parametrize("start", ["mpirun", "run"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_ctrl_c_at_any_moment_ends_all_ranks(launch, start, seed):
    """Also in the first tenths of a second, in which Python and MPI are loaded."""
    words = ["training.py", 2 + seed, "--step-seconds", 0.1]
    job = launch.start(*words, launcher=start, namespaces=True)
    process = job.launcher()
    job.pause(random.Random(seed).uniform(0.4 if start == "run" else 0.05, 1.2))
    job.signal(process, "SIGINT")
    result = job.end()
    assert result.status != 0 and "weight" not in result.out and result.leftovers == []


@slow
def test_a_rank_that_is_stopped_for_a_while_goes_on(launch):
    env = {"HPCSTRAT_STALL_SECONDS": 1}
    job = launch.start("training.py", 3, "--step-seconds", 0.02, launcher="run", env=env)
    job.wait_for("step-4")
    victim = job.rank(1)
    job.signal(victim, "SIGSTOP")
    job.wait_until(lambda: "rank 1: " in job.err, "the report")
    job.signal(victim, "SIGCONT")
    result = job.end()
    assert (result.status, last_line(result), result.leftovers) == (0, weight(3), [])


ATTEMPT = """
    import os, sys
    import numpy as np
    import hpcstrat as hs
    from hpcstrat._memory import host_limits

    strategy = hs.CentralStorageStrategy()
    x = strategy.run(lambda: np.ones(64 << 17))  # 64 MiB
    available, found = host_limits.available_memory, []
    for left in (127, 1000):
        for call in lambda: strategy.gather(x, axis=0), lambda: strategy.reduce("SUM", x, axis=None):
            host_limits.available_memory = lambda: left << 20
            try:
                call()
            except MemoryError as error:
                assert "for 2 ranks, " in str(error), error
                found.append("refused")
            else:
                found.append("done")
            host_limits.available_memory = available
            assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == 2
    os.write(1, (" ".join(found) + "\\n").encode())
"""


def test_too_little_memory_for_all_ranks_together(launch):
    """An error on all ranks, though each alone has enough memory: the kernel would kill them."""
    result = launch(ATTEMPT, 2, env={"OMP_NUM_THREADS": "1"})
    assert (result.status, result.out) == (0, 2 * "refused refused done done\n")


def test_little_address_space(launch):
    """As if a batch system sets `ulimit -v`: no rank makes what one cannot map."""
    program = """
        import os, resource
        import numpy as np
        import hpcstrat as hs

        if hs.rank() == 1:
            resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
        strategy = hs.CentralStorageStrategy()
        with strategy.scope():
            w = hs.Variable(np.arange(3.0))
        w.assign_add([1.0, 2.0, 3.0])
        total = strategy.reduce("SUM", strategy.run(lambda: np.full(10**6, hs.rank() + w[2])), axis=None)
        text = f"{w.numpy()} {total[0]} {total[-1]}"
        try:
            with strategy.scope():
                hs.Variable(np.broadcast_to(0.0, (250_000_000,)))
        except MemoryError as error:
            os.write(2, f"{text} {error}\\n".encode())
    """
    result = launch(program, 2, env={"OMP_NUM_THREADS": "1"})
    assert result.status == 0
    message = (
        "[1. 3. 5.] 11.0 11.0 the ranks of this host cannot share 2,000,027,648 bytes of memory"
    )
    assert result.err.count(message) == 2
    assert result.err.count("`ulimit -f` and `ulimit -n` limit what they can share") == 2
