"""Arrays and elements that must be equal on all ranks but differ; each rank is a thread."""

import math
import os
import re

import numpy as np
import pytest
from internals import Workers, distribute_dataset, distribute_from_function, select
from internals import _elements as elements
from thread_ranks import on_ranks

from hpcstrat import ReplicaMismatchError
from hpcstrat.data import Dataset

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")

ROWS = np.random.default_rng(0).random((2000, 3))


def distributed_rows(array, rank):
    return distribute_dataset(slices(array).batch(2), rank, None)


def permuted(rank, array):
    return array[np.random.default_rng(rank).permutation(len(array))]


slices = Dataset.from_tensor_slices
PERMUTED = {
    "rows": lambda rank: slices(permuted(rank, ROWS)),
    "labels": lambda rank: slices({"x": ROWS, "y": permuted(rank, np.arange(2000) % 10)}),
    "one hot": lambda rank: slices(permuted(rank, np.eye(300, dtype=np.int8))),
    "strings": lambda rank: slices(permuted(rank, np.array([f"row {i}" for i in range(2000)]))),
    "transformed": lambda rank: (
        slices(ROWS + rank).shuffle(10, seed=0).map(lambda x: x).filter(np.any)
    ),
    "zipped": lambda rank: Dataset.zip((Dataset.range(2000), slices(permuted(rank, ROWS)))),
    "joined": lambda rank: Dataset.range(3).concatenate(slices(permuted(rank, np.arange(20)))),
}


@pytest.mark.parametrize("kind", PERMUTED)
def test_another_order_on_each_rank_is_found_at_the_begin_of_each_pass(kind):
    def program(rank):
        messages = []
        distributed = distribute_dataset(PERMUTED[kind](rank.rank).batch(8), rank, None)
        for _ in range(2):
            with pytest.raises(ReplicaMismatchError) as caught:
                iter(distributed)
            messages.append(str(caught.value))
        return messages

    (message,) = {text for texts in on_ranks(3, program) for text in texts}
    assert message.startswith(
        "iterating over Strategy.experimental_distribute_dataset: the ranks have different arrays"
    )
    assert all(f" on rank {rank}" in message for rank in range(3))
    assert "a seed that all ranks share" in message and "hs.broadcast_object(" in message


def test_rows_of_any_size_are_told_apart():
    sample = elements.checksum_of_sample
    for shape in ((5000,), (90, 40, 300), (1, 2**18)):
        whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        assert sample(whole) == sample(np.asfortranarray(whole))
        last = whole.copy()
        last.reshape(-1)[-1] = -1
        for other in (whole[..., ::-1], whole + 1, whole.astype(np.float64), last):
            assert sample(other) != sample(whole)
    assert sample(np.zeros((0, 2))) != sample(np.zeros((0, 3)))
    # Objects are compared by shape and dtype.
    assert sample(np.array([object(), None])) == sample(np.array([object(), object()]))
    assert sample(np.array([None])) != sample(np.array([None, None]))


def test_equal_values_are_equal_whatever_lies_between_them():
    padded = np.dtype([("a", np.int8), ("b", np.float64, (2,)), ("text", "U3")], align=True)

    def filled(rank, dtype, values):
        array = np.frombuffer(bytearray([rank]) * (4 * np.dtype(dtype).itemsize), dtype)
        array[:] = values
        return array

    def structured(rank, *row):
        return filled(rank, padded, row or (1, np.nan, "abc"))

    assert structured(1).tobytes() != structured(2).tobytes()
    for make in (structured, lambda rank: filled(rank, np.longdouble, [0, 1, np.nan, np.inf])):
        assert elements.checksum_of(make(1)) == elements.checksum_of(make(2))
        on_ranks(2, lambda rank, make=make: [*distributed_rows(make(rank.rank), rank)])
    for row in (2, np.nan, "abc"), (1, 0, "abc"), (1, np.nan, "x"):
        assert elements.checksum_of_sample(structured(1, *row)) != elements.checksum_of_sample(
            structured(1)
        )
    nan, other_nan = (np.array(0x7FF8 << 48 | low).view(np.float64) for low in (0, 1))
    checksums = [elements.checksum_of(array) for array in (nan, nan.copy(), other_nan)]
    assert checksums[0] == checksums[1] != checksums[2]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="of NumPy 2")
def test_strings_that_lie_elsewhere_are_compared():
    def strings(rank, text="a string that is longer than what fits into the array itself"):
        return np.array(["x" * rank, text], np.dtypes.StringDType())[1:]

    assert elements.checksum_of(strings(1)) == elements.checksum_of(strings(500))
    assert elements.checksum_of(strings(1)) != elements.checksum_of(strings(1, "another"))


def test_of_a_file_little_is_read(tmp_path, monkeypatch):
    def opened(name, value):
        path = tmp_path / name
        path.touch()
        os.truncate(path, 1 << 34)
        array = np.memmap(path, np.float64, "r+", shape=(1 << 17, 1 << 14))
        array[-1, -1] = value
        return np.asarray(array)

    arrays, taken = [opened("a", 1), opened("b", 1), opened("c", 2)], []
    of_contents = lambda array, value: taken.append(array.size) or hash(array.tobytes())  # noqa: E731
    monkeypatch.setattr(elements, "_checksum_of_contents", of_contents)
    for every in (False, True):
        found = [elements.checksum_of_arrays([array], every) for array in arrays]
        assert found[0] == found[1] != found[2]
    assert sum(taken) < 500


def test_later_passes_and_every_element_are_compared_where_it_is_asked(monkeypatch):
    def program(rank, when):
        array = ROWS.copy()
        array[701, 1] += rank.rank * (when == 0)  # no sample
        distributed = distribute_dataset(slices(array).batch(500), rank, None)
        steps = len(list(distributed))
        array[701] += rank.rank * (when == 1)
        return steps, len(list(distributed))

    monkeypatch.setattr(elements, "_SAMPLE_BYTES", 1)
    for when in 0, 1:
        monkeypatch.delenv("HPCSTRAT_CHECK", raising=False)
        assert on_ranks(2, lambda rank, when=when: program(rank, when)) == [(4, 4)] * 2
        monkeypatch.setenv("HPCSTRAT_CHECK", "1")
        with pytest.raises(ReplicaMismatchError, match="arrays in Dataset.from_tensor_slices"):
            on_ranks(2, lambda rank, when=when: program(rank, when))


def test_workers_may_have_other_arrays_and_their_ranks_may_not():
    def make(rank):
        def dataset_fn(context):
            return slices(np.arange(8) + 10 * context.input_pipeline_id + (rank == 2)).batch(2)

        return dataset_fn

    def program(rank):
        made = Workers((0, 0, 1, 1), rank.rank)
        iter(distribute_from_function(make(-1), rank, None, workers=made))
        with pytest.raises(ReplicaMismatchError, match="different arrays") as caught:
            iter(distribute_from_function(make(rank.rank), rank, None, workers=made))
        return str(caught.value)

    (message,) = set(on_ranks(4, program))
    assert [rank for rank in range(4) if f" on rank {rank}" in message] == [2, 3]


# ---- elements that come of user code


def shuffled(rank):
    """A list of batches in a different order on each rank."""
    return list(np.random.default_rng(rank).permutation(40).reshape(10, 4))


def taken(dataset, rank):
    """The number of steps before the error, and its text; it must be raised only once."""
    iterator, steps = iter(distribute_dataset(dataset, rank, None)), 0
    with pytest.raises(ReplicaMismatchError) as caught:
        for _ in iterator:
            steps += 1
    assert list(iterator) == []
    return steps, str(caught.value)


def generated(rank):
    return Dataset.from_generator(lambda: iter(shuffled(rank)))


OTHERS = {
    "list": shuffled,
    "generator": lambda rank: generated(rank).unbatch().batch(4),
    "mapped": lambda rank: generated(rank).map(lambda x: x * 0).unbatch().batch(5),
    "dtypes": lambda rank: [np.arange(4).astype(np.int32 if rank else np.float32)],
    "names": lambda rank: [{"x" if rank else "y": np.arange(4)}],
    "shapes": lambda rank: [np.zeros((4, 1 + rank))],
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_elements_are_an_error_on_all_ranks(kind):
    for size in 2, 3:
        found = on_ranks(size, lambda rank: taken(OTHERS[kind](rank.rank), rank))
        assert {steps for steps, _ in found} == {0} and len({message for _, message in found}) == 1
    message = found[0][1]
    assert re.search(r"different elements up to step 0, .* \d+ on rank 0; \d+ on rank", message)
    assert "generator=torch.Generator().manual_seed(0)" in message
    assert "Do not use a DistributedSampler: every batch is split" in message


def test_elements_are_compared_in_every_pass_and_round():
    def program(rank):
        batches = [np.arange(4)]
        distributed = distribute_dataset(batches, rank, None)
        assert [select(x).tolist() for x in distributed] == [[2 * rank.rank, 2 * rank.rank + 1]]
        batches[0] += rank.rank
        with pytest.raises(ReplicaMismatchError, match=r"list must give the same elements"):
            next(iter(distributed))
        rounds = iter(range(5))
        repeated = Dataset.from_generator(
            lambda: iter([next(rounds) // 2 * (1 + rank.rank)] * 4)
        ).repeat(5)
        return taken(repeated.batch(4), rank)[0]

    assert on_ranks(2, program) == [2, 2]


def test_later_batches_are_compared_where_it_is_asked(monkeypatch):
    def batches(rank):  # of which the third differs
        return [np.arange(4), np.arange(4), np.arange(4) + rank.rank, np.arange(4)]

    on_ranks(2, lambda rank: [*distribute_dataset(batches(rank), rank, None)])
    monkeypatch.setenv("HPCSTRAT_CHECK", "1")
    assert on_ranks(2, lambda rank: taken(batches(rank), rank)[0]) == [2, 2]


@pytest.mark.parametrize(("kept_on", "check"), [((), "0"), ((0,), "0"), ((0,), "1"), ((0, 1), "1")])
def test_elements_in_a_cache_are_compared(monkeypatch, kept_on, check):
    """Those that a cache has kept on one rank are not missed."""
    monkeypatch.setenv("HPCSTRAT_CHECK", check)

    def program(rank):
        def cached(first):
            dataset = Dataset.from_generator(lambda: iter(range(first, 6 + first))).cache()
            if rank.rank in kept_on:
                list(dataset)
            return distribute_dataset(dataset.batch(6), rank, None)

        differing = cached(rank.rank)
        for _ in range(2):
            with pytest.raises(ReplicaMismatchError, match=r"different elements up to step 0"):
                next(iter(differing))
        return [select(x).tolist() for x in cached(0)]

    assert on_ranks(2, program) == [[[0, 1, 2]], [[3, 4, 5]]]
