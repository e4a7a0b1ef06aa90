"""Shared by the suite: single (one process), parallel (under mpirun), launch (starts mpirun)."""

import os

import hypothesis
import pytest
from slow import thin

# Drops the user's settings: a test that needs one sets it.
for name in [
    name
    for name in os.environ
    if name.startswith("HPCSTRAT_") and not name.startswith("HPCSTRAT_TEST_")
]:
    del os.environ[name]

# Every rank and every run draws the same examples.
hypothesis.settings.register_profile("hpcstrat", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("hpcstrat"), max_examples=20
)
hypothesis.settings.load_profile("hpcstrat")


def pytest_make_parametrize_id(val):
    """Names a case after what it tests, so that a failure says it."""
    if isinstance(val, type):
        return val.__name__
    if callable(val):
        name = getattr(val, "__name__", "<lambda>")
        if name == "<lambda>":
            raise pytest.UsageError(
                f"a parameter is {val}, which names nothing; give the case an id"
            )
        return name
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "GPU" in (parameters.get("place"), parameters.get("gpus")):
            item.add_marker(pytest.mark.gpu)
    thin(items)


def pytest_report_header():
    import hpcstrat

    return f"hpcstrat: {os.path.dirname(hpcstrat.__file__)}"
