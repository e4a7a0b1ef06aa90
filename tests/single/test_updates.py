"""Updates of shards on any number of ranks, against sums that are written out in rank order.

Variables without elements, fewer elements than ranks, 16-bit variables that start between two
words, and gaps between variables.
"""

import functools
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from internals import (
    CHUNK,
    HostUpdate,
    MessageOrder,
    Plan,
    Slabs,
    allocate_private,
    compiled,
    slabs,
)
from package_kernels import optimizers_of, rule_of

from hpcstrat.optimizers import SGD

DTYPES = [np.dtype(t) for t in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
SIZES = st.integers(0, 5) | st.sampled_from([63, 64, 65, 1000, CHUNK + 1, 2 * CHUNK + 3])
# For each variable its size, its dtype, and whether there is a gap before it.
VARIABLES = st.lists(
    st.tuples(SIZES, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6
)
RANKS = st.integers(1, 5)
KINDS = [
    pytest.param(HostUpdate, id="NumPy"),
    pytest.param(
        functools.partial(HostUpdate, compile_after=0),
        id="compiled",
        marks=pytest.mark.skipif(compiled.compiler() is None, reason="there is no C compiler"),
    ),
]


class Memory:
    """Blocks in slabs of this test's own, numbered as storage does."""

    def __init__(self):
        self._slabs = Slabs(allocate_private)
        self._made = 0

    def new_block(self, shape, dtype):
        block = self._slabs.new_block(shape, dtype)
        self._made += 1
        block.number = self._made
        block.array[...] = 0
        return block


def made_in(memory, variables, random):
    """Blocks with random values, in the order of a message."""
    blocks = []
    for size, dtype, has_gap in variables:
        if has_gap:
            memory.new_block((3,), np.dtype(np.int8))
        blocks.append(memory.new_block((size,), dtype))
        blocks[-1].array[...] = random.standard_normal(size)
    return by_dtype(blocks)


def by_dtype(blocks):
    dtypes = [block.array.dtype for block in blocks]
    return sorted(blocks, key=lambda block: dtypes.index(block.array.dtype))


def gradients_of(blocks, ranks, random):
    return [
        [random.standard_normal(block.array.shape).astype(block.array.dtype) for block in blocks]
        for _ in range(ranks)
    ]


def sum_in_order(arrays):
    wide = np.float32 if arrays[0].itemsize == 2 else arrays[0].dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = total + array.astype(wide)
    return total.astype(arrays[0].dtype)


def expected_of(rule, blocks, slots, gradients):
    """The bits of each variable, and of its slot, after the rule was applied to it as a whole."""
    results = []
    for i, (block, (slot,)) in enumerate(zip(blocks, slots, strict=True)):
        value, state = block.array.copy(), slot.array.copy()
        total = sum_in_order([of_rank[i] for of_rank in gradients])
        rule.kernel.run(rule.numbers, value, total, [state])
        results.append((value.tobytes(), state.tobytes()))
    return results


def bits_of(blocks, slots):
    return [
        (block.array.tobytes(), slot.array.tobytes())
        for block, (slot,) in zip(blocks, slots, strict=True)
    ]


def momentum():
    return rule_of(optimizers_of(DTYPES[0])["SGD with momentum"](), 1)


@pytest.mark.parametrize("kind", KINDS)
@given(variables=VARIABLES, ranks=RANKS, seed=st.integers(0, 99))
def test_ranks_that_share_memory_update_their_shards(kind, variables, ranks, seed):
    memory, random = Memory(), np.random.default_rng(seed)
    blocks = made_in(memory, variables, random)
    slots = [[memory.new_block(block.array.shape, block.array.dtype)] for block in blocks]
    gradients = gradients_of(blocks, ranks, random)
    expected = expected_of(momentum(), blocks, slots, gradients)

    order = MessageOrder(blocks[::-1], slots[::-1])
    assert [block.number for block in order.blocks] == [block.number for block in blocks]
    shards = [order.shards_of_rank(rank, ranks) for rank in range(ranks)]
    updates = [kind(slabs.part, own, {}, rank) for rank, own in enumerate(shards)]
    in_place = [update.in_place(own) for update, own in zip(updates, gradients, strict=True)]
    for own, of_rank in zip(shards, in_place, strict=True):
        large = {shard.variable for shard in own if shard.elements.size >= CHUNK}
        assert large <= {variable for variable, (elements, _) in of_rank.items() if elements}
    # What a rank reads in place stays NaN in its message.
    messages = [np.full(order.layout.nbytes, 0xFF, np.uint8) for _ in range(ranks)]
    plan = Plan(order, updates[0])
    for message, own, of_rank in zip(messages, gradients, in_place, strict=True):
        plan.write(message, own, of_rank)
    for update, of_rank in zip(updates, in_place, strict=True):
        update.run(momentum(), messages, in_place=of_rank)
    assert bits_of(blocks, slots) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_forgets_its_messages_lets_go_of_their_memory(kind):
    """Or there would have to be room for old and new ones. Calls keep views of them."""
    random = np.random.default_rng(0)
    blocks = made_in(memory := Memory(), [(20, DTYPES[0], False)], random)
    slots = [[memory.new_block((20,), DTYPES[0])]]
    order = MessageOrder(blocks, slots)
    plan = Plan(order, kind(slabs.part, order.shards, {}))
    plan.attach(np.zeros(order.layout.nbytes, np.uint8))
    clipped = [SGD(1.0, momentum=0.5, clipnorm=1.0), SGD(1.0, momentum=0.5, global_clipnorm=1.0)]
    for optimizer in (SGD(1.0, momentum=0.5), *clipped):
        rule = rule_of(optimizer, 1)
        for _ in range(3):  # so that a kernel is bound, or compiled
            plan.write(plan.memory, [block.array for block in blocks])
            plan.update.run(rule, [plan.memory])
    memory_of_message = weakref.ref(plan.memory)
    plan.attach(None)
    assert memory_of_message() is None
