"""Prints in all the ways that there are, on standard output and on standard error."""

import faulthandler
import logging
import os
import sys
import threading
import traceback
import warnings

from tqdm import tqdm

import hpcstrat as hs

print("first")
strategy = hs.CentralStorageStrategy()
logging.basicConfig(level=logging.INFO, format="%(message)s")
print("cross-replica", "context")


class File:
    def __del__(self):
        raise OSError(f"disk {hs.rank()} is full")


def in_threads():
    threads = [threading.Thread(target=print, args=(f"thread {k} " + 200 * "y",)) for k in range(9)]
    for thread in threads:  # which count as the top level
        thread.start()
        thread.join()


def inside():
    print(f"replica {hs.rank()}")
    for number in range(300):
        print("rank", hs.rank(), "line", number, 100 * "x")
    print(f"error of replica {hs.rank()}", file=sys.stderr)


strategy.run(in_threads)
hs.barrier()
strategy.run(inside)
sys.stdout.writelines(["a\n", "b\n"])
sys.stdout.buffer.write(b"bytes\n")

print("an error", file=sys.stderr)
warnings.warn("warned", stacklevel=1)
logging.info("noted")
# The interval is that of further states of the bar, which a slow machine would show.
for _ in tqdm(range(3), desc="bar", mininterval=1000):
    pass
hs.barrier()  # so that what one rank alone says stays together
try:
    _ = 1 / 0
except ZeroDivisionError:
    traceback.print_exc()
logging.error("logged")
os.write(2, b"of C\n")
faulthandler.dump_traceback()
File()
hs.barrier()
