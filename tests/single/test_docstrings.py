"""What the documentation says is there: examples run, public names and their arguments are described."""

import doctest
import importlib
import inspect
import pkgutil
import re

import pytest
from public_api import public_names

import hpcstrat as hs

MODULES = [name for _, name, _ in pkgutil.walk_packages(hs.__path__, "hpcstrat.") if not name.endswith("__main__")]
EXAMPLES = [
    "Strategy.run",
    "ValueMethods.reduce",
    "ValueMethods.gather",
    "ValueMethods.experimental_distribute_values_from_function",
    "InputMethods.experimental_distribute_dataset",
    "InputMethods.distribute_datasets_from_function",
    "OneDeviceStrategy",
]


def documented_arguments(docstring):
    """The names in the section "Args" of a docstring."""
    section = re.search(r"\n( *)Args:\n((?:\1 +.*\n|\n)*)", inspect.cleandoc(docstring) + "\n")
    if section is None:
        return []
    indent = len(section[1]) + 4
    names = re.findall(rf"^ {{{indent}}}(\**\w+(?:, \**\w+)*):", section[2], re.MULTILINE)
    return [name.strip("* ") for line in names for name in line.split(",")]


NAMES = public_names()


def test_there_are_public_names():
    assert {"hpcstrat.Strategy.run", "hpcstrat.optimizers.Adam", "hpcstrat.data.Dataset.shuffle"} <= NAMES.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name):
    assert inspect.getdoc(NAMES[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_that_a_docstring_names_exist(name):
    thing = NAMES[name]
    arguments = documented_arguments(thing.__doc__ or "")
    if arguments and not isinstance(thing, property):
        target = thing.__init__ if inspect.isclass(thing) else thing
        assert set(arguments) <= set(inspect.signature(target).parameters)


def test_arguments_are_found_in_a_docstring():
    text = "Does.\n\nArgs:\n    first: one,\n        goes on: here.\n    a, b: two.\n    **rest: more.\n\n"
    text += "Returns:\n    x: y\n"
    assert documented_arguments(text) == ["first", "a", "b", "rest"]


def examples():
    """(name, example) of all docstrings that have examples."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    return {test.name: test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples}


TESTS = examples()


def test_the_methods_of_tensorflows_documentation_have_examples():
    assert all(any(found.endswith("." + name) for found in TESTS) for name in EXAMPLES)


@pytest.mark.parametrize("name", TESTS)
def test_examples_run(name):
    report = []
    doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(TESTS[name], out=report.append)
    assert not report, "".join(report)
