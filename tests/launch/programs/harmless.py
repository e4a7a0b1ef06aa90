"""What looks like a fault, but is not: children, threads, and errors that the program catches."""

import contextlib
import contextvars
import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np
from planting import die

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
rank, last = hs.rank(), hs.rank() == hs.size() - 1
with strategy.scope():
    v = hs.Variable(np.arange(3.0))


def child_ends(act):
    """Forks a child of the last rank, which acts; returns its status as `waitpid` has it."""
    if not last:
        return None
    child = os.fork()
    if child == 0:
        act()
    return os.waitpid(child, 0)[1]


# A child that dies, one that exits, and one that computes.
assert child_ends(die) in (None, signal.SIGKILL)
# After sys.exit mpi4py's own last act, MPI_Finalize, would wait for the others.
assert child_ends(lambda: os._exit(3)) in (None, 3 << 8)
assert child_ends(lambda: os._exit(v.numpy().sum() != 3 or hs.rank() != rank)) in (None, 0)
v.assign_add(np.ones(3))
print(v.numpy())


class Forking:
    """In whose parent's call a child raises."""

    def __array__(self, *_, **__):
        if last:
            child = os.fork()
            if child == 0:
                raise ValueError("the child's")
            os.waitpid(child, 0)
        return np.ones(3)


process = os.getpid()
try:
    v.assign(Forking())
except TypeError:
    if os.getpid() == process:
        raise
    os._exit(0)
print(v.numpy())

with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))

# Calls in one thread after the other; a thread that makes the calls of a replica function.
found = []


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def work():
    found.append(strategy.reduce("SUM", strategy.run(lambda: rank + 1.0), None))


def step():
    sums, sum_up = [], hs.get_replica_context().all_reduce
    context = contextvars.copy_context()
    in_a_thread(lambda: context.run(lambda: sums.append(sum_up("SUM", 1.0))))
    return sums[0]


for _ in range(3):
    in_a_thread(work)
    work()
print(*found)
print(strategy.reduce("MEAN", strategy.run(step), None))

with contextlib.suppress(ValueError):
    strategy.run(lambda: int("x"))
in_a_thread(sys.exit)

# An overflow that one rank's NumPy would raise.
np.seterr(all="raise" if last else "ignore")
own = np.full(3, 12_800 + 6_400 * rank, np.float16)
assert np.isinf(strategy.reduce("SUM", strategy.run(lambda: own), axis=0))

time.sleep(1.5)  # for longer than a watchdog looks
hs.barrier()
print("went on")
