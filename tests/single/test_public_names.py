"""How public names show, what is said of names of other libraries, and where files and names lie."""

import functools
import pathlib
import pickle
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from internals import INSTEAD

import hpcstrat as hs

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "hpcstrat"
FILES = sorted(PACKAGE.rglob("*.py"))
# What a name in a hint belongs to.
OWNERS = {
    r"\bhs\.((?:\w+\.)*\w+)": hs,
    r"\bstrategy\.(\w+)": hs.Strategy,
    r"get_replica_context\(\)\.(\w+)": hs.ReplicaContext,
    r"Checkpoint\(w=w\)\.(\w+)": hs.checkpoint.Checkpoint,
    r"\bnp\.(\w+)": np,
}


@pytest.mark.parametrize("name", INSTEAD)
def test_a_foreign_name_says_what_to_write_instead(name):
    assert not hasattr(hs, name)
    with pytest.raises(AttributeError, match=f"^hpcstrat.{name} does not exist; write ") as caught:
        getattr(hs, name)
    hint = str(caught.value).partition("; write ")[2]
    found = hint.startswith("nothing: ")
    for pattern, owner in OWNERS.items():
        for path in re.findall(pattern, hint):
            functools.reduce(getattr, path.split("."), owner)
            found = True
    for page in re.findall(r"docs/(\S+\.md)", hint):
        assert (ROOT / "docs" / page).exists()
        found = True
    assert found


def test_names_show_as_programs_write_them():
    shown = [hs.Variable, hs.data.Dataset, hs.optimizers.Adam, hs.compat.v1.MirroredStrategy]
    names = ["Variable", "data.Dataset", "optimizers.Adam", "compat.v1.MirroredStrategy"]
    assert [str(name) for name in shown] == [f"<class 'hpcstrat.{name}'>" for name in names]
    assert str(hs.optimizers.schedules.CosineDecay).endswith(".optimizers.schedules.CosineDecay'>")
    assert hs.barrier.__module__ == hs.ReplicaMismatchError.__module__ == "hpcstrat"
    assert pickle.loads(pickle.dumps(hs.ReduceOp.SUM)) is hs.ReduceOp.SUM


PROGRAM = """
import sys, warnings, hpcstrat as hs
late = "hpcstrat.torch", "hpcstrat.optimizers.schedules", "hpcstrat._tools", "hpcstrat._timeline"
print([name for name in sys.modules if name.startswith(late)])
print([module.__name__ for module in (hs.torch, hs.optimizers.schedules)])
strategy = hs.MirroredStrategy(["CPU:0"])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        print(strategy.experimental_run_v2(lambda x, y: x - y, (5,), {"y": 3}))
        make = lambda context: hs.data.Dataset.range(4).batch(3)
        print(*strategy.experimental_distribute_datasets_from_function(make))
for one in caught:
    print(one.category.__name__, one.filename, one.lineno, one.message)
"""


def test_modules_are_imported_late_and_older_names_warn_once_a_process():
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    new = "distribute_datasets_from_function"
    assert result.stdout.splitlines() == [
        "[]",
        "['hpcstrat.torch', 'hpcstrat.optimizers.schedules']",
        *["2", "[0 1 2] [3]"] * 2,
        "DeprecationWarning <string> 10 Strategy.experimental_run_v2 is now called Strategy.run; "
        "use that",
        f"DeprecationWarning <string> 12 Strategy.experimental_{new} is now called Strategy.{new}; "
        "use that",
    ]


# ---- the rules for the places and names of files


def test_the_root_has_the_public_door_alone():
    public = {"__init__.py", "__main__.py", "losses.py", "torch.py"}
    private = {"_start.py", "_info.py", "_program.py", "_run.py"}
    assert {path.name for path in PACKAGE.glob("*.py")} == public | private


def test_a_class_name_is_unique():
    texts = [path.read_text() for path in FILES]
    names = Counter(
        name for text in texts for name in re.findall(r"^ *class (\w+)[:(]", text, re.M)
    )
    assert names["Variable"] == 1
    assert [name for name, count in names.items() if count > 1] == []
