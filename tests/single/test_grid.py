"""The grid of hosts and ranks: who serves whom, for ranks on any hosts."""

import hypothesis
import hypothesis.strategies as st
import pytest
from internals import Grid

# Of each rank: unequal hosts, in turns, one rank on each, all on one.
PLACEMENTS = st.lists(st.integers(0, 6), min_size=1, max_size=24) | st.lists(
    st.integers(0, 99), min_size=1, max_size=12, unique=True
)


@pytest.mark.parametrize(
    ("host_of", "servers"),
    [
        ((0, 0, 1, 1, 2, 2), [[0, 2, 4], [1, 3, 5]] * 3),
        ((0, 1, 2, 0, 1, 2), [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3),
        ((0, 0, 0, 3), [[0, 3], [1, 3], [2, 3], [0, 3]]),
        ((7, 5, 5, 5, 5), [[0, 1], [0, 1], [0, 2], [0, 3], [0, 4]]),
        ((0, 1, 2), [[0, 1, 2]] * 3),
        ((4, 4, 4), [[0], [1], [2]]),
    ],
)
def test_servers(host_of, servers):
    assert [Grid(host_of).servers(rank) for rank in range(len(host_of))] == servers


@hypothesis.given(PLACEMENTS)
def test_a_column_is_the_ranks_of_a_host(host_of):
    grid = Grid(host_of)
    assert [host[0] for host in grid.hosts] == sorted(map(host_of.index, set(host_of)))
    for rank, host in enumerate(host_of):
        assert grid.peers(rank) == [n for n, other in enumerate(host_of) if other == host]


@hypothesis.given(PLACEMENTS)
def test_each_rank_has_a_server_on_each_host_and_on_its_own_itself(host_of):
    grid = Grid(host_of)
    for rank, host in enumerate(host_of):
        servers = grid.servers(rank)
        assert [host_of[server] for server in servers] == list(dict.fromkeys(host_of))
        assert [server for server in servers if host_of[server] == host] == [rank]


@hypothesis.given(PLACEMENTS)
def test_clients_are_the_inverse_of_servers(host_of):
    grid, ranks = Grid(host_of), range(len(host_of))
    for server in ranks:
        assert grid.clients(server) == [rank for rank in ranks if server in grid.servers(rank)]


@hypothesis.given(PLACEMENTS)
def test_the_ranks_of_a_host_serve_each_rank_once_and_share_the_work(host_of):
    grid, ranks = Grid(host_of), range(len(host_of))
    for peers in grid.hosts:
        clients = [grid.clients(peer) for peer in peers]
        assert sorted(rank for group in clients for rank in group) == list(ranks)
        for host in grid.hosts:  # also of each other host they serve the same number, within one
            counts = [len(set(group) & set(host)) for group in clients]
            assert max(counts) - min(counts) <= 1
