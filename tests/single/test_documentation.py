"""Documented names, arguments and environment variables exist, and examples run."""

import ast
import doctest
import fnmatch
import functools
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import re

import numpy as np
import pytest
from public_api import PUBLIC_MODULES, public_names

import hpcstrat as hs

ROOT = pathlib.Path(__file__).parents[2]
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
NAMES = [
    name
    for page in REFERENCE
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]
MODULES = [
    importlib.import_module(name)
    for _, name, _ in pkgutil.walk_packages(hs.__path__, "hpcstrat.")
    if not name.endswith("__main__")
]
# Classes of which every public method has an example.
SHOWN_BY_EXAMPLES = """CentralStorageStrategy IndexedSlices MirroredStrategy MultiWorkerMirroredStrategy
OneDeviceStrategy ReplicaContext Strategy StrategyExtended Variable checkpoint.Checkpoint
checkpoint.CheckpointManager data.Dataset data.DistributedDataset data.DistributedIterator
data.InputContext data.Optional metrics.Metric optimizers.Optimizer""".split()


def documented_arguments(docstring):
    """The names in the section "Args" of a docstring."""
    section = re.search(r"\n( *)Args:\n((?:\1 +.*\n|\n)*)", inspect.cleandoc(docstring) + "\n")
    if section is None:
        return []
    indent = len(section[1]) + 4
    names = re.findall(rf"^ {{{indent}}}(\**\w+(?:, \**\w+)*):", section[2], re.MULTILINE)
    return [name.strip("* ") for line in names for name in line.split(",")]


def test_public_names_have_docstrings_and_the_arguments_that_these_name():
    """As ruff does, but also for exported names from private files, and for classes."""
    names, found = public_names(), 0
    assert {"hpcstrat.Strategy.run", "hpcstrat.data.Dataset.shuffle"} <= names.keys()
    for name, thing in names.items():
        assert inspect.getdoc(thing), name
        arguments = documented_arguments(thing.__doc__ or "")
        found += len(arguments)
        if arguments and not isinstance(thing, property):
            target = thing.__init__ if inspect.isclass(thing) else thing
            assert set(arguments) <= set(inspect.signature(target).parameters), name
    assert found > 200


def find(name):
    """The object with a dotted name."""
    return functools.reduce(getattr, name.split(".")[1:], hs)


def test_the_reference_has_every_public_name_once():
    """Constants too, which `public_names` omits."""
    exported = {
        f"{module.__name__}.{name}"
        for module in PUBLIC_MODULES
        for name in getattr(module, "__all__", ())
    }
    assert "hpcstrat.data.AUTOTUNE" in exported
    described = [find(name) for name in NAMES]
    assert len(NAMES) == len(set(NAMES))
    named = exported | public_names(with_methods=False).keys()
    things = {name: find(name) for name in named - {*NAMES}}
    assert [
        name
        for name, thing in things.items()
        if not inspect.ismodule(thing) and not any(thing is other for other in described)
    ] == []


def test_every_name_has_one_stability():
    page = (ROOT / "docs" / "api" / "names.md").read_text()
    links = re.findall(r"\[`([\w.]+)`\]\((\w+\.md)#hpcstrat\.([\w.]+)\)", page)
    assert all(shown == name for shown, _, name in links)
    assert sorted(f"hpcstrat.{name}" for name, _, _ in links) == sorted(NAMES)
    texts = {path.name: f"{path.read_text()}\n" for path in REFERENCE}
    assert all(f"::: hpcstrat.{name}\n" in texts[where] for name, where, _ in links)


def is_deprecated(thing):
    return (inspect.getdoc(thing) or "").startswith("Deprecated: ")


def test_deprecated_names_are_listed():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", page, re.MULTILINE))
    deprecated = {thing for thing in public_names().values() if is_deprecated(thing)}
    assert {find(f"hpcstrat.{name}") for name in rows} == deprecated
    assert not any(is_deprecated(find(f"hpcstrat.{name}")) for name in rows.values())


def test_no_name_of_another_module_is_public():
    starred = {}
    exec("from hpcstrat import *", starred)
    shown = {*dir(hs), *starred}
    assert {"any_rank", "Strategy"} <= shown
    assert shown & {"Any", "TYPE_CHECKING", "sys", "typing"} == set()


def examples():
    """The examples, by the `id` of what they show: classes inherit methods with their examples."""
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    things = public_names()
    for module in MODULES:
        for name, thing in vars(module).items():
            if inspect.isfunction(thing) and thing.__module__ == module.__name__:
                things[f"{thing.__module__}.{name}"] = thing
    found = {}
    # The shortest name is that of the class that defines a method: `Strategy.run`.
    for name, thing in sorted(things.items(), key=lambda item: len(item[0])):
        homes = [module for module in [hs, *MODULES] if name.startswith(f"{module.__name__}.")]
        home = max(homes, key=lambda module: len(module.__name__))
        # Methods are shown below their class, whose example has the imports.
        namespace = {"np": np, "hs": hs, **vars(home)}
        tests = finder.find(thing, name, module=False, globs=namespace)
        if tests and tests[0].examples:
            found.setdefault(id(thing), tests[0])
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", SHOWN_BY_EXAMPLES)
def test_every_method_has_an_example(name):
    inside = f"hpcstrat.{name}."
    things = {inner: thing for inner, thing in public_names().items() if inner.startswith(inside)}
    assert things
    assert [
        inner
        for inner, thing in things.items()
        if id(thing) not in EXAMPLES
        and not isinstance(thing, property)
        and not is_deprecated(thing)
        # Of TensorFlow's names that do nothing of their own.
        and not str(getattr(thing, "__module__", "")).endswith("tensorflow_names")
        # The example of the class shows what an array has, too.
        and not (name == "Variable" and hasattr(np.ndarray, inner.rpartition(".")[2]))
    ] == []


@pytest.mark.parametrize("module", ["hpcstrat.losses", "hpcstrat.metrics", "hpcstrat.optimizers"])
def test_every_optimizer_schedule_metric_and_loss_has_an_example_of_its_own(module):
    """And every function of the package."""
    names = {name for name in NAMES if name.startswith(f"{module}.")}
    names |= {f"hpcstrat.{name}" for name, one in vars(hs).items() if inspect.isfunction(one)}
    without = {name for name in names if id(find(name)) not in EXAMPLES and "._" not in name}
    # Programs on its page subclass it.
    assert "hpcstrat.on_lead" in names and without <= {"hpcstrat.optimizers.Optimizer"}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=lambda example: example.name)
def test_examples_run(example):
    report, flags = [], doctest.REPORT_NDIFF | doctest.ELLIPSIS
    doctest.DocTestRunner(optionflags=flags).run(example, out=report.append)
    assert not report, "".join(report)


# ---- environment variables


def names_on_the_page():
    """The names in backticks in the first columns of the page's tables."""
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    return {name.partition("=")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def names_that_are_read(path):
    """The strings that look like environment variables in a Python file that reads any."""
    text = path.read_text()
    if "environ" not in text and "settings." not in text:
        return set()
    constants = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    texts = [text for text in constants if isinstance(text, str)]
    return {name for name in texts if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", name)}


def test_the_environment_variables_that_are_read_are_on_the_page():
    page = names_on_the_page()
    read = set().union(*(names_that_are_read(path) for path in (ROOT / "hpcstrat").rglob("*.py")))
    assert {"HPCSTRAT_OUTPUT", "OMP_NUM_THREADS", "PMI_RANK"} <= read
    unknown = {name for name in read if not any(fnmatch.fnmatch(name, known) for known in page)}
    assert unknown == set()
    assert {name for name in page if name.startswith("HPCSTRAT_")} <= read
    for path in [p for name in ("launch", "slurm", "benchmarks") for p in (ROOT / name).iterdir()]:
        if path.is_file() and path.suffix != ".png":
            assert set(re.findall(r"\bHPCSTRAT_[A-Z_]*[A-Z]\b", path.read_text())) <= page, path
