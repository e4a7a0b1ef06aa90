"""The simulated GPU runs the package as it is, and finds bugs planted in a copy of it."""

import pathlib
import re
import shutil

import pytest
import simulated_gpu

import hpcstrat

pytestmark = pytest.mark.skipif(not simulated_gpu.is_available(), reason="there is no C++ compiler")

PACKAGE = pathlib.Path(hpcstrat.__file__).parent
# == NAME: WHAT IS SAID (or|this), then for each change a file and lines of a diff.
DIFFS = pathlib.Path(__file__).with_name("planted_gpu_bugs.diff").read_text()
BUGS = re.findall(r"^== (.*?): (.*)\n((?:(?!==).*\n)+)", DIFFS, re.MULTILINE)
HANGS_SOON = {"HPCSTRAT_STALL_SECONDS": "1", "HPCSTRAT_TIMEOUT_SECONDS": "3"}


@pytest.mark.slow
def test_the_package_as_it_is(simulated):
    for ranks in (None, 1, 2, 3, 4):
        result = simulated("gpu_training.py", ranks)
        assert (result.status, result.out, result.leftovers) == (0, "trained\n", []), ranks


def plant(changes, folder):
    """Makes a copy of the package with these changes, each of which must fit once."""
    shutil.copytree(PACKAGE, folder / "hpcstrat", ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in re.findall(r"^(\w.*\.py)\n((?:[-+ ].*\n)+)", changes, re.MULTILINE):
        path, lines = folder / "hpcstrat" / name, lines.splitlines()
        text = path.read_text()
        old, new = (
            "\n".join(one[1:] for one in lines if one[0] in kinds) for kinds in (" -", " +")
        )
        assert text.count(old) == 1, f"{name} has {text.count(old)} times: {old}"
        path.write_text(text.replace(old, new))


@pytest.mark.slow
@pytest.mark.parametrize("name, says, changes", BUGS, ids=[name for name, *_ in BUGS])
def test_a_planted_bug_is_found(simulated, tmp_path, name, says, changes):
    plant(changes, tmp_path / "planted")
    words = ["gpu_graph.py", 2, "closes"] if "graph" in name else ["gpu_training.py", 2]
    env = HANGS_SOON if "NCCL" in name else {}
    result = simulated(*words, package=tmp_path / "planted", env=env)
    assert result.status != 0 and any(text in result.err for text in says.split("|"))
    if "NCCL" in name:
        assert re.search("ends the job|the job ends", result.err)
    assert "graph" in name or result.leftovers == []
