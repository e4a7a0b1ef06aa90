"""How public names show, and what is said of names of other libraries and TensorFlow's older ones."""

import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from internals import INSTEAD

import hpcstrat as hs

DOCS = pathlib.Path(__file__).parents[2] / "docs"
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
    hint, found = str(caught.value).partition("; write ")[2], 0
    for pattern, owner in OWNERS.items():
        for path in re.findall(pattern, hint):
            thing = owner
            for part in path.split("."):
                thing = getattr(thing, part)
            found += 1
    for page in re.findall(r"docs/(\S+\.md)", hint):
        assert (DOCS / page).exists()
        found += 1
    assert found or hint.startswith("nothing: ")


@pytest.mark.parametrize("name", ["DatasetSpec", "assert_cardinality", "flat_map", "misspelt"])
def test_what_the_module_of_datasets_has_not(name):
    assert not hasattr(hs.data, name) and name not in hs.data.__all__
    with pytest.raises(AttributeError, match=rf"hpcstrat\.data.*{name}"):
        getattr(hs.data, name)


def test_names_show_as_programs_write_them():
    assert [str(name) for name in (hs.Variable, hs.data.Dataset, hs.optimizers.Adam)] == [
        f"<class 'hpcstrat.{name}'>" for name in ("Variable", "data.Dataset", "optimizers.Adam")
    ]
    assert str(hs.compat.v1.MirroredStrategy) == "<class 'hpcstrat.compat.v1.MirroredStrategy'>"
    assert str(hs.optimizers.schedules.CosineDecay).endswith(".optimizers.schedules.CosineDecay'>")
    assert hs.barrier.__module__ == hs.ReplicaMismatchError.__module__ == "hpcstrat"
    assert pickle.loads(pickle.dumps(hs.ReduceOp.SUM)) is hs.ReduceOp.SUM


def test_modules_that_take_long_are_imported_late():
    program = """
import sys, hpcstrat as hs
late = "hpcstrat.torch", "hpcstrat.optimizers.schedules"
private = "hpcstrat._tools", "hpcstrat._timeline"
print([name for name in sys.modules if name.startswith((*late, *private))])
print([module.__name__ for module in (hs.torch, hs.optimizers.schedules)])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == [
        "[]",
        "['hpcstrat.torch', 'hpcstrat.optimizers.schedules']",
    ]


OLDER = """
import warnings, hpcstrat as hs
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


def test_older_names_do_the_same_and_warn_once_a_process():
    result = subprocess.run(
        [sys.executable, "-c", OLDER], capture_output=True, text=True, check=True
    )
    new = "distribute_datasets_from_function"
    assert result.stdout.splitlines() == [
        *["2", "[0 1 2] [3]"] * 2,
        "DeprecationWarning <string> 7 Strategy.experimental_run_v2 is now called Strategy.run; use "
        "that",
        f"DeprecationWarning <string> 9 Strategy.experimental_{new} is now called Strategy.{new}; "
        "use that",
    ]
