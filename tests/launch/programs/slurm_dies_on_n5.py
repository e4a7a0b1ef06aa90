"""Prints where each rank is; then one of the fifth node dies."""

import os
import signal

import hpcstrat as hs
from hpcstrat._process import worlds

strategy = hs.MultiWorkerMirroredStrategy()
node, world = os.environ["SLURMD_NODENAME"], worlds.start()
sizes = [world.hosts.count(host) for host in sorted(set(world.hosts))]
line = f"rank {hs.rank()} on {node}, rank {world.local_rank} of host {world.hosts[hs.rank()]} of {sizes}\n"
os.write(1, line.encode())  # in one piece
for step in range(20):
    hs.any_rank(False)
    if step == 10 and hs.rank() == 17:
        os.kill(os.getpid(), signal.SIGKILL)
print("ends")
