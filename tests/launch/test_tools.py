"""Debuggers, shells, pytest and Python's options run as they do without the library."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from slow import slow_but

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
    "import times": (["-X", "importtime", "program.py"], ""),
    "IPython": (
        ["-m", "IPython", "--simple-prompt", "--no-banner", "-i", "program.py"],
        "1 + 1\nexit\n",
    ),
}


def shown(text):
    """Lines without what times, and modules that are imported, change."""
    return re.sub(r"^import time:.*\n| in [0-9.]+s|at 0x\w+", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("mpirun", slow_but(["mpirun"], ["mpirun", "by hand"]))
@pytest.mark.parametrize("tool", slow_but(["pdb", "pytest"], TOOLS))
def test_a_tool_runs_as_without_the_library(launch, tool, mpirun):
    """On one rank of two: what others print is the library's choice."""
    if tool == "IPython" and importlib.util.find_spec("IPython") is None:
        pytest.skip("IPython is not installed: pip install '.[notebooks]'")
    words, typed = TOOLS[tool]
    ends = []
    for line in ("", "import hpcstrat"):
        (launch.folder / "program.py").write_text(PROGRAM.format(line))
        (launch.folder / "test_program.py").write_text(TEST.format(line))
        (launch.folder / "startup.py").write_text(f"{line}\nprint('startup')\n")
        command = [sys.executable, *words]
        if mpirun == "mpirun":  # the second rank does nothing
            command = [*launch.mpirun, "-n", "1", *command, ":", "-n", "1", "sleep", "0"]
        ended = subprocess.run(
            command,
            input=typed,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            cwd=launch.folder,
            env=os.environ
            | {
                "PYTHONSTARTUP": str(launch.folder / "startup.py"),
                "IPYTHONDIR": str(launch.folder),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )
        ends.append((ended.returncode, *map(shown, (ended.stdout, ended.stderr))))
    without, with_library = ends
    assert with_library == without
    assert "caught 3" in without[1] or "2 passed" in without[1]
