"""A large message of the program's own is on its way while the ranks wait in a barrier."""

import numpy as np
from mpi4py import MPI

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
world = MPI.COMM_WORLD
data = np.full(20_000_000, world.rank, np.uint8)
request = None
if world.rank == 0:
    world.Send(data, dest=1)
elif world.rank == 1:
    request = world.Irecv(data, source=0)
hs.barrier()
if request is not None:
    request.Wait()
print(hs.any_rank(False), data.max())
