"""Attacks by the system: too few resources, missing parts, signals in the first moments."""

import random

import pytest
from training import training, weight

slow = pytest.mark.slow
LATE = "time.sleep(1.5 * (os.environ['PMI_RANK'] == '1'))"


def test_shared_memory_of_a_containers_size_suffices_for_eight_ranks(cell):
    cell.write(training(before=LATE))
    ended = cell("mpirun", "-n", 8, cell.python, "program.py", shm="64m")
    assert (ended.status, ended.stdout) == (0, f"weight {weight(8)}\n")


@pytest.mark.parametrize(
    "ranks, size",
    [(4, "8m"), pytest.param(2, "1m", marks=slow), pytest.param(8, "24m", marks=slow)],
)
def test_too_little_shared_memory_is_named_and_ends_all_ranks(cell, ranks, size):
    cell.write(training(before=LATE))
    ended = cell("mpirun", "-n", ranks, cell.python, "program.py", shm=size, seconds=30)
    assert ended.status != 0 and "weight" not in ended.stdout
    assert "RuntimeError: /dev/shm has " in ended.stderr


@slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_without_proc_the_start_says_so(cell, ranks):
    cell.write(training())
    without = 'mount -t tmpfs tmpfs /proc; exec mpirun -n "$0" "$@"'
    ended = cell(
        "unshare", "-m", "bash", "-c", without, ranks, cell.python, "program.py", seconds=30
    )
    assert ended.status != 0 and "/proc is not mounted" in ended.stderr


@slow
@pytest.mark.parametrize("limit", ["-n 64", "-v 4000000", "-f 20000", "-u 400"])
def test_limits_suffice_or_are_named(cell, limit):
    cell.write(training())
    ended = cell("bash", "-c", f'ulimit {limit}; exec mpirun -n 2 "$0" program.py', cell.python)
    if ended.status:
        assert "ulimit" in ended.stderr
    else:
        assert ended.stdout == f"weight {weight(2)}\n"


HOMES = {
    "read-only": "mount -t tmpfs -o ro tmpfs home",
    "full": "mount -t tmpfs -o size=4k tmpfs home; head -c 4096 /dev/zero >home/full || true",
    "not executable": "mount -t tmpfs -o noexec tmpfs home",
    "a file": "rmdir home; touch home",
}


@pytest.mark.parametrize(
    "home", [pytest.param(home, marks=[slow] * (home != "read-only")) for home in HOMES]
)
def test_a_home_is_not_needed(cell, home):
    cell.write(training(sizes=(120_000, 5)))
    ended = cell("mpirun", "-n", 2, cell.python, "program.py", before=HOMES[home])
    assert (ended.status, ended.stdout, ended.stderr) == (0, f"weight {weight(2)}\n", "")


@pytest.mark.parametrize("blocking", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
def test_a_full_disk_leaves_the_previous_checkpoint_whole(cell, ranks, blocking):
    cell.write(f"""
        import os
        import numpy as np
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()
        with strategy.scope():
            w = hs.Variable(np.full(40_000, 3.0))
        checkpoint = hs.checkpoint.Checkpoint(w=w)
        checkpoint.save("disk/saved", keep=2)
        w.assign(np.full(40_000, 4.0))
        try:
            checkpoint.save("disk/saved", keep=2, blocking={blocking})
            checkpoint.sync()
        except OSError as error:
            end = "No space left on device", "nothing was saved"
            print("disk/saved" in str(error), *(text in str(error) for text in end))
        hs.barrier()
        assert os.listdir("disk") == ["saved"]
        checkpoint.restore("disk/saved")
        print(*np.unique(w.numpy()))
    """)
    full = "mkdir disk; mount -t tmpfs -o size=500k tmpfs disk"
    words = "mpirun", "-n", ranks, cell.python, "program.py"
    ended = cell(*words, before=full, HPCSTRAT_OUTPUT="all")
    assert ended.status == 0
    assert sorted(ended.stdout.splitlines()) == ranks * ["3.0"] + ranks * ["True True True"]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[slow] * (seed > 0)) for seed in range(8)]
)
def test_a_ctrl_c_in_the_first_tenths_of_a_second_ends_all_ranks(cell, seed):
    moments = random.Random(seed)
    cell.write(training(step_seconds=0.1))
    attacked = cell.start("mpirun", "-n", 1 + seed % 3, cell.python, "program.py")
    process = attacked.launcher()
    attacked.pause(moments.uniform(0.05, 0.9))
    attacked.signal(process, "SIGINT")
    ended = attacked.end(seconds=20)
    assert ended.status != 0 and "weight" not in ended.stdout


@slow
def test_a_rank_that_is_stopped_for_a_while_goes_on(cell):
    cell.write(training(step_seconds=0.02))
    attacked = cell.start("hpcstrat", "run", "-n", 3, "program.py", HPCSTRAT_STALL_SECONDS=1)
    attacked.wait_for("step-4")
    victim = attacked.rank(1)
    attacked.signal(victim, "SIGSTOP")
    attacked.pause(3)
    attacked.signal(victim, "SIGCONT")
    ended = attacked.end()
    assert (ended.status, ended.stdout) == (
        0,
        f"weight {weight(3)}\n",
    ) and "rank 1: " in ended.stderr
