"""A step of SGD with momentum written by hand with mpi4py, in two ways, and one of Adam.

Each takes the initial weights as arrays. `weights` are its current weights, updated in place;
`step(gradients)` sums the gradients over the ranks and updates them.
"""

import numpy as np
from mpi4py import MPI
from networks import MOMENTUM, RATE

import hpcstrat as hs
from hpcstrat._update import compiled
from hpcstrat._update.formula import trace

COMM = MPI.COMM_WORLD
ADAM_RATE = 1e-4
_CHUNK = 16_384  # elements that are updated while they are in cache


def _views(flat, arrays):
    ends = np.cumsum([0, *(array.size for array in arrays)])
    return [
        flat[a:b].reshape(array.shape) for a, b, array in zip(ends, ends[1:], arrays, strict=False)
    ]


def _update(weight, velocity, gradient):
    np.multiply(velocity, MOMENTUM, out=velocity)
    np.multiply(gradient, RATE, out=gradient)
    np.subtract(velocity, gradient, out=velocity)
    np.add(weight, velocity, out=weight)


class AllReduce:
    """One Allreduce of the flat gradient, then every rank updates its own copy."""

    def __init__(self, start):
        self._flat = np.concatenate([value.ravel() for value in start])
        self._velocity, self._gradient = np.zeros_like(self._flat), np.empty_like(self._flat)
        self._places = _views(self._gradient, start)
        self.weights = _views(self._flat, start)

    def step(self, gradients):
        for place, value in zip(self._places, gradients, strict=True):
            place[...] = value
        COMM.Allreduce(MPI.IN_PLACE, self._gradient)
        _update(self._flat, self._velocity, self._gradient)


class Window:
    """One copy in an MPI-3 shared window. Each rank updates its slice between two barriers."""

    def __init__(self, start, barrier=COMM.Barrier):
        size = sum(value.size for value in start)
        self._window = MPI.Win.Allocate_shared(
            (2 + COMM.size) * size * 4 if COMM.rank == 0 else 0, 4, comm=COMM
        )
        memory = np.frombuffer(self._window.Shared_query(0)[0], np.float32).reshape(
            2 + COMM.size, size
        )
        self._places = _views(memory[2 + COMM.rank], start)
        self.weights = _views(memory[0], start)
        if COMM.rank == 0:
            memory[1] = 0
            for weight, value in zip(self.weights, start, strict=True):
                weight[...] = value
        COMM.Barrier()
        first, last = (size * rank // COMM.size for rank in (COMM.rank, COMM.rank + 1))
        self._chunks = [memory[:, a : min(a + _CHUNK, last)] for a in range(first, last, _CHUNK)]
        self._sum = np.empty(_CHUNK, np.float32)
        self.barrier = barrier

    def step(self, gradients):
        self.write(gradients)
        self.barrier()
        self.update()
        self.barrier()

    def write(self, gradients):
        for place, value in zip(self._places, gradients, strict=True):
            place[...] = value

    def update(self):
        for weight, velocity, *mailboxes in self._chunks:
            total = self._sum[: weight.size]
            total[...] = mailboxes[0]
            for mailbox in mailboxes[1:]:
                np.add(total, mailbox, out=total)
            _update(weight, velocity, total)


class _CompiledAdam:
    """The library's compiled loop over rows of memory: the weights, both slots, the messages."""

    def __init__(self, memory, messages):
        self._adam, self._steps = hs.optimizers.Adam(ADAM_RATE), 0
        names, dtype = [*self._adam.numbers(ADAM_RATE, 1)], np.dtype(np.float32)
        kernel, self._literals = trace("Adam.formula", self._adam.formula, 2, names)
        compiled.prepare(kernel, dtype, 1, is_shared=False)
        self._numbers = np.empty(kernel.numbers)
        self._table = compiled.table([list(memory)], messages)
        self._update = compiled.loops(kernel, dtype).update(self._numbers)

    def step(self):
        self._steps += 1
        numbers = self._adam.numbers(ADAM_RATE, self._steps)
        self._numbers[:] = *numbers.values(), *self._literals
        self._update(*self._table)


class WindowAdam:
    """As Window, but Adam, by the library's compiled loop. What the library adds is overhead."""

    def __init__(self, start):
        size = sum(value.size for value in start)
        self._window = MPI.Win.Allocate_shared(
            (3 + COMM.size) * size * 4 if COMM.rank == 0 else 0, 4, comm=COMM
        )
        memory = np.frombuffer(self._window.Shared_query(0)[0], np.float32).reshape(
            3 + COMM.size, size
        )
        self._places = _views(memory[3 + COMM.rank], start)
        self.weights = _views(memory[0], start)
        if COMM.rank == 0:
            memory[1:3] = 0
            for weight, value in zip(self.weights, start, strict=True):
                weight[...] = value
        COMM.Barrier()
        first, last = (size * rank // COMM.size for rank in (COMM.rank, COMM.rank + 1))
        self._adam = _CompiledAdam(memory[:, first:last], COMM.size)

    def step(self, gradients):
        for place, value in zip(self._places, gradients, strict=True):
            place[...] = value
        COMM.Barrier()
        self._adam.step()
        COMM.Barrier()


class AllReduceAdam:
    """As AllReduce, with Adam by the library's own compiled loop, on ranks of any hosts."""

    def __init__(self, start):
        size = sum(value.size for value in start)
        # The weights, both slots, and the sum of the gradients.
        memory = np.zeros((4, size), np.float32)
        self.weights, self._places = _views(memory[0], start), _views(memory[3], start)
        for weight, value in zip(self.weights, start, strict=True):
            weight[...] = value
        self._sum = memory[3]
        self._adam = _CompiledAdam(memory, 1)

    def step(self, gradients):
        for place, value in zip(self._places, gradients, strict=True):
            place[...] = value
        COMM.Allreduce(MPI.IN_PLACE, self._sum)
        self._adam.step()
