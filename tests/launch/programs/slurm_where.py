"""Prints where each rank is."""

import os
import sys

import hpcstrat as hs

hs.barrier()
word = hs.broadcast_object(f"of rank {hs.rank()}")
assert hs.any_rank(hs.rank() == hs.size() - 1)
line = (
    f"rank {hs.rank()} of {hs.size()} on {os.environ['SLURMD_NODENAME']}, {word}, {sys.argv[1:]}\n"
)
os.write(1, line.encode())  # in one piece
