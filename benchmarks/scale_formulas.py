"""The messages of calls and steps between hosts in closed form, and a model of their time.

After Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", International Journal of High Performance Computing Applications 19(1), 2005.
`tests/single/test_scale.py` compares with what the library sends.
"""

import itertools
import math
from collections import Counter
from typing import NamedTuple

import mpi_rounds

from hpcstrat._agreement.records import WHOLE
from hpcstrat._memory.host_limits import LARGE
from hpcstrat._transports import rail
from hpcstrat._transports.mpi import FEW_RANKS

RECORD = 256  # bytes of a rank's record, with a short message
RECORD_AND_COMPLEMENT = 96  # bytes that many ranks reduce instead
PIECE = 1 << 20  # the most bytes of a message between ranks: more are sent as several


class Links(NamedTuple):
    """What connects hosts.

    Attributes:
        latency: seconds until a message arrives, what MPI itself needs for it included.
        bandwidth: bytes per second, in each direction.
        message: seconds that a rank needs to send a message by mpi4py, or to receive one.
        of_each_rank: whether every rank has its own link; otherwise the ranks of a host share one.
        memory_latency: seconds until a message arrives inside a host.
        added_byte: seconds in which a rank adds up a byte.
    """

    latency: float = 2e-6
    bandwidth: float = 12.5e9
    message: float = 1e-6
    of_each_rank: bool = False
    memory_latency: float = 0.5e-6
    added_byte: float = 1 / 5e9


class Cost(NamedTuple):
    """A call of MPI, or messages that ranks send to each other themselves.

    Attributes:
        rounds: those in which a message leaves its host.
        messages: those that leave their host.
        nbytes: their bytes.
        through_host: bytes that the busiest host of each round sends, or receives if that is more.
        through_rank: the same for a single rank.
        handled: messages that the busiest rank sends and receives itself, not MPI for it.
        rounds_inside: rounds in which no message leaves its host.
    """

    rounds: int
    messages: int
    nbytes: int
    through_host: int
    through_rank: int
    handled: int = 0
    rounds_inside: int = 0

    def seconds(self, links):
        """How long it takes by the model."""
        busiest = self.through_rank if links.of_each_rank else self.through_host
        return (
            self.rounds * links.latency
            + self.rounds_inside * links.memory_latency
            + self.handled * links.message
            + busiest / links.bandwidth
        )


def cost_of(rounds, hosts, is_mpi):
    """What these rounds of messages cost.

    Args:
        rounds: of messages: source, destination, bytes.
        hosts: of each rank.
        is_mpi: whether MPI sends them in one call.
    """
    handled = Counter()
    inside = between = messages = total = of_hosts = of_ranks = 0
    for sent in rounds:
        leaving = [one for one in sent if one[2] and hosts[one[0]] != hosts[one[1]]]
        between += bool(leaving)
        inside += not leaving and any(nbytes for *_, nbytes in sent)
        messages += len(leaving)
        through_host, through_rank = Counter(), Counter()
        for source, to, nbytes in leaving:
            total += nbytes
            for way, rank in ("out", source), ("in", to):
                through_host[way, hosts[rank]] += nbytes
                through_rank[way, rank] += nbytes
                handled[rank] += not is_mpi
        of_hosts += max(through_host.values(), default=0)
        of_ranks += max(through_rank.values(), default=0)
    most = max(handled.values(), default=0)
    return Cost(between, messages, total, of_hosts, of_ranks, most, inside)


def seconds(calls, links):
    """The sum of calls that follow each other."""
    return sum(call.seconds(links) for call in calls)


def hosts_of(groups):
    """The host of each rank, for hosts of these sizes, one host after the other."""
    return tuple(itertools.chain.from_iterable([host] * n for host, n in enumerate(groups)))


# ---- calls. `groups` are the ranks of each host, one host after the other


def in_mpi(groups, rounds):
    """A call of MPI."""
    return cost_of(rounds, hosts_of(groups), is_mpi=True)


def records(groups):
    """Every rank receives all records."""
    return in_mpi(groups, mpi_rounds.all_gather([RECORD] * sum(groups)))


def agreement(groups):
    """The ranks find out whether they make the same call."""
    if sum(groups) <= FEW_RANKS:
        return records(groups)
    return in_mpi(groups, mpi_rounds.recursive_doubling(sum(groups), RECORD_AND_COMPLEMENT))


def pairwise(hosts, rails, nbytes):
    """On each rail every rank sends a share to each other host, and the sum of its share back."""
    share = nbytes // hosts
    pieces = math.ceil(share / PIECE)
    pairs = rails * hosts * (hosts - 1)
    through = (hosts - 1) * share
    return Cost(
        2,
        2 * pairs * pieces,
        2 * pairs * share,
        *both(rails, 2 * through),
        4 * (hosts - 1) * pieces,
    )


def halving(hosts, rails, nbytes):
    """Halving and doubling on each rail: as many halvings as the library's rule says.

    Hosts beyond a power of two send all they have to a neighbour first, and get the result.
    """
    power = mpi_rounds.largest_power(hosts)
    extra, doublings = hosts - power, power.bit_length() - 1
    halvings = rail.halving_of(nbytes, hosts).halvings
    sizes = [nbytes >> i + 1 for i in range(halvings)] * 2
    sizes += [nbytes >> halvings] * (doublings - halvings)
    pieces = [math.ceil(size / PIECE) for size in sizes]
    of_all = math.ceil(nbytes / PIECE)
    rounds, through, handled = len(sizes), sum(sizes), 2 * sum(pieces)
    messages, total = power * sum(pieces), power * sum(sizes)
    if extra:
        rounds, through, handled = rounds + 2, through + 2 * nbytes, handled + 2 * of_all
        messages, total = messages + 2 * extra * of_all, total + 2 * extra * nbytes
    return Cost(rounds, rails * messages, rails * total, *both(rails, through), handled)


def both(rails, through_rank):
    """What goes through a host, and through a rank."""
    return rails * through_rank, through_rank


def on_rails(groups, nbytes, rails=None):
    """Sums of `nbytes` bytes: each rail reduces an equal part, in the way that the rule says."""
    rails = rails or min(groups)
    way = pairwise if rail.is_pairwise(nbytes // rails, len(groups)) else halving
    return way(len(groups), rails, nbytes // rails)


def to_each(groups, nbytes):
    """Every rank receives `nbytes` from one rank of each other host.

    The way back, to the same ranks, is the same in the other direction.
    """
    n, hosts = sum(groups), len(groups)
    first = [0, *itertools.accumulate(groups)]
    places = [(host, place) for host, group in enumerate(groups) for place in range(group)]
    sent = Counter(
        first[other] + place % groups[other]
        for host, place in places
        for other in range(hosts)
        if other != host
    )
    out = max(n - group for group in groups)  # sections of ranks elsewhere
    into = max(group * (hosts - 1) for group in groups)
    most, pieces = max(sent.values()), math.ceil(nbytes / PIECE)
    messages = n * (hosts - 1)
    return Cost(
        1,
        messages * pieces,
        messages * nbytes,
        max(out, into) * nbytes,
        max(most, hosts - 1) * nbytes,
        (most + hosts - 1) * pieces,
    )


NUMBER, NUMBER_AND_SHAPE, MEGABYTE = 8, 24, 1 << 20  # bytes


def reduce_number(groups):
    """With few ranks the number travels in the record; otherwise one rail sums it."""
    if sum(groups) <= FEW_RANKS:
        return [records(groups)]
    return [agreement(groups), on_rails(groups, NUMBER, rails=1)]


def gather_number(groups):
    """With few ranks the number travels in the record, otherwise after the agreement."""
    if sum(groups) <= FEW_RANKS:
        return [records(groups)]
    sizes = [NUMBER_AND_SHAPE] * sum(groups)
    return [agreement(groups), in_mpi(groups, mpi_rounds.all_gather(sizes))]


def broadcast_megabyte(groups):
    """MPI's own broadcast. The ranks' messages differ in size, so many ranks gather the records."""
    n = sum(groups)
    differing = [in_mpi(groups, mpi_rounds.all_gather([WHOLE] * n))] if n > FEW_RANKS else []
    checks = 2 * (n * MEGABYTE >= LARGE)  # that all have the memory, and have read the message
    rounds = in_mpi(groups, mpi_rounds.broadcast(n, 0, MEGABYTE))
    return [agreement(groups), *differing, rounds, *[agreement(groups)] * checks]


def step(groups, nbytes):
    """A step of `nbytes` bytes of gradients."""
    return [agreement(groups), on_rails(groups, nbytes)]


CALLS = {
    "agreement": lambda groups: [agreement(groups)],
    "`reduce` of a number": reduce_number,
    "`all_gather` of a number": gather_number,
    "broadcast of 1 MB": broadcast_megabyte,
}


# ---- what came before, to compare with: records of all ranks, and pairwise exchange only


def broadcast_megabyte_by_ring(groups):
    """From rank to rank."""
    checks = 1 + 2 * (sum(groups) * MEGABYTE >= LARGE)
    sizes = [MEGABYTE] + [0] * (sum(groups) - 1)
    return [records(groups)] * checks + [in_mpi(groups, mpi_rounds.ring(sizes))]


def step_pairwise(groups, nbytes):
    """Each rank sums a part."""
    part = to_each(groups, nbytes // sum(groups))
    return [records(groups), part, part]


BEFORE = {
    **dict.fromkeys([*CALLS][:3], lambda groups: [records(groups)]),
    "broadcast of 1 MB": broadcast_megabyte_by_ring,
}


# ---- where pairwise exchange becomes better than halving and doubling


def way_seconds(way, hosts, rails, nbytes, links):
    """Seconds of `pairwise` or `halving`, which adds up between messages and not during them."""
    added = nbytes * links.added_byte if way is halving else 0.0
    return way(hosts, rails, nbytes).seconds(links) + added


def crossing(is_pairwise):
    """The bytes of a part, a power of two, from which on it goes pairwise."""
    return next((1 << bit for bit in range(12, 40) if is_pairwise(1 << bit)), None)


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


def nccl(hosts, kind, nbytes):
    """Bytes through a NIC, and seconds, of an allReduce by a ring."""
    n = hosts * kind.gpus
    steps, between = 2 * (n - 1), 2 * (hosts - 1)
    moved = steps * nbytes / n  # by each rank to the next
    bandwidth = kind.nvlink if hosts == 1 else min(kind.nvlink, kind.nics * kind.nic)
    latency = NCCL_START + (steps - between) * NVLINK_HOP + between * NETWORK_HOP
    return (moved / kind.nics if hosts > 1 else 0.0), latency + moved / bandwidth
