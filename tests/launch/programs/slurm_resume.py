"""The example, whose first start waits at its 50th step until every rank has the signal."""

import os
import runpy
import signal
import time

import hpcstrat as hs

step, received = hs.checkpoint.CheckpointManager.step, []


def wait_and_step(manager):
    if manager.steps == 0:
        handle = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *given: (received.append(given), handle(*given)))  # pyright: ignore[reportCallIssue, reportOptionalCall]
    if manager.steps == 49 and "SLURM_RESTART_COUNT" not in os.environ:
        print("waits")
        while not received:
            time.sleep(0.01)
    step(manager)


hs.checkpoint.CheckpointManager.step = wait_and_step  # pyright: ignore[reportAttributeAccessIssue]
runpy.run_path("examples/resume.py", run_name="__main__")
