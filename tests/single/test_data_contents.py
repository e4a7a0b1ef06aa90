"""Arrays that must be equal on all ranks but differ; each rank is a thread."""

import math

import numpy as np
import pytest
from internals import Workers, distribute_dataset, distribute_from_function, select
from internals import _elements as elements
from thread_ranks import on_ranks

from hpcstrat import ReplicaMismatchError
from hpcstrat.data import Dataset

ROWS = np.random.default_rng(0).random((2000, 3))


def begun(make, distribute=distribute_dataset):
    """The message that all ranks raise when each starts to iterate over its own dataset."""

    def program(rank):
        with pytest.raises(ReplicaMismatchError) as caught:
            iter(distribute(make(rank.rank), rank, None))
        return str(caught.value)

    (message,) = set(on_ranks(3, program))
    return message


def agrees(make):
    """Whether two ranks can iterate to the end, each over the dataset it makes."""
    on_ranks(2, lambda rank: len(list(distribute_dataset(make(rank.rank), rank, None))))
    return True


def permuted(rank, array):
    return array[np.random.default_rng(rank).permutation(len(array))]


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: Dataset.from_tensor_slices(permuted(rank, ROWS)),
        lambda rank: Dataset.from_tensor_slices(
            {"x": ROWS, "y": permuted(rank, np.arange(2000) % 10)}
        ),
        lambda rank: Dataset.from_tensor_slices(permuted(rank, np.arange(2000) % 50 == 0)),
        lambda rank: Dataset.from_tensor_slices(permuted(rank, np.eye(300, dtype=np.int8))),
        lambda rank: Dataset.from_tensor_slices(
            permuted(rank, np.array([f"row {i}" for i in range(2000)]))
        ),
        lambda rank: Dataset.from_tensors(permuted(rank, ROWS)),
        lambda rank: (
            Dataset.from_tensor_slices(ROWS + rank)
            .shuffle(10, seed=0)
            .map(lambda x: x)
            .filter(np.any)
        ),
        lambda rank: Dataset.zip(
            (Dataset.range(2000), Dataset.from_tensor_slices(permuted(rank, ROWS)))
        ),
        lambda rank: Dataset.range(3).concatenate(
            Dataset.from_tensor_slices(permuted(rank, np.arange(20)))
        ),
    ],
    ids=[
        "rows",
        "labels",
        "rare",
        "one hot",
        "strings",
        "one element",
        "transformed",
        "zipped",
        "joined",
    ],
)
def test_another_order_on_each_rank_is_found_at_the_begin(make):
    message = begun(lambda rank: make(rank).batch(8))
    assert message.startswith(
        "iterating over Strategy.experimental_distribute_dataset: the ranks have different arrays"
    )
    assert all(f" on rank {rank}" in message for rank in range(3))
    assert "a seed that all ranks share" in message and "hs.broadcast_object(" in message


def test_rows_of_any_size_are_told_apart():
    for shape in ((5000,), (200, 7), (90, 40, 300), (3, 2**18), (1, 2**18)):
        whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        assert elements.checksum_of_sample(whole) == elements.checksum_of_sample(
            np.asfortranarray(whole)
        )
        for change in (
            lambda a: a[::-1],
            lambda a: a[..., ::-1],
            lambda a: a + 1,
            lambda a: a.astype(np.float64),
        ):
            if not np.array_equal(change(whole), whole) or change(whole).dtype != whole.dtype:
                assert elements.checksum_of_sample(whole) != elements.checksum_of_sample(
                    change(whole)
                )
        for place in (0, -1):  # the first and the last
            other = whole.copy()
            other.reshape(-1)[place] = -1
            assert elements.checksum_of_sample(whole) != elements.checksum_of_sample(other)
    assert elements.checksum_of_sample(np.zeros((0, 2))) != elements.checksum_of_sample(
        np.zeros((0, 3))
    )


def test_equal_values_are_equal_whatever_lies_between_them():
    padded = np.dtype([("a", np.int8), ("b", np.float64, (2,)), ("text", "U3")], align=True)

    def structured(rank):
        raw = bytearray([rank]) * (4 * padded.itemsize)
        array = np.frombuffer(raw, padded)
        array["a"], array["b"], array["text"] = 1, np.nan, "abc"
        return array

    def extended(rank):
        array = np.frombuffer(
            bytearray([rank]) * (4 * np.dtype(np.longdouble).itemsize), np.longdouble
        )
        array[:] = [0, 1, np.nan, np.inf]
        return array

    assert structured(1).tobytes() != structured(2).tobytes()
    for make in (structured, extended):
        assert elements.checksum_of(make(1)) == elements.checksum_of(make(2))
        assert agrees(lambda rank, make=make: Dataset.from_tensor_slices(make(rank)).batch(2))
    for name, other in {"a": 2, "b": 0, "text": "x"}.items():
        array = structured(1)
        array[name][-1] = other
        assert elements.checksum_of_sample(array) != elements.checksum_of_sample(structured(1))
    nan, other_nan = (np.array(0x7FF8 << 48 | low).view(np.float64) for low in (0, 1))
    assert (
        elements.checksum_of(nan)
        == elements.checksum_of(nan.copy())
        != elements.checksum_of(other_nan)
    )


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="of NumPy 2")
def test_strings_that_lie_elsewhere_are_compared():
    def strings(rank, text="a string that is longer than what fits into the array itself"):
        return np.array(["x" * rank, text], np.dtypes.StringDType())[1:]

    assert elements.checksum_of(strings(1)) == elements.checksum_of(strings(500))
    assert elements.checksum_of(strings(1)) != elements.checksum_of(strings(1, "another"))


def test_objects_are_compared_by_shape_and_dtype():
    assert elements.checksum_of_sample(np.array([object(), None])) == elements.checksum_of_sample(
        np.array([object(), object()])
    )
    assert elements.checksum_of_sample(np.array([None])) != elements.checksum_of_sample(
        np.array([None, None])
    )


def test_one_array_and_its_copies_are_equal():
    """Two pipelines over one array on one rank, and over two equal arrays on another."""

    def make(rank):
        first = Dataset.from_tensor_slices(ROWS)
        return Dataset.zip(
            (first, Dataset.from_tensor_slices(ROWS.copy()) if rank else first)
        ).batch(100)

    assert agrees(make)


def test_of_a_file_little_is_read(tmp_path, monkeypatch):
    def opened(name, value):
        path = tmp_path / name
        with open(path, "wb") as file:
            file.truncate(1 << 34)
        array = np.memmap(path, np.float64, "r+", shape=(1 << 17, 1 << 14))
        array[-1, -1] = value
        return array

    arrays = [opened("a", 1), opened("b", 1), opened("c", 2)]
    taken = []
    monkeypatch.setattr(
        elements,
        "_checksum_of_contents",
        lambda array, value: taken.append(array) or hash(array.tobytes()),
    )
    for every in (False, True):
        found = [elements.checksum_of_arrays([np.asarray(array)], every) for array in arrays]
        assert found[0] == found[1] != found[2]
    assert sum(array.size for array in taken) < 500


def test_later_passes_and_every_element_are_compared_where_it_is_asked(monkeypatch):
    def program(rank):
        array = ROWS.copy()
        array[701, 1] += rank.rank  # no sample
        distributed = distribute_dataset(Dataset.from_tensor_slices(array).batch(500), rank, None)
        return [len(list(distributed)), len(list(distributed))]

    def changed(rank):
        array = ROWS.copy()
        distributed = distribute_dataset(Dataset.from_tensor_slices(array).batch(500), rank, None)
        steps = len(list(distributed))
        array[701] += rank.rank
        list(distributed)
        return steps

    monkeypatch.setattr(elements, "_SAMPLE_BYTES", 1)
    assert on_ranks(2, program) == [[4, 4]] * 2
    assert on_ranks(2, changed) == [4] * 2
    monkeypatch.setenv("HPCSTRAT_CHECK", "1")
    for wrong in (program, changed):
        with pytest.raises(
            ReplicaMismatchError, match="different arrays in Dataset.from_tensor_slices"
        ):
            on_ranks(2, wrong)


def test_after_the_error_the_next_pass_is_compared_too():
    def program(rank):
        distributed = distribute_dataset(
            Dataset.from_tensor_slices(np.arange(4) + rank.rank).batch(2), rank, None
        )
        for _ in range(2):
            with pytest.raises(ReplicaMismatchError):
                iter(distributed)
        return "done"

    assert on_ranks(2, program) == ["done"] * 2


def test_functions_are_called_for_no_sample():
    def program(rank):
        """What each rank loads by itself may differ."""
        dataset = Dataset.range(8).map(lambda i: np.full(2, 100 * rank.rank + i)).batch(4)
        return [select(x)[:, 0].tolist() for x in distribute_dataset(dataset, rank, None)]

    assert on_ranks(2, program) == [[[0, 1], [4, 5]], [[102, 103], [106, 107]]]


@pytest.mark.parametrize("odd", [1, 2])
def test_workers_may_have_other_arrays_and_their_ranks_may_not(odd):
    workers = (0, 0, 1, 1)

    def make(rank):
        def dataset_fn(context):
            return Dataset.from_tensor_slices(
                np.arange(8) + 10 * context.input_pipeline_id + (rank == odd)
            ).batch(2)

        return dataset_fn

    def program(rank):
        made = Workers(workers, rank.rank)
        iter(distribute_from_function(make(-1), rank, None, workers=made))
        with pytest.raises(ReplicaMismatchError, match="different arrays") as caught:
            iter(distribute_from_function(make(rank.rank), rank, None, workers=made))
        return str(caught.value)

    (message,) = set(on_ranks(4, program))
    ranks = [rank for rank in range(4) if f" on rank {rank}" in message]
    assert ranks == ([0, 1] if odd == 1 else [2, 3])
