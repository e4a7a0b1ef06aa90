"""Which memory NCCL takes, and which not."""

import cupy  # pyright: ignore[reportMissingImports]
from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]
from mpi4py import MPI

COMM = MPI.COMM_WORLD
N, RANK = COMM.size, COMM.rank
cupy.cuda.Device(RANK).use()
stream = cupy.cuda.Stream(non_blocking=True)
comm = nccl.NcclCommunicator(N, COMM.bcast(nccl.get_unique_id()), RANK)
DOUBLE, SUM = nccl.NCCL_FLOAT64, nccl.NCCL_SUM


def at(i):
    return place + 8 * i


def grouped(*calls):
    nccl.groupStart()
    for call in calls:
        call()
    nccl.groupEnd()


def all_reduce(source, target, count):
    comm.allReduce(at(source), at(target), count, DOUBLE, SUM, stream.ptr)


def all_gather(source, target, count):
    comm.allGather(at(source), at(target), count, DOUBLE, stream.ptr)


with stream:
    memory = cupy.arange(20.0) + 1
    place = memory.data.ptr
    # What NCCL allows, in place and apart.
    all_gather(2 * RANK, 0, 2)
    grouped(lambda: all_reduce(0, 8, 4), lambda: all_reduce(2, 12, 4))
    for wrong in (
        lambda: all_gather(2 * ((RANK + 1) % N), 0, 2),  # from another's part
        lambda: all_reduce(0, 2, 4),
        lambda: grouped(lambda: all_reduce(0, 4, 4), lambda: all_reduce(10, 6, 4)),  # both write
        lambda: grouped(
            lambda: all_reduce(0, 4, 4), lambda: all_reduce(8, 2, 2)
        ),  # one writes what the other sends
        lambda: comm.allReduce(place + 4, place + 4, 4, DOUBLE, SUM, stream.ptr),
    ):
        try:
            wrong()
        except AssertionError as error:
            if RANK == 0:
                print(error)
    stream.synchronize()
comm.destroy()
