"""Attacks on compiled updates: compilers that hang or lie, folders that hold nothing, kills."""

import random
import shutil

import pytest

slow = pytest.mark.slow
CC = shutil.which("cc")
pytestmark = pytest.mark.skipif(CC is None, reason="there is no C compiler")
UPDATE = """
    import numpy as np
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w = hs.Variable(np.zeros(120_000, np.float32))
        optimizer = hs.optimizers.SGD(0.5)
    for step in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.full(w.shape, hs.rank() + 1, np.float32), w)]))
    hs.on_lead(lambda: print("weight", *np.unique(w.numpy())))
"""


def weight(ranks):
    return f"weight {-ranks * (ranks + 1) / 2}\n"


def compiler(cell, *lines, flags=""):
    """A compiler that runs these lines first."""
    path = cell.folder / "compiler"
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {CC} "$@" {flags}', ""]))
    path.chmod(0o755)
    return {"CC": path}


READ_ONLY = """
    for at in "$PWD" /tmp /var/tmp; do
        mount --bind "$at" "$at"
        mount -o remount,bind,ro "$at"
    done
    cd "$PWD"
"""
MOUNTS = {
    "full": "mount -t tmpfs -o size=4k tmpfs $TMPDIR",
    "executes nothing": "mount -t tmpfs -o noexec tmpfs $TMPDIR",
    "read only, as all others": READ_ONLY,
}


@pytest.mark.parametrize("folder", MOUNTS)
def test_a_temporary_folder_that_holds_no_library_costs_one_line(cell, folder):
    cell.write(UPDATE)
    mounts = "unshare", "--mount", "sh", "-ec", f'{MOUNTS[folder]}\nexec "$@"', "sh"
    ended = cell(*mounts, "mpirun", "-n", 2, cell.python, "program.py")
    assert (ended.status, ended.stdout) == (0, weight(2))
    (line,) = ended.stderr.splitlines()
    assert "hpcstrat: NumPy makes the updates" in line


@pytest.mark.parametrize("path", ["/nonexistent", "program.py"])
def test_a_temporary_folder_that_is_none_is_not_used(cell, path):
    """Python's `tempfile` takes another."""
    cell.write(UPDATE)
    ended = cell("env", f"TMPDIR={path}", "mpirun", "-n", 2, cell.python, "program.py")
    assert (ended.status, ended.stdout, ended.stderr) == (0, weight(2), "")


@slow
def test_a_compiler_that_hangs_costs_its_limit_once(cell):
    """Not once per rank, which would exceed the others' time-out; its children end with it."""
    cell.write(UPDATE)
    env = compiler(cell, f"echo tried >>{cell.folder}/tried", "sleep 1000 & sleep 1000")
    limits = {"HPCSTRAT_STALL_SECONDS": 20, "HPCSTRAT_TIMEOUT_SECONDS": 30}
    ended = cell("mpirun", "-n", 4, cell.python, "program.py", **env, **limits)
    assert (ended.status, ended.stdout) == (0, weight(4))
    assert len(ended.stderr.splitlines()) == 1
    assert (cell.folder / "tried").read_text() == "tried\n"


@pytest.mark.parametrize("victim", ["the launcher", pytest.param("a rank", marks=slow)])
@pytest.mark.parametrize("seconds", [0.5, pytest.param(1000, marks=slow)])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[slow] * (seed > 0)) for seed in range(2)]
)
def test_a_job_that_is_killed_while_it_compiles_leaves_nothing_running(cell, victim, seconds, seed):
    cell.write(UPDATE)
    env = compiler(cell, f"touch {cell.folder}/compiles", f"sleep {seconds}")
    folder = str(cell.folder / "tmp" / "hpcstrat-")  # whose owner has been killed
    attacked = cell.start("hpcstrat", "run", "-n", 2, "program.py", leaves=[folder], **env)
    killed = attacked.launcher() if victim == "the launcher" else attacked.rank(seed % 2)
    attacked.wait_for("compiles")
    attacked.pause(random.Random(seed).uniform(0.0, 0.8))
    attacked.signal(killed, "SIGKILL")
    attacked.end()
    env = compiler(cell)
    ended = cell("mpirun", "-n", 2, cell.python, "program.py", leaves=[folder], **env)
    assert (ended.status, ended.stdout, ended.stderr) == (0, weight(2), "")


BITS = """
import hashlib, os
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
optimizers = hs.optimizers

class Clipped(optimizers.Optimizer):
    slots = {"velocity": 0.0}

    @staticmethod
    def formula(value, gradient, velocity, *, rate):
        bounded = np.where(gradient < float("inf"), gradient, 0.0)
        bounded = np.where(bounded > -float("inf"), bounded, np.nan)
        velocity = np.minimum(np.maximum(0.9 * velocity + bounded, -1e3), float("inf"))
        return value - rate * velocity, velocity

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 6e4, 3e38, 1e-7]
KINDS = [optimizers.SGD, optimizers.Adam, optimizers.RMSprop, optimizers.Lion, lambda: Clipped(0.1)]
digest = hashlib.blake2b()
for dtype in ("float16", "float32", "float64"):
    for make in KINDS:
        random = np.random.default_rng(3)
        with np.errstate(all="ignore"), strategy.scope():
            sizes = (1, 255, 256, 257, 120_001)
            variables = [hs.Variable(random.standard_normal(size).astype(dtype)) for size in sizes]
            optimizer = make()
            for _ in range(3):
                gradients = [random.standard_normal(size).astype(dtype) * (hs.rank() + 1) for size in sizes]
                for one in gradients:
                    one[::5] = random.choice(SPECIAL, one[::5].size)
                strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables)))
        for one in variables:
            found = one.numpy()
            found[np.isnan(found)] = np.nan  # whose own bits are anybody's
            digest.update(found.tobytes())
hs.on_lead(lambda: print(digest.hexdigest()))
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize(
    "flags",
    ["", *(pytest.param(one, marks=slow) for one in ("-ffast-math", "-O0", "-fno-such-flag"))],
)
def test_compiled_updates_have_numpys_bits_or_are_not_used(cell, flags, ranks):
    """For numbers of each kind, and infinities; also under compilers that add their own flags."""
    cell.write(BITS)
    env = compiler(cell, flags=flags)
    found = []
    for on in (1, 0):
        ended = cell("mpirun", "-n", ranks, cell.python, "program.py", HPCSTRAT_COMPILE=on, **env)
        assert ended.status == 0
        found.append(ended.stdout)
        assert len(ended.stderr.splitlines()) == (flags.startswith("-f") and on)
    assert found[0] == found[1]
