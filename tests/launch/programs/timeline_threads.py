"""Two threads whose replica functions overlap, and a forked child that tries one."""

import atexit
import contextlib
import os
import threading

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
both = threading.Barrier(2)


def late():
    both.wait()


threads = [threading.Thread(target=strategy.run, args=(late,), name="loader") for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

strategy.run(lambda: None)
child = os.fork()
if child == 0:
    with contextlib.suppress(RuntimeError):
        strategy.run(lambda: None)
    atexit._run_exitfuncs()  # not all of an exit: MPI's end is its parent's
    os._exit(0)
os.waitpid(child, 0)
strategy.run(lambda: None)
