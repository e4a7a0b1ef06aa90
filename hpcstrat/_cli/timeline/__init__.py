"""`python -m hpcstrat timeline`: what a timeline says."""
