"""Programs with mpi4py's messages, PyTorch, JAX, debuggers, shells and Python's options."""

import importlib.util
import re
import sys

import pytest
from documents import BLOCKS

ENV = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
ON_GPUS = ENV | {"JAX_PLATFORMS": None, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def test_a_message_on_its_way_does_not_hold_up_a_barrier(launch):
    """MPI moves a large message only during calls of MPI, even if a rank waits in one of ours."""
    result = launch("mpi4py_messages.py", 3, env={"HPCSTRAT_OUTPUT": "all"})
    assert (result.status, result.leftovers) == (0, [])
    assert sorted(result.out.splitlines()) == ["False 0", "False 0", "False 2"]


# ---- PyTorch and JAX


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_programs_of_the_documentation(place, library):
    place.skip_unless_it_has(library)
    page = [block for block in BLOCKS["docs/interoperation.md"] if block.language == "python"]
    (program,) = [block.text for block in page if f"import {library}\n" in block.text]
    histories = []
    for ranks in place.choose(1, 2, 3):
        result = place(program, ranks, env=ON_GPUS if place.has_gpus else ENV)
        assert (result.status, result.err, result.leftovers) == (0, "", [])
        histories.append([float(number) for number in result.out.split()])
    first = histories[0]
    assert len(first) > 2 and first[-1] < first[0] / 2
    for other in histories:
        assert other == pytest.approx(first, rel=1e-3, abs=2e-4)


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_loaders_with_workers(launch, ranks):
    for kind in "persistent", "anew":
        result = launch("torch_loaders.py", ranks, "seeded", kind, env=ENV)
        assert (result.status, result.err, result.leftovers) == (0, "", [])
        assert result.out.splitlines() == ["7 True False {0, 1}"] * 2


CAUGHT = "raised in a call on rank {} and was caught, but other"
DIFFERENCES = {
    "loaders in other orders": (
        ["torch_loaders.py", 3, "unseeded", "anew"],
        "ReplicaMismatchError: iterating over Strategy.experimental_distribute_dataset: the ranks "
        "have",
        "generator=torch.Generator().manual_seed(0)",
    ),
    "one step more": (
        ["torch_training.py", 3, "more steps"],
        "ranks 1, 2: all_reduce_gradients(MEAN, weight, bias, int32 as float64)",
    ),
    "other parameters": (["torch_training.py", 3, "adds"], "equal after hs.torch.broadcast"),
    # Although the program goes on: of its module only a part is rank 0's.
    "a broadcast that is interrupted where it reads": (
        ["torch_broadcast.py", 3, "cpu", 0],
        CAUGHT.format(0),
    ),
    "a broadcast that is interrupted where it writes": (
        ["torch_broadcast.py", 3, "copy_", 2],
        CAUGHT.format(2),
    ),
}


@needs_torch
@pytest.mark.parametrize("name", DIFFERENCES)
def test_ranks_that_differ_end(launch, name):
    words, *said = DIFFERENCES[name]
    env = ENV | {"HPCSTRAT_CHECK": "1"} if "adds" in words else ENV
    result = launch(*words, env=env)
    assert result.status != 0 and result.out == "" and result.leftovers == []
    for text in said:
        assert text in result.err


# ---- tools that run programs

PROGRAM = """
import sys
{}
try:
    sys.exit(3)
except SystemExit as left:
    print("caught", left.code)
"""
TEST = """
import sys
import pytest
{}

def test_output(capsys):
    print("out")
    print("err", file=sys.stderr)
    assert capsys.readouterr() == ("out\\n", "err\\n")

def test_exit(capfd):
    with pytest.raises(SystemExit, match="^3$"):
        sys.exit(3)
    assert capfd.readouterr() == ("", "")
"""
# What each is started with, and given to read.
TOOLS = {
    "pdb": (["-m", "pdb", "program.py"], "continue\nquit\n"),
    "pytest": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_program.py"], ""),
    "prompt": (["-i", "program.py"], "1 + 1\nexit\nraise SystemExit(0)\n"),
    "IPython": ("-m IPython --simple-prompt --no-banner -i program.py".split(), "1 + 1\nexit\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_runs_as_without_the_library(launch, tool, ranks):
    """It shows the same, apart from times and addresses."""
    if tool == "IPython" and importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed: pip install '.[notebooks]'")
    words, typed = TOOLS[tool]
    command = [sys.executable, *words]
    if ranks:  # on one rank of two: what others print is the library's choice
        command = [*launch.mpirun, "-n", "1", *command, ":", "-n", "1", "sleep", "0"]
    own = {"IPYTHONDIR": launch.folder, "PYTHONDONTWRITEBYTECODE": "1"}
    env = own | {"PYTHONSTARTUP": launch.folder / "startup.py"}
    ends = []
    for line in ("", "import hpcstrat"):
        (launch.folder / "program.py").write_text(PROGRAM.format(line))
        (launch.folder / "test_program.py").write_text(TEST.format(line))
        (launch.folder / "startup.py").write_text(f"{line}\nprint('startup')\n")
        ended = launch(command, stdin=typed, env=env)
        shown = (re.sub(r" in [0-9.]+s|at 0x\w+", "", text) for text in (ended.out, ended.err))
        ends.append((ended.status, *shown))
    without, with_library = ends
    assert with_library == without
    assert "caught 3" in without[1] or "2 passed" in without[1]
