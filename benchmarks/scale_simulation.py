r"""Shows what a training step sends between hosts, and its time by a model of their links.

    python benchmarks/scale_simulation.py
    python benchmarks/scale_simulation.py --hosts 2 3 --ranks 4 --gigabits 10 --latency 0.00002 \
        --links rank

The library's communicators and storages run unchanged, on ranks that are threads of this process:
`recorded_ranks.py` records their MPI calls. `scale_formulas.py` has the same in closed form, and
continues where there are too many threads. docs/scale.md says what the tables mean, and what is
assumed.
"""

import argparse
from collections import Counter

import numpy as np
import scale_formulas as formulas
from recorded_ranks import Job, hosts_of
from rounds import header, row

from hpcstrat import ReduceOp
from hpcstrat._communicators.hierarchical import HierarchicalCommunicator
from hpcstrat._communicators.mpi import MpiCommunicator
from hpcstrat._communicators.shared_memory import SharedMemoryCommunicator
from hpcstrat._core.call_name import call_named
from hpcstrat._storage.host import MirroredHostStorage
from hpcstrat._storage.sharded_host import ShardedHostStorage
from hpcstrat._update.rule import UpdateRule


def by_hosts(comm, host_comm):
    """The communicator that the library uses."""
    if host_comm.size == comm.size:
        return SharedMemoryCommunicator(comm)
    if comm.allgather(host_comm.size) == [1] * comm.size:
        return MpiCommunicator(comm)
    return HierarchicalCommunicator(comm, host_comm)


STEPS = {
    "flat": (lambda comm, _: MpiCommunicator(comm), MirroredHostStorage),
    "unsharded": (by_hosts, MirroredHostStorage),
    "sharded": (by_hosts, ShardedHostStorage),
}
"""For names of `formulas.STEPS` the communicator and the storage."""
MOMENTUM, STEPS_OF_A_RUN = 0.5, 2


def step(name, hosts, gradients, is_unbacked=False):
    """One step with momentum, after one that makes room for it.

    Args:
        name: one of `STEPS`.
        hosts: of each rank.
        gradients: of each rank, of equal length.
        is_unbacked: see `recorded_ranks.Job`.

    Returns:
        Its MPI calls, as `recorded_ranks.Call`, and the new values on each rank.
    """
    connect, storage_of = STEPS[name]
    job = Job(hosts, is_unbacked)

    def program(comm, host_comm):
        communicator = connect(comm.Dup(), host_comm)
        storage = storage_of(communicator)
        with call_named("simulated step"):
            variable = storage.create(np.zeros(gradients[comm.rank].shape, np.float32))
            slot = storage.create_slot(variable, 0.0, storage.split([variable])[0])
            plan = storage.plan([variable], [[slot]])
            for _ in range(STEPS_OF_A_RUN):
                job.record(comm)
                storage.update(
                    plan, [gradients[comm.rank]], ReduceOp.SUM, UpdateRule(descend, {"rate": 1.0})
                )
        return variable.array.copy()

    values = job.run(program)
    return job.calls, values


def descend(value, gradient, slots, _):
    """A step with momentum and a rate of 1."""
    (velocity,) = slots
    velocity *= MOMENTUM
    velocity += gradient
    value -= velocity


# ---- the model: a call takes a latency per round, and as long as its busiest link needs


def cost(call, hosts):
    """What a call sends between hosts."""
    rounds = [
        [one for one in messages if hosts[one[0]] != hosts[one[1]]] for messages in call.rounds
    ]
    sizes, through_host, through_rank = [], Counter(), Counter()
    for source, to, nbytes in (one for messages in rounds for one in messages):
        sizes.append(nbytes)
        for way, rank in ("out", source), ("in", to):
            through_host[way, hosts[rank]] += nbytes
            through_rank[way, rank] += nbytes
    busiest = [max(through.values(), default=0) for through in (through_host, through_rank)]
    return formulas.Cost(sum(map(bool, rounds)), len(sizes), sum(sizes), *busiest)


def seconds(call, hosts, links):
    """How long a call takes: messages inside hosts overlap with those between them."""
    between, inside = cost(call, hosts), Counter()
    for source, to, nbytes in (one for messages in call.rounds for one in messages):
        if hosts[source] == hosts[to]:
            inside["out", source] += nbytes
            inside["in", to] += nbytes
    rounds = len(call.rounds) - between.rounds  # those that stay inside
    memory = (
        rounds * links.memory_latency + max(inside.values(), default=0) / links.memory_bandwidth
    )
    return max(between.seconds(links), memory)


# ---- tables


def gradients_of(n, elements):
    """Each rank's gradients: small whole numbers, whose sums are exact."""
    return [
        ((np.arange(elements) * (2 * rank + 1) + 3 * rank) % 11 - 5).astype(np.float32)
        for rank in range(n)
    ]


def show_simulation(options, links):
    print(
        f"\n## What the library sends in a step: {4 * options.elements / 1e6:.1f} MB of gradients\n"
    )
    header(
        "step",
        "hosts",
        "ranks a host",
        "messages",
        "MB",
        "by formula",
        "MB, busiest link",
        "ms",
        "by formula",
    )
    for count in options.hosts:
        groups = (options.ranks,) * count
        hosts, elements = hosts_of(groups), even(options.elements, groups)
        for name in STEPS:
            calls, values = step(name, hosts, gradients_of(sum(groups), elements))
            if name == "flat":
                plain = values[0]
            assert all(np.array_equal(value, plain) for value in values), (
                "the ways of a step differ"
            )
            found = [cost(call, hosts) for call in calls]
            expected = formulas.STEPS[name](groups, 4 * elements)
            megabytes = [
                f"{sum(one.nbytes for one in costs) / 1e6:,.2f}" for costs in (found, expected)
            ]
            busiest = sum(
                one.through_rank if links.of_each_rank else one.through_host for one in found
            )
            times = (
                sum(seconds(call, hosts, links) for call in calls),
                formulas.seconds(expected, links),
            )
            cells = *megabytes, f"{busiest / 1e6:,.2f}", *(f"{1e3 * time:,.2f}" for time in times)
            row(name, count, options.ranks, sum(one.messages for one in found), *cells)


def show_seconds(options, links):
    print("\n## Milliseconds of a step's messages between hosts, by the formulas\n")
    header("gradients", "hosts", "ranks a host", *formulas.STEPS)
    for megabytes in options.megabytes:
        for count in options.many_hosts:
            groups = (options.ranks,) * count
            times = [
                formulas.seconds(of(groups, int(1e6 * megabytes)), links)
                for of in formulas.STEPS.values()
            ]
            row(
                f"{megabytes:g} MB", count, options.ranks, *(f"{1e3 * time:,.1f}" for time in times)
            )


def show_gpus(options):
    print("\n## GPUs: milliseconds in NCCL, by its own cost model\n")
    header(
        "hosts of",
        "gradients",
        "hosts",
        "MB through a NIC",
        "all-reduce",
        "reduce-scatter and all-gather",
    )
    for kind, hosts in formulas.GPU_HOSTS.items():
        for megabytes in options.megabytes:
            for count in (1, *options.many_hosts):
                through, reduced = formulas.nccl("allReduce", count, hosts, 1e6 * megabytes)
                parts = [
                    formulas.nccl(call, count, hosts, 1e6 * megabytes)[1]
                    for call in ("reduceScatter", "allGather")
                ]
                times = [f"{1e3 * time:,.3g}" for time in (reduced, sum(parts))]
                row(kind, f"{megabytes:g} MB", count, f"{through / 1e6:,.1f}", *times)


def even(elements, groups):
    """About this many elements, which divide into equal slices for hosts and ranks."""
    unit = 256 * sum(groups) * len(groups)
    return max(round(elements / unit), 1) * unit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="simulated (1 2 3 4 8)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="of a host (4)")
    parser.add_argument(
        "--elements", type=int, default=1 << 20, help="of the simulated gradients, float32 (2**20)"
    )
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[1, 33.6, 400], help="for the formulas"
    )
    parser.add_argument(
        "--many-hosts", type=int, nargs="+", default=[2, 3, 8, 32, 128], help="for the formulas"
    )
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second, of a link (1)")
    parser.add_argument(
        "--latency", type=float, default=1e-4, help="of a link, in seconds (0.0001)"
    )
    parser.add_argument(
        "--links", choices=["host", "rank"], default="host", help="who has one (host)"
    )
    options = parser.parse_args()
    links = formulas.Links(options.latency, options.gigabits * 1e9 / 8, options.links == "rank")
    print(
        f"A link of each {options.links}: {options.gigabits:g} Gbit/s, {1e3 * options.latency:g} ms"
    )
    show_simulation(options, links)
    show_seconds(options, links)
    show_gpus(options)


if __name__ == "__main__":
    main()
