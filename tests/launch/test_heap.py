"""Memory that a step frees: the next step takes it again; the process keeps at most 1 GiB of it."""

import platform

import pytest
from internals import heap
from slow import slow_but

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or heap._user_decides(),
    reason="another allocator, or other settings",
)

# More than the 64 MiB that glibc keeps at most by default; in a thread less, because its arena
# grows by 64 MiB, each of which is returned as a whole.
TRAINING = """
import resource
import sys
import threading

import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.zeros(1 << 20, np.float32))
    optimizer = hs.optimizers.SGD(0.1, momentum=0.9)


def step(arrays):
    optimizer.apply_gradients([(np.ones(w.shape, np.float32), w)])
    # Last, so that nothing that stays lies above them and holds them in the heap by chance.
    [np.ones(4 << 20, np.float32) for _ in range(arrays)]


def train(arrays):
    for _ in range(5):
        strategy.run(step, args=(arrays,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        strategy.run(step, args=(arrays,))
    print("faults", (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)


if sys.argv[1] == "thread":
    thread = threading.Thread(target=train, args=(3,))
    thread.start()
    thread.join()
else:
    train(6)
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


def numbers(launched, word):
    return [int(line.split()[1]) for line in launched.stdout.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(
    "ranks, where", slow_but([(2, "main")], [(2, "main"), (2, "thread"), (3, "main")])
)
def test_a_step_pages_nothing_in_anew(launch, ranks, where):
    """Unless that is forbidden: then each MiB costs 256 faults."""

    def faults(keep):
        env = {"HPCSTRAT_KEEP_MEMORY": keep, "HPCSTRAT_OUTPUT": "all"}
        env["NUMPY_MADVISE_HUGEPAGE"] = "0"  # a page fault brings 4 KiB
        return numbers(launch(TRAINING, ranks, where, env=env), "faults")

    kept = faults("1")
    assert len(kept) == ranks and max(kept) < 100
    assert max(faults("0")) > 1000


def test_freed_memory_is_kept_up_to_the_bound(launch):
    few, many = numbers(launch(MORE_THAN_IS_KEPT), "kept")
    assert 600 << 20 < few < 1 << 30
    assert many < 1 << 30  # of 1,280 MiB


@pytest.mark.parametrize(
    "setting", slow_but(["MALLOC_TOP_PAD_"], ["MALLOC_TOP_PAD_", "GLIBC_TUNABLES"])
)
def test_settings_of_the_user_stay(launch, setting):
    value = {"MALLOC_TOP_PAD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}[setting]
    few, _ = numbers(launch(MORE_THAN_IS_KEPT, env={setting: value}), "kept")
    assert few < 600 << 20


def test_a_setting_that_means_nothing(launch):
    result = launch(TRAINING, None, "main", env={"HPCSTRAT_KEEP_MEMORY": "some"})
    assert result.status != 0
    assert "HPCSTRAT_KEEP_MEMORY is 'some'; it must be 1 or 0" in result.stderr
