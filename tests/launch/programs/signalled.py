"""Ranks that wait, and end when all of them have got a signal: `signalled.py STATUS|number [mpi]`."""

import os
import pathlib
import signal
import sys
import time

rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
size = int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)


def end(number, frame):
    os.write(1, f"rank {rank} got {number}\n".encode())
    pathlib.Path(f"signalled-{rank}").touch()
    # Where a rank ends with an error, Open MPI kills the other, whether its signal was handled or not.
    while len(list(pathlib.Path().glob("signalled-*"))) < size:
        time.sleep(0.01)
    sys.exit(number if sys.argv[1] == "number" else int(sys.argv[1]))


if "mpi" in sys.argv:
    import hpcstrat as hs

    hs.barrier()
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(one, end)
pathlib.Path(f"ready-{rank}").touch()
time.sleep(1000)
