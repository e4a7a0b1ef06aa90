"""Which tests `launch/test` leaves to `launch/test --all`: those marked `slow`, here or by `@pytest.mark.slow`."""

import itertools
from collections import defaultdict

import pytest


def slow_but(quick, values):
    """The values, for `parametrize`, of which all are slow but those that are quick."""
    marks = pytest.mark.slow
    return [
        value if value in quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]


def thin(items):
    """Marks cases of a test that has three or more parameters as slow, such that any two values still meet in one.

    Most faults need two values to meet, hardly any three: Kuhn, Wallace and Gallo, "Software fault interactions and
    implications for software testing", IEEE TSE 30 (2004).
    """
    products = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            products[item.parent, item.originalname, item.get_closest_marker("gpu") is None].append(item)
    for cases in products.values():
        for case in set(cases).difference(_that_cover_all_pairs(cases)):
            case.add_marker(pytest.mark.slow)


def _that_cover_all_pairs(cases):
    """Few of the cases, greedily chosen, the same in every process."""
    columns = {tuple(case.callspec.indices.get(name, 0) for case in cases) for name in cases[0].callspec.indices}
    columns = sorted(column for column in columns if len(set(column)) > 1)  # each parameter, or several that go together
    if len(columns) < 3:
        return cases
    pairs = {
        case: {(a, column_a[i], b, column_b[i]) for (a, column_a), (b, column_b) in two}
        for two in [list(itertools.combinations(enumerate(columns), 2))]
        for i, case in enumerate(cases)
    }
    chosen, missing = [], set().union(*pairs.values())
    while missing:
        chosen.append(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
