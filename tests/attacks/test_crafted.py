"""Attacks by crafted or damaged input: launchers' variables, resolvers, checkpoints."""

import pytest
from crafting import CRAFT

RESOLVERS = """
import os, resource
import hpcstrat as hs

resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # what takes more has believed a number
CONFIGS = [
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e400}}',
    '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": %s}}' % (5000 * "9"),
    100_000 * "[", "[]", "3", '{"cluster": [1]}', '{"cluster": {"worker": {"x": "a"}}}', '{"task": 3}', "{", "\\ud800",
]
LISTS = ["n[1-99999999999]", "n[1-9999][1-9999][1-9999]", "n[3-1]", "n[", "n]", "n[1-", 5000 * "n[1-2]", "n[a-b]"]
TASKS = ["1(x99999999999)", 5000 * "9", "x", "2(x", "2(x-1)", "1(x1048577)"]
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2",
         "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def attempt(variable, value, make, also=()):
    os.environ.update(SLURM if variable != "TF_CONFIG" else {})
    for name in (variable, *also):
        os.environ[name] = value
    try:
        resolver = make()
        print("accepted", variable, value[:50], resolver.cluster_spec(), resolver.task_type, resolver.task_id)
    except (ValueError, RuntimeError) as error:
        assert variable in str(error) and len(str(error)) < 1000, (variable, value[:50], str(error)[:500])


resolvers = hs.cluster_resolver
for value in CONFIGS:
    attempt("TF_CONFIG", value.encode(errors="replace").decode(), resolvers.TFConfigClusterResolver)
for value in LISTS:
    attempt("SLURM_STEP_NODELIST", value, resolvers.SlurmClusterResolver)
for value in TASKS:
    attempt("SLURM_STEP_TASKS_PER_NODE", value, resolvers.SlurmClusterResolver)
print("all")
"""


def test_resolvers_name_what_is_crafted_and_take_no_memory(cell):
    cell.write(RESOLVERS)
    ended = cell("python", "program.py")
    assert (ended.status, ended.stdout) == (0, "all\n")


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
