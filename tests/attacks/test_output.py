"""Attacks on what is printed, and on the variables that hpcstrat reads."""

import pytest
from training import training, weight


def test_bytes_of_any_kind_arrive_as_they_are(cell):
    """From Python, from C, from a child, through a copy of the descriptor, and in pieces."""
    cell.write("""
        import os, subprocess, sys
        import numpy as np
        import hpcstrat as hs

        hs.barrier()
        parts = np.random.default_rng(0).bytes(1 << 18), b"\\x1b[2J\\r\\0", "é€\\n".encode()
        for turn in range(hs.size()):
            if hs.rank() == turn:
                os.write(1, parts[0])
                os.write(os.dup(1), parts[1])
                subprocess.run(["cat"], input=parts[2], check=True)
            hs.barrier()
        if hs.rank() == 0:
            with open("expected", "wb") as file:
                file.write(hs.size() * b"".join(parts))
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    expected = (cell.folder / "expected").read_bytes()
    found = (cell.folder / "stdout").read_bytes()
    # mpirun mixes what two ranks print at nearly the same time.
    assert ended.status == 0 and sorted(found) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", ">/dev/full"])
def test_a_training_does_not_need_its_output(cell, closed):
    cell.write(training(step_seconds=0.01))
    ended = cell("sh", "-c", f'"$0" program.py {closed}', cell.python)
    assert (cell.folder / "step-40").exists()
    assert ended.status == 0 or "full" in closed


@pytest.mark.slow
def test_lines_of_threads_and_replicas_stay_whole(cell):
    """Threads count as the top level."""
    cell.write("""
        import threading
        import hpcstrat as hs

        strategy = hs.CentralStorageStrategy()

        def say():
            print(f"replica {hs.rank()}")
            threads = [threading.Thread(target=lambda: print(f"line {hs.rank()}" + 200 * "x")) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        strategy.run(say)
        hs.barrier()
    """)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    lines = [line for line in ended.stdout.splitlines() if line]
    assert ended.status == 0
    assert sorted(lines) == [f"line 0{200 * 'x'}"] * 50 + ["replica 0", "replica 1"]


VARIABLES = {
    "HPCSTRAT_STALL_SECONDS": ["x", "-1", "nan", "1e999x", "0x10", "9" * 5000],
    "HPCSTRAT_TIMEOUT_SECONDS": ["", " ", "1 2", "-inf", "0"],
    "HPCSTRAT_CHECK": ["2", "maybe", "\u0661"],
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "HPCSTRAT_CHECK"))
        for name in VARIABLES
    ],
)
def test_odd_settings_are_named_or_do_no_harm(cell, name):
    cell.write(training())
    for value in VARIABLES[name]:
        for path in cell.folder.glob("st*-*"):
            path.unlink()
        (cell.folder / "checkpoint").unlink(missing_ok=True)
        ended = cell("mpirun", "-n", "2", cell.python, "program.py", **{name: value})
        if ended.status:
            assert name in ended.stderr and len(ended.stderr) < 4000
        else:
            assert ended.stdout == f"weight {weight(2)}\n"
