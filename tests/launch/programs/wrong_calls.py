"""A wrong call of one replica raises on all, and the next call is right."""

from typing import Any

import numpy as np

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
N, rank, ROUNDS = hs.size(), hs.rank(), 40


def of_rank_0(function):
    return strategy.experimental_local_results(strategy.run(function))[0]


random = np.random.default_rng(40)
right = np.arange(6.0).reshape(2, 3)
calls: list[Any] = [
    lambda c, v, op, axis: c.all_reduce(op, v),
    lambda c, v, op, axis: c.all_gather(v, axis),
    lambda c, v, op, axis: c.broadcast(v, axis),
    lambda c, v, op, axis: c.reduce_scatter(op, v, axis),
    lambda c, v, op, axis: c.all_to_all([v] * (N if axis < 2 else 2)),
    lambda c, v, op, axis: c.neighbor_exchange(v, v, periodic=op == "SUM"),
]
wrong = [None, "x", b"x", [right], {"a": right}, right.astype("f4"), right.astype("M8[s]")]
wrong += [object(), right[0, 0], np.zeros((0, 3, 2)), right > 1, hs.data.Dataset.range(3)]
wrong += [np.array([right, None], object)]
raised = 0
for number in range(ROUNDS):
    culprit, name, odd = (int(random.integers(n)) for n in (N, len(calls), len(wrong)))
    other = calls[random.integers(len(calls))] if number % 4 == 0 else calls[name]
    mine = {
        0: (other, right, "SUM", 0),
        1: (calls[name], right, "MEAN", 9),
    }.get(number % 4, (calls[name], wrong[odd], "SUM", 0))

    def fn(call=calls[name], mine=mine, culprit=culprit):
        context = hs.get_replica_context()
        if context.replica_id_in_sync_group != culprit:
            return call(context, right, "SUM", 0)
        return mine[0](context, *mine[1:])

    try:
        strategy.run(fn)
        failed = 0
    except (hs.ReplicaMismatchError, TypeError, ValueError, NotImplementedError):
        failed = 1
    own = np.array([failed, rank + 1])
    found = of_rank_0(lambda own=own: hs.get_replica_context().all_reduce("SUM", own)).tolist()
    assert found[1] == N * (N + 1) // 2 and found[0] in (0, N), (number, found, culprit, name)
    raised += failed
assert raised > ROUNDS // 3
print("all raised")
