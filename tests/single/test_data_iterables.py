"""Iterables of other libraries, and ranks with different elements; each rank is a thread."""

import re

import numpy as np
import pytest
from internals import distribute_dataset, distribute_from_function, select
from thread_ranks import on_ranks, parts

from hpcstrat import ReplicaMismatchError
from hpcstrat.data import Dataset


class Table:
    """Like a HuggingFace dataset: columns of Python numbers, lists and strings."""

    def iter(self, batch_size):
        for start in range(0, 5, batch_size):
            rows = range(start, min(5, start + batch_size))
            yield {
                "id": list(rows),
                "text": [f"row {row}" for row in rows],
                "tokens": [[row, 2 * row] for row in rows],
                "weight": [row / 2 for row in rows],
            }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_columns_of_python_numbers(size):
    steps = parts(size, lambda: lambda: Table().iter(3))
    columns = {
        name: [np.concatenate([part[name] for part in step]) for step in steps]
        for name in steps[0][0]
    }
    assert [column.tolist() for column in columns["id"]] == [[0, 1, 2], [3, 4]]
    assert [column.tolist() for column in columns["text"]] == [
        ["row 0", "row 1", "row 2"],
        ["row 3", "row 4"],
    ]
    assert [column.tolist() for column in columns["tokens"]] == [
        [[0, 0], [1, 2], [2, 4]],
        [[3, 6], [4, 8]],
    ]
    assert columns["weight"][1].dtype == np.float32 and columns["weight"][1].tolist() == [1.5, 2]


# ---- ranks with different elements

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


def shuffled(rank):
    """A list of batches in a different order on each rank."""
    return list(np.random.default_rng(rank).permutation(40).reshape(10, 4))


def differs_later(rank):
    """The same first batch on all ranks, but a different third batch."""
    return [np.arange(4), np.arange(4), np.arange(4) + rank, np.arange(4)]


def taken(dataset, rank, distribute=distribute_dataset):
    """The number of steps before the error, and its text; it must be raised only once."""
    iterator, steps = iter(distribute(dataset, rank, None)), 0
    with pytest.raises(ReplicaMismatchError) as caught:
        for _ in iterator:
            steps += 1
    assert list(iterator) == []
    return steps, str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        shuffled,
        lambda rank: lambda: iter(shuffled(rank)),
        lambda rank: Dataset.from_generator(lambda: iter(shuffled(rank))).unbatch().batch(4),
        lambda rank: (
            Dataset.from_generator(lambda: iter(shuffled(rank)))
            .map(lambda x: x * 0)
            .unbatch()
            .batch(5)
        ),
        lambda rank: [np.arange(4).astype(np.int32 if rank else np.float32)],
        lambda rank: [{"x" if rank else "y": np.arange(4)}],
        lambda rank: [np.zeros((4, 1 + rank))],
    ],
    ids=["list", "function", "generator", "mapped", "dtypes", "names", "shapes"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_other_elements_are_an_error_on_all_ranks(size, make):
    found = on_ranks(size, lambda rank: taken(make(rank.rank), rank))
    assert {steps for steps, _ in found} == {0} and len({message for _, message in found}) == 1
    assert re.search(
        r"different elements up to step 0, with checksums \d+ on rank 0; \d+ on rank", found[0][1]
    )
    assert "generator=torch.Generator().manual_seed(0)" in found[0][1]
    assert "Do not use a DistributedSampler: every batch is split" in found[0][1]


def test_in_every_pass():
    def program(rank):
        batches = [np.arange(4)]
        distributed = distribute_dataset(batches, rank, None)
        assert [select(x).tolist() for x in distributed] == [[2 * rank.rank, 2 * rank.rank + 1]]
        batches[0] += rank.rank
        with pytest.raises(ReplicaMismatchError, match=r"list must give the same elements"):
            next(iter(distributed))
        return "done"

    assert on_ranks(2, program) == ["done"] * 2


def test_in_every_round_of_a_repeated_generator():
    def program(rank):
        rounds = iter(range(5))
        dataset = (
            Dataset.from_generator(lambda: iter([next(rounds) // 2 * (1 + rank.rank)] * 4))
            .repeat(5)
            .batch(4)
        )
        return taken(dataset, rank)[0]

    assert on_ranks(3, program) == [2] * 3


def test_later_batches_are_compared_where_it_is_asked(monkeypatch):
    assert on_ranks(
        2, lambda rank: len(list(distribute_dataset(differs_later(rank.rank), rank, None)))
    ) == [4, 4]
    monkeypatch.setenv("HPCSTRAT_CHECK", "1")
    assert [
        steps for steps, _ in on_ranks(2, lambda rank: taken(differs_later(rank.rank), rank))
    ] == [2, 2]


def test_elements_that_are_dealt_out_are_compared():
    found = on_ranks(
        2,
        lambda rank: taken(
            lambda context: shuffled(rank.rank), rank, distribute=distribute_from_function
        ),
    )
    assert {steps for steps, _ in found} == {0}


def test_what_a_cache_has_kept_on_one_rank_is_not_missed(monkeypatch):
    def program(rank):
        dataset = Dataset.from_generator(lambda: iter(range(6))).cache()
        if rank.rank == 0:
            list(dataset)
        return [select(x).tolist() for x in distribute_dataset(dataset.batch(6), rank, None)]

    assert on_ranks(2, program) == [[[0, 1, 2]], [[3, 4, 5]]]
    monkeypatch.setenv("HPCSTRAT_CHECK", "1")
    assert on_ranks(2, program) == [[[0, 1, 2]], [[3, 4, 5]]]


@pytest.mark.parametrize("kept_on", [(), (0,), (0, 1)])
def test_elements_in_a_cache_are_compared(kept_on):
    def program(rank):
        dataset = Dataset.from_generator(lambda: iter(range(rank.rank, 6 + rank.rank))).cache()
        if rank.rank in kept_on:
            list(dataset)
        distributed = distribute_dataset(dataset.batch(6), rank, None)
        for _ in range(2):
            with pytest.raises(ReplicaMismatchError, match=r"different elements up to step 0"):
                next(iter(distributed))
        return "done"

    assert on_ranks(2, program) == ["done"] * 2
