"""A step message by message: who sends what to whom and when, on links that carry one message at a time.

The closed forms of `scale_model` are checked against it. It knows ranks and links, and nothing of those formulas but
the number of segments of a chain and which of two ways is the faster.
"""

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import scale_model as model


@dataclass
class Message:
    """Bytes from one rank to another, or work on one (source and destination are equal), once others have arrived."""

    source: int
    destination: int
    nbytes: int
    after: list[int]
    seconds: float = 0.0


@dataclass
class Schedule:
    """The messages of a step. `arrived[rank]`: those that a rank waits for before it begins what comes next."""

    machine: model.Machine
    messages: list[Message] = field(default_factory=list)
    arrived: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def send(self, source, destination, nbytes, after):
        self.messages.append(Message(source, destination, nbytes, after))
        return len(self.messages) - 1

    def work(self, rank, seconds):
        self.messages.append(Message(rank, rank, 0, self.arrived[rank], seconds))
        self.arrived[rank] = [len(self.messages) - 1]

    # ---- collectives among some ranks; the first is the root

    def star_reduce(self, ranks, nbytes):
        root, *others = ranks
        self.arrived[root] = self.arrived[root] + [self.send(rank, root, nbytes, self.arrived[rank]) for rank in others]

    def star_broadcast(self, ranks, nbytes):
        root, *others = ranks
        for rank in others:
            self.arrived[rank] = [self.send(root, rank, nbytes, self.arrived[root])]

    def chain_reduce(self, ranks, sizes):
        before = [self.arrived[ranks[-1]]] * len(sizes)
        for source, destination in itertools.pairwise(reversed(ranks)):
            sent = [self.send(source, destination, n, after) for n, after in zip(sizes, before, strict=True)]
            before = [[message, *self.arrived[destination]] for message in sent]
        self.arrived[ranks[0]] = self.arrived[ranks[0]] + [message for part in before for message in part]

    def chain_broadcast(self, ranks, sizes):
        before = [self.arrived[ranks[0]]] * len(sizes)
        for source, destination in itertools.pairwise(ranks):
            before = [[self.send(source, destination, n, after)] for n, after in zip(sizes, before, strict=True)]
            self.arrived[destination] = [message for part in before for message in part]

    def binomial_reduce(self, ranks, nbytes):
        distance = 1
        while distance < len(ranks):
            for place in range(distance, len(ranks), 2 * distance):
                source, destination = ranks[place], ranks[place - distance]
                message = self.send(source, destination, nbytes, self.arrived[source])
                self.arrived[destination] = [*self.arrived[destination], message]
            distance *= 2

    def binomial_broadcast(self, ranks, nbytes):
        distance = 1 << (len(ranks) - 1).bit_length() >> 1
        while distance:
            for place in range(distance, len(ranks), 2 * distance):
                source, destination = ranks[place - distance], ranks[place]
                self.arrived[destination] = [self.send(source, destination, nbytes, self.arrived[source])]
            distance //= 2

    def ring(self, ranks, sizes):
        """Half of an all-reduction: a reduce-scatter or an all-gather. In step s place p sends chunk p - s."""
        n = len(ranks)
        for step in range(n - 1):
            sent = {}
            for place, rank in enumerate(ranks):
                following = ranks[(place + 1) % n]
                sent[following] = self.send(rank, following, sizes[(place - step) % n], self.arrived[rank])
            for rank, message in sent.items():
                self.arrived[rank] = [message]


# ---- the steps of scale_model


def schedule(name, machine, nbytes):
    """All messages of a step."""
    plan = Schedule(machine)
    hosts = [list(range(first, first + machine.gpus)) for first in range(0, machine.ranks, machine.gpus)]
    leaders = [ranks[0] for ranks in hosts]
    rails = [list(ranks) for ranks in zip(*hosts, strict=True)]
    everyone = list(range(machine.ranks))
    if name == "central, flat":
        plan.star_reduce(everyone, nbytes)
        plan.work(0, model.updated(machine, nbytes))
        plan.star_broadcast(everyone, nbytes)
    elif name == "central":
        up_and_down(plan, hosts, leaders, nbytes, lambda: plan.work(0, model.updated(machine, nbytes)))
    elif name == "mirrored, one ring" or (name == "mirrored, leaders" and machine.hosts == 1):
        around(plan, everyone, nbytes)
    elif name == "mirrored, leaders":
        if faster_is_ring(machine, nbytes):
            up_and_down(plan, hosts, [], nbytes, lambda: around(plan, leaders, nbytes))
        else:
            up_and_down(plan, hosts, leaders, nbytes, lambda: None)
    else:
        for ranks in hosts:
            plan.ring(ranks, parts(nbytes, machine.gpus))
        for ranks in rails:
            on_a_rail(plan, name, ranks, nbytes // machine.gpus)
        for ranks in hosts:
            plan.ring(ranks, parts(nbytes, machine.gpus))
    if name.startswith("mirrored"):
        for rank in everyone:
            plan.work(rank, model.updated(machine, nbytes))
    return plan


def on_a_rail(plan, name, ranks, nbytes):
    """What one GPU of each host does with its share, between the two halves of a ring inside the hosts."""
    machine = plan.machine
    if name.startswith("sharded"):
        plan.ring(ranks, parts(nbytes, len(ranks)))
        for rank in ranks:
            plan.work(rank, model.updated(machine, nbytes / len(ranks)))
        plan.ring(ranks, parts(nbytes, len(ranks)))
    elif name.startswith("mirrored") and faster_is_ring(machine, nbytes):
        around(plan, ranks, nbytes)
    else:
        to_root(plan, ranks, nbytes, machine.between)
        if name.startswith("central"):
            plan.work(ranks[0], model.updated(machine, nbytes))
        from_root(plan, ranks, nbytes, machine.between)


def up_and_down(plan, hosts, leaders, nbytes, between):
    """Reduced inside hosts, then among the leaders; something; and back."""
    machine = plan.machine
    for ranks in hosts:
        to_root(plan, ranks, nbytes, machine.inside)
    to_root(plan, leaders, nbytes, machine.between)
    between()
    from_root(plan, leaders, nbytes, machine.between)
    for ranks in hosts:
        from_root(plan, ranks, nbytes, machine.inside)


def to_root(plan, ranks, nbytes, link):
    if len(ranks) > 1 and is_chain(len(ranks), nbytes, link):
        plan.chain_reduce(ranks, parts(nbytes, model.chain_segments(len(ranks), nbytes, link)))
    elif len(ranks) > 1:
        plan.binomial_reduce(ranks, nbytes)


def from_root(plan, ranks, nbytes, link):
    if len(ranks) > 1 and is_chain(len(ranks), nbytes, link):
        plan.chain_broadcast(ranks, parts(nbytes, model.chain_segments(len(ranks), nbytes, link)))
    elif len(ranks) > 1:
        plan.binomial_broadcast(ranks, nbytes)


def around(plan, ranks, nbytes):
    for _ in range(2):
        plan.ring(ranks, parts(nbytes, len(ranks)))


def is_chain(n, nbytes, link):
    return model.chain(n, nbytes, link).seconds <= model.binomial(n, nbytes, link).seconds


def faster_is_ring(machine, nbytes):
    return model.all_reduce(machine.hosts, nbytes, machine.between) == model.ring(
        machine.hosts, nbytes, machine.between
    )


def parts(nbytes, count):
    """Sizes as equal as they can be."""
    return [nbytes // count + (place < nbytes % count) for place in range(count)]


# ---- running it


def simulate(plan):
    """The cost of a schedule: each message begins as soon as those before it have arrived and its links are free."""
    machine = plan.machine
    waiting = [len(message.after) for message in plan.messages]
    followers = defaultdict(list)
    for number, message in enumerate(plan.messages):
        for before in message.after:
            followers[before].append(number)
    free = defaultdict(float)  # when a way out of or into a rank or a NIC is free again
    moved = defaultdict(int)
    counts = {"inside": [0, 0], "between": [0, 0]}
    ready = [(0.0, number) for number, count in enumerate(waiting) if not count]
    ready_at = [0.0] * len(waiting)
    end = 0.0
    while ready:
        begin, number = heapq.heappop(ready)
        message = plan.messages[number]
        where, ways, seconds = links(machine, message)
        possible = max([begin, *(free[way] for way in ways)])
        if possible > begin:
            heapq.heappush(ready, (possible, number))
            continue
        arrival = begin + seconds
        for way in ways:
            free[way] = arrival
            moved[way] += message.nbytes
        if where is not None:
            counts[where][0] += 1
            counts[where][1] += message.nbytes
        end = max(end, arrival)
        for follower in followers[number]:
            waiting[follower] -= 1
            ready_at[follower] = max(ready_at[follower], arrival)
            if not waiting[follower]:
                heapq.heappush(ready, (ready_at[follower], follower))
    assert not any(waiting), "some messages wait for each other"
    busiest = max((nbytes for way, nbytes in moved.items() if way[0] == "NIC"), default=0)
    return model.Cost(*counts["inside"], *counts["between"], busiest, end)


def links(machine, message):
    """Where a message goes, the ways that it occupies, and for how long."""
    source, destination = message.source, message.destination
    if source == destination:
        return None, (), message.seconds
    (host, gpu), (other, far_gpu) = divmod(source, machine.gpus), divmod(destination, machine.gpus)
    if host == other:
        return "inside", (("GPU", source, "out"), ("GPU", destination, "in")), machine.inside.seconds(message.nbytes)
    ways = ("NIC", host, gpu % machine.nics, "out"), ("NIC", other, far_gpu % machine.nics, "in")
    return "between", ways, machine.between.seconds(message.nbytes)
