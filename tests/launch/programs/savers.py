"""Processes that save in a loop, and are killed: `savers.py alone|together PATH True|False`."""

import os
import pathlib
import random
import signal
import sys
import time

import numpy as np

import hpcstrat as hs
from hpcstrat.checkpoint._format import CheckpointFile

SIZE = 1 << 17
how, path, blocking = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3] == "True"


def save_for_ever(ready):
    """Saves 1, 2, ..., after the last that is there; tells of each save."""
    values, i = hs.Variable(np.zeros(SIZE)), hs.Variable(0, dtype=np.int64)
    checkpoint = hs.checkpoint.Checkpoint(values=values, i=i)
    random.seed(os.getpid())
    if not path.exists():
        checkpoint.save(path)
    elif how == "alone":
        checkpoint.restore(path)
    while True:
        i.assign_add(1)
        values.assign(np.full(SIZE, float(i) + (os.getpid() / 1e7 if how == "together" else 0)))
        try:
            checkpoint.save(path, keep=3, blocking=blocking)
        except OSError as error:
            removed = "another program, which saves to it too, has removed the new file"
            assert how == "together"
            assert removed in str(error) or isinstance(error, FileNotFoundError), error
            time.sleep(random.random() * 0.02)  # or they would stop each other again and again
            os.write(ready, b"x")
        else:
            os.write(ready, b".")


def started():
    done, ready = os.pipe()
    child = os.fork()  # MPI has not started here
    if child == 0:
        try:
            save_for_ever(ready)
        finally:
            os._exit(1)  # an error in saving
    os.close(ready)
    while (outcome := os.read(done, 1)) != b".":
        assert outcome, "a save failed"
    return child, done


def killed(child, done):
    """What it has told."""
    os.kill(child, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, "a save failed"
    told = os.read(done, 1 << 16)
    os.close(done)
    return told


def value(path):
    """The number that was saved, whole and checked."""
    with CheckpointFile(path) as file:
        (values,) = [np.frombuffer(bytes(part)) for part in file.parts("values")]
        (i,) = [int(np.frombuffer(part, np.int64)[0]) for part in file.parts("i")]
    assert values.size == SIZE and (values == values[0]).all() and int(values[0]) == i
    return i


def save_alone():
    last = partials = 0
    for _ in range(50):
        saver = started()
        time.sleep(random.random() * 0.01)
        reported = len(killed(*saver))
        names = os.listdir(path.parent)
        left = sum(".partial" in name for name in names)
        assert left <= 1  # what one kill leaves, the next program removes
        partials += left
        # In the background, only the one before the last that was reported has surely been written.
        assert value(path) >= last + blocking + reported, (value(path), last, reported)
        last = value(path)
        older = [value(f"{path}.{k}") for k in (1, 2) if f"{path.name}.{k}" in names]
        assert older == sorted(older, reverse=True)
    print(partials > 0)


def save_together():
    told = b""
    savers = [started(), started()]
    for k in range(400):
        value(path)
        if k % 20 == 19:
            told += killed(*savers.pop(random.randrange(2)))
            savers.append(started())
    for saver in savers:
        told += killed(*saver)
    killed(*started())  # which has removed what the others left
    assert sum("partial" in name for name in os.listdir(path.parent)) <= 1  # of the last kill
    for name in sorted(os.listdir(path.parent)):
        if "partial" not in name:
            value(path.with_name(name))
            print(name)
    print(bytes(sorted(set(told))))


random.seed(3)
{"alone": save_alone, "together": save_together}[how]()
