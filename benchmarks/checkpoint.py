"""Times saving a checkpoint, by all ranks and by one, as on hosts without a shared file system.

    OMP_NUM_THREADS=1 mpirun -n 4 python benchmarks/checkpoint.py --folder /scratch

Next to it is the disk itself: the same bytes, as zeros, written and synced by one process, and by
all ranks to a file each. `without disk` leaves out waiting for the disk (`fsync`): the checksum and
the page cache remain. The last column is the time for which `save(blocking=False)` stops the
program.
"""

import argparse
import os
import tempfile
import time

import numpy as np
from mpi4py import MPI
from rounds import header, interleaved, row

import hpcstrat as hs
from hpcstrat.checkpoint._new_file import NewFile

COMM = MPI.COMM_WORLD


def written(path, nbytes):
    """Writes that many zeros to a file and syncs it."""
    zeros = bytes(1 << 22)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, nbytes, len(zeros)):
            file.write(zeros[: nbytes - start])
        os.fsync(file.fileno())


def trained(strategy, size):
    """A checkpoint of a variable and Adam's two slots."""
    with strategy.scope():
        v, optimizer = hs.Variable(np.zeros(size, np.float32)), hs.optimizers.Adam()
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(size, np.float32), v)]))
    return hs.checkpoint.Checkpoint(v=v, optimizer=optimizer)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--elements",
        type=int,
        default=1 << 28,
        help="of float32, a third of them variables (1 GiB)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each way (%(default)s)")
    parser.add_argument("--folder", default=".", help="on the disk to measure (%(default)s)")
    options = parser.parse_args()
    nbytes = 4 * options.elements
    see, fsync = NewFile._open, os.fsync
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        folder = COMM.bcast(own)
        path = os.path.join(folder, "saved")

        def saved(checkpoint, by_all, syncs, blocking=True):
            def way(calls):
                # What a rank on another host would see.
                NewFile._open = see if by_all else lambda *_: False
                os.fsync = fsync if syncs else lambda *_: None
                begin = time.perf_counter()
                checkpoint.save(path, blocking=blocking)
                seconds = time.perf_counter() - begin
                checkpoint.sync()
                os.fsync = fsync
                return seconds * calls

            return way

        def disk(by_all):
            def way(calls):
                begin = time.perf_counter()
                if by_all:
                    written(f"{path}-{COMM.rank}", nbytes // COMM.size)
                elif COMM.rank == 0:
                    written(path, nbytes)
                COMM.Barrier()
                return (time.perf_counter() - begin) * calls

            return way

        names = ["by one rank", "by all", "by one, without disk", "by all, without disk", "stall"]
        kinds = {"CentralStorage": hs.CentralStorageStrategy, "Mirrored": hs.MirroredStrategy}
        strategies = {name: kind(["CPU:0"] * hs.size()) for name, kind in kinds.items()}
        plain = interleaved({"one": disk(False), "all": disk(True)}, options.rounds, comm=COMM)
        header(
            "strategy, seconds", "the disk, by one", "by all", *names, "one / all", "without disk"
        )
        for name, strategy in strategies.items():
            with strategy:
                checkpoint = trained(strategy, options.elements // 3)
                kinds = [
                    (False, True),
                    (True, True),
                    (False, False),
                    (True, False),
                    (True, True, False),
                ]
                ways = {
                    key: saved(checkpoint, *kind) for key, kind in zip(names, kinds, strict=True)
                }
                took = interleaved(ways, options.rounds, comm=COMM)
            one, both, dry_one, dry_all, _ = took.values()
            cells = [f"{seconds:.3f}" for seconds in (*plain.values(), *took.values())]
            row(name, *cells, f"{one / both:.2f}", f"{dry_one / dry_all:.2f}")


if __name__ == "__main__":
    main()
