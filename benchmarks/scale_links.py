"""Measures what `scale_model` needs to know of this machine: latency and bandwidth of messages, and of memory.

    OMP_NUM_THREADS=1 mpirun -n 2 python benchmarks/scale_links.py

Neighbouring ranks play ping-pong through MPI, all pairs at once, and each rank copies memory. Then a reduction with a
broadcast, and an all-reduction, stand beside what the model makes of these constants. Prints tables in Markdown.
"""

import argparse
import statistics
import time

import numpy as np
import scale_model as model
from mpi4py import MPI
from rounds import header, interleaved, repeated, row

COMM = MPI.COMM_WORLD


def ping_pong(nbytes, rounds):
    """Seconds of a message to the neighbour: half of there and back, the median, on the slowest pair."""
    partner = COMM.rank ^ 1
    buffer = np.zeros(nbytes, np.uint8)
    seconds = []
    COMM.Barrier()
    if partner < COMM.size:
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            if COMM.rank < partner:
                COMM.Send(buffer, partner)
                COMM.Recv(buffer, partner)
            else:
                COMM.Recv(buffer, partner)
                COMM.Send(buffer, partner)
            seconds.append((time.perf_counter() - begin) / 2)
    return max(COMM.allgather(statistics.median(seconds[1:]) if seconds else 0.0))


def memory(nbytes, rounds):
    """Bytes a second that a rank reads and writes while all do."""
    source = np.ones(nbytes, np.uint8)
    copy = np.empty_like(source)
    taken = interleaved({"copy": repeated(lambda: np.copyto(copy, source))}, rounds, comm=COMM)["copy"]
    return 2 * nbytes / taken


def collectives(nbytes, rounds):
    """Seconds of a reduction with a broadcast, and of an all-reduction, by MPI."""
    own, total = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)

    def reduce_and_broadcast():
        COMM.Reduce(own, total)
        COMM.Bcast(total)

    ways = {"there and back": repeated(reduce_and_broadcast), "all": repeated(lambda: COMM.Allreduce(own, total))}
    return interleaved(ways, rounds, calls=max(1, 2**20 // nbytes), comm=COMM)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="turns of each measurement (%(default)s)")
    parser.add_argument("--largest", type=int, default=2**24, help="bytes of a message (%(default)s)")
    options = parser.parse_args()
    if COMM.size < 2:
        parser.error("start it by mpirun, with at least 2 ranks")
    latency = ping_pong(8, 20 * options.rounds)
    link = model.Link(latency, options.largest / (ping_pong(options.largest, options.rounds) - latency))
    bandwidth = memory(options.largest, options.rounds)
    if COMM.rank == 0:
        header("ranks", "latency, us", "bandwidth, GB/s", "memory, GB/s")
        row(COMM.size, f"{1e6 * latency:.2f}", f"{link.bandwidth / 1e9:.2f}", f"{bandwidth / 1e9:.2f}")
        print()
        header("bytes", "reduce and broadcast, us", "by the model", "all-reduce, us", "by the model ")
    for nbytes in (2**10, 2**16, options.largest):
        taken = collectives(nbytes, options.rounds)
        if COMM.rank == 0:
            there = model.reduce_and_broadcast(COMM.size, nbytes, link).seconds
            around = model.all_reduce(COMM.size, nbytes, link).seconds
            found = (taken["there and back"], there, taken["all"], around)
            row(f"{nbytes:,}", *(f"{1e6 * seconds:,.0f}" for seconds in found))


if __name__ == "__main__":
    main()
