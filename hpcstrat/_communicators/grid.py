"""Ranks on several hosts as a grid: which rank of a host works for which ranks of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class Grid:
    """The ranks of several hosts: a column for each host, a row for each local index.

    With 3 hosts of 2 ranks each:

                       host 0    host 1    host 2
        index 0        rank 0    rank 2    rank 4
        index 1        rank 1    rank 3    rank 5

    What a rank and a host send each other goes through one rank of the host, the rank's *server*
    there, so it travels between hosts once. The servers of a rank are its row: those of rank 2 are
    0, 2 and 4. On its own host a rank serves itself.

    In the rows that a host lacks, its ranks serve again, from the first on. With 3 + 1 ranks:

                       host 0    host 1
        index 0        rank 0    rank 3
        index 1        rank 1    (rank 3)
        index 2        rank 2    (rank 3)

    So all ranks are *clients* of rank 3, whose own servers are 0 and 3. Ranks 1 and 2 serve only
    themselves.

    Args:
        host_of: the host of each rank, as a number that differs from those of other hosts.

    Attributes:
        hosts: the ranks of each host; hosts are in the order of their first ranks.
    """

    def __init__(self, host_of: Sequence[int]) -> None:
        members: dict[int, list[int]] = {}
        for rank, host in enumerate(host_of):
            members.setdefault(host, []).append(rank)
        self.hosts: list[list[int]] = [*members.values()]
        self._peers = {rank: ranks for ranks in self.hosts for rank in ranks}

    def peers(self, rank: int) -> list[int]:
        """The ranks of this rank's host, itself included: its column."""
        return self._peers[rank]

    def servers(self, rank: int) -> list[int]:
        """The rank of each host that serves this rank: its row."""
        index = self.peers(rank).index(rank)
        return [host[index % len(host)] for host in self.hosts]

    def clients(self, rank: int) -> list[int]:
        """The ranks that have this rank as a server, in rank order."""
        peers = self.peers(rank)
        index = peers.index(rank)
        return sorted(other for host in self.hosts for other in host[index :: len(peers)])
