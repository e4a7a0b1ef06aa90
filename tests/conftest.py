"""Shared by the suite: what is left out, how many processes, and ranks that agree on outcomes."""

import functools
import gc
import os
import pathlib
import shutil
import signal

# Before NumPy and MPI are loaded. hpcstrat sets the same for programs, where it is imported first.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
os.environ.setdefault("OMPI_MCA_btl", "^ofi")
# A shell lets what it starts in the background ignore Ctrl-C; jobs of tests must not inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Drops the user's settings: a test that needs one sets it.
for name in [name for name in os.environ if name.startswith("HPCSTRAT_")]:
    if not name.startswith("HPCSTRAT_TEST_"):
        del os.environ[name]

import hypothesis
import pytest
import simulated_gpu
from agreement import Ranks
from internals import gpu, launchers

_HERE = pathlib.Path(__file__).parent
_PARALLEL = _HERE / "parallel"
_WITH_MPI = _PARALLEL, _HERE / "launch", _HERE / "test_suites.py"

# Every rank and every run draws the same examples; --hypothesis-profile=hpcstrat draws more.
hypothesis.settings.register_profile("hpcstrat", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("hpcstrat"), max_examples=20
)
hypothesis.settings.load_profile("quick")


@functools.cache
def _launcher():
    """The launcher of this process, unless it started no other rank."""
    launcher = launchers.find()
    return None if launcher is None or launchers.is_child() else launcher


@functools.cache
def _has_mpi():
    return _launcher() is not None or shutil.which("mpirun") is not None


@functools.cache
def _has_gpus():
    return "HPCSTRAT_TEST_GPU" in os.environ or (gpu.has_cupy() and gpu.visible_gpus() != ())


def pytest_ignore_collect(collection_path):
    if not _has_mpi() and any(map(collection_path.is_relative_to, _WITH_MPI)):
        return True
    return None


def pytest_xdist_auto_num_workers():
    """Ranks run their tests themselves; without ranks, each core runs tests."""
    return min(len(os.sched_getaffinity(0)), 8) if _launcher() is None else 0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Under a launcher the ranks run each test together; only tests/parallel is made for it."""
    config.option.with_mpi = True  # otherwise pytest-mpi skips tests/parallel
    launcher = _launcher()
    if launcher is None:
        return
    for name in config.args:
        path = (config.invocation_params.dir / name.partition("::")[0]).resolve()
        if not path.is_relative_to(_PARALLEL) and not launcher.alone:
            raise pytest.UsageError(
                f"{launcher.describe()} for {name}, but only tests/parallel runs on several "
                "ranks: `mpirun -n 2 python -m pytest tests/parallel`"
            )
    config.pluginmanager.register(Ranks(config), "hpcstrat-ranks")


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


def pytest_collection_modifyitems(config, items):
    """Deselects tests for other numbers of ranks, and without a GPU those that compute on GPUs."""
    ranks = config.pluginmanager.get_plugin("hpcstrat-ranks")
    size = ranks.comm.size if ranks else 1
    kept, left_out = [], []
    for item in items:
        if item.path.is_relative_to(_PARALLEL):
            item.add_marker(pytest.mark.mpi)
        bounds = [mark.kwargs for mark in item.iter_markers("mpi")]
        fits = all(one.get("min_size", 1) <= size <= one.get("max_size", size) for one in bounds)
        fits = fits and (item.get_closest_marker("gpu") is None or _has_gpus())
        (kept if fits else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish():
    # Thousands of collected tests live to the end; a collection need not visit them, and many tests
    # collect often.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    plugins = session.config.pluginmanager
    for plugin in plugins.get_plugins():
        # Its closing table repeats the header in 20 lines.
        if type(plugin).__module__ == "pytest_mpi":
            plugins.unregister(plugin)


def pytest_report_header():
    import hpcstrat

    lines = [f"hpcstrat: {os.path.dirname(hpcstrat.__file__)}"]
    if not _has_mpi():
        lines.append(
            "MPI: there is no mpirun, so only tests/single and tests/real_cupy run; "
            "`pip install '.[mpich,test]'` brings one"
        )
    if not _has_gpus():
        there = "g++" if simulated_gpu.is_available() else "g++, which is not here"
        lines.append(
            "GPUs: none, so tests marked gpu are left out; HPCSTRAT_TEST_GPU=simulated runs them "
            f"on simulated ones, built with {there}"
        )
    return lines
