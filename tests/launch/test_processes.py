"""A rank's process: its BLAS threads, the memory it keeps, its children, and a launcher that dies."""

import ast
import os
import platform
import sys

import pytest
from internals import heap
from processes import parent, runs

slow = pytest.mark.slow

# ---- BLAS threads: a rank's share of the cores that it may run on

THREADS = """
    import os, sys
    import numpy as np
    from threadpoolctl import threadpool_info
    from hpcstrat._process import worlds

    world = worlds.start()
    blas = [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]
    rows = world.comm.gather((blas, sorted(os.sched_getaffinity(0))))
    if world.rank == 0:
        print(rows)
"""
# Ranks that mpirun binds to one core each get one thread from OpenBLAS itself, whatever is set.
UNBOUND = {"OMPI_MCA_hwloc_base_binding_policy": "none"}


def shares(result):
    assert result.status == 0
    rows = ast.literal_eval(result.out)
    if not rows[0][0]:
        pytest.skip("this NumPy's BLAS is none that threadpoolctl knows")
    return [(set(blas), own) for blas, own in rows]


def test_each_rank_takes_its_share(launch):
    rows = shares(launch(THREADS, 2))
    for blas, own in rows:
        share = sum(1 / sum(core in other for _, other in rows) for core in own)
        assert blas == {max(1, int(share + 1e-9))}


@slow
def test_one_rank_is_not_limited_and_the_users_choices_win(launch):
    cores = len(os.sched_getaffinity(0))
    assert shares(launch(THREADS, env=UNBOUND))[0][0] == {cores}
    env = {"OPENBLAS_NUM_THREADS": "2", **UNBOUND}
    assert [blas for blas, _ in shares(launch(THREADS, 2, env=env))] == [{2}, {2}]
    if cores > 1:
        bound = shares(launch(THREADS, 2, options=["--bind-to", "core"]))
        assert [blas for blas, _ in bound] == [{1}, {1}]


# ---- memory that a step frees: the next step takes it again; a process keeps at most 1 GiB of it

needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or heap._user_decides(),
    reason="another allocator, or other settings",
)
# More than the 64 MiB that glibc keeps at most by default.
STEPS = """
import resource
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(1 << 20, np.float32))
    optimizer = hs.optimizers.SGD(0.1, momentum=0.9)

def step():
    optimizer.apply_gradients([(np.ones(w.shape, np.float32), w)])
    # Last, so that nothing that stays lies above them and holds them in the heap by chance.
    [np.ones(4 << 20, np.float32) for _ in range(6)]

def train():
    for _ in range(5):
        strategy.run(step)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        strategy.run(step)
    print("faults", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)

train()
"""
MORE_THAN_IS_KEPT = """
import numpy as np
import hpcstrat as hs

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))

strategy = hs.CentralStorageStrategy()
before = resident()
for count in (40, 80):
    arrays = [np.ones(16 << 20, np.uint8) for _ in range(count)]
    del arrays
    print("kept", resident() - before)
"""


def numbers(result, word):
    return [int(line.split()[1]) for line in result.out.splitlines() if line.startswith(word)]


@needs_glibc
@pytest.mark.parametrize("keep", ["1", pytest.param("0", marks=slow)])
def test_a_step_pages_nothing_in_anew(launch, keep):
    """Unless that is forbidden: then each MiB costs 256 faults."""
    env = {"HPCSTRAT_KEEP_MEMORY": keep, "HPCSTRAT_OUTPUT": "all"}
    env["NUMPY_MADVISE_HUGEPAGE"] = "0"  # a page fault brings 4 KiB
    faults = numbers(launch(STEPS, 2, env=env), "faults")
    assert len(faults) == 2
    assert max(faults) < 100 if keep == "1" else max(faults) > 1000


@slow
@needs_glibc
@pytest.mark.parametrize(
    "users",
    [{}, {"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}],
    ids=str,
)
def test_freed_memory_is_kept_up_to_the_bound_or_as_the_user_sets_it(launch, users):
    few, many = numbers(launch(MORE_THAN_IS_KEPT, env=users), "kept")
    assert few < 600 << 20 if users else 600 << 20 < few < 1 << 30
    assert many < 1 << 30  # of 1,280 MiB


def test_a_setting_that_means_nothing(launch):
    for name in ("HPCSTRAT_KEEP_MEMORY", "HPCSTRAT_COMPILE"):
        result = launch("import hpcstrat as hs\nhs.CentralStorageStrategy()", env={name: "some"})
        assert result.status != 0 and f"{name} is 'some'; it must be 1 or 0" in result.err


# ---- children

FORKS = """
    import os, warnings
    import numpy as np
    import hpcstrat as hs

    warnings.filterwarnings("ignore", ".*use of fork.*")  # of Python 3.12 and later
    strategy = hs.MirroredStrategy(["CPU:0"] * hs.size())
    with strategy.scope():
        before = hs.Variable(np.ones(4))
    to_parent, to_child = os.pipe(), os.pipe()

    def send(pipe): os.write(pipe[1], b"x")
    def wait(pipe): assert os.read(pipe[0], 1) == b"x"

    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = hs.Variable(np.full(4, 7.0))
            send(to_parent)
            wait(to_child)  # the parent has made variables, too
            assert own.numpy().tolist() == [7.0] * 4
            own.assign(np.full(4, 8.0))
            assert own.numpy().tolist() == [8.0] * 4
            status = 0
        finally:
            os._exit(status)
    os.close(to_parent[1])  # so that the end of the child is seen
    wait(to_parent)
    with strategy.scope():
        after = hs.Variable(np.zeros(4))
    outside = hs.Variable(np.zeros(4))
    send(to_child)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    found = [v.numpy().tolist() for v in (before, after, outside)]
    assert found == [[1.0] * 4, [0.0] * 4, [0.0] * 4], found
    after.assign(np.full(4, 2.0))
    assert after.numpy().tolist() == [2.0] * 4
    print("done")
"""


def test_a_forked_child_has_variables_of_its_own(launch):
    result = launch(FORKS, 2, env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.out, result.err) == (0, 2 * "done\n", "")


# ---- the launcher is killed or stopped, so it can end no rank: each rank ends by itself

ALONE = """
import os, pathlib, sys, threading, time
import hpcstrat as hs

hs.barrier()
pathlib.Path(f"started-{hs.rank()}").touch()

def print_on():
    while True:
        print(1000 * "x")

if sys.argv[1] == "print":
    threading.Thread(target=print_on, daemon=True).start()
    time.sleep(2)
    if hs.rank() == 0:
        hs.barrier()
while True:
    if sys.argv[1] == "call":
        hs.barrier()
    time.sleep(0.01)
"""
SHELL = ["sh", "-c", '"$@"; true', "sh"]


@pytest.mark.parametrize(
    "shell, does, ranks",
    [
        (SHELL, "call", 2),
        pytest.param([], "compute", 1, marks=slow),
        pytest.param([], "call", 3, marks=slow),
        pytest.param(SHELL, "compute", 3, marks=slow),
    ],
)
def test_ranks_end_with_their_launcher(launch, shell, does, ranks):
    path = launch.folder / "alone.py"
    path.write_text(ALONE)
    job = launch.start([*launch.mpirun, "-n", ranks, *shell, sys.executable, path, does])
    job.wait_for(*(f"started-{rank}" for rank in range(ranks)))
    # MPICH's proxy; Open MPI's mpirun itself, on one host.
    proxy = parent(job.rank(0))
    for process in {proxy, job.launcher()}:
        job.signal(process, "SIGKILL")
    assert job.end().leftovers == []


@slow
def test_ranks_end_where_nobody_reads_what_they_print(launch):
    """Rank 1 does not come; the others' pipes are full, so the report cannot be printed."""
    env = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "6"}
    env["HPCSTRAT_OUTPUT"] = "all"
    job = launch.start(ALONE, 2, "print", env=env, wrap=["sh", "-c", '"$@" | sleep 1000', "sh"])
    job.wait_for("started-0", "started-1")
    ranks = [job.rank(0), job.rank(1)]
    job.wait_until(lambda: not any(map(runs, ranks)), "the end of the ranks")
    for process in job.processes():
        job.signal(process, "SIGKILL")
    job.end()
