"""Large updates as C loops: who compiles, what stays behind, and what is said without a compiler."""

import os
import shutil

import pytest
from slow import slow_but

CC = shutil.which("cc")
needs_compiler = pytest.mark.skipif(CC is None, reason="there is no C compiler")
PROGRAM = """
import numpy as np
import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
with strategy.scope():
    w = hs.Variable(np.linspace(-1, 1, 200_000, dtype=np.float32))
    optimizer = hs.optimizers.Adam(0.5)
for step in range(3):
    gradient = np.linspace(hs.rank(), 1 + step, w.size, dtype=np.float32)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
hs.on_lead(lambda: print(hash(w.numpy().tobytes())))
"""


def compiler(folder, *lines):
    """A compiler that is these lines of a shell; each start of it is noted."""
    path = folder / "compiler"
    path.write_text("\n".join(["#!/bin/sh", f"echo started >>{folder}/noted", *lines, ""]))
    path.chmod(0o700)
    (folder / "temporary").mkdir(exist_ok=True)
    found = {"CC": os.fspath(path), "TMPDIR": os.fspath(folder / "temporary")}
    return found | {"HPCSTRAT_COMPILE": "1", "PYTHONHASHSEED": "1"}


def starts(folder):
    noted = folder / "noted"
    return noted.read_text().count("started\n") if noted.exists() else 0


@needs_compiler
@pytest.mark.parametrize("ranks", slow_but([2], [None, 1, 2, 3]))
def test_one_rank_compiles_for_its_host(launch, tmp_path, ranks):
    """Unless that is forbidden: NumPy returns the same bits, and no compiler is started."""
    env = compiler(tmp_path, f'exec {CC} "$@"')
    forbidden = launch(PROGRAM, ranks, env=env | {"HPCSTRAT_COMPILE": "0"})
    assert forbidden.stdout and forbidden.stderr == "" and starts(tmp_path) == 0
    compiled = launch(PROGRAM, ranks, env=env)
    assert (compiled.stdout, compiled.stderr, starts(tmp_path)) == (forbidden.stdout, "", 1)
    assert os.listdir(env["TMPDIR"]) == []


@needs_compiler
def test_small_updates_are_compiled_after_many_steps(launch, tmp_path):
    program = """
        import os
        import numpy as np
        import hpcstrat as hs

        strategy = hs.MirroredStrategy()
        with strategy.scope():
            w, optimizer = hs.Variable(np.zeros(10)), hs.optimizers.SGD(0.5)
        compiled = [0]
        for _ in range(1100):
            strategy.run(lambda: optimizer.apply_gradients([(np.full(10, hs.rank() + 1.0), w)]))
            compiled.append(hs.on_lead(lambda: int(os.path.exists("noted"))))
        hs.on_lead(lambda: print(compiled.index(1) in (1000, 1001, 1002), *np.unique(w.numpy())))
    """
    result = launch(program, 2, env=compiler(tmp_path, f'exec {CC} "$@"'))
    assert (result.stdout, result.stderr) == (f"True {-1100 * 0.5 * 3}\n", "")
    assert starts(tmp_path) == 1


FAILING: dict[str, tuple[list[str], str]] = {
    "no compiler": ([], "there is no /nonexistent"),
    "a compiler that fails": (["echo no such flag >&2", "exit 1"], "status 1: no such flag"),
    "a compiler that does nothing": (["exit 0"], "No such file"),
    "a compiler that writes something else": (
        ['while [ "$1" != -o ]; do shift; done', 'echo x >"$2"'],
        "OSError",
    ),
    "a compiler of another function": (
        [f"""sed 's/void update/void updated/' | {CC} "$@" """],
        "undefined symbol: update",
    ),
    "a compiler of other numbers": (
        [f"""sed 's/first.i. + second.i./first[i] - second[i]/' | {CC} "$@" """],
        "its loop for adam computes other values than NumPy",
    ),
}


@needs_compiler
@pytest.mark.parametrize(
    "failing", slow_but(["no compiler", "a compiler of other numbers"], FAILING)
)
def test_without_a_loop_the_job_goes_on_after_one_line(launch, tmp_path, failing):
    lines, said = FAILING[failing]
    env = compiler(tmp_path, *lines) | ({} if lines else {"CC": "/nonexistent"})
    expected = launch(PROGRAM, 2, env=env | {"HPCSTRAT_COMPILE": "0"}).stdout
    result = launch(PROGRAM, 2, env=env)
    assert (result.status, result.stdout) == (0, expected)
    (line,) = result.stderr.splitlines()
    assert "hpcstrat: NumPy makes the updates" in line and said in line
    assert starts(tmp_path) == bool(lines) and os.listdir(env["TMPDIR"]) == []


@pytest.mark.parametrize("ranks", slow_but([None], [None, 2]))
def test_a_setting_that_means_nothing(launch, ranks):
    result = launch(PROGRAM, ranks, env={"HPCSTRAT_COMPILE": "perhaps"})
    assert (
        result.status != 0 and "HPCSTRAT_COMPILE is 'perhaps'; it must be 1 or 0" in result.stderr
    )
