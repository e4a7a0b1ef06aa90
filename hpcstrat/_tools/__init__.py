"""What runs beside programs, behind `python -m hpcstrat`.

Nothing else in the package imports it.
"""
