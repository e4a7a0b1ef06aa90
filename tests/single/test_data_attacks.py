"""Attacks on datasets: errors of one worker or in one part, and what is read ahead of user code."""

import itertools

import numpy as np
import pytest
from internals import Workers, distribute_from_function, select
from thread_ranks import on_ranks

from hpcstrat import TensorSpec
from hpcstrat.data import Dataset


def identity(x):
    return x


KEYED = {
    "source": lambda: Dataset.range(100),
    "map": lambda: Dataset.range(100).map(identity),
    "cache": lambda: Dataset.range(100).map(identity).cache(),
    "concatenate": lambda: Dataset.range(9).map(identity).concatenate(Dataset.range(100)),
    "shuffle": lambda: Dataset.range(100).map(identity).cache().shuffle(5, seed=1),
}


@pytest.mark.parametrize("keyed", KEYED.values(), ids=KEYED)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_generator_is_read_no_further_than_what_is_zipped_with_it(keyed, batch_size):
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield np.int64(i)

    zipped = Dataset.zip(Dataset.from_generator(endless), keyed())
    for batch, _ in enumerate(zipped.batch(batch_size).take(3), start=1):
        assert len(taken) == batch * batch_size


@pytest.mark.parametrize("cached", [False, True])
def test_an_error_between_parts_comes_after_the_elements_of_the_first(cached):
    integers, floats = Dataset.range(5).map(identity), Dataset.range(5).map(np.float32)
    both = integers.concatenate(floats)
    got = []
    with pytest.raises(TypeError, match=r"Dataset\.concatenate"):
        for x in both.cache() if cached else both:
            got.append(int(x))
    assert got == [0, 1, 2, 3, 4]


def test_all_ranks_raise_if_a_worker_has_nothing_to_show_the_shapes_of_empty_steps():
    def program(rank):
        workers = Workers((0, 1), rank.rank)

        def make(context):
            count = 0 if context.input_pipeline_id else 5
            return Dataset.from_generator(lambda: iter(np.eye(count)))

        distributed = distribute_from_function(make, rank, None, workers=workers)
        with pytest.raises(ValueError, match="yields nothing"):
            next(iter(distributed))

    on_ranks(2, program)


@pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")
def test_a_worker_makes_its_empty_step_once_a_pass():
    starts = []

    def program(rank):
        workers = Workers((0, 1), rank.rank)

        def make(context):
            def generator():
                starts.append(rank.rank)
                yield from np.eye(1 if context.input_pipeline_id else 5)

            signature = TensorSpec((None,), np.float64)
            return Dataset.from_generator(generator, output_signature=signature).map(identity)

        steps = distribute_from_function(make, rank, None, workers=workers)
        return [len(select(step)) for step in steps]

    assert on_ranks(2, program) == [[5] * 5, [1, 0, 0, 0, 0]]
    assert sorted(starts) == [0, 0, 1, 1]  # a pass, and the first element for the empty step


@pytest.mark.parametrize("stage", ["plain", "cache", "shuffle", "concatenate", "unbatch"])
def test_zips_of_chosen_elements_have_the_rows_of_their_arrays(stage):
    x, y = np.arange(40).reshape(20, 2), np.arange(20)
    some = Dataset.from_tensor_slices(x).skip(3), Dataset.from_tensor_slices(y).skip(3).enumerate()
    zipped = {
        "plain": lambda d: d,
        "cache": lambda d: d.cache(),
        "shuffle": lambda d: d.shuffle(9, seed=1),
        "concatenate": lambda d: d.take(9).concatenate(d.skip(9)),
        "unbatch": lambda d: d.batch(4).unbatch(),
    }[stage](Dataset.zip(*some))
    for elements in zipped, zipped.batch(5).unbatch(), zipped.take(0).concatenate(zipped):
        found = [(row.tolist(), int(i), int(label)) for row, (i, label) in elements]
        expected = [([2 * n, 2 * n + 1], n - 3, n) for n in range(3, 20)]
        assert (sorted(found) if stage == "shuffle" else found) == expected
    assert [len(row) for row, _ in zipped.batch(5)] == [5, 5, 5, 2]
