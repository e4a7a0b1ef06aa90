"""Slabs: what is contiguous, how large they are, and when one is freed."""

import itertools
import weakref

import numpy as np
import pytest
from internals import GPU_ALIGNMENT, MessageOrder, Slab, Slabs, allocate_private, runs, slabs

MIB = 1 << 20
FLOAT = np.dtype(np.float32)


class Device:
    """Memory of `nbytes` bytes, whose slabs are not touched and so cost nothing.

    Attributes:
        used: bytes allocated now.
        sizes: of the slabs allocated so far.
    """

    def __init__(self, nbytes=1 << 40):
        self.nbytes, self.used, self.sizes = nbytes, 0, []

    def allocate(self, least, wanted):
        left = self.nbytes - self.used
        if left < least:
            raise MemoryError(f"no {least} bytes")
        size = wanted if wanted <= left else least
        array = np.empty(size, np.uint8)
        self.used += size
        self.sizes.append(size)
        weakref.finalize(array, self.give_back, size)
        return Slab(array)

    def give_back(self, nbytes):
        self.used -= nbytes


def network(memory, sizes, slots=0):
    """Blocks for a network's matrices and vectors, and for the slots of each."""
    shapes = [
        shape
        for rows, columns in itertools.pairwise(sizes)
        for shape in ((rows, columns), (columns,))
    ]
    made, *kinds = ([memory.new_block(shape, FLOAT) for shape in shapes] for _ in range(1 + slots))
    return made, [tuple(kind[i] for kind in kinds) for i in range(len(made))]


def ranges(variables, slots):
    return len(runs(MessageOrder(variables, slots, GPU_ALIGNMENT).shards, GPU_ALIGNMENT))


def place(block):
    """Where a block starts in its slab, and where it stops."""
    return [end - block.owner.address for end in block.memory]


@pytest.mark.parametrize("alignment", [1, GPU_ALIGNMENT])
def test_blocks_lie_one_after_another(alignment):
    memory = Slabs(Device().allocate, alignment=alignment)
    forms = [((3,), np.int8), ((2, 2), FLOAT), ((), np.complex128), ((0, 5), FLOAT), ((1,), FLOAT)]
    blocks = [memory.new_block(shape, np.dtype(dtype)) for shape, dtype in forms]
    closely = [[0, 3], [4, 20], [32, 48], [48, 48], [48, 52]]
    of_gpu = [[0, 3], [256, 272], [512, 528], [768, 768], [768, 772]]
    assert [place(block) for block in blocks] == (closely if alignment == 1 else of_gpu)
    for i, block in enumerate(blocks):
        block.array[...] = i
    for i, block in enumerate(blocks):
        shape, dtype = forms[i]
        assert block.array.shape == shape and block.array.dtype == dtype
        assert (block.view == i).all() and not block.view.flags.writeable
        assert slabs.part(*block.memory).tobytes() == block.array.tobytes()


@pytest.mark.parametrize(
    "sizes", [(1024, 2048, 2048, 1024), (4096, 4096, 4096), (30_000, 4000, 4000, 100)], ids=str
)
def test_a_network_lies_in_few_ranges(sizes):
    memory = Device()
    variables, slots = network(Slabs(memory.allocate, alignment=GPU_ALIGNMENT), sizes, slots=2)
    assert ranges(variables, [()] * len(variables)) <= 4  # for sending new values
    assert ranges(variables, slots) <= 8  # for updating everything


def test_slabs_double_up_to_the_limit():
    """And large blocks have slabs of their own, between which the others go on as before."""
    device = Device()
    memory = Slabs(device.allocate, smallest=1 << 17, largest=1 << 20)
    before = memory.new_block((5,), FLOAT)
    kept = [memory.new_block(((1 << 19) + 1,), np.dtype(np.uint8))]
    after = memory.new_block((5,), FLOAT)
    assert (place(before), place(kept[0]), place(after)) == ([0, 20], [0, (1 << 19) + 1], [20, 40])
    kept += [memory.new_block((1 << 16,), np.dtype(np.uint8)) for _ in range(63)]
    alone = (1 << 19) + (1 << 16)
    # The first has room for one beside the two small blocks.
    doubled = [1 << 17, 1 << 18, 1 << 19]
    assert device.sizes == [1 << 17, alone, *doubled, *[1 << 20] * 3]


def test_a_slab_goes_with_its_last_block_and_its_last_view():
    device = Device()
    memory = Slabs(device.allocate, smallest=1 << 17, largest=1 << 17)
    first, second = (memory.new_block((1 << 14,), np.dtype(np.uint8)) for _ in range(2))
    assert device.used == 1 << 17
    large = memory.new_block((1 << 20,), np.dtype(np.uint8))
    view = large.view[5:10].reshape(5, 1)
    del large
    assert device.used == (1 << 17) + (1 << 20)  # by the view
    del view
    assert device.used == 1 << 17
    fills = memory.new_block((3 << 14,), np.dtype(np.uint8))
    rest = [memory.new_block((3 << 14,), np.dtype(np.uint8))]
    assert device.used == 1 << 17
    rest.append(memory.new_block((1,), np.dtype(np.uint8)))  # the first slab is full
    assert device.used == 2 << 17
    del first, second, rest[0]
    assert device.used == 2 << 17
    del fills
    assert device.used == 1 << 17 and place(rest[0]) == [0, 1]


def test_variables_that_are_made_and_dropped_take_bounded_memory():
    device = Device()
    memory = Slabs(device.allocate, smallest=1 << 16, largest=1 << 18)
    most = 0
    for i in range(10_000):
        block = memory.new_block((1 + i % 3000,), FLOAT)
        most = max(most, device.used)
        del block
    assert most <= 2 << 18  # a full slab that goes, and the next
    assert sum(device.sizes) > 10 << 18


def test_slabs_grow_with_what_is_there_and_not_with_what_was_ever_made():
    device = Device()
    memory = Slabs(device.allocate, largest=1 << 40, share=8)
    for _ in range(2000):
        memory.new_block((4 * MIB,), FLOAT)
        assert device.used <= 2 * 32 * MIB  # each slab has room for two
    kept = [memory.new_block((4 * MIB,), FLOAT) for _ in range(100)]
    assert len(kept) > 3 * len({block.owner for block in kept})  # they grow


def test_a_slab_may_be_as_small_as_there_is_room():
    device = Device(100 * MIB)
    memory = Slabs(device.allocate)
    blocks = [memory.new_block((4 * MIB,), FLOAT) for _ in range(6)]
    assert [block.array.nbytes for block in blocks] == [16 * MIB] * 6
    with pytest.raises(MemoryError):
        memory.new_block((4 * MIB,), FLOAT)
    small = memory.new_block((1,), FLOAT)  # nothing has changed
    assert small.array.size == 1


def test_memory_that_is_not_committed_is_left_unused():
    """It may be committed later: a failed block leaves the others where they are."""
    limit = [100]

    def commit(start, stop):
        if stop > limit[0]:
            raise MemoryError(f"{start} to {stop}")

    memory = Slabs(lambda least, wanted: Slab(np.zeros(wanted, np.uint8), commit))
    first = memory.new_block((10,), FLOAT)
    with pytest.raises(MemoryError, match="40 to 140"):
        memory.new_block((25,), FLOAT)
    limit[0] = 1000
    assert place(first) == [0, 40]
    assert place(memory.new_block((25,), FLOAT)) == [140, 240]


def test_arrays_of_variables_are_known_by_their_memory():
    memory = Slabs(allocate_private)
    block = memory.new_block((4, 3), FLOAT)
    assert slabs.holds(block.array) and slabs.holds(block.view[1:, 2])
    assert slabs.holds(np.frombuffer(memoryview(block.view), np.float32))
    assert not slabs.holds(np.zeros(3)) and not slabs.holds(block.array.copy())


def test_a_block_without_elements_keeps_its_slab():
    memory = Slabs(Device().allocate, alignment=GPU_ALIGNMENT)
    empty = memory.new_block((0, 3), FLOAT)
    large = memory.new_block((200 * MIB,), FLOAT)
    assert ranges([empty, large], [(), ()]) == 1
    assert slabs.part(*empty.memory).size == 0
