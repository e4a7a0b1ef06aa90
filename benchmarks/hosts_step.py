r"""Times a training step on CPU replicas of several hosts, and counts the bytes on their links.

    mpirun -n 4 python benchmarks/hosts_step.py --link eth0    # on real hosts
    sudo env PATH="$PATH" python benchmarks/emulated_hosts.py --hosts 2 --ranks 4 \
        python benchmarks/hosts_step.py

The largest network of networks.py, of 8.4 million parameters, is trained by Adam:

    unsharded    hpcstrat.MultiWorkerMirroredStrategy: every rank makes the whole update
    ready        the same, which marks each layer's gradients as soon as they are written
    sharded      with shard_updates=True: every rank updates its part and keeps its slots
    allreduce    mpi4py: one Allreduce of the flat gradient, then the library's compiled loop
    DDP          torch.nn.parallel.DistributedDataParallel over gloo, if PyTorch is installed
    ZeRO         the same with torch.distributed.optim.ZeroRedundancyOptimizer

The first four take turns, round by round, and then the last two, in as many rounds: gloo's thread
wakes a hundred times a second until the process ends, and makes the others' steps up to twice as
long where ranks outnumber cores. Those that take turns must end with the same weights. The table
has medians over rounds on the slowest rank, and the megabytes per step on the busiest link,
including TCP's headers.
"""

import argparse
import pathlib

import numpy as np
from by_hand import AllReduceAdam
from host_step import COMM, adam, by_hand, ours, process_group, pytorch_adams, timed, torch
from mpi4py import MPI
from networks import NETWORKS, data
from rounds import header, row

import hpcstrat as hs

LAYERS = list(NETWORKS)[-1]


def carried(link):
    """Bytes that this host has sent and received over its link."""
    folder = pathlib.Path(f"/sys/class/net/{link}/statistics")
    return np.array([int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx")])


def alternatives(batch):
    """By name: a step, and a function that returns the weights."""
    x, y = data(LAYERS, batch, COMM.rank)

    def mirrored(marks=False, **options):
        strategy = hs.MultiWorkerMirroredStrategy(**options)
        return ours(LAYERS, x, y, make=adam, strategy=strategy, marks=marks)

    return {
        "unsharded": mirrored(),
        "ready": mirrored(marks=True),
        "sharded": mirrored(shard_updates=True),
        "allreduce": by_hand(AllReduceAdam, LAYERS, x, y),
    }


def measure(made, rounds, link):
    """By name: the median seconds of a step, and the bytes in one direction of the busiest link."""
    seconds, _ = timed(made, rounds, 1)
    nbytes = {}
    for name, (step, _) in made.items():
        COMM.Barrier()
        before = carried(link)
        COMM.Barrier()
        step()
        COMM.Barrier()
        nbytes[name] = COMM.allreduce(int((carried(link) - before).max()), MPI.MAX)
    return {name: (seconds[name], nbytes[name]) for name in made}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns that each way takes (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=NETWORKS[LAYERS][0], help="of a replica (%(default)s)"
    )
    parser.add_argument("--link", default="eth0", help="of this host to the others (%(default)s)")
    options = parser.parse_args()
    found = measure(alternatives(options.batch), options.rounds, options.link)
    if torch is not None:
        with process_group():
            found |= measure(pytorch_adams(LAYERS, options.batch), options.rounds, options.link)
    hosts = COMM.Split_type(MPI.COMM_TYPE_SHARED).rank == 0
    print(
        f"A step of Adam on {COMM.size} ranks of {COMM.allreduce(int(hosts))} hosts, "
        f"{options.rounds} rounds\n"
    )
    header("way", "ms", "sharded / that", "MB over the busiest link")
    for name, (seconds, nbytes) in found.items():
        row(
            name,
            f"{1e3 * seconds:,.0f}",
            f"{found['sharded'][0] / seconds:.2f}",
            f"{nbytes / 1e6:,.1f}",
        )
    COMM.Barrier()


if __name__ == "__main__":
    main()
