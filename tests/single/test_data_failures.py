"""What is not a batch, and what fails, on ranks that are threads: all raise, and then end."""

import numpy as np
import pytest
from internals import distribute_dataset, distribute_from_function, select
from test_data_distributed import lists, shares
from thread_ranks import on_ranks, parts

from hpcstrat import ReplicaMismatchError
from hpcstrat.data import Dataset

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


def joined(first, second):
    return Dataset.from_tensor_slices(first).concatenate(Dataset.from_tensor_slices(second))


RAGGED = {
    "mapped": (
        lambda: Dataset.range(4).map(lambda i: np.zeros(i // 2)).batch(4),
        r"float64\[0\], float64\[1\]",
    ),
    "joined": (
        lambda: joined(np.zeros((2, 2)), np.ones((2, 3))).batch(4),
        r"must have the same (structure, )?shape",
    ),
    "generated": (
        lambda: Dataset.from_generator(lambda: (np.ones(n, np.int64) for n in (1, 1, 2, 2))).batch(
            4
        ),
        r"int64\[1\], int64\[2\]",
    ),
    "dtypes": (
        lambda: Dataset.range(4).map(lambda i: i if i < 2 else 0.5).batch(4),
        r"float32\[\], int64\[\]",
    ),
    "structures": (
        lambda: Dataset.range(4).map(lambda i: {"a" if i < 2 else "b": i}).batch(4),
        r"nests of the same structure; they are \{'a': \*\} and \{'b': \*\}",
    ),
}


@pytest.mark.parametrize("kind", RAGGED)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_that_make_no_batch_are_refused_on_any_number_of_replicas(kind, size):
    """Even if the rows of each replica match, as with two replicas."""
    make, message = RAGGED[kind]

    def program(rank):
        iterator = iter(distribute_dataset(make().repeat(2), rank, None))
        with pytest.raises((TypeError, ValueError), match=message):
            next(iterator)
        return list(iterator)

    assert on_ranks(size, program) == [[]] * size


@pytest.mark.parametrize("batch_size", [4, 8])
def test_datasets_that_are_not_alike_are_refused_on_all_ranks(batch_size):
    """Even if the elements on each rank have the same structure."""

    def program(rank):
        first, second = (
            Dataset.range(4).map(function) for function in (lambda x: x, lambda x: {"a": x})
        )
        with pytest.raises(
            TypeError, match=r"Dataset\.concatenate: .*must have the same structure"
        ) as caught:
            list(distribute_dataset(first.concatenate(second).batch(batch_size), rank, None))
        return str(caught.value).partition(" (found by")[0]

    assert len(set(on_ranks(2, program))) == 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_strings_of_different_lengths_make_a_batch(size):
    words = ["a", "bc", "def", "g"]
    assert lists(parts(size, lambda: Dataset.range(4).map(lambda i: words[i]).batch(4))) == [
        shares(words, size)
    ]


# ---- functions and generators that fail


def attempts(distributed):
    """This rank's parts, and the text of the error that ends them."""
    found, iterator = [], iter(distributed)
    try:
        for step in iterator:
            found.append(np.asarray(select(step)).tolist())
    except ArithmeticError as error:
        found.append(str(error).partition(" (")[0])
    assert list(iterator) == []
    return found


def fail_at(*wrong, rank=None, on=None):
    def check(x):
        if x in wrong and rank is on:
            raise ZeroDivisionError(f"no {x}")
        return True

    return check


FAILING = {
    "map": lambda check: Dataset.range(14).map(lambda x: check(x) and x).batch(4),
    "filter": lambda check: Dataset.range(14).filter(check).batch(4).prefetch(1),
    "batches": lambda check: (
        Dataset.range(14).batch(4).map(lambda x: [check(y) for y in x] and x).prefetch(1)
    ),
    "generated": lambda check: (
        Dataset.from_generator(lambda: iter(range(14))).map(lambda x: check(x) and x).batch(4)
    ),
    "in threads": lambda check: (
        Dataset.range(14).map(lambda x: check(x) and x, num_parallel_calls=3).batch(4)
    ),
    "batches in threads": lambda check: (
        Dataset.range(14)
        .batch(4)
        .map(lambda x: [check(y) for y in x] and x, num_parallel_calls=2)
        .prefetch(1)
    ),
}


@pytest.mark.parametrize("source", FAILING)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_error_is_raised_on_all_ranks_and_ends_the_iteration(source, size):
    for wrong in ((5,), (0, 13), (6, 9), (12,)):
        every = on_ranks(
            size,
            lambda rank, wrong=wrong: attempts(
                distribute_dataset(FAILING[source](fail_at(*wrong)), rank, None)
            ),
        )
        whole = min(wrong) // 4  # batches before the error
        steps = list(zip(*every, strict=True))
        assert [list(step) for step in steps[:-1]] == [
            shares([*range(4 * step, 4 * step + 4)], size) for step in range(whole)
        ]
        assert set(steps[-1]) == {f"no {min(wrong)}"}


@pytest.mark.parametrize("source", FAILING)
def test_an_error_on_one_rank_alone_is_raised_on_all(source):
    def program(rank):
        check = fail_at(*range(4, 8), rank=rank.rank, on=1)
        return attempts(distribute_dataset(FAILING[source](check), rank, None))

    every = on_ranks(2, program)
    assert [parts[0] for parts in every] == [[0, 1], [2, 3]]
    assert [len(parts) for parts in every] == [2, 2]
    assert {type(parts[1]) for parts in every} == {str}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_error_in_elements_that_are_dealt_out(size):
    def program(rank):
        dataset = Dataset.range(24).batch(2).map(lambda x: [fail_at(6)(y) for y in x] and x)
        return attempts(distribute_from_function(lambda context: dataset, rank, None))

    *steps, last = zip(*on_ranks(size, program), strict=True)
    batches = [[x, x + 1] for x in range(0, 24, 2)]
    assert [list(step) for step in steps] == [
        batches[step * size : (step + 1) * size] for step in range(3 // size)
    ]
    assert set(last) == {"no 6"}


def test_an_error_of_a_generator_ends_the_iteration_on_all_ranks():
    def program(rank):
        def numbers():
            yield from range(4)
            if rank.rank == 1:
                raise ZeroDivisionError("no more")
            yield from range(4, 8)

        return attempts(
            distribute_dataset(Dataset.from_generator(numbers, np.int64).batch(4), rank, None)
        )

    assert on_ranks(2, program) == [[[0, 1], "no more"], [[2, 3], "no more"]]


def test_generators_of_different_lengths_are_named():
    def program(rank):
        dataset = Dataset.from_generator(lambda: iter(range(4 + rank.rank)), np.int64).batch(2)
        for _ in distribute_dataset(dataset, rank, None):
            pass

    with pytest.raises(ReplicaMismatchError, match="in step 2: none on rank 0; 1 on rank 1"):
        on_ranks(2, program)


def test_datasets_that_differ_are_named():
    def program(rank):
        iter(distribute_dataset(Dataset.range(4 + rank.rank).batch(2), rank, None))

    with pytest.raises(
        ReplicaMismatchError, match=r"rank 1: Dataset\.range\(0, 5\)\.batch\(2, False\) with 3"
    ):
        on_ranks(2, program)


def test_ragged_batches_are_refused():
    with pytest.raises(ValueError, match="first dimension"):
        parts(2, lambda: [(np.arange(3), np.arange(4))])
