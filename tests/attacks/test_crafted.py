"""Attacks by crafted or damaged input: launchers' variables, checkpoints."""

import pytest
from crafting import CRAFT

LAUNCHERS = {
    "PMI_RANK": {"PMI_SIZE": "2", "PMI_RANK": "x"},
    "PMI_SIZE": {"PMI_SIZE": 5000 * "9", "PMI_RANK": "0"},
    "OMPI_COMM_WORLD_RANK": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"},
    "SLURM_STEP_TASKS_PER_NODE": {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)",
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "PMI_RANK")) for name in LAUNCHERS],
)
def test_a_launchers_variable_that_is_crafted_is_named(cell, name):
    cell.write("import hpcstrat")
    ended = cell("python", "program.py", **LAUNCHERS[name])
    *_, line = ended.stderr.splitlines()
    assert (
        ended.status == 1
        and line.startswith(f"RuntimeError: the environment variable {name}")
        and len(line) < 400
    )


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_changes_nothing(cell, count):
    """Whatever bytes are changed, cut or added; also on all ranks."""
    cell.write(f"""{CRAFT}
import shutil
import hpcstrat as hs

strategy = hs.MirroredStrategy()
with strategy.scope():
    w, n = hs.Variable(np.arange(50.0)), hs.Variable(7)
checkpoint = hs.checkpoint.Checkpoint(w=w, n=n)
checkpoint.save("whole")
w.assign(np.full(50, -1.0))
refused = 0
for number in range({count}):
    if hs.rank() == 0:
        shutil.copyfile("whole", "damaged")
        damage("damaged", np.random.default_rng(number))
        is_whole = open("whole", "rb").read() == open("damaged", "rb").read()
    hs.barrier()
    try:
        checkpoint.restore("damaged")
    except (ValueError, OSError) as error:
        assert "damaged" in str(error) and len(str(error)) < 1000, (number, error)
        assert (w.numpy() == -1.0).all() and int(n) == 7, number
        refused += 1
    else:
        assert (w.numpy() == np.arange(50.0)).all(), number
        w.assign(np.full(50, -1.0))
print(refused > {count} // 2)
""")
    ended = cell("mpirun", "-n", "2", cell.python, "program.py")
    assert (ended.status, ended.stdout) == (0, "True\n")
