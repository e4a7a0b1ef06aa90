"""Counts to 8, with checkpoints; on its first start the ranks of the second node die."""

import os
import signal
import sys

import hpcstrat as hs

strategy = hs.MultiWorkerMirroredStrategy()
with strategy.scope():
    step = hs.Variable(0)
checkpoint = hs.checkpoint.Checkpoint(step=step)
path = sys.argv[-1]
if os.path.exists(path):
    checkpoint.restore(path)
begin = int(step.numpy())
os.write(
    1,
    f"rank {hs.rank()} of {hs.size()} on {os.environ['SLURMD_NODENAME']} begins at {begin}\n".encode(),
)
while int(step.numpy()) < 8:
    step.assign_add(1)
    checkpoint.save(path)
    if begin == 0 and int(step.numpy()) == 5 and os.environ["SLURMD_NODENAME"] == "n2":
        os.kill(os.getpid(), signal.SIGKILL)
print(f"ends at {int(step.numpy())}")
