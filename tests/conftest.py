"""Shared by the suite: single (one process), parallel (under mpirun), launch (starts mpirun)."""

import os
import pathlib

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

# Every rank and every run draws the same examples; `launch/test --all` draws more of them.
hypothesis.settings.register_profile("hpcstrat", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("hpcstrat"), max_examples=20
)
hypothesis.settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Refuses several ranks for tests that would not know of each other."""
    from internals import launchers  # not before the user's settings are dropped

    launcher = launchers.find()
    if launcher is None or launcher.alone or launchers.is_child():
        return
    parallel = pathlib.Path(__file__).with_name("parallel")
    for name in config.args:
        path = (config.invocation_params.dir / name.partition("::")[0]).resolve()
        if not path.is_relative_to(parallel):
            raise pytest.UsageError(
                f"{launcher.describe()} for {name}, but only tests/parallel runs on several ranks: "
                "`mpirun -n 2 python -m pytest tests/parallel`"
            )


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
