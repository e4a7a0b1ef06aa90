"""Memory for variables in slabs: what is contiguous, and when a slab is freed."""

import itertools
import weakref

import numpy as np
import pytest
from internals import ALIGNMENT, MessageOrder, SlabAllocator, runs

MIB = 1 << 20


class Device:
    """Memory of `nbytes` bytes; its slabs are not touched and so cost nothing.

    Attributes:
        used: bytes allocated now.
        slabs: number of slabs allocated so far.
    """

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.used = self.slabs = 0

    def allocate(self, nbytes):
        if self.used + nbytes > self.nbytes:
            raise MemoryError(f"no {nbytes} bytes")
        array = np.empty(nbytes, np.uint8)
        self.used += nbytes
        self.slabs += 1
        weakref.finalize(array, self.give_back, nbytes)
        return array

    def give_back(self, nbytes):
        self.used -= nbytes


def network(memory, sizes, slots=0):
    """Blocks for a network's matrices and vectors, and for the slots of each."""
    shapes = [
        shape
        for rows, columns in itertools.pairwise(sizes)
        for shape in ((rows, columns), (columns,))
    ]
    made = [memory.new_block(shape, np.dtype(np.float32)) for shape in shapes]
    kinds = [
        [memory.new_block(block.array.shape, block.array.dtype) for block in made]
        for _ in range(slots)
    ]
    return made, [tuple(kind[i] for kind in kinds) for i in range(len(made))]


def ranges(variables, slots):
    return len(runs(MessageOrder(variables, slots, ALIGNMENT).shards, ALIGNMENT))


@pytest.mark.parametrize(
    "sizes", [(1024, 2048, 2048, 1024), (4096, 4096, 4096), (30_000, 4000, 4000, 100)], ids=str
)
def test_a_network_lies_in_few_ranges(sizes):
    memory = SlabAllocator(Device(1 << 40).allocate)
    variables, slots = network(memory, sizes, slots=2)
    assert ranges(variables, [()] * len(variables)) <= 2  # for sending new values
    assert ranges(variables, slots) <= 4  # for updating everything


def test_networks_made_and_dropped_in_turn():
    """Each is larger than the one before, so that no hole is large enough."""
    device = Device(1100 * MIB)
    memory = SlabAllocator(device.allocate)
    for width in range(1000, 8000, 500):
        made = network(memory, (width, width, width))
        del made
    kept, _ = network(memory, (100, 100))
    again = network(memory, (8000, 8000, 8000))
    del again
    for block in kept:  # a slab in use is kept
        assert memory.has(block.array)


def test_variables_that_are_made_and_die_use_their_memory_again():
    device = Device(1 << 40)
    memory = SlabAllocator(device.allocate)
    for _ in range(100):
        memory.new_block((MIB,), np.dtype(np.float32))
    assert device.slabs == 1


def test_a_slab_may_be_as_small_as_there_is_room():
    device = Device(100 * MIB)
    memory = SlabAllocator(device.allocate)
    blocks = [memory.new_block((4 * MIB,), np.dtype(np.float32)) for number in range(6)]
    assert [block.array.nbytes for block in blocks] == [16 * MIB] * 6
    with pytest.raises(MemoryError):
        memory.new_block((4 * MIB,), np.dtype(np.float32))


def test_blocks_without_elements_keep_their_slab():
    memory = SlabAllocator(Device(1 << 40).allocate)
    empty = memory.new_block((0, 3), np.dtype(np.float32))
    large = memory.new_block((200 * MIB,), np.dtype(np.float32))
    assert ranges([empty, large], [(), ()]) <= 2
    assert memory.part(*empty.memory).size == 0
