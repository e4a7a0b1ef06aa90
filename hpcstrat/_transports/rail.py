"""Reductions between hosts: of a part of a message, by one rank of each host."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np

from hpcstrat._core.types import Array, Bytes, ReduceOp
from hpcstrat._memory.intervals import ByteRange, ElementRange, divide_up
from hpcstrat._memory.layout import sections_in
from hpcstrat._transports.point_to_point import PointToPoint
from hpcstrat._transports.reduction import (
    CHUNK,
    REDUCTIONS,
    accumulator,
    combine_hosts,
    part_of_rank,
    reduce_in_chunks,
)

# The model by which one of two ways is chosen; docs/scale.md shows what follows from it. Only
# their ratios matter, and only where both ways take about as long.
_MESSAGE = 5e-6  # seconds that a rank needs to send a message and to receive one
_LATENCY = 2e-6  # seconds until a message arrives
_BYTE = 1 / 1.5e9  # seconds a byte, of a host's link that its ranks share
_ADDED_BYTE = 1 / 5e9  # seconds to add up a byte of this host's ranks; pairwise hides them
_HALVED = 1 << 13  # bytes: below this to send all costs less than another message


class Halving(NamedTuple):
    """What halving and doubling costs a rank.

    Attributes:
        halvings: how many of its rounds halve what is sent.
        rounds: messages that the rank sends, one after the other.
        nbytes: bytes of all of them.
    """

    halvings: int
    rounds: int
    nbytes: float


@functools.lru_cache(maxsize=1024)
def halving_of(nbytes: int, hosts: int) -> Halving:
    """How `nbytes` bytes are reduced over this many hosts by halving and doubling."""
    doublings = hosts.bit_length() - 1
    # As long as what is left to halve is worth a message on the way back.
    halvings = 0 if nbytes <= _HALVED else math.ceil(math.log2(nbytes / _HALVED))
    halvings = min(halvings, doublings - 1) if doublings > 1 else 0
    sent = [nbytes / 2 ** (i + 1) for i in range(halvings)]
    rounds, total = doublings + halvings, 2 * sum(sent)
    total += (doublings - halvings) * nbytes / 2**halvings
    if hosts > 1 << doublings:  # some hosts send all they have to others first, and get the result
        rounds, total = rounds + 2, total + 2 * nbytes
    return Halving(halvings, rounds, total)


@functools.lru_cache(maxsize=1024)
def is_pairwise(nbytes: int, hosts: int) -> bool:
    """Whether to reduce `nbytes` bytes over `hosts` hosts by pairwise exchange.

    Otherwise by halving and doubling: fewer messages, but one after the other, and added up in
    between.
    """
    pairwise = 2 * ((hosts - 1) * _MESSAGE + _LATENCY + nbytes * _BYTE * (hosts - 1) / hosts)
    _, rounds, sent = halving_of(nbytes, hosts)
    return pairwise <= rounds * (_MESSAGE + _LATENCY) + sent * _BYTE + nbytes * _ADDED_BYTE


@final
class Rail:
    """One rank of each host: those that reduce the same part of every message.

    A rank first reduces what the ranks of its own host have of the part, in shared memory. Between
    hosts there are two ways, for the same sums in the same order, that of `reduce_by_hosts`:

    - *Pairwise*: each rank gets the hosts' sums of its share, adds them up, and sends the result to
      all others. Messages go at the same time, while the next are added up.
    - *Halving and doubling*: in log2 H rounds a rank adds up with a rank twice as far away in each
      round, of half as much each time; the results come back the same way. Thakur, Rabenseifner
      and Gropp, "Optimization of Collective Communication Operations in MPICH", International
      Journal of High Performance Computing Applications 19(1), 2005.

    Args:
        messages: sends them.
        ranks: one of each host, in the order of the hosts.
        rank: this rank, one of them.
        size: the number of all ranks, of all rails.
    """

    def __init__(self, messages: PointToPoint, ranks: Sequence[int], rank: int, size: int) -> None:
        self._messages = messages
        self._ranks = ranks
        self._host = ranks.index(rank)
        self._size = size
        # Kept from call to call: the pages of new memory would cost about as much as a copy.
        self._sums: Bytes = np.empty(0, np.uint8)
        self._received: Bytes = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> None:
        """Makes room for parts of up to `nbytes` bytes.

        Raises:
            MemoryError: there is none.
        """
        nbytes = 2 * nbytes + 2048 * len(self._ranks)  # sums may be wider; shares are rounded up
        if self._sums.size < nbytes:
            # Freed before larger ones are allocated.
            self._sums = self._received = np.empty(0, np.uint8)
            self._sums, self._received = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    @np.errstate(all="ignore")  # as in `reduce_in_chunks`
    def all_reduce(self, result: Array, parts: Sequence[Array], op: ReduceOp) -> None:
        """Writes the reduction over all hosts to `result`; all ranks of the rail call it.

        Args:
            result: gets it: flat, C-contiguous, and perhaps one of `parts`.
            parts: what this host's ranks have, of the same length and dtype on all hosts.
            op: how they are reduced.
        """
        wide = accumulator(result.dtype)
        if len(parts) == 1 and wide == result.dtype:
            sums = parts[0]
        else:
            sums = self._sums[: result.size * wide.itemsize].view(wide)
        # A mean of the hosts' means would be wrong where hosts run different numbers of ranks.
        partial = ReduceOp.SUM if REDUCTIONS[op].is_mean else op
        if is_pairwise(sums.nbytes, len(self._ranks)):
            self._exchange_pairwise(result, sums, parts, op, partial)
            return
        reduce_in_chunks(sums, parts, partial)
        self._halve_and_double(sums, partial)
        result[...] = sums / self._size if REDUCTIONS[op].is_mean else sums

    def _exchange_pairwise(
        self, result: Array, sums: Array, parts: Sequence[Array], op: ReduceOp, partial: ReduceOp
    ) -> None:
        hosts = len(self._ranks)
        shares = [part_of_rank(result.size, host, hosts) for host in range(hosts)]
        own = shares[self._host]
        room = sections_in(self._received, [own.size * sums.itemsize] * hosts)

        def add_up(window: ByteRange) -> None:
            """What this host's ranks have of each share, in these of its bytes."""
            some = ElementRange(
                window.start // sums.itemsize, divide_up(window.stop, sums.itemsize)
            )
            for share in shares:
                here = (some.shift(share.start) & share).slice
                reduce_in_chunks(sums[here], [part[here] for part in parts], partial)

        received = dict(zip(self._ranks, room, strict=True))
        is_there = sums is parts[0]
        self._messages.swap(self._by_rank(sums, shares), received, None if is_there else add_up)
        reduction = REDUCTIONS[op]
        summands = [section.view(sums.dtype) for section in received.values()]
        summands[self._host] = sums[own.slice]
        for chunk in ElementRange(0, own.size).split(CHUNK):
            total = combine_hosts([part[chunk.slice] for part in summands], reduction.ufunc)
            target = chunk.shift(own.start).slice
            result[target] = total / self._size if reduction.is_mean else total
        totals = dict.fromkeys(self._ranks, _bytes(result[own.slice]))
        self._messages.swap(totals, self._by_rank(result, shares))

    def _by_rank(self, array: Array, shares: Sequence[ElementRange]) -> dict[int, Bytes]:
        """The bytes of each host's share, by its rank of this rail."""
        views = [_bytes(array[share.slice]) for share in shares]
        return dict(zip(self._ranks, views, strict=True))

    def _halve_and_double(self, sums: Array, op: ReduceOp) -> None:
        """Replaces this host's sums by those of all hosts."""
        # Until their number is a power of two, the first hosts work in pairs, as one.
        extra = len(self._ranks) - (1 << len(self._ranks).bit_length() - 1)
        ranks = [*self._ranks[: 2 * extra : 2], *self._ranks[2 * extra :]]
        if self._host >= 2 * extra:
            self._halve_and_double_with(ranks, sums, op)
            return
        swap, partner = self._messages.swap, self._ranks[self._host ^ 1]
        if self._host % 2:
            swap({partner: _bytes(sums)}, {})
            swap({}, {partner: _bytes(sums)})
            return
        theirs = self._received[: sums.nbytes]
        swap({}, {partner: theirs})
        REDUCTIONS[op].ufunc(sums, theirs.view(sums.dtype), out=sums)
        self._halve_and_double_with(ranks, sums, op)
        swap({partner: _bytes(sums)}, {})

    def _halve_and_double_with(self, ranks: Sequence[int], sums: Array, op: ReduceOp) -> None:
        """The same for these ranks, as many as a power of two."""
        place = ranks.index(self._ranks[self._host])
        received = self._received[: sums.nbytes].view(sums.dtype)
        halvings = halving_of(sums.nbytes, len(self._ranks)).halvings
        held, given_away = ElementRange(0, sums.size), []
        for bit in range(len(ranks).bit_length() - 1):
            partner, is_lower = ranks[place ^ 1 << bit], not place >> bit & 1
            given = held
            if bit < halvings:
                middle = held.start + held.size // 2
                halves = ElementRange(held.start, middle), ElementRange(middle, held.stop)
                held, given = halves if is_lower else halves[::-1]
                given_away.append((partner, held, given))
            ours, theirs = sums[held.slice], received[held.slice]
            self._messages.swap({partner: _bytes(sums[given.slice])}, {partner: _bytes(theirs)})
            # The lower host's first: of two nan the first one's bits remain.
            lower, upper = (ours, theirs) if is_lower else (theirs, ours)
            REDUCTIONS[op].ufunc(lower, upper, out=ours)
        for partner, held, given in reversed(given_away):
            ours, theirs = _bytes(sums[held.slice]), _bytes(sums[given.slice])
            self._messages.swap({partner: ours}, {partner: theirs})


def _bytes(array: Array) -> Bytes:
    return array.view(np.uint8)
