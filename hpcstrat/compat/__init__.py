"""Older versions of the interface."""

from hpcstrat.compat import v1 as v1
