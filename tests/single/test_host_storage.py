"""Messages of storage in host memory."""

import gc
import weakref

import numpy as np
from internals import MirroredHostStorage, SoloCommunicator
from package_kernels import rule_of

from hpcstrat import ReduceOp, optimizers


def test_a_sum_that_became_too_small_is_given_back():
    """It would otherwise live as long as its plans, and each assigned variable has a plan."""
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
