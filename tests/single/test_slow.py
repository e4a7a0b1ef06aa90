"""Thinning a product of parameters: any two values still meet, and no row of a table is lost."""

import itertools
import pathlib
import subprocess
import sys

PRODUCT = """
import pytest

@pytest.fixture(params=["x", "y"])
def from_fixture(request):
    return request.param

@pytest.mark.parametrize(("n", "name"), [(1, "a"), (1, "b"), (2, "a"), (2, "b")], ids=["1a", "1b", "2a", "2b"])
@pytest.mark.parametrize("letter", "klm")
def test_product(letter, n, name, from_fixture): ...

@pytest.mark.parametrize("letter", "klm")
@pytest.mark.parametrize("digit", "0123")
def test_two(letter, digit): ...

@pytest.mark.parametrize("a, b, c", [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)])
def test_table(a, b, c): ...
"""
CONFTEST = """
from slow import thin

def pytest_configure(config):
    config.addinivalue_line("markers", "slow")

def pytest_collection_modifyitems(items):
    thin(items)
"""


def test_any_two_values_meet(tmp_path):
    (tmp_path / "test_it.py").write_text(PRODUCT)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "not slow",
        "-c",
        "/dev/null",
        tmp_path,
    ]
    tests = pathlib.Path(__file__).parents[1]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(tests)}, check=True
    )
    found = {}
    for line in result.stdout.splitlines():
        if "::" in line:
            name, _, values = line.partition("::")[2].rstrip("]").partition("[")
            found.setdefault(name, []).append(tuple(values.split("-")))
    parameters = ["x", "y"], ["k", "l", "m"], ["1a", "1b", "2a", "2b"]
    for one, other in itertools.combinations(parameters, 2):
        pairs = {pair for case in found["test_product"] for pair in itertools.permutations(case, 2)}
        assert pairs >= set(itertools.product(one, other))
    assert 12 <= len(found["test_product"]) < 24
    assert len(found["test_two"]) == 12 and len(found["test_table"]) == 5
