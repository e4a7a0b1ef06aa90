"""Values that replicas may get, each in a function: `odd_values.py NAME ...`."""

import copy
import pickle
import sys
from typing import Any

import numpy as np

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
N, rank = hs.size(), hs.rank()
ROUNDS = 40


def of_rank_0(function):
    return strategy.experimental_local_results(strategy.run(function))[0]


def wrong_calls():
    """A wrong call of one replica raises on all, and the next call is right."""
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


def layouts():
    """Odd layouts and dtypes have NumPy's results."""
    ways: dict[str, Any] = {
        "turned": lambda a: a[::-1, ::2],
        "fortran": np.asfortranarray,
        "transposed": lambda a: a.T,
        "none": lambda a: a[:0],
        "scalars": lambda a: a[0, 0],
        "one row for all": lambda a: np.broadcast_to(a[0], (5, 8)),
        "rows": lambda a: a[1::3],
        "readonly": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
        "odd address": lambda a: (
            np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)
        ),
    }
    dtypes = (
        "bool int8 uint8 int16 uint32 int64 uint64 float16 float32 float64 complex64 complex128"
    )
    for dtype in map(np.dtype, [*dtypes.split(), ">f8", ">i4", "longdouble"]):
        for name, layout in ways.items():
            everyones = [
                layout(np.random.default_rng(r).integers(0, 9, (6, 8)).astype(dtype))
                for r in range(N)
            ]

            def fn(own=everyones[rank]):
                context = hs.get_replica_context()
                out = [context.broadcast(own, 1)]
                if own.ndim:
                    parts = [own, own[:1], own[:0]][:N]
                    out += [context.all_gather(own, 0), *context.all_to_all(parts)]
                return out

            expected = [everyones[1]]
            if everyones[0].ndim:
                parts = [[one, one[:1], one[:0]][rank] for one in everyones]
                expected += [np.concatenate(everyones), *parts]
            try:
                found = strategy.experimental_local_results(strategy.run(fn))[rank]
            except TypeError as error:
                refused = str(error)
                assert dtype.str[1:] in refused or dtype.name in refused, (dtype, name, refused)
                continue
            for one, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, wanted, err_msg=f"{dtype} {name}")
                assert np.asarray(one).dtype == dtype.newbyteorder("="), (dtype, name, one.dtype)


def writes():
    """A variable is written by `assign`, or not at all."""
    with strategy.scope():
        w = hs.Variable(np.arange(6.0).reshape(2, 3))
    random = np.random.default_rng(0)
    ways: list[Any] = [
        lambda v: v.__setitem__(0, 9),
        lambda v: v.__iadd__(1),
        lambda v: np.add(v, 1, out=v),
        lambda v: np.copyto(v, 9),
        lambda v: np.put(v, 0, 9),
        lambda v: np.place(v, v > 0, 9),
        lambda v: np.putmask(v, v > 0, 9),
        lambda v: v.fill(9),
        lambda v: v[::-1].sort(),
        lambda v: random.shuffle(v),
        lambda v: v.flat.__setitem__(0, 9),
        lambda v: v.setflags(write=True),
        lambda v: v.view(np.int64).fill(9),
        lambda v: v.byteswap(True),
        lambda v: v.reshape(-1).__setitem__(0, 9),
        lambda v: memoryview(v).cast("B").__setitem__(0, 9),
        lambda v: v.base.__setitem__(..., 9),
        lambda v: random.random(out=v),
        lambda v: copy.copy({"w": w})["w"].value().fill(9),
        lambda v: copy.deepcopy({"w": w})["w"].value().fill(9),
        lambda v: pickle.loads(pickle.dumps({"w": w}))["w"].value().fill(9),
    ]
    refusals = (ValueError, TypeError, AttributeError, BufferError, RuntimeError)
    for number, way in enumerate(ways):

        def write(way=way):
            try:
                way(w.value())
            except refusals:
                pass

        strategy.run(write)
        assert (w.numpy() == np.arange(6.0).reshape(2, 3)).all(), number


for name in sys.argv[1:]:
    globals()[name]()
    hs.barrier()
    print(name)
