"""The strategies that tests run on: add a new one here."""

import hpcstrat as hs

STRATEGIES = [hs.CentralStorageStrategy, hs.MirroredStrategy]
"""The strategies for any number of replicas on one host."""


def strategies_for(size):
    """The strategies to test on this number of ranks."""
    return STRATEGIES + [hs.OneDeviceStrategy] * (size == 1)


def in_both_contexts(strategy, fn):
    """Calls a function in the strategy's scope, and in each replica."""
    with strategy.scope():
        fn()
    strategy.run(fn)
