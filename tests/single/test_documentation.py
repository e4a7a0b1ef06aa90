"""The site is built without a warning, and has every public name and every environment variable."""

import ast
import fnmatch
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import hpcstrat as hs
from hpcstrat import _settings

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
NAMES = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
# Modules that a program imports from; the files of a package, such as hpcstrat.data.options, are not.
MODULES = ["hpcstrat", *(name for _, name, _ in pkgutil.iter_modules(hs.__path__, "hpcstrat.") if "._" not in name)]
MODULES += ["hpcstrat.compat.v1", "hpcstrat.optimizers.schedules"]


def find(name):
    """What stands behind a dotted name."""
    parts = name.split(".")
    thing = hs
    for part in parts[1:]:
        thing = getattr(thing, part)
    return thing


def public_names(module):
    listed = getattr(module, "__all__", None)
    for name, thing in vars(module).items():
        if inspect.ismodule(thing) or name.startswith("_"):
            continue
        is_ours = (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith("hpcstrat")
        if name in listed if listed is not None else is_ours:
            yield name, thing


@pytest.mark.parametrize("name", NAMES)
def test_what_the_reference_names_exists_once(name):
    assert inspect.getdoc(find(name))
    assert NAMES.count(name) == 1


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_in_the_reference(module):
    described = [find(name) for name in NAMES]
    missing = [
        name
        for name, thing in public_names(importlib.import_module(module))
        if f"{module}.{name}" not in NAMES and not any(thing is other for other in described)
    ]
    assert missing == []


def names_of_variables(page):
    """What stands in the first columns of a page's tables, in backticks."""
    rows = re.findall(r"^\| (`.*?) \|", page.read_text(), re.MULTILINE)
    return {name.partition("=")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_environment_variables_are_those_that_are_known():
    page = names_of_variables(ROOT / "docs" / "environment.md")
    assert {name for name in page if name.startswith("HPCSTRAT_")} == set(_settings._KNOWN)


def names_that_are_read(path):
    """The strings of a Python file that look like environment variables, where it reads any."""
    text = path.read_text()
    if "environ" not in text and "_settings." not in text:
        return set()
    constants = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    return {name for name in constants if isinstance(name, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)+", name)}


def test_the_environment_variables_that_are_read_are_on_the_page():
    page = names_of_variables(ROOT / "docs" / "environment.md")
    read = set().union(*(names_that_are_read(path) for path in (ROOT / "hpcstrat").rglob("*.py")))
    assert {"HPCSTRAT_OUTPUT", "OMP_NUM_THREADS", "PMI_RANK", "TF_CONFIG"} <= read
    assert sorted(name for name in read if not any(fnmatch.fnmatch(name, known) for known in page)) == []
    for folder in "launch", "slurm", "tests", "benchmarks":
        for path in (path for path in (ROOT / folder).iterdir() if path.is_file() and path.suffix != ".png"):
            assert set(re.findall(r"\bHPCSTRAT_[A-Z_]*[A-Z]\b", path.read_text())) <= page, path


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
    reason='mkdocs is not installed; pip install ".[docs]" brings it',
)
def test_the_site_is_built_without_a_warning(tmp_path):
    # Not --quiet, with which --strict sees no warning.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "Formatting signatures requires" not in result.stderr  # else long ones stand in one line
    pages = {path.relative_to(tmp_path / "site").as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    reference = "".join(text for name, text in pages.items() if name.startswith("api/"))
    assert [name for name in NAMES if f'id="{name}"' not in reference] == []
    assert "<blockquote>" not in reference  # what ">>>" becomes where it does not stand under "Examples:"
    loads = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?https?:')  # from elsewhere, which needs a network
    assert [name for name, text in pages.items() if loads.search(text)] == []
