"""Ranks as threads of one process, on a stand-in for mpi4py's communicator that records messages.

The library's own communicators run on it: bytes really move between the ranks, and each MPI call is
recorded as the rounds of messages that MPI would send, by `mpi_rounds.py`. A message that ranks
send each other themselves is in the first round in which its sender can send it and its receiver
asks for it: one after those that each of them had to wait for.

One thread runs at a time, until its rank has to wait for others. So a thousand ranks do not compete
for the interpreter, every run is the same, and ranks that wait forever are an error at once.
"""

import contextlib
import sys
import threading
import types
from collections import deque
from typing import NamedTuple
from unittest import mock

from recorded_mpi import MPI, Meeting, RecordingComm
from unbacked_memory import unbacked_memory

from hpcstrat._transports import shared_memory


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
            barrier = mock.patch.object(shared_memory, "barrier", lambda _, comm: comm.Barrier)
            stack.enter_context(barrier)
            stack.enter_context(mock.patch.dict(sys.modules, {"mpi4py": module}))
            if self._is_unbacked:
                stack.enter_context(unbacked_memory())
            for thread in threads:
                thread.start()
            turns.go_on()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return results
