"""Ranks as threads of one process, on a stand-in for mpi4py's communicator that records messages.

The library's own communicators run on it: bytes really move between the ranks, and each MPI call is
recorded as the rounds of messages that MPI would send. These rounds are assumptions, one function
for each below.
"""

import itertools
import pickle
import queue
import sys
import threading
import types
from collections import defaultdict
from typing import NamedTuple
from unittest import mock

from hpcstrat._communicators import shared_memory
from hpcstrat._memory.allocator import private_memory

SECONDS = 60  # that a rank waits for the others at most


class Call(NamedTuple):
    """A call of MPI.

    Attributes:
        name: MPI's.
        rounds: in order, the messages that are under way at the same time: source, destination,
            bytes.
    """

    name: str
    rounds: list[list[tuple[int, int, int]]]


# ---- what MPI is assumed to do: the rounds of a call of n ranks


def bruck(n, nbytes):
    """All-gather of small parts: Bruck's algorithm.

    Recursive doubling has as many rounds and bytes.
    """
    distance = 1
    while distance < n:
        yield [
            (rank, (rank - distance) % n, min(distance, n - distance) * nbytes) for rank in range(n)
        ]
        distance *= 2


def ring(sizes):
    """All-gather of large parts: each rank passes on what came from the previous rank."""
    n = len(sizes)
    for turn in range(n - 1):
        yield [(rank, (rank + 1) % n, sizes[(rank - turn) % n]) for rank in range(n)]


def pairwise(sizes):
    """All-to-all: in each turn a rank sends to one other.

    `sizes[source][destination]`; empty messages are not sent.
    """
    n = len(sizes)
    for distance in range(1, n):
        yield [
            (rank, (rank + distance) % n, sizes[rank][(rank + distance) % n]) for rank in range(n)
        ]


def binomial(n, root, nbytes):
    """Broadcast of few bytes."""
    distance = 1 << (n - 1).bit_length()
    while distance := distance // 2:
        places = range(0, n - distance, 2 * distance)
        yield [((root + place) % n, (root + place + distance) % n, nbytes) for place in places]


# ---- what the library uses of the module `mpi4py.MPI`


def wait_for_all(requests):
    """`MPI.Request.Waitall`."""
    for one in requests:
        one.wait()
    if requests:
        comm = requests[0].comm
        comm.on_their_way -= len(requests)
        comm.swaps += comm.on_their_way == 0  # windows of one swap overlap


MPI = types.SimpleNamespace(
    IN_PLACE="in place", UNDEFINED=-1, Request=types.SimpleNamespace(Waitall=wait_for_all)
)


class Request(NamedTuple):
    """What a rank has sent, or receives from a queue."""

    comm: "RecordingComm"
    buffer: object = None
    messages: queue.Queue | None = None

    def wait(self):
        if self.messages is not None:
            self.buffer[...] = self.messages.get(timeout=SECONDS)


# ---- the ranks


class Job:
    """Some ranks on some hosts.

    Attributes:
        hosts: of each rank, in rank order.
        calls: what was recorded.
    """

    def __init__(self, hosts):
        self.hosts = hosts
        self.calls = []
        self._meetings = []

    def meeting(self, ranks):
        """Where these ranks meet."""
        self._meetings.append(Meeting(self, ranks))
        return self._meetings[-1]

    def run(self, program):
        """What `program(comm, host_comm)` returns on each rank.

        The first error of a rank ends them all.
        """
        private_memory()  # one for all threads, so that they do not make several at once
        n = len(self.hosts)
        world, results, errors = self.meeting(range(n)), [None] * n, []

        def start(rank):
            try:
                comm = RecordingComm(world, rank)
                results[rank] = program(comm, comm.Split(self.hosts[rank]))
            except BaseException as error:
                errors.append(error)
                for meeting in self._meetings:
                    meeting.barrier.abort()

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(n)]
        module = types.ModuleType("mpi4py")
        module.MPI = MPI
        # The library's own barrier polls memory that other processes change. Polling threads keep
        # each other from running.
        barrier = mock.patch.object(shared_memory, "barrier", lambda _, comm: comm.Barrier)
        with barrier, mock.patch.dict(sys.modules, {"mpi4py": module}):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results


class Meeting:
    """Ranks that make collective calls together."""

    def __init__(self, job, ranks):
        self.job, self.ranks = job, list(ranks)
        self.barrier = threading.Barrier(len(self.ranks), timeout=SECONDS)
        self.given = [None] * len(self.ranks)
        self.made = {}
        self.lock = threading.Lock()
        self.swaps = {}  # by number, the messages of each
        self.queues = defaultdict(queue.Queue)  # by source and destination


class RecordingComm:
    """What the library uses of `mpi4py.MPI.Intracomm`."""

    def __init__(self, meeting, rank):
        self.rank, self.size = rank, len(meeting.ranks)
        # how many this rank has made, each until all that it sends and receives has arrived
        self.swaps = 0
        self.on_their_way = 0  # requests
        self._meeting = meeting

    def _meet(self, given):
        """What each rank contributes. It is unchanged until this rank calls `Barrier`."""
        self._meeting.given[self.rank] = given
        self.Barrier()
        return list(self._meeting.given)

    def _note(self, name, rounds):
        if self.rank == 0:
            ranks, found = self._meeting.ranks, []
            for messages in rounds:
                sent = [
                    (ranks[source], ranks[to], nbytes) for source, to, nbytes in messages if nbytes
                ]
                found += [sent] if sent else []
            self._meeting.job.calls.append(Call(name, found))

    # ---- mpi4py's names: those for objects are in lower case

    def Barrier(self):
        self._meeting.barrier.wait()

    def Split(self, color=0, key=0):
        everyones = self._meet((color, key))
        if self.rank == 0:
            members = defaultdict(list)
            for rank in sorted(range(self.size), key=lambda rank: (everyones[rank][1], rank)):
                if everyones[rank][0] != MPI.UNDEFINED:
                    members[everyones[rank][0]].append(self._meeting.ranks[rank])
            self._meeting.made = {
                color: self._meeting.job.meeting(ranks) for color, ranks in members.items()
            }
        self.Barrier()
        if color not in self._meeting.made:
            return None
        made = self._meeting.made[color]
        return RecordingComm(made, made.ranks.index(self._meeting.ranks[self.rank]))

    def Dup(self):
        return self.Split()

    def allgather(self, given):
        messages = self._meet(pickle.dumps(given))
        self._note("allgather", ring([len(message) for message in messages]))
        self.Barrier()
        return [pickle.loads(message) for message in messages]

    def bcast(self, given, root=0):
        message = self._meet(pickle.dumps(given))[root]
        self._note("bcast", binomial(self.size, root, len(message)))
        self.Barrier()
        return pickle.loads(message)

    def Allgather(self, sent, received):
        for place, part in zip(received, self._meet(sent), strict=True):
            place[...] = part
        self._note("Allgather", bruck(self.size, sent.nbytes))
        self.Barrier()

    def Allgatherv(self, _, received):
        """In place, as the library calls it."""
        memory, (sizes, starts) = received
        for rank, part in enumerate(self._meet(memory)):
            if rank != self.rank:
                place = slice(starts[rank], starts[rank] + sizes[rank])
                memory[place] = part[place]
        self._note("Allgatherv", ring(sizes))
        self.Barrier()

    def Alltoallv(self, sent, received):
        everyones = self._meet(sent)
        memory, (sizes, starts) = received
        for (part, (counts, begins)), size, start in zip(everyones, sizes, starts, strict=True):
            assert counts[self.rank] == size
            memory[start : start + size] = part[begins[self.rank] : begins[self.rank] + size]
        self._note("Alltoallv", pairwise([counts for _, (counts, _) in everyones]))
        self.Barrier()

    def Isend(self, piece, to):
        meeting = self._meeting
        with meeting.lock:
            if self.swaps not in meeting.swaps:
                meeting.swaps[self.swaps] = []
                meeting.job.calls.append(Call("Isend", [meeting.swaps[self.swaps]]))
            meeting.swaps[self.swaps].append(
                (meeting.ranks[self.rank], meeting.ranks[to], piece.nbytes)
            )
            self.on_their_way += 1
            messages = meeting.queues[self.rank, to]
        messages.put(piece.copy())
        return Request(self)

    def Irecv(self, piece, source):
        self.on_their_way += 1
        with self._meeting.lock:
            return Request(self, piece, self._meeting.queues[source, self.rank])


def hosts_of(ranks_per_host):
    """The host of each rank, for hosts of these sizes, one host after the other."""
    return tuple(
        itertools.chain.from_iterable([host] * count for host, count in enumerate(ranks_per_host))
    )
