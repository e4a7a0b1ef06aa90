"""Attacks on `hpcstrat run`: signals, what a rank leaves behind, arguments, output and limits."""

import random
import signal

import pytest
from training import training, weight

SAYS = "import sys; print(sys.argv[1:])"
CONNECTED = """
    import os, pathlib, signal, time
    import hpcstrat as hs

    hs.barrier()
    def note(number, frame):
        os.write(1, f"rank {hs.rank()} got {number}\\n".encode())
        pathlib.Path(f"noted-{hs.rank()}").touch()

    signal.signal(signal.SIGUSR1, note)
    signal.signal(signal.SIGUSR2, note)
    pathlib.Path(f"ready-{hs.rank()}").touch()
    while not all(pathlib.Path(f"noted-{rank}").exists() for rank in range(hs.size())):
        time.sleep(0.01)
    hs.barrier()
"""


def test_a_line_of_megabytes_gets_one_tag(cell):
    cell.write(f"import os, sys; sys.stdout.write('x' * {8 << 20} + '\\nlast')")
    ended = cell("hpcstrat", "run", "-n", "1", "--prefix", "program.py")
    assert (ended.status, ended.stdout) == (0, f"[rank 0] {'x' * (8 << 20)}\n[rank 0] last\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_ends_ranks_in_the_middle_of_a_line(cell, name):
    cell.write("""
        import os, pathlib, time
        os.write(1, 4_000_000 * b"x")
        pathlib.Path("ready").touch()
        time.sleep(1000)
    """)
    attacked = cell.start("hpcstrat", "run", "-n", "1", "--prefix", "program.py")
    attacked.wait_for("ready")
    attacked.signal(attacked.launcher(), name)
    ended = attacked.end()
    assert ended.status != 0 and ended.stdout.startswith("[rank 0] xxx")


def test_output_does_not_wait_for_what_a_rank_has_left(cell):
    cell.write("""
        import os, subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.write(1, b"said")
    """)
    ended = cell("hpcstrat", "run", "-n", "1", "--prefix", "program.py", leaves=["sleep"])
    assert (ended.status, ended.stdout) == (0, "[rank 0] said\n")


def test_a_full_disk_for_copies_is_said_once(cell):
    cell.write("import sys; sys.stdout.write(20_000 * 'a line of this kind\\n')")
    full = "mkdir logs; mount -t tmpfs -o size=64k tmpfs logs"
    ended = cell("hpcstrat", "run", "-n", "2", "--tee", "logs", "program.py", before=full)
    # If a line is cut in the middle, mpirun puts the other rank's between.
    assert ended.status == 0 and sorted(ended.stdout) == sorted(40_000 * "a line of this kind\n")
    assert sorted(ended.said) == [
        f"hpcstrat run: --tee: {cell.folder}/logs/rank-{n}.log: No space left on device; nothing "
        "more is copied to it"
        for n in range(2)
    ]


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_users_signals_reach_the_ranks(cell, name):
    cell.write(CONNECTED)
    attacked = cell.start("hpcstrat", "run", "-n", "2", "program.py")
    for rank in range(2):
        attacked.wait_for(f"ready-{rank}")
    attacked.signal(attacked.launcher(), name)
    ended = attacked.end()
    number = getattr(signal, name).value
    assert (ended.status, sorted(ended.stdout.splitlines())) == (
        0,
        [f"rank {rank} got {number}" for rank in range(2)],
    )


WORDS = [
    ["data", ":", "touch", "injected"],
    [":"],
    ["a b", "", ":", "$HOME", "'", "\n", "--", "-genv", ":"],
]


@pytest.mark.parametrize("words", WORDS, ids=["another program", "alone", "odd words"])
def test_arguments_reach_the_program_and_nothing_else(cell, words):
    cell.write(SAYS)
    ended = cell("hpcstrat", "run", "-n", "2", "program.py", *words)
    assert (ended.status, ended.stdout) == (0, 2 * f"{words}\n")
    assert not (cell.folder / "injected").exists()


CRAFTED = {
    "quotes": (["--mpiexec", "mpirun 'x"], {}, "--mpiexec"),
    "no program": (["--mpiexec", ""], {}, "--mpiexec"),
    "Slurm, a word": ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "x"}, "SLURM_NTASKS"),
    "Slurm, a list": ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2(x3)"}, "SLURM_NTASKS"),
    "Slurm, none": ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "0"}, "SLURM_NTASKS"),
    "Slurm, digits": ([], {"SLURM_JOB_ID": "1", "SLURM_NTASKS": 5000 * "9"}, "SLURM_NTASKS"),
    "torchrun": ([], {"TORCHELASTIC_RUN_ID": "1", "RANK": "x"}, "torchrun"),
    "ranks": (["-n", 5000 * "9"], {}, "argument -n"),
    "restarts": (["--restarts", "-1"], {}, "argument --restarts"),
}


@pytest.mark.parametrize("options, env, name", CRAFTED.values(), ids=CRAFTED)
def test_what_is_crafted_is_named_in_a_line(cell, options, env, name):
    cell.write(SAYS)
    ended = cell("hpcstrat", "run", *options, "program.py", **env)
    assert (ended.status, ended.stdout) == (2, "")
    *usage, line = ended.stderr.splitlines()
    assert (
        name in line
        and "hpcstrat run: " in line
        and len(line) < 200
        and "Traceback" not in "".join(usage)
    )


@pytest.mark.parametrize("blocks, runs", [(1, False), (64, True)], ids=["nothing", "little"])
def test_a_limit_of_files_is_named_or_suffices(cell, blocks, runs):
    cell.write(SAYS)
    limited = f'ulimit -f {blocks}; exec "$0" -m hpcstrat run -n 2 --restarts 2 program.py'
    ended = cell("bash", "-c", limited, cell.python)
    if runs:
        assert (ended.status, ended.stdout) == (0, 2 * "[]\n")
    else:
        assert (ended.status, ended.stdout) == (2, "") and "--restarts" in ended.stderr


@pytest.mark.parametrize("status", [0, 2, 15, 75])
def test_a_rank_that_leaves_the_others_is_no_success(cell, status):
    cell.write(training(f"if step == 13 and rank == last: os._exit({status})"))
    ended = cell("hpcstrat", "run", "-n", "2", "program.py")
    assert ended.status != 0 and "weight" not in ended.stdout
    # BAD TERMINATION is mpiexec's, if the process that it kills ends first.
    if status == 0 and "BAD TERMINATION" not in ended.stdout:
        assert (
            "left after step 12 without the others, as by os._exit; the status is 1" in ended.stderr
        )


@pytest.mark.parametrize("options", [[], ["--prefix"], ["--restarts", "3"]], ids=" ".join)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(5)]
)
def test_nothing_is_left_of_a_launcher_that_is_killed_at_any_moment(cell, options, seed):
    cell.write(training(step_seconds=0.05))
    attacked = cell.start("hpcstrat", "run", "-n", "3", *options, "program.py")
    attacked.pause(random.Random(seed).uniform(0.05, 2.0))
    attacked.signal(attacked.launcher(), "SIGKILL")
    assert attacked.end().status == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(5)]
)
def test_ctrl_c_ends_all_ranks_at_any_moment(cell, seed):
    """Also in the first tenths of a second, in which Python and MPI are loaded."""
    cell.write(training(step_seconds=0.05))
    attacked = cell.start("hpcstrat", "run", "-n", "2", "program.py")
    process = attacked.launcher()
    attacked.pause(random.Random(seed).uniform(0.4, 1.5))
    attacked.signal(process, "SIGINT")
    ended = attacked.end()
    assert ended.status != 0 and "weight" not in ended.stdout


def test_without_an_attack_the_training_ends(cell):
    cell.write(training())
    ended = cell("hpcstrat", "run", "-n", "3", "program.py")
    assert (ended.status, ended.stdout, ended.stderr) == (0, f"weight {weight(3)}\n", "")
