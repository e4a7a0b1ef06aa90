"""Marks tests as `slow`: `pytest` leaves them out, `pytest -m slow` and `launch/test --all` run them."""

import itertools
from collections import defaultdict

import pytest


def slow_but(quick, values):
    """The values for `parametrize`, all marked slow except the quick ones."""
    marks = pytest.mark.slow
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def thin(items):
    """Marks most cases of tests with three or more parameters as slow; all pairs still meet.

    Most faults need two values to meet, very few need three: Kuhn, Wallace and Gallo, "Software
    fault interactions and implications for software testing", IEEE TSE 30 (2004).
    """
    products = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            products[item.parent, item.originalname, item.get_closest_marker("gpu") is None].append(
                item
            )
    for cases in products.values():
        for case in set(cases).difference(_that_cover_all_pairs(cases)):
            case.add_marker(pytest.mark.slow)


def _that_cover_all_pairs(cases):
    """A few cases that cover all pairs, chosen greedily, the same in every process."""
    columns = [column for column in _columns(cases) if len(set(column)) > 1]
    if len(columns) < 3:
        return cases
    pairs = {
        case: set(itertools.combinations(enumerate(values), 2))
        for case, values in zip(cases, zip(*columns, strict=True), strict=True)
    }
    chosen, missing = [], set().union(*pairs.values())
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def _columns(cases):
    """The values of each parameter, or group of parameters in one mark, numbered as they occur.

    Not pytest's `callspec.indices`: without a fixture those number the cases.
    """
    marks = [mark.args[0] for mark in cases[0].iter_markers("parametrize")]
    marks = [
        names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
        for names in marks
    ]
    alone = set(cases[0].callspec.params).difference(*marks)
    for names in [*marks, *([name] for name in sorted(alone))]:
        numbers = {}
        values = [tuple(id(case.callspec.params[name]) for name in names) for case in cases]
        yield [numbers.setdefault(value, len(numbers)) for value in values]
