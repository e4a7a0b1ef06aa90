"""The messages of a step between hosts in closed form: rounds, messages, bytes on the busiest link.

After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", International Journal of High Performance Computing Applications 19(1), 2005. A call of MPI
takes one latency for each of its rounds, and as long as its busiest link needs for its bytes.
`tests/single/test_scale.py` compares with what the library sends.
"""

import itertools
import math
from typing import NamedTuple

RECORD = 256  # bytes per rank, with which every collective call starts
# Bytes of all ranks' parts: from this size on, every part is sent to its rank in pieces of this
# size, all at the same time.
PIECE = 1 << 20


class Links(NamedTuple):
    """What connects hosts.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second, in each direction.
        of_each_rank: whether every rank has its own link; otherwise the ranks of a host share one.
        memory_latency, memory_bandwidth: the same for a rank inside its host.
    """

    latency: float = 1e-4
    bandwidth: float = 125e6
    of_each_rank: bool = False
    memory_latency: float = 1e-6
    memory_bandwidth: float = 1e10


class Cost(NamedTuple):
    """A call of MPI, between hosts only.

    Attributes:
        rounds: those in which a message leaves its host.
        messages: all of them.
        nbytes: of all messages.
        through_host: bytes that the busiest host sends, or receives if that is more.
        through_rank: the same for a single rank.
    """

    rounds: int
    messages: int
    nbytes: int
    through_host: int
    through_rank: int

    def seconds(self, links):
        """How long it takes."""
        busiest = self.through_rank if links.of_each_rank else self.through_host
        return self.rounds * links.latency + busiest / links.bandwidth


NOTHING = Cost(0, 0, 0, 0, 0)


# ---- calls. `groups` are the ranks of each host, one host after the other


def records(groups, nbytes=RECORD):
    """All-gather of small parts, by Bruck's algorithm: rank r sends to r - 1, r - 2, r - 4 ..."""
    n = sum(groups)
    if len(groups) == 1:
        return NOTHING
    sent, messages = {}, 0  # by each place on each host
    distances = [1 << bit for bit in range((n - 1).bit_length())]
    for distance in distances:
        for group in set(groups):
            for place in range(group):
                if place < distance and place + n - distance >= group:  # it leaves the host
                    messages += groups.count(group)
                    sent[group, place] = (
                        sent.get((group, place), 0) + min(distance, n - distance) * nbytes
                    )
    by_host = {
        group: sum(size for (of, _), size in sent.items() if of == group) for group in groups
    }
    total = sum(by_host[group] for group in groups)
    return Cost(len(distances), messages, total, max(by_host.values()), max(sent.values()))


def all_to_all(groups, nbytes):
    """Every rank sends this many bytes to every other rank."""
    n = sum(groups)
    if len(groups) == 1:
        return NOTHING
    pairs = n * n - sum(group * group for group in groups)
    host = max(group * (n - group) for group in groups)
    found = Cost(n - 1, pairs, pairs * nbytes, host * nbytes, (n - min(groups)) * nbytes)
    return in_pieces(found, n, nbytes)


def in_pieces(found, n, nbytes):
    """Sends one message of `nbytes` to each rank, if these are large: then all go at once."""
    if n * nbytes <= PIECE:
        return found
    return found._replace(rounds=1, messages=found.messages * math.ceil(nbytes / PIECE))


def all_gather(groups, nbytes):
    """This many bytes from every rank.

    Small parts go by a ring: each host has one rank that sends to the next.
    """
    n, hosts = sum(groups), len(groups)
    if hosts == 1 or n * nbytes > PIECE:
        return all_to_all(groups, nbytes)
    return Cost(
        n - 1, hosts * (n - 1), hosts * (n - 1) * nbytes, (n - 1) * nbytes, (n - 1) * nbytes
    )


def rails(groups, nbytes):
    """Every rank receives its part from the rank with its own local index on each other host.

    The way back, to the same ranks, is the same in the other direction.
    """
    n, hosts = sum(groups), len(groups)
    if hosts == 1:
        return NOTHING
    first = [0, *itertools.accumulate(groups)]
    places = [(host, place) for host, group in enumerate(groups) for place in range(group)]
    senders = [
        [
            (first[other] + place % groups[other], first[host] + place)
            for other in range(hosts)
            if other != host
        ]
        for host, place in places
    ]
    distances = {(rank - sender) % n for pairs in senders for sender, rank in pairs}
    out = max(n - group for group in groups)  # sections of ranks elsewhere
    into = max(group * (hosts - 1) for group in groups)
    # The first rank of a host serves most: one local index in `group` of every other host.
    of_first = max(
        sum(math.ceil(other / group) for j, other in enumerate(groups) if j != i)
        for i, group in enumerate(groups)
    )
    messages = n * (hosts - 1)
    found = Cost(
        len(distances),
        messages,
        messages * nbytes,
        max(out, into) * nbytes,
        max(of_first, hosts - 1) * nbytes,
    )
    return in_pieces(found, n, nbytes)


# ---- steps, of `nbytes` bytes of gradients: the calls of one after another


def flat(groups, nbytes):
    """All ranks sum up and gather a slice each: with one rank per host, and for 16-bit floats."""
    part = nbytes // sum(groups)
    return [records(groups), all_to_all(groups, part), all_gather(groups, part)]


def leaders(groups, nbytes):
    """Summed inside each host; the hosts' first ranks do the rest as above.

    The library does not do this.
    """
    return [] if len(groups) == 1 else [records(groups), *flat((1,) * len(groups), nbytes)]


def unsharded(groups, nbytes):
    """Each rank gets its part of each host's sum, and sends the sum of these back the same way."""
    part = nbytes // sum(groups)
    return [] if len(groups) == 1 else [records(groups), rails(groups, part), rails(groups, part)]


def sharded(groups, nbytes):
    """The same, but new values go back, in a separate call."""
    part = nbytes // sum(groups)
    return (
        []
        if len(groups) == 1
        else [records(groups), rails(groups, part), records(groups), rails(groups, part)]
    )


STEPS = {"flat": flat, "leaders": leaders, "unsharded": unsharded, "sharded": sharded}


def seconds(calls, links):
    """The sum of calls that follow each other."""
    return sum(call.seconds(links) for call in calls)


# ---- NCCL


class GpuHosts(NamedTuple):
    """Hosts of GPUs, each with its own NVLink, in bytes per second and direction.

    Attributes:
        gpus: per host.
        nics: per host; NCCL spreads its rings over them.
        nic: of one NIC.
        nvlink: of one GPU.
        source: where the figures are from.
    """

    gpus: int
    nics: int
    nic: float
    nvlink: float
    source: str


GPU_HOSTS = {
    "DGX A100": GpuHosts(
        8, 8, 25e9, 300e9, "NVIDIA DGX A100 data sheet: 8 x 200 Gb/s, NVLink 600 GB/s both ways"
    ),
    "DGX H100": GpuHosts(
        8, 8, 50e9, 450e9, "NVIDIA DGX H100 data sheet: 8 x 400 Gb/s, NVLink 900 GB/s both ways"
    ),
}
# Seconds of a ring with the protocol LL128, from NCCL's own cost model, `src/graph/tuning.cc`.
NCCL_START, NVLINK_HOP, NETWORK_HOP = 10.0e-6, 1.9e-6, 4.0e-6


def nccl(call, hosts, kind, nbytes):
    """Bytes through a NIC, and seconds, of an allReduce, reduceScatter or allGather by a ring."""
    passes = 2 if call == "allReduce" else 1
    n = hosts * kind.gpus
    steps, between = passes * (n - 1), passes * (hosts - 1)
    moved = steps * nbytes / n  # by each rank to the next
    bandwidth = kind.nvlink if hosts == 1 else min(kind.nvlink, kind.nics * kind.nic)
    latency = NCCL_START + (steps - between) * NVLINK_HOP + between * NETWORK_HOP
    return (moved / kind.nics if hosts > 1 else 0.0), latency + moved / bandwidth
