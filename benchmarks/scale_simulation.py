r"""Shows what calls and training steps send between hosts, and their time by a model of the links.

    python benchmarks/scale_simulation.py
    python benchmarks/scale_simulation.py --hosts 2 3 --ranks 4 --gigabits 10 --latency 2e-5 \
        --links rank

The library's communicators and storages run unchanged, on ranks that are threads of this process:
`recorded_ranks.py` records their MPI calls. `scale_formulas.py` has the same in closed form.
docs/scale.md says what the tables mean, and what is assumed.
"""

import argparse
import statistics
import time
from functools import partial

import numpy as np
import scale_formulas as formulas
from recorded_ranks import Job
from rounds import header, row
from unbacked_memory import Unbacked

from hpcstrat import ReduceOp
from hpcstrat._core.call_name import call_named
from hpcstrat._storage.host import HostStorage
from hpcstrat._transports import rail
from hpcstrat._transports.hosts import HierarchicalCommunicator
from hpcstrat._transports.shared_memory import SharedMemoryCommunicator
from hpcstrat._update.formula import trace
from hpcstrat._update.rule import UpdateRule


def connect(comm, host_comm):
    """The communicator that the library uses."""
    if host_comm.size == comm.size:
        return SharedMemoryCommunicator(comm)
    return HierarchicalCommunicator(comm, host_comm)


CALLS = {
    "agreement": lambda of: of.barrier(),
    "`reduce` of a number": lambda of: of.all_reduce([np.float64([of.rank])], ReduceOp.SUM),
    "`all_gather` of a number": lambda of: of.all_gather([np.float64([of.rank])], 0),
    "broadcast of 1 MB": lambda of: of.broadcast([np.full(1 << 17, of.rank + 1.0)], 0),
}
"""For names of `formulas.CALLS` the call of a communicator."""
MOMENTUM, RUNS = 0.5, 2


def call(name, hosts, runs=RUNS):
    """One call, after others that make room for it.

    Args:
        name: one of `CALLS`.
        hosts: of each rank.
        runs: how many.

    Returns:
        Its MPI calls, what it returns on each rank, and the seconds of the processor that the
        library takes on a rank, without MPI: the median of the ranks' fastest.
    """
    job = Job(hosts)

    def program(comm, host_comm):
        communicator, own = connect(comm.Dup(), host_comm), job.ranks[comm.rank]
        seconds = []
        with call_named("simulated call"):
            for _ in range(runs):
                job.record(comm)
                begin = time.thread_time() - own.in_mpi
                result = CALLS[name](communicator)
                seconds.append(time.thread_time() - own.in_mpi - begin)
        return result, min(seconds)

    results, seconds = zip(*job.run(program), strict=True)
    return job.calls, results, statistics.median(seconds)


def step(hosts, gradients, is_unbacked=False):
    """One step with momentum, after one that makes room for it.

    Args:
        hosts: of each rank.
        gradients: of each rank, of equal length.
        is_unbacked: see `recorded_ranks.Job`.

    Returns:
        Its MPI calls, as `recorded_ranks.Call`, and the new values on each rank.
    """
    job = Job(hosts, is_unbacked)

    def program(comm, host_comm):
        storage = HostStorage(connect(comm.Dup(), host_comm))
        job.record(comm, False)
        with call_named("simulated step"):
            variable = storage.create(np.zeros(gradients[comm.rank].shape, np.float32))
            slot = storage.create_slot(variable, 0.0)
            plan = storage.plan([variable], [[slot]])
            for _ in range(RUNS):
                job.record(comm)
                rule = UpdateRule(*trace("descend", descend, 1, []))
                storage.update(plan, [gradients[comm.rank]], ReduceOp.SUM, rule)
        return None if is_unbacked else variable.array.copy()

    values = job.run(program)
    return job.calls, values


def descend(value, gradient, velocity):
    """A step with momentum and a rate of 1."""
    velocity = MOMENTUM * velocity + gradient
    return value - velocity, velocity


def costs(calls, hosts):
    """What these recorded calls send between hosts."""
    return [formulas.cost_of(one.rounds, hosts, one.name != "Isend") for one in calls]


# ---- tables


def unbacked_gradients(n, elements):
    """Of each rank the same, without pages."""
    return [np.empty(elements, np.float32).view(Unbacked)] * n


def even(elements, groups):
    """About this many elements, which divide into equal shares for hosts and ranks."""
    unit = 256 * np.lcm(sum(groups), min(groups) * len(groups))
    return int(max(round(elements / unit), 1) * unit)


def microseconds(found, links):
    return f"{1e6 * formulas.seconds(found, links):,.1f}"


def cells(found, links):
    """Of a row: what goes between hosts, and how long it takes."""
    return (
        sum(one.rounds for one in found),
        f"{sum(one.messages for one in found):,}",
        f"{sum(one.nbytes for one in found) / 1e6:,.4g}",
        f"{sum(one.through_host for one in found) / 1e6:,.4g}",
        microseconds(found, links),
    )


COLUMNS = "rounds", "messages", "MB", "MB through a host's link", "µs by the model"


def show_calls(options, links):
    print("\n## Calls\n")
    header("call", "hosts", "ranks", *COLUMNS, "µs before", "µs of Python")
    for name in CALLS:
        for count in options.hosts:
            groups = (options.ranks,) * count
            hosts = formulas.hosts_of(groups)
            calls, _, software = call(name, hosts, runs=5)
            found = costs(calls, hosts)
            if count > 1:
                assert found == formulas.CALLS[name](groups), (name, groups)
            before = microseconds(formulas.BEFORE[name](groups), links) if count > 1 else ""
            row(
                *(name, count, sum(groups)),
                *cells(found, links),
                *(before, f"{1e6 * software:,.0f}"),
            )


def show_steps(options, links):
    print("\n## Steps\n")
    header("MB", "hosts", "ranks", *COLUMNS, "µs before")
    for megabytes in options.megabytes:
        for count in options.hosts:
            groups = (options.ranks,) * count
            hosts, elements = formulas.hosts_of(groups), even(megabytes * 250_000, groups)
            gradients = unbacked_gradients(sum(groups), elements)
            calls, _ = step(hosts, gradients, is_unbacked=True)
            found, before = costs(calls, hosts), ""
            if count > 1:
                assert found == formulas.step(groups, 4 * elements), groups
                before = microseconds(formulas.step_pairwise(groups, 4 * elements), links)
            sizes = f"{4 * elements / 1e6:.4g}", count, sum(groups)
            row(*sizes, *cells(found, links), before)


def show_crossing(options, links):
    print("\n## From which bytes of a rail's part on pairwise exchange is used\n")
    # The rule's bandwidth is that of a rank, which shares the link of its host.
    shared = links._replace(of_each_rank=True, bandwidth=links.bandwidth / options.ranks)
    header("hosts", "by the library's rule", "by this model", "µs then, pairwise", "halving")
    for count in (2, 3, 4, 5, 8, 12, 16, 32, 48, 64, 100, 128):

        def times(nbytes, count=count):
            return [
                formulas.way_seconds(way, count, 1, nbytes, shared)
                for way in (formulas.pairwise, formulas.halving)
            ]

        at = formulas.crossing(partial(rail.is_pairwise, hosts=count))
        by_model = formulas.crossing(lambda nbytes, of=times: of(nbytes)[0] <= of(nbytes)[1])
        row(count, *map(binary, (at, by_model)), *(f"{1e6 * one:,.1f}" for one in times(at)))


def binary(nbytes):
    """Bytes in KiB or MiB."""
    if nbytes is None:
        return "never"
    for unit, name in (1 << 20, "MiB"), (1 << 10, "KiB"):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"


def show_gpus(options):
    print("\n## GPUs: milliseconds in NCCL, by its own cost model\n")
    header("hosts of", "gradients", "hosts", "MB through a NIC", "all-reduce")
    for kind, hosts in formulas.GPU_HOSTS.items():
        for megabytes in options.megabytes:
            for count in options.hosts:
                through, seconds = formulas.nccl(count, hosts, 1e6 * megabytes)
                row(
                    *(kind, f"{megabytes:g} MB", count),
                    *(f"{through / 1e6:,.1f}", f"{1e3 * seconds:,.3g}"),
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[1, 2, 8, 32, 128], help="(1 2 8 32 128)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="of a host (8)")
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[4, 400], help="of gradients (4 400)"
    )
    parser.add_argument("--gigabits", type=float, default=100.0, help="a second, of a link (100)")
    parser.add_argument("--latency", type=float, default=2e-6, help="of a link, in seconds (2e-6)")
    parser.add_argument(
        "--links", choices=["host", "rank"], default="host", help="who has one (host)"
    )
    options = parser.parse_args()
    links = formulas.Links(
        options.latency, options.gigabits * 1e9 / 8, of_each_rank=options.links == "rank"
    )
    print(
        f"A link of each {options.links}: {options.gigabits:g} Gbit/s, {1e6 * options.latency:g} µs"
    )
    show_calls(options, links)
    show_steps(options, links)
    show_crossing(options, links)
    show_gpus(options)


if __name__ == "__main__":
    main()
