"""Storage for GPUs on a replica that uses the CPU while other replicas use GPUs; its messages."""

import gc
import weakref

import numpy as np
from internals import (
    MirroredDeviceStorage,
    MirroredHostStorage,
    SoloCommunicator,
    StagedCommunicator,
)
from package_kernels import rule_of

from hpcstrat import ReduceOp, optimizers


def test_buffers_may_be_passed_in_another_order():
    """Each gradient is then copied to where another gradient is."""
    storage = MirroredDeviceStorage(StagedCommunicator(SoloCommunicator(), None), 0)
    blocks = [storage.create(np.zeros(3, np.float32)) for _ in range(3)]
    plan = storage.plan(blocks, [()] * 3)
    storage.make_buffers(plan)
    rule = rule_of(optimizers.SGD(1.0), 1)
    for turn in range(3):
        for number, buffer in enumerate(plan.buffers.arrays):
            buffer[...] = number + 1
        values = [plan.buffers.arrays[(i + turn) % 3] for i in range(3)]
        values[2] = values[2][::-1]  # a view
        before = [block.array.copy() for block in blocks]
        storage.update(plan, values, ReduceOp.SUM, rule)
        changes = [(old - block.array).tolist() for old, block in zip(before, blocks, strict=True)]
        assert changes == [[(i + turn) % 3 + 1] * 3 for i in range(3)]


def test_a_message_that_became_too_small_is_given_back():
    """It would otherwise live as long as its plans, and each assigned variable has a plan."""
    storage = MirroredDeviceStorage(StagedCommunicator(SoloCommunicator(), None), 0)
    rule = rule_of(optimizers.SGD(1.0), 1)
    plans = [storage.plan([storage.create(np.zeros(n, np.float32))], [()]) for n in (3, 5, 4, 900)]
    for turn in range(2):
        messages = []
        for plan in plans:
            gradient = np.ones(plan.order.blocks[0].array.shape, np.float32)
            storage.update(plan, [gradient], ReduceOp.SUM, rule)
            messages.append(weakref.ref(plan.memory))
            assert plan.order.blocks[0].array.tolist() == (-(turn + 1) * gradient).tolist()
        gc.collect()
        assert {id(message()) for message in messages if message() is not None} == {
            id(plans[-1].memory)
        }


def test_buffers_stay_when_another_plan_needs_a_larger_message():
    """The plan has had the message that all plans share, before it got buffers."""
    storage = MirroredDeviceStorage(StagedCommunicator(SoloCommunicator(), None), 0)
    rule = rule_of(optimizers.SGD(1.0), 1)
    blocks = [storage.create(np.zeros(n, np.float32)) for n in (3, 3000)]
    small, large = (storage.plan([block], [()]) for block in blocks)
    storage.update(small, [np.full(3, 1, np.float32)], ReduceOp.SUM, rule)
    storage.make_buffers(small)
    storage.update(large, [np.full(3000, 2, np.float32)], ReduceOp.SUM, rule)
    (buffer,) = small.buffers.arrays
    buffer[...] = 4
    storage.update(small, [buffer], ReduceOp.SUM, rule)
    assert [block.array[-1] for block in blocks] == [-5, -2]


def test_a_sum_that_became_too_small_is_given_back():
    """On a host; each assigned variable has a plan."""
    storage = MirroredHostStorage(SoloCommunicator())
    rule = rule_of(optimizers.SGD(1.0), 1)
    plans = [storage.plan([storage.create(np.zeros(n, np.float32))], [()]) for n in (3, 5, 900)]
    sums = []
    for plan in plans:
        gradient = np.ones(plan.order.blocks[0].array.shape, np.float32)
        storage.update(plan, [gradient], ReduceOp.SUM, rule)
        sums.append(weakref.ref(plan.memory))
        assert plan.order.blocks[0].array.tolist() == (-gradient).tolist()
    gc.collect()
    assert [one() is not None for one in sums] == [False, False, True]
