"""A stand-in for mpi4py between the ranks of `recorded_ranks.Job`, which records messages."""

import functools
import pickle
import time
import types
from collections import defaultdict, deque
from typing import NamedTuple

import mpi_rounds
import numpy as np
from unbacked_memory import Unbacked

# ---- what the library uses of the module `mpi4py.MPI`


def wait_for_all(requests):
    """`MPI.Request.Waitall`."""
    if requests:
        requests[0].comm.wait_for(requests)


MPI = types.SimpleNamespace(
    IN_PLACE="in place",
    UNDEFINED=-1,
    BAND=np.bitwise_and,
    MAX=np.maximum,
    Request=types.SimpleNamespace(Waitall=wait_for_all),
)


class Request(NamedTuple):
    """What a rank has sent, or receives.

    Attributes:
        comm: the rank's communicator.
        buffer: where a message goes.
        messages: where it comes from: for each its first possible round, its source and content.
        asked: the round in which the rank asked for it.
    """

    comm: "RecordingComm"
    buffer: object = None
    messages: deque | None = None
    asked: int = 0


# ---- communicators


class Meeting:
    """Ranks that make collective calls together."""

    def __init__(self, job, ranks):
        self.job, self.ranks = job, list(ranks)
        self.names, self.given, self.results = [], [None] * len(self.ranks), []
        self.messages = defaultdict(deque)  # by source, destination and tag


def as_mpi(method):
    """What takes time in MPI, and not in the library."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        begin = time.thread_time()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.own.in_mpi += time.thread_time() - begin

    return call


class RecordingComm:
    """What the library uses of `mpi4py.MPI.Intracomm`."""

    def __init__(self, meeting, rank):
        self.rank, self.size = rank, len(meeting.ranks)
        self.own = meeting.job.ranks[meeting.ranks[rank]]
        self._meeting, self._job, self._in_world = meeting, meeting.job, meeting.ranks[rank]

    def meet(self, name, given, deliver):
        """A call of all ranks, which the last one makes for all.

        Args:
            name: equal on all ranks.
            given: by this rank.
            deliver: returns what the call returns on each rank, given what each has `given`.
        """
        meeting, turns = self._meeting, self._job.turns
        meeting.names.append(name)
        meeting.given[self.rank] = given
        if len(meeting.names) < self.size:
            turns.wait_for_others(self._in_world)
            return meeting.results[self.rank]
        if len({*meeting.names}) > 1:
            raise RuntimeError(f"the ranks make different calls of MPI: {meeting.names}")
        ranks = [self._job.ranks[rank] for rank in meeting.ranks]
        latest = max(rank.next_round for rank in ranks)
        for rank in ranks:
            rank.next_round = latest
        meeting.results = deliver(meeting.given)
        meeting.names, meeting.given = [], [None] * self.size
        turns.ready += [rank for rank in meeting.ranks if rank != self._in_world]
        return meeting.results[self.rank]

    def _meet(self, name, given, deliver, rounds):
        """The same, recorded."""
        ranks = self._meeting.ranks

        def deliver_and_note(given):
            self._job.note(
                name,
                (
                    [(ranks[source], ranks[to], nbytes) for source, to, nbytes in messages]
                    for messages in rounds(given)
                ),
            )
            return deliver(given)

        return self.meet(name, given, deliver_and_note)

    # ---- mpi4py's names: those for objects are in lower case

    @as_mpi
    def Barrier(self):
        self.meet("Barrier", None, lambda given: given)

    @as_mpi
    def Split(self, color=0, key=0):
        def split(given):
            members = defaultdict(list)
            for rank in sorted(range(self.size), key=lambda rank: (given[rank][1], rank)):
                if given[rank][0] != MPI.UNDEFINED:
                    members[given[rank][0]].append(rank)
            comms = [None] * self.size
            for ranks in members.values():
                made = Meeting(self._job, [self._meeting.ranks[rank] for rank in ranks])
                for place, rank in enumerate(ranks):
                    comms[rank] = RecordingComm(made, place)
            return comms

        return self.meet("Split", (color, key), split)

    def Dup(self):
        return self.Split()

    @as_mpi
    def allgather(self, given):
        def gather(messages):  # the ranks share the objects, which they only read
            objects = [pickle.loads(message) for message in messages]
            return [objects] * self.size

        return [
            *self._meet(
                "allgather",
                pickle.dumps(given),
                gather,
                lambda messages: mpi_rounds.all_gather([*map(len, messages)]),
            )
        ]

    @as_mpi
    def bcast(self, given, root=0):
        return self._meet(
            "bcast",
            pickle.dumps(given),
            lambda messages: [pickle.loads(messages[root]) for _ in messages],
            lambda messages: mpi_rounds.broadcast(self.size, root, len(messages[root])),
        )

    @as_mpi
    def Allgather(self, sent, received):
        def gather(given):
            whole = np.stack([sent for sent, _ in given])
            for _, place in given:
                place[...] = whole.reshape(place.shape)
            return given

        self._meet(
            "Allgather",
            (sent, received),
            gather,
            lambda _: mpi_rounds.all_gather([sent.nbytes] * self.size),
        )

    @as_mpi
    def Allreduce(self, sent, received, op):
        def reduce(given):
            result = op.reduce([sent for sent, _ in given])
            for _, place in given:
                place[...] = result
            return given

        self._meet(
            "Allreduce",
            (received if sent is MPI.IN_PLACE else sent, received),
            reduce,
            lambda _: mpi_rounds.recursive_doubling(self.size, received.nbytes),
        )

    @as_mpi
    def Bcast(self, buffer, root=0):
        def send(given):
            for rank, place in enumerate(given):
                if rank != root:
                    place[...] = given[root]
            return given

        self._meet(
            "Bcast",
            buffer,
            send,
            lambda given: mpi_rounds.broadcast(self.size, root, given[root].nbytes),
        )

    @as_mpi
    def Allgatherv(self, _, received):
        """In place, as the library calls it."""
        memory, (sizes, starts) = received
        begin, end = min(starts), max(map(sum, zip(starts, sizes, strict=True)))

        def gather(given):
            whole = np.empty_like(memory[begin:end])
            for memory_of_rank, start, size in zip(given, starts, sizes, strict=True):
                whole[start - begin :][:size] = memory_of_rank[start : start + size]
            for memory_of_rank in given:
                memory_of_rank[begin:end] = whole
            return given

        self._meet("Allgatherv", memory, gather, lambda _: mpi_rounds.all_gather(sizes))

    @as_mpi
    def Isend(self, piece, dest, tag=0):
        meeting, own = self._meeting, self.own
        own.under_way += 1
        own.has_sent = True
        messages = meeting.messages[self.rank, dest, tag]
        content = piece if isinstance(piece, Unbacked) else piece.copy()
        messages.append((own.next_round, self._in_world, content))
        receiver = self._job.ranks[meeting.ranks[dest]]
        if receiver.waits_for is messages:
            receiver.waits_for = None
            self._job.turns.ready.append(meeting.ranks[dest])
        return Request(self)

    @as_mpi
    def Irecv(self, piece, source, tag=0):
        messages = self._meeting.messages[source, self.rank, tag]
        self.own.under_way += 1
        return Request(self, piece, messages, self.own.next_round)

    @as_mpi
    def wait_for(self, requests):
        """`MPI.Request.Waitall`, of any communicator's requests."""
        own = self.own
        own.under_way -= len(requests)
        for request in requests:
            if request.messages is None:
                continue
            if not request.messages:
                own.waits_for = request.messages
                self._job.turns.wait_for_others(self._in_world)
            sent, source, content = request.messages.popleft()
            request.buffer[...] = content
            number = max(sent, request.asked)
            self._job.note_message(number, source, self._in_world, content.nbytes)
            own.latest = max(own.latest, number)
        own.begin_next_round()
