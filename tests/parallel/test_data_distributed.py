"""Distributed datasets under a real strategy, at any number of ranks."""

import itertools

import numpy as np
import pytest

import hpcstrat as hs
from hpcstrat.data import Dataset

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def strategy():
    with hs.CentralStorageStrategy() as made:
        yield made


def steps(strategy, distributed):
    """`[step][replica]`: every replica's part, as a list, on every rank."""
    return [[hs.asnumpy(part).tolist() for part in strategy.experimental_local_results(x)] for x in distributed]


def shares(batch, batch_size, size):
    sizes = [batch_size // size + (r < batch_size % size) for r in range(size)]
    ends = list(itertools.accumulate(sizes))
    return [list(batch[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


def rows(n):
    yield from range(n)


@pytest.mark.parametrize("batch_size", [1, 4, 5, 8, 30])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(21),
        lambda: Dataset.from_tensor_slices(np.arange(21)).shuffle(21, seed=1),
        lambda: Dataset.range(21).map(lambda x: x * 2),
        lambda: Dataset.from_generator(rows, np.int64, args=(21,)).shuffle(5, seed=2),
    ],
    ids=["range", "shuffled", "mapped", "generated"],
)
def test_the_parts_of_all_replicas_are_the_batches(strategy, make, batch_size):
    distributed = strategy.experimental_distribute_dataset(make().batch(batch_size))
    expected = [shares(batch.tolist(), batch_size, strategy.num_replicas_in_sync) for batch in make().batch(batch_size)]
    assert steps(strategy, distributed) == expected


def test_from_function_deals_the_elements_in_turn(strategy):
    n = strategy.num_replicas_in_sync
    distributed = strategy.distribute_datasets_from_function(lambda context: Dataset.range(2 * n * 3 + 1).batch(3))
    found = steps(strategy, distributed)
    assert list(itertools.chain(*itertools.chain(*found))) == list(range(2 * n * 3 + 1))
    assert found[0] == [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(n)]
    assert found[-1] == [[6 * n]] + [[]] * (n - 1)


def test_unseeded_shuffles_agree_and_differ_between_iterations(strategy):
    dataset = Dataset.range(50).shuffle(50).batch(10)
    if hs.is_lead():
        list(dataset)  # one rank's own iteration puts no rank out of step
    distributed = strategy.experimental_distribute_dataset(dataset)
    orders = [tuple(itertools.chain(*itertools.chain(*steps(strategy, distributed)))) for _ in range(3)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len(set(orders)) == 3


def test_it_is_left_early_and_begun_again(strategy):
    for dataset in (Dataset.range(40), Dataset.range(40).filter(lambda number: number >= 0)):
        distributed = strategy.experimental_distribute_dataset(dataset.batch(8))
        first = hs.asnumpy(strategy.experimental_local_results(next(iter(distributed)))[0]).tolist()
        for x in distributed:
            assert hs.asnumpy(strategy.experimental_local_results(x)[0]).tolist() == first
            break
        assert len(list(distributed)) == 5


def test_batches_go_into_run(strategy):
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)

    def add_up(pair):
        a, more = pair
        return a.sum() + more["y"].sum()

    total = 0.0
    for batch in strategy.experimental_distribute_dataset(Dataset.from_tensor_slices((x, {"y": y})).batch(6)):
        sums = strategy.run(add_up, args=(batch,))
        total += float(strategy.reduce("SUM", sums, axis=None))
    assert total == x.sum() + y.sum()


def test_an_error_on_one_rank_is_raised_on_all(strategy):
    def odd(x):
        if hs.rank() == strategy.num_replicas_in_sync - 1:
            raise KeyError("no such file")
        return x

    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(20).map(odd).batch(10)))
    with pytest.raises(KeyError, match="no such file"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    hs.barrier()


def test_generators_that_differ_are_named(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica agrees with itself")
    dataset = Dataset.from_generator(lambda: iter(range(4 + hs.rank())), np.int64).batch(2)
    with pytest.raises(hs.ReplicaMismatchError, match="different numbers of elements in step 2: rank 0 none, rank 1 1"):
        list(strategy.experimental_distribute_dataset(dataset))


def test_datasets_that_differ_are_named(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica agrees with itself")
    distributed = strategy.experimental_distribute_dataset(Dataset.range(4 + hs.rank()).batch(2))
    with pytest.raises(hs.ReplicaMismatchError, match=r"rank 1 has Dataset\.range\(0, 5\)"):
        iter(distributed)


def test_unbatched_datasets_are_refused(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("one replica takes elements as they are")
    with pytest.raises(ValueError, match=r"call Dataset\.batch"):
        strategy.experimental_distribute_dataset(Dataset.range(4))
