"""Measures what a job takes as its ranks grow in number: memory, files, threads, start, calls, end.

    OMP_NUM_THREADS=1 python benchmarks/many_ranks.py --ranks 1 2 4 8 16 32 64 --hosts 1 8

Each cell is the median of rounds in which fresh jobs take turns. Start it without mpirun, which it
runs itself. Several hosts are MPICH's emulated ones: groups of ranks that share no memory with
those of others. Where ranks outnumber the cores, their times say little; sizes and counts do not
depend on that.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time

from rounds import header, interleaved, repeated, row

COLUMNS = {
    "MiB resident": "a rank",
    "proportional": "a rank",
    "private": "a rank",
    "MiB shared": "all ranks",
    "in segments": "all ranks",
    "open files": "the last rank",
    "of hpcstrat": "a rank",
    "threads": "a rank",
    "s to the first strategy": "mpirun to the last rank",
    "barrier, ms": "",
    "reduce": "",
    "step": "",
    "s to the end": "of the job",
}


# ---- in a job


def memory():
    """MiB of this process: resident, proportional, private, and its part of what is shared."""
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return [size / 1024 for size in (kib["Rss"], kib["Pss"], private, kib["Pss_Shmem"])]


def open_files():
    """The open files of this process: by inode and name, how often each is open, and its MiB."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            what, status = os.readlink(f"/proc/self/fd/{name}"), os.stat(f"/proc/self/fd/{name}")
        except OSError:  # that of the list itself
            continue
        times, _ = files.get((status.st_ino, what), (0, 0))
        files[status.st_ino, what] = times + 1, 512 * status.st_blocks / 2**20
    return files


def number_of(files):
    return sum(times for times, _ in files.values())


def job(begin, calls):
    """One rank's part. Rank 0 prints what was found, and when its last line came."""
    import numpy as np
    from mpi4py import MPI

    import hpcstrat as hs

    files_before = number_of(open_files())  # MPI has started
    strategy = hs.MultiWorkerMirroredStrategy()
    started = time.monotonic() - begin  # the same clock in all processes
    with strategy.scope():
        w, b = hs.Variable(np.zeros((64, 10), np.float32)), hs.Variable(np.zeros(10, np.float32))
        optimizer = hs.optimizers.SGD(1e-6, momentum=0.9)
    x, one = np.ones((32, 64), np.float32), strategy.run(lambda: 1.0)

    def step(x):
        d = x @ w + b - 1
        optimizer.apply_gradients([(x.T @ d, w), (d.sum(axis=0), b)])

    calls_of = {
        "barrier": hs.barrier,
        "reduce": lambda: strategy.reduce("SUM", one, axis=None),
        "step": lambda: strategy.run(step, args=(x,)),
    }
    for call in calls_of.values():
        call()
    # Before this program's own messages, for which MPI opens more files.
    files, threads, sizes = open_files(), len(os.listdir("/proc/self/task")), memory()
    segments = sum(size for (_, what), (_, size) in files.items() if "memfd:hpcstrat" in what)
    hs.barrier()  # all are there while each is looked at
    comm = MPI.COMM_WORLD
    ways = {name: repeated(call) for name, call in calls_of.items()}
    medians = interleaved(ways, 3, calls, comm)
    sizes = np.array(comm.allgather(sizes))
    counts = np.array(
        comm.allgather((number_of(files), number_of(files) - files_before, threads, started))
    )
    found = [
        *sizes[:, :3].mean(axis=0),
        sizes[:, 3].sum(),
        sum(comm.allgather(segments if hs.local_rank() == 0 else 0.0)),
        *counts.max(axis=0),
        *(1000 * medians[name] for name in ways),
    ]
    assert len(np.unique(comm.allgather(w.numpy().sum()))) == 1
    print(json.dumps([*map(float, found), time.monotonic()]), flush=True)


# ---- from outside


def run(mpirun, ranks, hosts, calls):
    """Runs a job; returns a number for each column."""
    begin = time.monotonic()
    own = [sys.executable, __file__, "--job", str(begin), "--calls", str(calls)]
    told = subprocess.run(
        [*mpirun, "-n", str(ranks), *own],
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | ({"MPIR_CVAR_NUM_CLIQUES": str(hosts)} if hosts > 1 else {}),
    ).stdout
    *found, last = json.loads(told)
    return [*found, time.monotonic() - last]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[1, 8], help="with two ranks each, or more"
    )
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind (%(default)s)")
    parser.add_argument("--calls", type=int, default=2, help="of a kind, in turn (%(default)s)")
    parser.add_argument(
        "--mpirun", default="mpirun", help="with the options that it needs (%(default)s)"
    )
    parser.add_argument("--job", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        job(options.job, options.calls)
        return
    jobs = [
        (hosts, ranks)
        for hosts in options.hosts
        for ranks in options.ranks
        if hosts == 1 or ranks >= 2 * hosts
    ]
    found = {key: [] for key in jobs}
    for turn in range(options.rounds):
        for hosts, ranks in random.Random(turn).sample(jobs, len(jobs)):
            numbers = run(shlex.split(options.mpirun), ranks, hosts, options.calls)
            found[hosts, ranks].append(numbers)
    header("ranks", "hosts", *(f"{name} ({of})" if of else name for name, of in COLUMNS.items()))
    for (hosts, ranks), runs in found.items():
        medians = [statistics.median(numbers) for numbers in zip(*runs, strict=True)]
        row(ranks, hosts, *(f"{median:.4g}" for median in medians))


if __name__ == "__main__":
    main()
