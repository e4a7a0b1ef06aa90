"""Ranks as threads of one process, on a stand-in for mpi4py's communicator that records messages.

The library's own communicators run on it: bytes really move between the ranks, and each MPI call is
recorded as the rounds of messages that MPI would send, by `mpi_rounds.py`. A message that ranks
send each other themselves is in the first round in which its sender can send it and its receiver
asks for it: one after those that each of them had to wait for.

One thread runs at a time, until its rank has to wait for others. So a thousand ranks do not compete
for the interpreter, every run is the same, and ranks that wait forever are an error at once.
"""

import contextlib
import functools
import pickle
import sys
import threading
import time
import types
from collections import defaultdict, deque
from typing import NamedTuple
from unittest import mock

import mpi_rounds
import numpy as np
from unbacked_memory import Unbacked, unbacked_memory

from hpcstrat._communicators import shared_memory
from hpcstrat._memory.allocator import private_memory

MAILBOX = 1 << 30  # bytes of addresses for each rank; a thousand ranks share those of one process


class Call(NamedTuple):
    """A call of MPI.

    Attributes:
        name: MPI's.
        rounds: in order, the messages that are under way at the same time: source, destination,
            bytes.
    """

    name: str
    rounds: list[list[tuple[int, int, int]]]


# ---- turns


class EndedError(BaseException):
    """Another rank has failed."""


class Turns:
    """Lets one rank run at a time."""

    def __init__(self, n):
        self.alive, self.ready = set(range(n)), deque(range(n))
        self.has_failed = False
        self._locks = [threading.Lock() for _ in range(n)]
        for lock in self._locks:
            lock.acquire()

    def wait(self, rank):
        """Until it is this rank's turn, which another rank has put on the list."""
        self._locks[rank].acquire()
        if self.has_failed:
            raise EndedError

    def wait_for_others(self, rank):
        """The same, while others run."""
        if self.has_failed:
            raise EndedError
        if not self.ready:
            raise RuntimeError(f"ranks {sorted(self.alive)} wait for each other")
        self.go_on()
        self.wait(rank)

    def go_on(self):
        """The next rank runs."""
        if self.ready:
            self._locks[self.ready.popleft()].release()

    def leave(self, rank):
        """This rank is done."""
        self.alive.remove(rank)
        self.go_on()

    def fail(self, rank):
        """All ranks end, as this one does."""
        if not self.has_failed:
            self.has_failed = True
            self.ready = deque(sorted(self.alive - {rank}))


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


# ---- the ranks


class Rank:
    """What is recorded of a rank.

    Attributes:
        next_round: in which it can send at the earliest.
        under_way: the messages that it has sent or asked for, and not waited for.
        waits_for: the list in which it waits for a message.
        in_mpi: seconds of the processor that the stand-in for MPI took.
    """

    def __init__(self):
        self.next_round = self.under_way = 0
        self.has_sent = False
        self.latest = -1  # round of what it has received
        self.waits_for = None
        self.in_mpi = 0.0

    def begin_next_round(self):
        """What it sends from now on depends on all that it has waited for."""
        if not self.under_way:  # windows of one exchange overlap
            self.next_round = max(self.next_round + self.has_sent, self.latest + 1)
            self.has_sent = False


class Job:
    """Some ranks on some hosts.

    Args:
        hosts: of each rank, in rank order.
        is_unbacked: whether the elements of arrays are neither stored nor computed, so that
            messages of any size fit.

    Attributes:
        hosts: the same.
        calls: what was recorded.
        ranks: see `Rank`.
    """

    def __init__(self, hosts, is_unbacked=False):
        self.hosts = hosts
        self.calls = []
        self.ranks = [Rank() for _ in hosts]
        self.turns = Turns(len(hosts))
        self.is_recording = True
        self._is_unbacked = is_unbacked
        self._rounds = {}

    def record(self, comm, is_recording=True):
        """From here on, or no longer; drops what came before. All ranks call it."""

        def switch(_):
            self.is_recording = is_recording
            if is_recording:
                self.calls.clear()
                self._rounds.clear()
            return [None] * comm.size

        comm.meet("record", None, switch)

    def note(self, name, rounds):
        """Records a call of MPI."""
        if self.is_recording:
            sent = ([one for one in messages if one[2]] for messages in rounds)
            self.calls.append(Call(name, [messages for messages in sent if messages]))

    def note_message(self, number, source, to, nbytes):
        """Records a message of a round that a rank sends itself."""
        if not self.is_recording:
            return
        if number not in self._rounds:
            # Consecutive rounds are one call, unless ranks have made another in between.
            if not self.calls or self.calls[-1].name != "Isend":
                self.calls.append(Call("Isend", []))
            self._rounds[number] = []
            self.calls[-1].rounds.append(self._rounds[number])
        self._rounds[number].append((source, to, nbytes))

    def run(self, program):
        """What `program(comm, host_comm)` returns on each rank.

        The first error of a rank ends them all.
        """
        n = len(self.hosts)
        world, results, errors, turns = Meeting(self, range(n)), [None] * n, [], self.turns

        def start(rank):
            try:
                turns.wait(rank)
                comm = RecordingComm(world, rank)
                results[rank] = program(comm, comm.Split(self.hosts[rank]))
                if not turns.ready and len(turns.alive) > 1:
                    raise RuntimeError(f"rank {rank} is done, others wait for it")
            except BaseException as error:
                errors.append(error)
                turns.fail(rank)
            turns.leave(rank)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(n)]
        module = types.ModuleType("mpi4py")
        module.MPI = MPI
        with contextlib.ExitStack() as stack:
            # The library's own barrier polls memory that other processes change. Polling threads
            # keep each other from running.
            for name, new in ("barrier", lambda _, comm: comm.Barrier), ("physical_memory", _few):
                stack.enter_context(mock.patch.object(shared_memory, name, new))
            stack.enter_context(mock.patch.dict(sys.modules, {"mpi4py": module}))
            if self._is_unbacked:
                stack.enter_context(unbacked_memory())
            private_memory()  # one for all threads
            for thread in threads:
                thread.start()
            turns.go_on()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results


def _few():
    return MAILBOX


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
    def Alltoall(self, sent, received):
        def exchange(given):
            whole = np.stack([sent.reshape(self.size, -1) for sent, _ in given])
            for rank, (_, place) in enumerate(given):
                place[...] = whole[:, rank].reshape(place.shape)
            return given

        nbytes = sent.nbytes // self.size
        self._meet(
            "Alltoall",
            (sent, received),
            exchange,
            lambda _: mpi_rounds.pairwise([[nbytes] * self.size] * self.size),
        )

    @as_mpi
    def Alltoallv(self, sent, received):
        def exchange(given):
            for source, ((memory, (sizes, starts)), _) in enumerate(given):
                for to in np.flatnonzero(sizes):
                    place, (expected, places) = given[to][1]
                    assert expected[source] == sizes[to]
                    section = memory[starts[to] : starts[to] + sizes[to]]
                    place[places[source] : places[source] + sizes[to]] = section
            return given

        self._meet(
            "Alltoallv",
            (sent, received),
            exchange,
            lambda given: mpi_rounds.pairwise([sizes for (_, (sizes, _)), _ in given]),
        )

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
