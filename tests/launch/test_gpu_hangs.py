"""GPUs that hang, and hosts that wait for them: in NCCL, in the program, in the driver.

The job ends, with a report.
"""

import pytest
import simulated_gpu
from slow import slow_but

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler"),
]

HANGS_SOON = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}
TRAINS = """
import sys

import cupy
import hpcstrat as hs

launches, reads, spins = (int(word) for word in sys.argv[1:])
strategy = hs.CentralStorageStrategy()
with strategy.scope():
    weights = hs.Variable(cupy.zeros(8))
    optimizer = hs.optimizers.SGD(0.1)


def step(number):
    gradient = strategy.xp.ones(8)
    for _ in range(launches):
        gradient = gradient * 1.0
    if number == spins and hs.rank() == 1:
        cupy._streams.current_queue().put(lambda: False)  # a kernel that never ends
    optimizer.apply_gradients([(gradient, weights)])
    if reads:
        gradient.get()


for number in range(5000):
    strategy.run(step, args=(number,))
"""
HANGS = {
    "a kernel of the program": (5, 20, {}),
    "a kernel of NCCL on one rank": (5, -1, {"SIMULATED_GPU_FAULTS": "nccl-hangs@1:40"}),
    "a kernel of NCCL on all ranks": (5, -1, {"SIMULATED_GPU_FAULTS": "nccl-hangs:40"}),
    "a host in NCCL": (5, -1, {"SIMULATED_GPU_FAULTS": "nccl-blocks@1:40"}),
    "all hosts in NCCL": (5, -1, {"SIMULATED_GPU_FAULTS": "nccl-blocks:40"}),
    "all hosts in a launch": (
        200,
        -1,
        {"SIMULATED_GPU_FAULTS": "nccl-hangs:9", "SIMULATED_GPU_LAUNCHES": "100"},
    ),
}


@pytest.mark.parametrize("ranks", slow_but([2], [2, 3]))
@pytest.mark.parametrize("reads", slow_but([False], [False, True]), ids=["reads nothing", "reads"])
@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_is_reported_and_ended(simulated, hang, reads, ranks):
    launches, spins, env = HANGS[hang]
    result = simulated(
        TRAINS, ranks, str(launches), str(int(reads)), str(spins), env=HANGS_SOON | env
    )
    assert result.status != 0 and result.leftovers == []
    assert "Python's lock" not in result.stderr
    assert (
        "hpcstrat: the ranks have been waiting for each other for 1 s (HPCSTRAT_STALL_SECONDS)"
        in result.stderr
    )
    assert (
        "hpcstrat: the job ends: the ranks have been waiting for each other for 3 s"
        in result.stderr
    )


GRAPHS = """
import cupy
import hpcstrat as hs

strategy = hs.MirroredStrategy()
with strategy.scope():
    weights = hs.Variable(cupy.zeros(8))
    optimizer = hs.optimizers.SGD(0.1)


@hs.function
def step(gradient):
    for _ in range(20):
        gradient = gradient * 1.0
    optimizer.apply_gradients([(gradient, weights)])


gradient = cupy.ones(8)
for _ in range(5000):
    strategy.run(step, args=(gradient,))
"""


@pytest.mark.parametrize(
    "env",
    [
        {"SIMULATED_GPU_FAULTS": "nccl-hangs@1:40"},
        {"SIMULATED_GPU_FAULTS": "nccl-hangs:40", "SIMULATED_GPU_LAUNCHES": "100"},
    ],
    ids=["on one rank", "in a launch"],
)
def test_a_hang_of_a_graph(simulated, env):
    result = simulated(GRAPHS, 2, env=HANGS_SOON | env)
    assert result.status != 0 and result.leftovers == []
    assert "Python's lock" not in result.stderr and "without a CUDA graph" not in result.stderr
    assert (
        "hpcstrat: the job ends: the ranks have been waiting for each other for 3 s"
        in result.stderr
    )


CATCHES = """
import cupy
import hpcstrat as hs

strategy = hs.MirroredStrategy()
for _ in range(100):
    try:
        strategy.reduce("SUM", strategy.run(lambda: cupy.ones(3)), axis=None)
    except Exception as error:
        print("caught")
"""


@pytest.mark.parametrize("rank", ["", "@1"], ids=["on all ranks", "on one rank"])
def test_a_program_cannot_go_on_after_a_failure_of_nccl(simulated, rank):
    """In a call that the ranks had agreed on: the others may be in it for good."""
    result = simulated(
        CATCHES, 2, env=HANGS_SOON | {"SIMULATED_GPU_FAULTS": f"nccl-fails{rank}:30:2"}
    )
    assert result.status != 0 and "caught" not in result.stdout and result.leftovers == []
    assert (
        "the job ends: NCCL failed on rank 1 of 2: NcclError('NCCL_ERROR_SYSTEM_ERROR"
        in result.stderr
    )
