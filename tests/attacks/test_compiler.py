"""Attacks on compiled updates: bad compilers, a damaged or locked cache, odd formulas."""

import os
import random
import shutil

import pytest

slow = pytest.mark.slow
CC = shutil.which(os.environ.get("CC", "cc"))
needs_compiler = pytest.mark.skipif(CC is None, reason="there is no C compiler")
UPDATE = """
    import numpy as np
    import hpcstrat as hs

    strategy = hs.CentralStorageStrategy()
    with strategy.scope():
        w = hs.Variable(np.zeros(120_000, np.float32))
        optimizer = hs.optimizers.SGD(0.5)
    for step in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.full(w.shape, hs.rank() + 1, np.float32), w)]))
    print("weight", *np.unique(w.numpy()))
"""


def weight(ranks):
    return f"weight {-ranks * (ranks + 1) / 2}\n"


def compiler(cell, *lines):
    """A compiler that runs these lines first; its results are cached separately."""
    path = cell.folder / "compiler"
    path.write_text("\n".join(["#!/bin/sh", *lines, f'exec {CC} "$@"', ""]))
    path.chmod(0o755)
    return {"CC": path}


def files(cell):
    folder = cell.home / ".cache" / "hpcstrat"
    return sorted(folder.iterdir()) if folder.exists() else []


def compiles(cell, **options):
    """Runs the update on one rank; returns the one file of the cache."""
    cell.write(UPDATE)
    ended = cell("python", "program.py", **options)
    assert (ended.status, ended.stdout, ended.stderr) == (0, weight(1), "")
    (library,) = files(cell)
    return library


def cut(data, moments):
    del data[moments.randrange(len(data)) :]


def flip(data, moments):
    data[moments.randrange(len(data))] ^= 1 << moments.randrange(8)


def zero(data, moments):
    begin = moments.randrange(len(data) - 1)
    data[begin:] = bytes(len(data) - begin)


@needs_compiler
@pytest.mark.parametrize(
    "damage", [cut, pytest.param(flip, marks=slow), pytest.param(zero, marks=slow)]
)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[slow] * (seed > 0)) for seed in range(4)]
)
def test_a_damaged_library_is_made_again(cell, damage, seed):
    library = compiles(cell)
    whole = library.read_bytes()
    data = bytearray(whole)
    damage(data, random.Random(seed))
    library.write_bytes(data)
    assert compiles(cell) == library and library.read_bytes() == whole


@slow
@needs_compiler
def test_a_compiler_that_hangs_costs_its_limit_once(cell):
    """Not once per rank, which would exceed the others' time-out; its children end with it."""
    cell.write(UPDATE)
    wrapper = compiler(cell, "echo tried >>tried", "sleep 1000 & sleep 1000").pop("CC")
    wrapper.write_text(wrapper.read_text().replace(">>tried", f">>{cell.folder}/tried"))
    limits = {"HPCSTRAT_STALL_SECONDS": 20, "HPCSTRAT_TIMEOUT_SECONDS": 30}
    ended = cell("mpirun", "-n", 4, cell.python, "program.py", CC=wrapper, **limits)
    assert (ended.status, ended.stdout, ended.stderr) == (0, weight(4), "")
    assert (cell.folder / "tried").read_text() == "tried\n" and files(cell) == []


@slow
@needs_compiler
def test_a_stopped_job_that_compiles_stops_no_other(cell):
    cell.write(UPDATE)
    env = compiler(cell, f"mkdir {cell.folder}/first 2>/dev/null && sleep 1000")
    others = """
        "$0" program.py & first=$!
        until [ -e first ]; do sleep 0.05; done
        kill -STOP $first
        mpirun -n 2 "$0" program.py; status=$?
        kill -KILL $first
        exit $status
    """
    ended = cell("bash", "-c", others, cell.python, **env)
    assert (ended.status, ended.stdout) == (0, weight(2))


@needs_compiler
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[slow] * (seed > 0)) for seed in range(6)]
)
def test_a_job_that_is_killed_while_it_compiles_leaves_nothing(cell, seed):
    cell.write(UPDATE)
    env = compiler(cell, f"touch {cell.folder}/compiles", "sleep 0.3")
    attacked = cell.start("hpcstrat", "run", "-n", 2, "program.py", **env)
    launcher = attacked.launcher()
    attacked.wait_for("compiles")
    attacked.pause(random.Random(seed).uniform(0.0, 0.8))
    attacked.signal(launcher, "SIGKILL")
    attacked.end()
    assert compiles(cell, **env).suffix == ".so"


@slow
@needs_compiler
def test_jobs_that_start_at_once_compile_once(cell):
    cell.write(UPDATE)
    env = compiler(cell, f"echo compiles >>{cell.folder}/noted")
    start = 'for job in 1 2 3; do mpirun -n 2 "$0" program.py & jobs="$jobs $!"; done'
    ended = cell(
        "bash", "-c", f"{start}; for job in $jobs; do wait $job || exit; done", cell.python, **env
    )
    assert (ended.status, ended.stdout) == (0, 3 * weight(2))
    assert (cell.folder / "noted").read_text() == "compiles\n" and len(files(cell)) == 1


LIES = {
    "other numbers": "sed 's/first.i. + second.i./first[i] - second[i]/'",
    "another symbol": "sed 's/void update/void updated/'",
    "no C": "tr a-z b-za",
}


@needs_compiler
@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=[slow] * (lie != "other numbers")) for lie in LIES]
)
def test_a_compiler_that_lies_is_not_believed(cell, lie):
    cell.write(UPDATE)
    wrapper = cell.folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\n{LIES[lie]} | {CC} "$@"\n')
    wrapper.chmod(0o755)
    ended = cell("mpirun", "-n", 2, cell.python, "program.py", CC=wrapper)
    assert (ended.status, ended.stdout, ended.stderr) == (0, weight(2), "")


BITS = """
import hashlib, os
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
optimizers = hs.optimizers

class Clipped(optimizers.Optimizer):
    slots = {"velocity": 0.0}

    def __init__(self):
        super().__init__(0.1)

    def formula(self, value, gradient, velocity, *, learning_rate):
        bounded = np.where(gradient < float("inf"), gradient, 0.0)
        bounded = np.where(bounded > -float("inf"), bounded, np.nan)
        velocity = np.minimum(np.maximum(0.9 * velocity + bounded, -1e3), float("inf"))
        return value - learning_rate * velocity, velocity

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 6e4, 3e38, 1e-7]
digest = hashlib.blake2b()
for dtype in ("float16", "float32", "float64"):
    for make in (optimizers.SGD, optimizers.Adam, optimizers.Nadam, optimizers.RMSprop, optimizers.Lion, Clipped):
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
print(digest.hexdigest())
"""


@needs_compiler
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize(
    "flags",
    ["", *(pytest.param(one, marks=slow) for one in ("-ffast-math", "-O0", "-fno-such-flag"))],
)
def test_compiled_updates_have_numpys_bits_or_are_not_used(cell, flags, ranks):
    """For numbers of each kind, and infinities; also under compilers that add their own flags."""
    cell.write(BITS)
    wrapper = cell.folder / "compiler"
    wrapper.write_text(f'#!/bin/sh\nexec {CC} "$@" {flags}\n')
    wrapper.chmod(0o755)
    found = [
        cell("mpirun", "-n", ranks, cell.python, "program.py", HPCSTRAT_COMPILE=on, CC=wrapper)
        for on in (1, 0)
    ]
    compiled, plain = found
    assert all((one.status, one.stderr) == (0, "") for one in found)
    assert compiled.stdout == plain.stdout
