"""Reductions between hosts: one order of sums, whichever way they travel."""

import functools
import itertools
import queue
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from internals import Rail, combine_hosts, halving_of, is_pairwise, rail, reduce_by_hosts

from hpcstrat import ReduceOp

KINDS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "complex64": np.complex64}


@pytest.mark.parametrize(
    ("hosts", "order"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+2)+(3+4))"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
        (8, "(((0+1)+(2+3))+((4+5)+(6+7)))"),
    ],
)
def test_the_order_of_hosts(hosts, order):
    assert combine_hosts([*map(str, range(hosts))], lambda a, b: f"({a}+{b})") == order


class Messages:
    """Stands in for `PointToPoint`, between threads; counts what it sends."""

    def __init__(self, rank, queues):
        self.rank, self.queues, self.sent = rank, queues, []

    def swap(self, outgoing, incoming, prepare=None):
        if prepare is not None:
            longest = max(message.size for message in (*outgoing.values(), *incoming.values()))
            for start in range(0, longest, 4096):
                prepare(rail.ByteRange(start, min(start + 4096, longest)))
        for rank, message in outgoing.items():
            if rank != self.rank:
                self.sent.append(message.size)
                self.queues[self.rank, rank].put(message.copy())
        for rank, message in incoming.items():
            if rank != self.rank:
                message[:] = self.queues[rank, self.rank].get(timeout=60)


def on_hosts(hosts, parts, op, ranks) -> list[Any]:
    """Each host's result, and the sizes of its messages."""
    queues, results = {}, [None] * hosts
    for a, b in itertools.product(range(hosts), repeat=2):  # here, not by two threads at once
        queues[10 * a, 10 * b] = queue.Queue()

    def run(host):
        messages: Any = Messages(10 * host, queues)
        one = Rail(messages, [10 * other for other in range(hosts)], 10 * host, ranks)
        one.reserve(parts[host][0].nbytes)
        mine = [part.copy() for part in parts[host]]
        one.all_reduce(mine[-1], mine, op)  # in place, as in shared memory
        results[host] = mine[-1], messages.sent

    threads = [threading.Thread(target=run, args=(host,)) for host in range(hosts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MEAN])
@pytest.mark.parametrize("count", [1, 70, 9001])
@pytest.mark.parametrize("hosts", [1, 2, 3, 5, 8, 12])
def test_both_ways_give_the_same_bits(monkeypatch, hosts, count, op, kind):
    """Hosts of one to three ranks, and numbers whose sums depend on the order."""
    random = np.random.default_rng([hosts, count])
    parts = [
        [(random.standard_normal(count) * 100).astype(KINDS[kind]) for _ in range(1 + host % 3)]
        for host in range(hosts)
    ]
    ranks = sum(map(len, parts))
    expected = np.empty(count, KINDS[kind])
    reduce_by_hosts(expected, parts, op, ranks)
    wide = np.float32 if kind == "bfloat16" else KINDS[kind]
    sums = [functools.reduce(np.add, [part.astype(wide) for part in of]) for of in parts]
    if hosts == 5:
        total = ((sums[0] + sums[1]) + sums[2]) + (sums[3] + sums[4])
        total = (total if op is ReduceOp.SUM else total / ranks).astype(KINDS[kind])
        assert expected.tobytes() == total.tobytes()
    for pairwise in (True, False):
        monkeypatch.setattr(rail, "is_pairwise", lambda *_, way=pairwise: way)
        for result, _ in on_hosts(hosts, parts, op, ranks):
            assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("hosts", [2, 4, 8, 16])
@pytest.mark.parametrize("kilobytes", [1, 64, 1024])
def test_halving_sends_what_its_model_says(monkeypatch, hosts, kilobytes):
    monkeypatch.setattr(rail, "is_pairwise", lambda *_: False)
    parts = [[np.full(kilobytes << 8, host, np.float32)] for host in range(hosts)]
    way = halving_of(kilobytes << 10, hosts)
    for result, sent in on_hosts(hosts, parts, ReduceOp.SUM, hosts):
        assert (result == hosts * (hosts - 1) / 2).all()
        assert (len(sent), sum(sent)) == (way.rounds, way.nbytes)
    least = 2 * (kilobytes << 10) * (hosts - 1) / hosts
    assert way.nbytes >= least and (way.halvings < hosts.bit_length() - 2 or way.nbytes == least)


def test_large_messages_go_pairwise_and_short_ones_between_many_hosts_do_not():
    for hosts in range(2, 300):
        assert is_pairwise(1 << 28, hosts) and not is_pairwise(8, hosts)
    ways = [is_pairwise(1 << bit, 128) for bit in range(3, 29)]
    assert ways == sorted(ways)  # one crossing point
