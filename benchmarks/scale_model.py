"""What a training step moves, and how long that takes, in closed form.

A message of n bytes takes `latency + n / bandwidth` and occupies the sender's way out and the receiver's way in for
that long (the alpha-beta model; Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, whose costs of the binomial tree and the ring stand below). Adding up gradients is not counted.
"""

import math
from dataclasses import dataclass

ADAM_TRAFFIC = 7  # reads parameter, gradient and two slots; writes parameter and two slots


@dataclass(frozen=True)
class Link:
    """A way between two ranks: seconds, and bytes a second in each direction."""

    latency: float
    bandwidth: float

    def seconds(self, nbytes):
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Hosts of equal form.

    Attributes:
        hosts, gpus: how many hosts, and how many GPUs (or CPU replicas) each has.
        inside: what connects the GPUs of a host, each with a way out and a way in of its own.
        between: what a NIC moves.
        nics: how many NICs a host has; GPU i uses number i modulo that.
        memory: bytes a second that an update reads and writes.
        launch: seconds that each collective takes before it begins.
    """

    hosts: int
    gpus: int
    inside: Link
    between: Link
    nics: int
    memory: float
    launch: float = 0.0

    @property
    def ranks(self):
        return self.hosts * self.gpus


@dataclass(frozen=True)
class Cost:
    """What is moved inside hosts and between them, in all; through the busiest NIC in one direction; the seconds."""

    messages_inside: int = 0
    bytes_inside: float = 0
    messages_between: int = 0
    bytes_between: float = 0
    busiest_nic: float = 0
    seconds: float = 0.0

    def __add__(self, other):
        """One after the other."""
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Collective:
    """A collective among n ranks: messages and bytes in all; through the busiest rank in one direction; the seconds."""

    messages: int
    bytes: float
    busiest: float
    seconds: float

    def inside(self, machine):
        """The same on all hosts at once."""
        return Cost(self.messages * machine.hosts, self.bytes * machine.hosts, seconds=self.seconds)

    def between(self, machine, rails=1):
        """Among one rank of each host; on so many rails at once, which share the NICs."""
        share = math.ceil(rails / machine.nics)
        moved = self.messages * rails, self.bytes * rails, self.busiest * share
        return Cost(0, 0, *moved, self.seconds * share)


# ---- collectives among n ranks


def chain(n, nbytes, link):
    """A reduction along a chain, in segments, and a broadcast back; the number of segments is the best one."""
    segments = chain_segments(n, nbytes, link)
    seconds = (n - 2 + segments) * link.seconds(nbytes / segments)
    return Collective(2 * (n - 1) * segments, 2 * (n - 1) * nbytes, min(n - 1, 2) * nbytes, 2 * seconds)


def chain_segments(n, nbytes, link):
    best = math.sqrt(max(n - 2, 0) * nbytes / (link.bandwidth * max(link.latency, 1e-9)))
    return min(max(round(best), 1), nbytes)


def binomial(n, nbytes, link):
    """A reduction along a binomial tree, and a broadcast back."""
    rounds = math.ceil(math.log2(n))
    return Collective(2 * (n - 1), 2 * (n - 1) * nbytes, rounds * nbytes, 2 * rounds * link.seconds(nbytes))


def ring(n, nbytes, link):
    """An all-reduction: a reduce-scatter around a ring, and an all-gather around it."""
    return Collective(
        2 * (n - 1) * n, 2 * (n - 1) * nbytes, 2 * (n - 1) * nbytes / n, 2 * (n - 1) * link.seconds(nbytes / n)
    )


def reduce_and_broadcast(n, nbytes, link):
    """To one rank and back, the faster way."""
    return min(chain(n, nbytes, link), binomial(n, nbytes, link), key=lambda way: way.seconds)


def all_reduce(n, nbytes, link):
    """The faster way."""
    return min(ring(n, nbytes, link), reduce_and_broadcast(n, nbytes, link), key=lambda way: way.seconds)


# ---- a step: gradients in, parameters out


def central_flat(machine, nbytes):
    """Every rank sends its gradients to the parameter rank, which sends each the parameters."""
    near, far = machine.gpus - 1, machine.ranks - machine.gpus
    way = max(near * machine.inside.seconds(nbytes), far * machine.between.seconds(nbytes))
    update = updated(machine, nbytes)
    return Cost(2 * near, 2 * near * nbytes, 2 * far, 2 * far * nbytes, far * nbytes, 2 * way) + launched(
        machine, 2, update
    )


def central(machine, nbytes):
    """Reduced inside each host, then between the hosts to the parameter rank, and the parameters the same way back."""
    cost = launched(machine, 2, updated(machine, nbytes))
    if machine.gpus > 1:
        cost += reduce_and_broadcast(machine.gpus, nbytes, machine.inside).inside(machine)
    if machine.hosts > 1:
        cost += launched(machine, 2) + reduce_and_broadcast(machine.hosts, nbytes, machine.between).between(machine)
    return cost


def central_rails(machine, nbytes):
    """As `central`, but each GPU of the parameter host keeps a share, which travels over its own NIC."""
    return launched(machine, 2, updated(machine, nbytes / machine.gpus)) + _by_rails(
        machine, nbytes, reduce_and_broadcast
    )


def mirrored_leaders(machine, nbytes):
    """Gradients reduced inside each host, all-reduced between one rank of each, and sent back inside."""
    if machine.hosts == 1:
        return mirrored_ring(machine, nbytes)
    cost = launched(machine, 1, updated(machine, nbytes))
    cost += all_reduce(machine.hosts, nbytes, machine.between).between(machine)
    if machine.gpus > 1:
        cost += launched(machine, 2) + reduce_and_broadcast(machine.gpus, nbytes, machine.inside).inside(machine)
    return cost


def mirrored_ring(machine, nbytes):
    """Gradients all-reduced around one ring of all ranks, host by host."""
    n, many = machine.ranks, machine.hosts > 1
    cost = launched(machine, 1, updated(machine, nbytes))
    if n == 1:
        return cost
    slowest = max(machine.inside, machine.between, key=lambda link: link.seconds(nbytes / n))
    around = ring(n, nbytes, slowest if many and machine.gpus > 1 else machine.between if many else machine.inside)
    far = machine.hosts if many else 0  # of the ring's n links
    return cost + Cost(
        around.messages * (n - far) // n,
        around.bytes * (n - far) / n,
        around.messages * far // n,
        around.bytes * far / n,
        around.busiest if many else 0,
        around.seconds,
    )


def mirrored_rails(machine, nbytes):
    """Reduce-scatter inside each host, an all-reduction of each GPU's share over its own NIC, all-gather inside."""
    return launched(machine, 1, updated(machine, nbytes)) + _by_rails(machine, nbytes, all_reduce)


def sharded_rails(machine, nbytes):
    """As `mirrored_rails`, but each rank updates its share only, and the parameters are gathered."""
    return launched(machine, 2, updated(machine, nbytes / machine.ranks)) + _by_rails(machine, nbytes, ring)


def _by_rails(machine, nbytes, between):
    cost = launched(machine, 0)
    if machine.gpus > 1:  # its first half before, its second half after
        cost += ring(machine.gpus, nbytes, machine.inside).inside(machine)
    if machine.hosts > 1:
        cost += launched(machine, 2 if machine.gpus > 1 else 0)
        share = nbytes // machine.gpus
        cost += between(machine.hosts, share, machine.between).between(machine, rails=machine.gpus)
    return cost


def updated(machine, nbytes):
    """Seconds of Adam's update of so many bytes of parameters."""
    return ADAM_TRAFFIC * nbytes / machine.memory


def launched(machine, collectives, seconds=0.0):
    """What so many collectives cost before they begin, and work of so many seconds."""
    return Cost(seconds=machine.launch * collectives + seconds)


STEPS = {
    "central, flat": central_flat,
    "central": central,
    "central, rails": central_rails,
    "mirrored, leaders": mirrored_leaders,
    "mirrored, one ring": mirrored_ring,
    "mirrored, rails": mirrored_rails,
    "sharded, rails": sharded_rails,
}


def memory_of_a_gpu(step, machine, nbytes):
    """Bytes of parameters, gradients and Adam's slots on the parameter rank's GPU, and on one of another host."""
    slots = 2 * nbytes
    on_any = {"central": 0, "mirrored": slots, "sharded": slots / machine.ranks}[step.split(",")[0]]
    on_first = {"central, flat": slots, "central": slots, "central, rails": slots / machine.gpus}.get(step, on_any)
    return 2 * nbytes + on_first, 2 * nbytes + on_any
