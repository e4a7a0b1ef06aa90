"""Marks what `launch/test` leaves to `launch/test --all`."""

import pytest


def slow_but(quick, values):
    """The values, for `parametrize`, of which all are slow but those that are quick."""
    marks = pytest.mark.slow
    return [
        value if value in quick else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
        for value in values
    ]
