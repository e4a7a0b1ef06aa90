"""Checkpoints whose bytes are changed, cut or added are refused, and change nothing: `damaged.py N`."""

import pathlib
import resource
import sys

import numpy as np

import hpcstrat as hs

COUNT = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # what takes more has believed a size


def damage(data, random):
    """Changes, inserts or cuts a few bytes."""
    data = bytearray(data)
    at, much = int(random.integers(len(data) + 1)), int(random.integers(1, 9))
    kind = random.integers(3)
    end = len(data) if kind == 2 else at + much * kind
    data[at:end] = b"" if kind == 2 else random.bytes(much)
    return bytes(data)


strategy = hs.MirroredStrategy()
with strategy.scope():
    w, n = hs.Variable(np.arange(50.0)), hs.Variable(7)
checkpoint = hs.checkpoint.Checkpoint(w=w, n=n)
checkpoint.save("whole")
whole = pathlib.Path("whole").read_bytes()
w.assign(np.full(50, -1.0))
refused = 0
for number in range(COUNT):
    hs.barrier()
    if hs.rank() == 0:
        pathlib.Path("damaged").write_bytes(damage(whole, np.random.default_rng(number)))
    hs.barrier()
    try:
        checkpoint.restore("damaged")
    except (ValueError, OSError) as error:
        assert "damaged" in str(error) and len(str(error)) < 1000, (number, error)
        assert (w.numpy() == -1.0).all() and int(n) == 7, number
        refused += 1
    else:
        assert (w.numpy() == np.arange(50.0)).all(), number
        w.assign(np.full(50, -1.0))
assert refused > COUNT // 2
print("as it was")
