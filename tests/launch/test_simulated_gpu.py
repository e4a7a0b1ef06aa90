"""The simulated GPU: it runs correct programs, and finds bugs planted in a copy of the package.

One program runs in `launch/test`, the tests marked `gpu` in `launch/test --simulated-gpu`, the rest
with `--all`.
"""

import fnmatch
import pathlib
import re
import shutil

import numpy as np
import pytest
import simulated_gpu
from slow import slow_but

import hpcstrat

pytestmark = pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")

TRAINING = pathlib.Path(__file__).with_name("simulated_training.py")
PACKAGE = pathlib.Path(hpcstrat.__file__).parent
HANGS_SOON = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}


def planted(folder, changes):
    """A copy of the package with these changes (file, old text, new text); each must match once."""
    shutil.copytree(PACKAGE, folder / "hpcstrat", ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in changes:
        path = folder / "hpcstrat" / name
        text = path.read_text()
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))
    return folder


@pytest.mark.parametrize("ranks", slow_but([], [None, 1, 2, 3, 4]))
def test_the_package_as_it_is(simulated, ranks):
    result = simulated(TRAINING, ranks)
    assert (result.status, result.stdout, result.leftovers) == (0, "trained\n", [])


NOT_ORDERED = " is not ordered with the"
BUGS = {
    "the strategy's stream does not wait for the caller's": (
        [
            (
                "_core/gpu.py",
                "            stream.raw.wait_event(stream.entered)\n",
                "            pass\n",
            )
        ],
        NOT_ORDERED,
    ),
    "the caller's stream does not wait for the strategy's": (
        [("_core/gpu.py", "            outer.wait_event(stream.left)\n", "            pass\n")],
        NOT_ORDERED,
    ),
    "use() instead of a push": (
        [
            ("_core/gpu.py", "stream.raw.__enter__()", "stream.raw.use()"),
            ("_core/gpu.py", "stream.raw.__exit__(None, None, None)", "self._outer.use()"),
        ],
        "Stream.use() at ",
    ),
    "a stream on another GPU": (
        [("_core/gpu.py", "self.cuda.Device(ordinal).use()", "self.cuda.Device(0).use()")],
        "cudaErrorInvalidResourceHandle",
    ),
    "updates on whatever stream is current": (
        [
            (
                "_storage/gpu.py",
                "with stream.current():\n            with communicator.raise_together():\n                # B",
                "if True:\n            with communicator.raise_together():\n                # B",
            )
        ],
        NOT_ORDERED,
    ),
    "a batch is copied to memory that is still in use": (
        [("data/_device_prefetch.py", "    copies.wait_event(free)\n", "")],
        NOT_ORDERED,
    ),
    "a batch is used before it has arrived": (
        [
            (
                "data/_device_prefetch.py",
                "stream.xp.cuda.get_current_stream().wait_event(arrived)",
                "pass",
            )
        ],
        NOT_ORDERED,
    ),
    "a batch's event is recorded before its copy": (
        [
            (
                "data/_device_prefetch.py",
                "    flat.set(loaded.pinned, stream=copies)\n    arrived = ",
                "    arrived = ",
            ),
            (
                "data/_device_prefetch.py",
                "    arrived.record(copies)\n",
                "    arrived.record(copies)\n    flat.set(loaded.pinned, stream=copies)\n",
            ),
        ],
        (NOT_ORDERED, "recorded after the copy"),  # where the host writes the next batch first
    ),
    "a pinned slot is written while it is copied": (
        [
            (
                "data/_device_prefetch.py",
                "            gpu.wait_for(self.copied, pause=1e-4)\n",
                "            pass\n",
            )
        ],
        "the host writes to pinned memory",
    ),
    "parts of a checkpoint are read before they have arrived": (
        [
            (
                "_storage/parts.py",
                "get(out=pinned[: here.size])",
                "get(out=pinned[: here.size], blocking=False)",
            )
        ],
        "the host reads pinned memory",
    ),
    "addresses of arrays that are gone": (
        [
            (
                "_memory/packing.py",
                "copies.append(array)  # they live until the launch\n",
                "pass\n",
            ),
        ],
        "memory that was given back",
    ),
    "gradients are packed off their alignment": (
        [
            (
                "_memory/layout.py",
                "start = end = round_up(end, max(alignment, GROUP_ALIGNMENT))",
                "start = end",
            )
        ],
        "at an address that is not a multiple of",
    ),
    "new values come from the wrong rank": (
        [
            (
                "_storage/gpu.py",
                "for move in communicator.prepare_broadcast(part(*run), root)",
                "for move in communicator.prepare_broadcast(part(*run), 0)",
            )
        ],
        "Not equal to tolerance",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(simulated, tmp_path, bug):
    changes, texts = BUGS[bug]
    result = simulated(TRAINING, 2, package=planted(tmp_path / "planted", changes))
    assert result.status != 0
    assert any(text in result.stderr for text in ([texts] if isinstance(texts, str) else texts))
    assert result.leftovers == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "(place, place, array.nbytes, self._byte, root, raw)",
            "(place, place, array.nbytes, self._byte, self.rank, raw)",
        ),
        (
            "_type(array.dtype), _operation(op))",
            "_type(array.dtype), _operation(op if self.rank == 0 else ReduceOp.MAX))",
        ),
        (
            "numbers = (source, target, count, _type",
            "numbers = (source, target, count - (self.rank == 1), _type",
        ),
    ],
    ids=["root", "operation", "count"],
)
def test_ranks_that_call_nccl_differently_hang_and_are_ended(simulated, tmp_path, old, new):
    package = planted(tmp_path / "planted", [("_transports/nccl.py", old, new)])
    result = simulated(TRAINING, 2, package=package, env=HANGS_SOON)
    assert result.status != 0
    assert "the ranks make different calls of NCCL, which hangs:" in result.stderr
    assert "ends the job" in result.stderr or "the job ends" in result.stderr
    assert result.leftovers == []


# ---- what a GPU does not forgive

KERNELS = """
import cupy
import numpy as np
from internals import PackKernel, layout_of

x, totals, stream = cupy.arange(8.0), cupy.zeros(2), cupy.cuda.Stream(non_blocking=True)
shifted = cupy.zeros(72, np.uint8)[4:68].view(np.float64)


def summed(operation):
    return cupy.ElementwiseKernel("T x", "raw T sums", operation, "summed", no_return=True)


def packed(array, message):
    layout = layout_of((array.shape,), (array.dtype,))
    PackKernel(layout, layout.groups[0])([array], message)


def packed_unordered():
    with stream:
        x[7:] += 1
    packed(x, cupy.zeros(64, np.uint8))


summed("atomicAdd(&sums[0], x)")(x, totals)
packed(x, cupy.zeros(64, np.uint8))
for wrong in (
    lambda: summed("sums[0] += x")(x, totals),
    lambda: summed("sums[i] = x")(x, totals),
    lambda: cupy.ElementwiseKernel("T x", "T y", "y = x")(shifted, x),
    lambda: packed(x.view(np.complex128), cupy.zeros(72, np.uint8)[4:]),
    packed_unordered,
):
    try:
        wrong()
    except AssertionError as error:
        print(error)
"""


@pytest.mark.gpu
def test_what_kernels_must_not_do(simulated):
    result = simulated(KERNELS, None)
    assert (result.status, result.leftovers) == (0, [])
    at = "the simulated GPU: the kernel that is launched at "
    expected = [
        f"{at}*, summed: thread 1 reads word 0 of sums, which thread 0 writes: which comes first "
        "is chance",
        f"{at}*, summed: thread 2 writes 8 bytes at an address that is outside of what its "
        "arguments say",
        f"{at}*, kernel, gets x of float64 at an address that is not a multiple of 8",
        f"{at}*, copy_arrays: thread 0 writes 8 bytes at an address that is not a multiple of them",
        "the simulated GPU: a read at * is not ordered with the write at *, of the same memory "
        "(bytes 56 to 64 of *",
    ]
    found = result.stdout.splitlines()
    assert [fnmatch.fnmatchcase(*pair) for pair in zip(found, expected, strict=True)] == [
        True
    ] * 5, found


CALLS_OF_NCCL = """
import sys
import cupy
import numpy as np
from cupy.cuda import nccl
from mpi4py import MPI

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
cupy.cuda.Device(RANK).use()
stream = cupy.cuda.Stream(non_blocking=True)
comm = nccl.NcclCommunicator(N, COMM.bcast(nccl.get_unique_id()), RANK)
DOUBLE, SUM = nccl.NCCL_FLOAT64, nccl.NCCL_SUM


def at(i):
    return place + 8 * i


def grouped(*calls):
    nccl.groupStart()
    for call in calls:
        call()
    nccl.groupEnd()


def all_reduce(source, target, count):
    comm.allReduce(at(source), at(target), count, DOUBLE, SUM, stream.ptr)


def all_gather(source, target, count):
    comm.allGather(at(source), at(target), count, DOUBLE, stream.ptr)


with stream:
    memory = cupy.arange(20.0) + 1
    place = memory.data.ptr
    # What NCCL allows, in place and apart.
    all_reduce(0, 0, 4)
    comm.reduce(at(0), at(0), 4, DOUBLE, SUM, N - 1, stream.ptr)
    comm.broadcast(at(0), at(0), 4, DOUBLE, N - 1, stream.ptr)
    all_gather(2 * RANK, 0, 2)
    grouped(lambda: all_reduce(0, 8, 4), lambda: all_reduce(2, 12, 4))
    for wrong in (
        lambda: all_gather(2 * ((RANK + 1) % N), 0, 2),  # from another's part
        lambda: all_reduce(0, 2, 4),
        lambda: grouped(lambda: all_reduce(0, 4, 4), lambda: all_reduce(10, 6, 4)),  # both write
        lambda: grouped(lambda: all_reduce(0, 4, 4), lambda: all_reduce(8, 2, 2)),  # one writes what the other sends
        lambda: comm.allReduce(place + 4, place + 4, 4, DOUBLE, SUM, stream.ptr),
    ):
        try:
            wrong()
        except AssertionError as error:
            if RANK == 0:
                print(error)
    stream.synchronize()
comm.destroy()
"""


@pytest.mark.gpu
def test_which_memory_nccl_does_not_take(simulated):
    result = simulated(CALLS_OF_NCCL, 2)
    assert (result.status, result.leftovers) == (0, []), result.stderr
    overlaps = "the simulated GPU: the memory that NCCL's *{} at * reads or writes overlaps {}, *"
    expected = [
        overlaps.format("allGather", "itself"),
        overlaps.format("allReduce", "itself"),
        overlaps.format("allReduce", "that of allReduce at *, in one group"),
        overlaps.format("allReduce", "that of allReduce at *, in one group"),
        "the simulated GPU: NCCL is called at * with float64 at an address that is not a multiple "
        "of 8",
    ]
    found = result.stdout.splitlines()
    assert [fnmatch.fnmatchcase(*pair) for pair in zip(found, expected, strict=True)] == [
        True
    ] * 5, found


# ---- faults on demand

FAULTS = {
    "nccl-fails@1:30:2": "NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_SYSTEM_ERROR: ",
    "nccl-fails:1:1": "NCCL_ERROR_UNHANDLED_CUDA_ERROR: ",
    "nccl-fails@0:30:7": "NCCL failed on rank 0 of 2: KeyError(7)",
    "nccl-fails@1:50:8": "NCCL failed on rank 1 of 2: KeyError(8)",
    "nccl-breaks@1:30:6": "the job ends: NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_REMOTE_ERROR: ",
    "nccl-breaks@0:30:8": "the job ends: NCCL failed on rank 0 of 2: KeyError(8)",
    "nccl-start-fails@1:1:2": "NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_SYSTEM_ERROR: ",
    "nccl-start-fails@0:1:8": "NCCL failed on rank 0 of 2: KeyError(8)",
    **{
        f"out-of-memory@{rank}:{number}": "MemoryError: "
        for rank in (0, 1)
        for number in (1, 4, 30, 150, 400)
    },
    "out-of-memory:30": "MemoryError: ",
    "out-of-pinned@1:1": "bytes of pinned host memory: ",
    "out-of-pinned@0:5": "bytes of pinned host memory: ",
    "compile@1:1": "CompileException: ",
    "compile@0:3": "CompileException: ",
    "context@1:3": "cudaErrorIllegalAddress: ",
    "context@0:40": "cudaErrorIllegalAddress: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_any_rank_ends_all_of_them_and_is_named(simulated, fault):
    result = simulated(TRAINING, 2, env=HANGS_SOON | {"SIMULATED_GPU_FAULTS": fault})
    assert result.status != 0 and FAULTS[fault] in result.stderr
    assert "waiting for each other" not in result.stderr and result.leftovers == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nccl-hangs:30", "nccl-hangs@1:30", "nccl-hangs@0:31"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_nccl_that_hangs_is_reported_and_ended(simulated, ranks, fault):
    """The host is in none of the library's calls: it waits for the GPU."""
    result = simulated(TRAINING, ranks, env=HANGS_SOON | {"SIMULATED_GPU_FAULTS": fault})
    assert result.status != 0
    assert (
        "hpcstrat: the ranks have been waiting for each other for 1 s (HPCSTRAT_STALL_SECONDS)"
        in result.stderr
    )
    assert (
        "hpcstrat: the job ends: the ranks have been waiting for each other for 3 s"
        in result.stderr
    )
    assert result.leftovers == []


STUCK = ["nccl-start-hangs@1:1", "nccl-start-hangs:1", "nccl-blocks@0:2", "nccl-hangs@1:3"]
STARTS = """
import hpcstrat as hs

try:
    hs.MirroredStrategy()
except Exception as error:
    print(error)
print(hs.MirroredStrategy(["CPU:0"] * hs.size()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("fault", slow_but(["nccl-start-hangs@1:1"], STUCK))
def test_nccl_that_never_connects(simulated, fault):
    result = simulated(STARTS, 2, env=HANGS_SOON | {"SIMULATED_GPU_FAULTS": fault})
    assert result.status != 0 and result.stdout == "" and result.leftovers == []
    assert "the job ends: the ranks have been waiting for each other for 3 s" in result.stderr
    assert re.search(
        r"ranks? [01].*: waiting in .*, starting NCCL\(.*NCCL_P2P_DISABLE=1", result.stderr
    )


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["nccl-start-fails@1:1:2", "nccl-fails@1:4:2"])
def test_nccl_that_fails_on_one_rank_at_its_start(simulated, fault):
    """The other may never return from it."""
    result = simulated(STARTS, 2, env=HANGS_SOON | {"SIMULATED_GPU_FAULTS": fault})
    assert result.status != 0 and result.stdout == "" and result.leftovers == []
    assert "[rank 1] cupy.cuda.nccl.NcclError: NCCL_ERROR_SYSTEM_ERROR" in result.stderr
    assert re.search(
        r"the job ends: NCCL failed on rank 1 of 2: .*NCCL_P2P_DISABLE=1", result.stderr
    )
    assert "waiting for each other" not in result.stderr


@pytest.mark.gpu
def test_nccl_that_is_too_old(simulated):
    """An error of several ranks, which may go on without GPUs; one rank needs no NCCL."""
    old = {"SIMULATED_NCCL_VERSION": "20906", "HPCSTRAT_OUTPUT": "all"}
    result = simulated(STARTS, 2, env=old)
    assert (result.status, result.stderr, result.leftovers) == (0, "", [])
    assert result.stdout.count("  ranks 0, 1: NCCL is 2.9.6, and hpcstrat needs 2.10.0") == 2
    assert result.stdout.count("Or start one rank, or name 'CPU:0' for each rank") == 2
    assert result.stdout.count("MirroredStrategy(2 replicas on CPU:0)") == 2
    result = simulated(TRAINING, 1, env=old)
    assert (result.status, result.stdout, result.leftovers) == (0, "trained\n", [])


ROWS = """
import cupy
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    table = hs.Variable(np.ones((4, 2)))
    optimizer = hs.optimizers.SGD(1.0)
rows = hs.IndexedSlices(cupy.ones((2, 2)), cupy.array([1, 3]), (4, 2))
for _ in range(2):
    before = cupy._faults.counted["waits"]
    strategy.run(lambda: optimizer.apply_gradients([(rows, table)]))
    waits = cupy._faults.counted["waits"] - before
print(waits)
"""


@pytest.mark.gpu
def test_a_sparse_gradient_waits_for_the_gpu_twice(simulated):
    """For the largest index, and for the number of rows."""
    result = simulated(ROWS, None)
    assert (result.status, result.stdout, result.leftovers) == (0, "2\n", [])


METRICS = """
import cupy
import numpy as np
import hpcstrat as hs

launched = 0
put = cupy._streams.Queue.put

def counted(queue, work):
    global launched
    launched += 1
    put(queue, work)

cupy._streams.Queue.put = counted
strategy = hs.CentralStorageStrategy()
classes, scores, weights = cupy.arange(4) % 2, cupy.ones((4, 2)), cupy.ones(4)
labels, chances = classes.astype(np.float64), cupy.full(4, 0.5)
with strategy.scope():
    metrics = {
        hs.metrics.Mean(): (chances.sum(),),
        hs.metrics.Accuracy(): (classes, classes),
        hs.metrics.MeanSquaredError(): (labels, chances),
        hs.metrics.SparseCategoricalAccuracy(): (classes, scores, weights),
        hs.metrics.CategoricalAccuracy(): (scores, scores),
        hs.metrics.ConfusionMatrix(2): (classes, classes, weights),
        hs.metrics.MeanSquaredError(): (labels * 1j, chances),
    }
for metric, arrays in metrics.items():
    strategy.run(lambda: metric.update_state(*arrays))  # which compiles
    before = launched, cupy._faults.counted["waits"]
    strategy.run(lambda: metric.update_state(*arrays))
    print(launched - before[0], cupy._faults.counted["waits"] - before[1])
"""


@pytest.mark.gpu
def test_for_an_update_of_a_metric_the_host_does_not_wait(simulated):
    result = simulated(METRICS, None)
    assert (result.status, result.leftovers) == (0, [])
    launches, waits = np.array([line.split() for line in result.stdout.splitlines()], int).T
    assert waits.tolist() == [0] * 7
    assert launches.tolist() == [2, 4, 6, 7, 6, 19, 8]


LOSES = """
import cupy
import hpcstrat as hs

strategy = hs.MirroredStrategy()
strategy.run(lambda: strategy.xp.ones(3) * 2)
if hs.rank() == 1:
    cupy._faults.lose_context()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_context_that_is_lost_at_the_end(simulated, ranks):
    result = simulated(LOSES, ranks, env=HANGS_SOON)
    assert result.status != 0 and "cudaErrorIllegalAddress: " in result.stderr
    assert result.leftovers == []


RUNS_ON = """
import cupy
import numpy as np
import hpcstrat as hs

strategy = hs.MirroredStrategy()
with strategy.scope():
    w, optimizer = hs.Variable(np.ones(3)), hs.optimizers.SGD(0.5)
gradient = strategy.xp.ones(3)
for i in range(500):
    if i == 100 and hs.rank() == 1:
        cupy._faults.lose_context()
    strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
"""


@pytest.mark.gpu
def test_a_context_that_is_lost_where_no_step_waits_for_the_gpu(simulated):
    """The host looks at the GPU from time to time, and raises what is wrong."""
    result = simulated(RUNS_ON, 2, env=HANGS_SOON)
    assert result.status != 0 and "cudaErrorIllegalAddress: " in result.stderr
    assert "apply_gradients" in result.stderr and result.leftovers == []


# ---- a step as one graph

FUNCTION = """
import sys
import numpy as np
import hpcstrat as hs

strategy = hs.MirroredStrategy()
xp = strategy.xp
with strategy.scope():
    w, optimizer = hs.Variable(np.ones((3, 2), np.float32)), hs.optimizers.SGD(0.5)

@hs.function
def step(x):
    optimizer.apply_gradients([(x.T @ (x @ w) / strategy.num_replicas_in_sync, w)])

x = xp.full((1, 3), 0.5, np.float32)
for i in range(200):
    if i == 100 and sys.argv[1] == "hangs" and hs.rank() == 1:
        hs.barrier()
    if i == 50:
        zeros = strategy.run(lambda: [xp.zeros(3 << k, np.float32) for k in range(4)])
    strategy.run(step, args=(x,))
written = strategy.run(lambda arrays: sum(float(a.sum()) for a in arrays), args=(zeros,))
assert strategy.reduce("SUM", written, axis=None) == 0, "the graph wrote to them"
hs.on_lead(lambda: print(optimizer.iterations, w.numpy().sum().round(3), flush=True))
if sys.argv[1] == "closes":
    strategy.close()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 3]))
@pytest.mark.parametrize("end", ["closes", "ends"])
def test_a_program_with_a_graph(simulated, ranks, end):
    """Its graphs end before its communicator."""
    result = simulated(FUNCTION, ranks, end)
    assert result.status == 0 and result.stdout == "200 0.0\n", result.stderr


GRAPH_BUGS = {
    "memory that others use too": (
        "        try:\n            memory = self._pool.malloc(nbytes)\n",
        "        try:\n            memory = self.stream.xp.get_default_memory_pool().malloc(nbytes)\n",
        "the graph wrote to them",
    ),
    "a graph that outlives its communicator": (
        "        _all.add(self)\n",
        "",
        "a graph holds calls of",
    ),
}


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("old", "new", "said"), GRAPH_BUGS.values(), ids=GRAPH_BUGS)
def test_a_planted_bug_of_graphs_is_found(simulated, tmp_path, old, new, said):
    change = ("_core/graph.py", old, new)
    result = simulated(FUNCTION, 2, "closes", package=planted(tmp_path / "planted", [change]))
    assert result.status != 0 and said in result.stderr, result.stderr


@pytest.mark.gpu
def test_a_rank_that_makes_another_call_than_a_launch(simulated):
    result = simulated(FUNCTION, 2, "hangs")
    assert result.status != 0
    assert "rank 0: Strategy.run(step), at " in result.stderr, result.stderr
    assert "rank 1: barrier(), at " in result.stderr, result.stderr


# ---- programs


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 3]))
def test_info(simulated, ranks):
    result = simulated(pathlib.Path("-m"), ranks, "hpcstrat", "info")
    assert re.search(r"^NCCL +2\.32\.3$", result.stdout, re.MULTILINE)
    for rank in range(ranks):
        device = f"GPU {rank} of 4, simulated GPU" + f" (rank {rank})" * (ranks > 1)
        assert device in result.stdout


TESTS = pathlib.Path(__file__).parents[1]
KIT = [TESTS / "conformance" / name for name in ("golden.json", "cases")]


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 4]))
def test_the_conformance_kit(simulated, ranks):
    result = simulated(TESTS / "conformance" / "compare.py", ranks, *KIT)
    assert result.status == 0 and " passed, 0 failed" in result.stdout
    assert result.stderr == ""


ONE_GPU = {"SIMULATED_GPUS": "1", "HPCSTRAT_TEST_GPU": None}
PYTEST = """
import sys

import pytest

sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.gpu
def test_tests_on_a_host_with_fewer_gpus_than_ranks(simulated):
    """Those of the CPU pass, also where strategies are made without devices."""
    file = TESTS / "parallel" / "test_extended.py"
    result = simulated(PYTEST, 2, "-k", "choices_of_communication", file, env=ONE_GPU)
    assert result.status == 0 and "1 passed, 1 skipped" in result.stdout
    assert "SKIPPED [1]" in result.stdout and "2 ranks and 1 GPU; launch/share-gpu" in result.stdout
    result = simulated(
        TESTS / "conformance" / "compare.py", 2, *KIT, "--only", "reduce", env=ONE_GPU
    )
    assert result.status == 0 and " passed, 0 failed" in result.stdout
    assert result.stderr == "there are fewer GPUs than ranks: the replicas compute on CPUs\n"
