"""The commands of `python -m hpcstrat`, which run outside programs.

Nothing else in the package imports it.
"""
