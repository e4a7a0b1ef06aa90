"""A training of 40 steps with a known end, in whose steps attacks can be written."""

import fractions

STEPS = 40
APPLY = "optimizer.apply_gradients([(np.full(v.shape, rank + 1.0), v) for v in variables])"


def weight(ranks, momentum=0.0, before=()):
    """The weight at the end: each step subtracts every rank's number + 1, and the momentum.

    Args:
        ranks: the number of ranks.
        momentum: see `training`.
        before: the numbers of ranks in the first steps.
    """
    moved, total = fractions.Fraction(), fractions.Fraction()
    for count in [*before, *[ranks] * (STEPS - len(before))]:
        moved = fractions.Fraction(momentum) * moved - count * (count + 1) // 2
        total += moved
    return total


def training(
    attack="pass",
    before="pass",
    step_seconds=0.0,
    strategy="CentralStorageStrategy()",
    sizes=(5,),
    momentum=0.0,
):
    """The program.

    Args:
        attack: a statement in each step, which knows `step`, `rank` and `start`, the number of the
            start.
        before: a statement before the library is imported.
        step_seconds: additional seconds per step.
        strategy: the call that makes it.
        sizes: of the variables.
        momentum: of the optimizer; a sum of few powers of two, so that sums are exact.
    """
    return f"""
import fractions, os, pathlib, signal, subprocess, sys, time
{before}
import numpy as np
import hpcstrat as hs

rank, last = hs.rank(), hs.size() - 1
strategy = hs.{strategy}
start = hs.on_lead(lambda: len(list(pathlib.Path().glob("start-*"))))
hs.on_lead(lambda: pathlib.Path(f"start-{{start}}").touch())
with strategy.scope():
    variables = [hs.Variable(np.zeros(size)) for size in {sizes}]
    optimizer = hs.optimizers.SGD(1.0, momentum={momentum})
checkpoint = hs.checkpoint.Checkpoint(variables=variables, optimizer=optimizer)
with hs.checkpoint.CheckpointManager(checkpoint, "checkpoint", every=2) as manager:
    manager.restore_or_initialize()
    while manager.steps < {STEPS}:
        step = manager.steps + 1
        def update():
            {APPLY}
        strategy.run(update)
        {attack}
        time.sleep({step_seconds})
        manager.step()
        if rank == 0:
            pathlib.Path(f"step-{{step}}").touch()
print("weight", *{{fractions.Fraction(one) for v in variables for one in np.unique(v.numpy())}})
"""
