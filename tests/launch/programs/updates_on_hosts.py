"""Updates on several hosts, each with a copy of the variables: as on one host, by closed forms."""
# ruff: noqa: B023 (replica functions run at once)

import os
import tempfile
import zlib

import numpy as np
from several_hosts import Memory, N, hosts, rank, report, strategy

import hpcstrat as hs

SUM = N * (N + 1) // 2  # of the replicas' gradients: rank r has r + 1 parts
SHAPES = [(0,), (1,), (), (N + 1,), (7, 11), (1009,), (60_001,)]
DTYPES = [np.float32, np.float64, np.float16]


def pattern(shape, dtype=np.float64):
    return (np.arange(np.prod(shape, dtype=int)) % 4).reshape(shape).astype(dtype)


def make(shapes=SHAPES, **options):
    with strategy.scope():
        return [
            hs.Variable(np.zeros(shape, DTYPES[i % len(DTYPES)]), **options)
            for i, shape in enumerate(shapes)
        ]


def own(variables):
    return [pattern(v.shape, v.dtype) * v.dtype.type(rank + 1) for v in variables]


def step(optimizer, variables):
    strategy.run(lambda: optimizer.apply_gradients([*zip(own(variables), variables, strict=True)]))


found = []


def check(variables, factor, rtol=0.0):
    for i, v in enumerate(variables):
        scale = factor[i] if isinstance(factor, list) else factor
        expected = scale * pattern(v.shape)
        assert np.allclose(v.numpy(), expected, rtol=rtol, atol=0), (v, expected)
        found.append(zlib.crc32(v.numpy().tobytes()))  # the same bits on all ranks


# dense
variables, optimizer = make(), hs.optimizers.SGD(1.0, momentum=1.0)
for steps in (1, 2, 3):
    step(optimizer, variables)
    check(variables, -SUM * steps * (steps + 1) / 2)
one = make([(3,)])  # a message that goes to every rank as it is
step(hs.optimizers.SGD(1.0), one)
check(one, -SUM)

# clipped
for shapes in (SHAPES, [(0,), (3,), (5,)]):
    squares = [float((pattern(shape) ** 2).sum()) for shape in shapes]
    norm = SUM * np.sqrt(sum(squares))
    variables = make(shapes)
    for steps in (1, 2):
        step(hs.optimizers.SGD(1.0, global_clipnorm=norm / 4), variables)
        check(variables, -steps * SUM / 4, 2e-3)
    variables = make(shapes)
    step(hs.optimizers.SGD(1.0, clipnorm=2.0), variables)
    scales = [min(1, 2 / (SUM * np.sqrt(square) or 1)) for square in squares]
    check(variables, [-SUM * scale for scale in scales], 2e-3)

# rows
(v,) = make([(9 + N, 3)])
optimizer = hs.optimizers.SGD(1.0, momentum=1.0)
rows = np.arange(9) + rank if rank else np.arange(0)
gradient = hs.IndexedSlices(np.ones((rows.size, 3), np.float32), rows, v.shape)
strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
expected = np.zeros(v.shape)
for other in range(1, N):
    expected[other : other + 9] -= 1
assert v.numpy().tolist() == expected.tolist()
found.append(zlib.crc32(v.numpy().tobytes()))

# assigned
for shape in SHAPES:
    (v,), (w,), (first,) = [
        make([shape], aggregation=how) for how in ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
    ]
    value = pattern(shape) * (rank + 1)
    strategy.run(lambda: v.assign(value))
    check([v], SUM)
    strategy.run(lambda: v.assign_sub(value))
    check([v], 0)
    strategy.run(lambda: w.assign_add(2 * value))
    check([w], N + 1)
    strategy.run(lambda: first.assign(value))
    check([first], 1)
    w.assign(pattern(shape))
    check([w], 1)
    assert strategy.extended.update(w, lambda w: w.assign_add(2 * w.value())) is w
    check([w], 3)
    strategy.run(lambda: np.testing.assert_array_equal(w.value(), 3 * pattern(shape)))

# buffers
for shapes in ([(3,), (2, 2)], SHAPES):
    variables, optimizer = make(shapes), hs.optimizers.SGD(1.0, momentum=1.0)
    buffers = optimizer.gradient_buffers(variables)
    for steps in (1, 2, 3):
        if steps == 2:  # other arrays in between
            step(optimizer, variables)
        else:
            for buffer, gradient in zip(buffers, own(variables), strict=True):
                buffer[...] = gradient
            strategy.run(lambda: optimizer.apply_gradients([*zip(buffers, variables, strict=True)]))
        check(variables, -SUM * steps * (steps + 1) / 2)

# on read
(total,) = make([(5,)], synchronization="ON_READ", aggregation="SUM")
strategy.run(lambda: total.assign_add(pattern((5,)) * (rank + 1)))
check([total], SUM)
own_value = (rank + 1) * pattern((5,))
strategy.run(lambda: np.testing.assert_array_equal(total.value(), own_value))

# saved
variables, optimizer = make(), hs.optimizers.SGD(1.0, momentum=1.0)
step(optimizer, variables)
path = hs.broadcast_object(tempfile.mkdtemp()) + "/saved"
saved = hs.checkpoint.Checkpoint(variables=variables, optimizer=optimizer)
written, pwrite = [], os.pwrite
os.pwrite = lambda *arguments: (written.append(arguments), pwrite(*arguments))[1]
for blocking in (True, False):
    saved.save(path, blocking=blocking)
    saved.sync()
    step(optimizer, variables)
    check(variables, -SUM * 3)
    saved.restore(path)
    check(variables, -SUM)
assert bool(written) == (rank == 0)  # it alone writes, for all hosts
others, optimizer = make(), hs.optimizers.SGD(1.0, momentum=1.0)
hs.checkpoint.Checkpoint(variables=others, optimizer=optimizer).restore(path)
step(optimizer, others)
check(others, -SUM * 3)  # the velocity was saved

# no memory
memory = Memory()
before = make([(5,)])
step(hs.optimizers.SGD(1.0), before)
for host in (0, 1):
    memory.is_full = hosts[rank] == host
    try:
        make([(300_000,)])
    except MemoryError as error:
        found.append("planted" in str(error))
    memory.is_full = False
    variables = [*make([(3,), (300_000,)]), *before]
    step(hs.optimizers.SGD(1.0), variables)
    check(variables, [-SUM, -SUM, -SUM * (host + 2)])
assert found.count(True) == 2
report(found)
