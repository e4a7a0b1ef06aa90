"""Two threads whose replica functions overlap, and a forked child that tries one."""

import atexit
import contextlib
import os
import threading

import hpcstrat as hs

strategy = hs.CentralStorageStrategy()
begun, may_end = threading.Event(), threading.Event()


def late():
    begun.set()
    may_end.wait()


def run():
    strategy.run(late)


threads = [threading.Thread(target=run, name="loader") for _ in range(2)]
threads[0].start()
begun.wait()
begun.clear()
threads[1].start()
begun.wait()
may_end.set()
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
