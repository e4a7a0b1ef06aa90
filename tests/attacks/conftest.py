"""Fixtures of the attacks: programs killed, crafted, starved or misused, each in a cell."""

import shutil

import pytest
from cell import Cell, why_not

_WHY_NOT = why_not()


def pytest_collection_modifyitems(items):
    for item in items:
        if "timeout" not in item.keywords:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture
def cell(tmp_path):
    """Runs commands isolated from others: `cell("hpcstrat", "run", "-n", "2", "program.py")`."""
    if _WHY_NOT:
        pytest.skip(_WHY_NOT)
    if shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun here")
    cell = Cell(tmp_path)
    yield cell
    cell.kill()
