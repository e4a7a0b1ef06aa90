"""The programs behind `python -m hpcstrat`."""
