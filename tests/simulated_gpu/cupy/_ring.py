"""Messages between ranks on one host: each posts to its own memory, which the others read."""

import mmap
import os
import pickle
import time

import numpy as np

_HEAD = 1 << 16
_POSTS = 1024  # messages in flight at most
_ROOM = 1 << 20
PATIENCE = 600.0


def new_id():
    """What the ranks need to find each other: the path of the first rank's table, without a name."""
    table = os.memfd_create("simulated-nccl")
    os.ftruncate(table, _HEAD)
    return f"/proc/{os.getpid()}/fd/{table}".encode().ljust(128, b"\0")


class Ring:
    """One rank's end of the ring. The constructor waits for all ranks, and shares a `fact`."""

    def __init__(self, size, identity, rank, fact):
        self.rank, self.size = rank, size
        self._table_file = os.open(identity.rstrip(b"\0"), os.O_RDWR)
        self._table = np.frombuffer(mmap.mmap(self._table_file, _HEAD), np.int64)
        self._own = _Outbox(os.memfd_create(f"simulated-nccl-{rank}"))
        row = self._table[8 * rank : 8 * rank + 8]
        row[:3] = os.getpid(), self._own.file, fact
        row[3] = 1
        _wait_for(lambda: all(self._table[8 * other + 3] for other in range(size)))
        rows = self._table[: 8 * size].reshape(size, 8)
        self.facts = rows[:, 2].tolist()
        self._boxes = [
            self._own
            if other == rank
            else _Outbox(os.open(f"/proc/{rows[other, 0]}/fd/{rows[other, 1]}", os.O_RDWR))
            for other in range(size)
        ]
        row[4] = 1
        _wait_for(lambda: all(self._table[8 * other + 4] for other in range(size)))

    def post(self, message):
        """Pickles and posts a message; returns its number, or None if too many are in flight."""
        done = min(int(box.head[1]) for box in self._boxes)
        if int(self._own.head[0]) - done >= _POSTS:
            return None
        return self._own.post(
            pickle.dumps(message, protocol=5), is_empty=int(self._own.head[0]) == done
        )

    def everyones(self, number):
        """All ranks' messages with this number; None while any is missing."""
        if any(int(box.head[0]) < number for box in self._boxes):
            return None
        return [pickle.loads(box.message(number)) for box in self._boxes]

    def finish(self, number):
        """Records that this rank no longer needs the messages with this number."""
        self._own.head[1] = number

    def close(self):
        """Frees the memory."""
        for box in self._boxes:
            box.close()
        os.close(self._table_file)


class _Outbox:
    """A rank's memory: its counts of posted and of read messages, and the last messages."""

    def __init__(self, file):
        self.file = file
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, _HEAD + _ROOM)
        self._map()
        self._end = _HEAD

    def _map(self):
        self._bytes = np.frombuffer(mmap.mmap(self.file, 0), np.uint8)
        self.head = self._bytes[:_HEAD].view(np.int64)

    def post(self, message, is_empty):
        start = _HEAD if is_empty else self._end
        if start + len(message) > self._bytes.size:
            os.ftruncate(self.file, start + 2 * len(message))
            self._map()
        self._bytes[start : start + len(message)] = np.frombuffer(message, np.uint8)
        self._end = start + -(-len(message) // 64) * 64
        number = int(self.head[0]) + 1
        place = 8 + 2 * (number % _POSTS)
        self.head[place : place + 2] = start, len(message)
        self.head[0] = number
        return number

    def message(self, number):
        place = 8 + 2 * (number % _POSTS)
        start, length = self.head[place : place + 2].tolist()
        if start + length > self._bytes.size:
            self._map()
        return self._bytes[start : start + length]

    def close(self):
        os.close(self.file)


def _wait_for(condition):
    deadline, pause = time.monotonic() + PATIENCE, 1e-5
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the simulated NCCL: a rank does not come")
        time.sleep(pause)
        pause = min(2 * pause, 2e-3)
