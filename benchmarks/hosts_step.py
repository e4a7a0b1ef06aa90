r"""Times a training step on CPU replicas of several hosts, and counts the bytes on their links.

    mpirun -n 4 python benchmarks/hosts_step.py --link eth0    # on real hosts
    sudo env PATH="$PATH" python benchmarks/emulated_hosts.py --hosts 2 --ranks 4 \
        python benchmarks/hosts_step.py

The largest network of networks.py, of 8.4 million parameters, is trained by Adam:

    ours         hpcstrat.MultiWorkerMirroredStrategy
    allreduce    mpi4py: one Allreduce of the flat gradient, then the library's compiled loop
    DDP          torch.nn.parallel.DistributedDataParallel over gloo, if PyTorch is installed

The first two take turns, round by round, and then comes DDP, in as many rounds: gloo's thread wakes
a hundred times a second until the process ends, and makes the others' steps up to twice as long
where ranks outnumber cores. All must end with the same weights. The table has medians over rounds on the slowest rank, and the megabytes per step on the busiest link,
including TCP's headers.
"""

import argparse
import pathlib

import numpy as np
from by_hand import AllReduceAdam
from host_step import COMM, adam, by_hand, ours, process_group, pytorch, timed, torch, torch_adam
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
    strategy = hs.MultiWorkerMirroredStrategy()
    return {
        "ours": ours(LAYERS, x, y, make=adam, strategy=strategy),
        "allreduce": by_hand(AllReduceAdam, LAYERS, x, y),
    }


def measure(made, rounds, link, expected=None):
    """By name: the median seconds of a step, and the bytes in one direction of the busiest link.

    Also the weights; `expected` is as in `timed`.
    """
    seconds, weights = timed(made, rounds, 1, expected)
    nbytes = {}
    for name, (step, _) in made.items():
        COMM.Barrier()
        before = carried(link)
        COMM.Barrier()
        step()
        COMM.Barrier()
        nbytes[name] = COMM.allreduce(int((carried(link) - before).max()), MPI.MAX)
    return {name: (seconds[name], nbytes[name]) for name in made}, weights


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
    found, weights = measure(alternatives(options.batch), options.rounds, options.link)
    if torch is not None:
        with process_group():
            made = {
                "DDP": pytorch(LAYERS, *data(LAYERS, options.batch, COMM.rank), True, torch_adam)
            }
            found |= measure(made, options.rounds, options.link, weights)[0]
    hosts = COMM.Split_type(MPI.COMM_TYPE_SHARED).rank == 0
    print(
        f"A step of Adam on {COMM.size} ranks of {COMM.allreduce(int(hosts))} hosts, "
        f"{options.rounds} rounds\n"
    )
    header("way", "ms", "ours / that", "MB over the busiest link")
    for name, (seconds, nbytes) in found.items():
        row(
            name,
            f"{1e3 * seconds:,.0f}",
            f"{found['ours'][0] / seconds:.2f}",
            f"{nbytes / 1e6:,.1f}",
        )
    COMM.Barrier()


if __name__ == "__main__":
    main()
