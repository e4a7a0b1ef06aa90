"""Distributed datasets under a real strategy, on any number of ranks."""

import itertools
import threading
import time
import warnings

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from slow import slow_but
from strategies import STRATEGIES

import hpcstrat as hs
from hpcstrat.data import AutoShardPolicy, Dataset

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")
several_replicas = pytest.mark.mpi(min_size=2)  # one agrees with itself, and has all elements


@pytest.fixture(scope="module")
def strategy(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


def steps(strategy, distributed):
    """`[step][replica]`: every replica's part, as a list, on every rank."""
    by_replica = strategy.experimental_local_results(list(distributed))
    return [[hs.asnumpy(part).tolist() for part in step] for step in zip(*by_replica, strict=True)]


def shares(batch, batch_size, size):
    sizes = [batch_size // size + (r < batch_size % size) for r in range(size)]
    ends = list(itertools.accumulate(sizes))
    return [list(batch[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


def rows(n):
    yield from range(n)


PIPELINES = {
    "range": lambda: Dataset.range(21),
    "shuffled": lambda: Dataset.from_tensor_slices(np.arange(21)).shuffle(21, seed=1),
    "mapped": lambda: Dataset.range(21).map(lambda x: x * 2),
    "generated": lambda: Dataset.from_generator(rows, np.int64, args=(21,)).shuffle(5, seed=2),
    "windows": lambda: Dataset.from_tensor_slices(sliding_window_view(np.arange(23), 3)),
    "in threads": lambda: Dataset.from_generator(rows, np.int64, args=(21,)).map(lambda x: -x, 4),
    "filtered": lambda: Dataset.range(30).filter(lambda x: x % 10 < 7),
    "repeated": lambda: Dataset.range(7).shuffle(7, seed=3).repeat(3),
    "joined": lambda: Dataset.range(7).concatenate(Dataset.range(100, 114).map(lambda x: -x)),
    "zipped": lambda: (
        Dataset.zip(Dataset.range(21), Dataset.range(40).shuffle(9, seed=4))
        .enumerate()
        .map(lambda i, pair: 100 * i + 10 * pair[0] + pair[1])
    ),
    "cached": lambda: (
        Dataset.range(21).map(lambda x: -x).shuffle(9, seed=1).cache().shuffle(5, seed=2)
    ),
    "batched anew": lambda: (
        Dataset.range(21).batch(4).unbatch().batch(3).map(lambda x: x * 2, 2).unbatch().prefetch(2)
    ),
}
CORE_PIPELINES = ("range", "generated", "in threads", "batched anew")


@pytest.mark.parametrize("batch_size", [1, 4, 5, 8, 30])
@pytest.mark.parametrize(
    "pipeline",
    [pytest.param(name, marks=[pytest.mark.core] * (name in CORE_PIPELINES)) for name in PIPELINES],
)
def test_the_parts_of_all_replicas_are_the_batches(strategy, pipeline, batch_size):
    dataset = PIPELINES[pipeline]().batch(batch_size)
    expected = [
        shares(batch.tolist(), len(batch), strategy.num_replicas_in_sync) for batch in dataset
    ]
    dataset = PIPELINES[pipeline]().batch(batch_size)
    assert steps(strategy, strategy.experimental_distribute_dataset(dataset)) == expected


def test_none_in_a_batch_is_none_on_each_replica(strategy):
    n = strategy.num_replicas_in_sync
    batches = Dataset.range(2 * n + 1).map(lambda x: (x, None)).batch(n)
    for dataset in batches, list(batches), batches.cache().prefetch(1):
        numbers = []
        distributed = strategy.experimental_distribute_dataset(dataset)
        for batch in distributed:
            assert batch[1] is None
            assert strategy.run(lambda x, none: none, args=batch) is None
            numbers += strategy.gather(batch[0], 0).tolist()
        assert numbers == [*range(2 * n + 1)]
    dealt = strategy.distribute_datasets_from_function(lambda _: batches)
    assert [batch[1] for batch in dealt] == [None] * -(-3 // n)


@pytest.mark.core
def test_from_function_deals_the_elements_in_turn(strategy):
    n = strategy.num_replicas_in_sync
    distributed = strategy.distribute_datasets_from_function(
        lambda context: Dataset.range(2 * n * 3 + 1).batch(3)
    )
    found = steps(strategy, distributed)
    assert list(itertools.chain(*itertools.chain(*found))) == list(range(2 * n * 3 + 1))
    assert found[0] == [[3 * r, 3 * r + 1, 3 * r + 2] for r in range(n)]
    assert found[-1] == [[6 * n]] + [[]] * (n - 1)


@pytest.mark.core
def test_unseeded_shuffles_agree_and_differ_between_iterations(strategy):
    dataset = Dataset.range(50).shuffle(50).batch(10)
    if hs.is_lead():
        list(dataset)  # one rank's own iteration puts no rank out of step
    distributed = strategy.experimental_distribute_dataset(dataset)
    orders = [
        tuple(itertools.chain(*itertools.chain(*steps(strategy, distributed)))) for _ in range(3)
    ]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len(set(orders)) == 3


@pytest.mark.core
def test_it_is_left_early_and_begun_again(strategy):
    for dataset in (Dataset.range(40), Dataset.range(40).filter(lambda number: number >= 0)):
        distributed = strategy.experimental_distribute_dataset(dataset.batch(8))
        first = hs.asnumpy(strategy.experimental_local_results(next(iter(distributed)))[0]).tolist()
        for x in distributed:
            assert hs.asnumpy(strategy.experimental_local_results(x)[0]).tolist() == first
            break
        assert len(list(distributed)) == 5


@pytest.mark.core
def test_orders_do_not_depend_on_what_was_prepared_ahead(strategy):
    """Each iteration is left after its first round of 3 steps; a thread may have begun another."""

    def order(number):
        given = Dataset.range(12).shuffle(12, seed=3)
        rounds = [[int(x) for x in given] for _ in range(number + 1)]
        return rounds[-1][:4]

    for ahead in (0, 1, 4):
        dataset = Dataset.range(12).shuffle(12, seed=3).batch(4).repeat()
        dataset = dataset.prefetch(ahead) if ahead else dataset
        distributed = strategy.experimental_distribute_dataset(dataset)
        for number in range(3):
            for step, x in enumerate(distributed):
                if step == 0:
                    assert hs.asnumpy(strategy.gather(x, axis=0)).tolist() == order(number)
                time.sleep(0.01)  # a thread takes further steps meanwhile
                if step == 2:
                    break


@pytest.mark.core
def test_batches_go_into_run(strategy, xp):
    x, y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)

    def add_up(pair):
        a, more = pair
        assert type(a) is type(more["y"]) is xp.ndarray
        return a.sum() + more["y"].sum()

    total = 0.0
    for batch in strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices((x, {"y": y})).batch(6)
    ):
        sums = strategy.run(add_up, args=(batch,))
        total += float(strategy.reduce("SUM", sums, axis=None))
    assert total == x.sum() + y.sum()


@pytest.mark.core
def test_an_error_on_one_rank_is_raised_on_all(strategy):
    def odd(x):
        if hs.rank() == strategy.num_replicas_in_sync - 1:
            raise KeyError("no such file")
        return x

    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(20).map(odd).batch(10)))
    with pytest.raises(KeyError, match="no such file"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    hs.barrier()


@pytest.mark.core
@pytest.mark.parametrize("wrong", [7, 23])
def test_an_error_comes_after_the_steps_before_it(strategy, place, wrong):
    """On all ranks, though only one replica gets the element, however far ahead batches load."""
    n = strategy.num_replicas_in_sync
    at = wrong // n

    def load(x):
        if x == wrong:
            raise KeyError(f"no element {wrong}")
        return x

    for calls in (None, 4):
        dataset = Dataset.range(24 * n).map(load, num_parallel_calls=calls).batch(n)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        for step in range(at):
            if place.kind == "GPU" and at - 3 <= step:  # nothing is loaded ahead for CPUs
                time.sleep(0.005)  # the loader reaches the error meanwhile
            parts = strategy.experimental_local_results(next(iterator))
            assert [part.tolist() for part in parts] == [[step * n + r] for r in range(n)]
        with pytest.raises(KeyError, match=f"no element {wrong}"):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_step_cannot_be_taken_inside_a_replica_function(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(10).batch(2)))
    for take in (next, lambda iterator: iterator.get_next()):
        with pytest.raises(
            ValueError, match="next was called inside a replica function.*call it outside"
        ):
            strategy.run(take, args=(iterator,))
    hs.barrier()
    assert len(list(iterator)) == 5  # nothing was taken


@pytest.mark.core
@pytest.mark.parametrize("count", [3, 4, None])
def test_v1_calls_a_function_for_each_element(place, count):
    with place.make(hs.compat.v1.CentralStorageStrategy) as strategy:
        n = strategy.num_replicas_in_sync
        numbers = iter(range(count * n)) if count else itertools.count()
        iterator = strategy.make_input_fn_iterator(
            lambda context: lambda: np.full(2, next(numbers))
        )
        iterator.initialize()
        for step in range(count or 5):
            parts = strategy.experimental_local_results(iterator.get_next())
            assert [hs.asnumpy(part).tolist() for part in parts] == [
                2 * [step * n + replica] for replica in range(n)
            ]
        if count:
            with pytest.raises(StopIteration):
                iterator.get_next()


@pytest.mark.core
@several_replicas
def test_generators_that_differ_are_named(strategy):
    dataset = Dataset.from_generator(lambda: iter(range(4 + hs.rank())), np.int64).batch(2)
    with pytest.raises(
        hs.ReplicaMismatchError,
        match="different numbers of elements in step 2: none on rank 0; 1 on rank 1",
    ):
        list(strategy.experimental_distribute_dataset(dataset))


@several_replicas
def test_datasets_that_differ_are_named(strategy):
    distributed = strategy.experimental_distribute_dataset(Dataset.range(4 + hs.rank()).batch(2))
    with pytest.raises(hs.ReplicaMismatchError, match=r"rank 1: Dataset\.range\(0, 5\)"):
        iter(distributed)


@pytest.mark.core
@several_replicas
@pytest.mark.parametrize("by_strategy", [False, True])
def test_arrays_that_differ_are_named(strategy, by_strategy):
    make = strategy.experimental_make_numpy_dataset if by_strategy else Dataset.from_tensor_slices
    own = np.random.default_rng(hs.rank()).permutation(1000)
    with pytest.raises(
        hs.ReplicaMismatchError,
        match=r"different arrays .* on rank 0; .* on rank 1.*broadcast_object",
    ):
        iter(strategy.experimental_distribute_dataset(make(own).batch(100)))
    distributed = strategy.experimental_distribute_dataset(
        make(hs.broadcast_object(own)).batch(100)
    )
    assert sum(int(strategy.reduce("SUM", x, axis=0)) for x in distributed) == 499_500


@several_replicas
def test_unbatched_datasets_are_refused(strategy):
    with pytest.raises(ValueError, match=r"call Dataset\.batch"):
        strategy.experimental_distribute_dataset(Dataset.range(4))


# ---- loading ahead


def own(strategy, batch):
    """This replica's part."""
    found = []
    strategy.run(found.append, args=(batch,))
    return found[0]


@pytest.mark.parametrize(
    ("slow", "buffer"),
    slow_but(
        [("producer", 4), ("consumer", 0), ("consumer", 1), ("nobody", 1)],
        list(itertools.product(["producer", "consumer", "nobody"], [0, 1, 4])),
    ),
)
def test_values_are_right_at_any_pace(strategy, xp, slow, buffer):
    n, steps, kept = strategy.num_replicas_in_sync, 40, []
    work = xp.eye(100)
    with strategy.scope():
        weighted, whole = hs.Variable(np.zeros(100), aggregation="SUM"), hs.Variable(np.zeros(100))
    optimizer = hs.optimizers.SGD(1.0)

    def produce(x):
        if slow == "producer" and x % 300 == 0:
            time.sleep(0.003)
        return x * 2.0

    def consume(x, step):
        if slow == "consumer":
            for _ in range(3):
                work[...] = work @ work  # a GPU is still busy with it when the next batch comes
            weighted.assign_add(x * (step + 1) * work[0, 0])
        optimizer.apply_gradients([(x, whole)])

    options = hs.InputOptions(experimental_per_replica_buffer_size=buffer)
    dataset = Dataset.range(100 * n * steps).map(produce).batch(100 * n)
    for step, batch in enumerate(strategy.experimental_distribute_dataset(dataset, options)):
        strategy.run(consume, args=(batch, step))
        if step % 3 == 0:
            kept.append(own(strategy, batch))
    values = 2.0 * np.arange(100 * n * steps).reshape(steps, n, 100)
    assert (-whole.numpy()).tolist() == values.sum(axis=(0, 1)).tolist()
    if slow == "consumer":
        assert (
            weighted.numpy().tolist() == (values.sum(axis=1).T @ np.arange(1.0, steps + 1)).tolist()
        )
    # Nothing overwrote what is still held.
    for part, expected in zip(kept, values[::3, hs.rank()], strict=True):
        assert part.tolist() == expected.tolist()


@pytest.mark.core
def test_nests_of_any_dtype_and_size(strategy, xp):
    n, r, sizes = strategy.num_replicas_in_sync, hs.rank(), [1, 3, 0, 40, 2] * 4

    def nest(step):
        rows = np.arange(sizes[step] * n) + step
        return {
            "half": np.outer(rows, np.arange(step)).astype(np.float16),
            "nest": [(rows[:, None] * np.array([1, 2j])).astype(np.complex64), rows % 2 == 0],
            "empty": np.zeros((len(rows), 0)),
            "name": np.array([f"row {row}" for row in rows], "U12"),
        }

    distributed = strategy.experimental_distribute_dataset(
        [nest(step) for step in range(len(sizes))]
    )
    for step, batch in zip(range(len(sizes)), distributed, strict=True):
        part, whole = own(strategy, batch), nest(step)
        mine = slice(r * sizes[step], (r + 1) * sizes[step])
        pairs = [(part[name], whole[name]) for name in ("half", "empty", "name")]
        for found, expected in [*pairs, *zip(part["nest"], whole["nest"], strict=True)]:
            assert type(found) is (np.ndarray if expected.dtype.kind == "U" else xp.ndarray)
            assert found.dtype == expected.dtype and found.tolist() == expected[mine].tolist()


@pytest.mark.core
def test_batches_stay_on_the_host_where_it_is_asked(strategy):
    n = strategy.num_replicas_in_sync
    options = hs.InputOptions(experimental_fetch_to_device=False)
    for distributed in (
        strategy.experimental_distribute_dataset(Dataset.range(6 * n).batch(2 * n), options),
        strategy.distribute_datasets_from_function(
            lambda context: Dataset.range(6 * n).batch(2), options
        ),
    ):
        parts = [own(strategy, batch) for batch in distributed]
        assert [type(part) for part in parts] == [np.ndarray] * 3
        starts = [2 * (step * n + hs.rank()) for step in range(3)]
        assert [part.tolist() for part in parts] == [[a, a + 1] for a in starts]


@pytest.mark.core
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_an_iteration_left_half_way_disturbs_no_other(strategy, taken):
    n = strategy.num_replicas_in_sync
    distributed = strategy.experimental_distribute_dataset(
        Dataset.range(20 * n).map(lambda x: x + 1).batch(2 * n)
    )
    left = iter(distributed)
    for _ in range(taken):
        next(left)
    between = steps(strategy, distributed)
    assert between == [
        [[2 * (s * n + r) + 1, 2 * (s * n + r) + 2] for r in range(n)] for s in range(10)
    ]
    assert steps(strategy, itertools.islice(left, 2)) == between[taken : taken + 2]
    del left
    assert steps(strategy, distributed) == between


@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_a_pipeline_may_compute_on_the_gpu(place):
    """In its own thread, while a step frees memory that its own work is still to read."""
    xp, given_back, computed = place.xp, threading.Event(), threading.Event()

    def doubled(batch):
        if batch[0] == 20:  # 20 is loaded during the first step
            assert given_back.wait(60)
        try:
            return (xp.asarray(batch) * xp.full(batch.shape, 2.0)).get()
        finally:
            if batch[0] == 20:
                computed.set()

    def step(batch, box):
        total = (batch + box.pop()).sum()
        given_back.set()
        assert computed.wait(60)
        return total

    with place.make(hs.MirroredStrategy) as strategy:
        dataset = Dataset.from_tensor_slices(np.arange(200.0)).batch(20).map(doubled)
        for i, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
            total = strategy.reduce(
                "SUM", strategy.run(step, args=(batch, [xp.full(1, 1.0)])), None
            )
            assert float(total) == 2 * np.arange(20.0 * i, 20.0 * i + 20).sum() + 20


@pytest.mark.core
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
@pytest.mark.parametrize("threads", [1, 3])
def test_functions_in_threads_compute_on_the_gpu_of_the_pipeline(place, threads):
    xp, places = place.xp, []

    def doubled(row):
        places.append((xp.cuda.Device().id, xp.cuda.get_current_stream().ptr))
        return (xp.asarray(row) * 2).get()

    with place.make(hs.MirroredStrategy) as strategy:
        rows = Dataset.from_tensor_slices(np.arange(80.0).reshape(40, 2))
        dataset = rows.map(doubled, num_parallel_calls=threads).batch(10)
        gathered = [
            strategy.gather(step, 0) for step in strategy.experimental_distribute_dataset(dataset)
        ]
        assert np.array_equal(
            hs.asnumpy(xp.concatenate(gathered)), 2 * np.arange(80.0).reshape(40, 2)
        )
        own = strategy.run(lambda: xp.cuda.Device().id)
        assert {device for device, _ in places} == {
            strategy.experimental_local_results(own)[hs.rank()]
        }
        assert len({stream for _, stream in places}) == 1


# ---- calls in threads


def meeting(count):
    """A function of a number that returns only when `count` calls of it are under way."""
    others = threading.Barrier(count)

    def wait(x):
        others.wait(timeout=30)
        return x * 2

    return wait


@pytest.mark.core
@pytest.mark.parametrize("source", ["range", "generator", "shuffled"])
def test_calls_run_at_the_same_time_over_batches(strategy, source):
    """Eight on each rank, of which each batch has but one or two elements."""
    n = strategy.num_replicas_in_sync
    count = 16 * n
    make = {
        "range": lambda: Dataset.range(count),
        "generator": lambda: Dataset.from_generator(rows, np.int64, args=(count,)),
        "shuffled": lambda: Dataset.range(count).shuffle(count, seed=1),
    }[source]
    for size in (n, 2 * n):
        dataset = make().map(meeting(8), num_parallel_calls=8).batch(size)
        found = steps(strategy, strategy.experimental_distribute_dataset(dataset))
        assert found == [shares(batch * 2, size, n) for batch in make().batch(size)]


@pytest.mark.core
@pytest.mark.parametrize("batches", [16, 24])
def test_calls_for_whole_batches_run_at_the_same_time(strategy, batches):
    n = strategy.num_replicas_in_sync
    numbers = Dataset.from_generator(rows, np.int64, args=(4 * n * batches,))
    dataset = numbers.batch(4 * n).map(meeting(8), num_parallel_calls=8)
    found = steps(strategy, strategy.experimental_distribute_dataset(dataset))
    assert list(itertools.chain(*itertools.chain(*found))) == [*range(0, 8 * n * batches, 2)]


# ---- arrays that take only slices of rows


class Stored:
    """An array that is read as from a file: whole rows, in slices."""

    def __init__(self, array):
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        if type(rows) is not slice:
            raise TypeError(f"{type(rows).__name__} is not a slice")
        return self._array[rows]


@pytest.mark.core
@pytest.mark.parametrize("shape", [(23,), (23, 3), (23, 2, 2)], ids=str)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_an_array_that_takes_only_slices(strategy, shape, is_shuffled):
    array = np.arange(np.prod(shape)).reshape(shape)

    def made(rows):
        pairs = Dataset.from_tensor_slices({"rows": rows, "number": np.arange(len(array))})
        return (pairs.shuffle(23, seed=3) if is_shuffled else pairs).batch(5)

    expected = list(made(array))
    distributed = strategy.experimental_distribute_dataset(made(Stored(array)))
    for batch, whole in zip(distributed, expected, strict=True):
        for name in whole:
            parts = strategy.experimental_local_results(batch[name])
            assert [hs.asnumpy(part).tolist() for part in parts] == shares(
                whole[name].tolist(), len(whole[name]), strategy.num_replicas_in_sync
            )


@pytest.mark.core
@several_replicas
@pytest.mark.parametrize("is_only_one", [False, True])
def test_arrays_that_take_only_slices_are_compared(strategy, is_only_one):
    seed = hs.rank() // (hs.size() - 1) if is_only_one else hs.rank()
    array = np.random.default_rng(seed).permutation(1000)
    distributed = strategy.experimental_distribute_dataset(
        Dataset.from_tensor_slices(Stored(array)).batch(100)
    )
    with pytest.raises(hs.ReplicaMismatchError, match=r"different (arrays|elements)"):
        for _ in distributed:
            pass


# ---- datasets that do not fit together

NUMBERS = Dataset.range(8)
TEXTS = Dataset.from_tensor_slices(np.array(["one", "two"]))
UNLIKE = {
    "a pair": (NUMBERS, Dataset.zip(NUMBERS, NUMBERS)),
    "a dict": (Dataset.from_tensor_slices({"x": np.arange(8)}), NUMBERS),
    "another key": (
        Dataset.from_tensor_slices({"x": np.arange(8)}),
        Dataset.from_tensor_slices({"y": np.arange(8)}),
    ),
    "texts behind numbers": (NUMBERS, TEXTS),
    "numbers behind texts": (TEXTS, NUMBERS),
    "another dimension": (NUMBERS, Dataset.from_tensor_slices(np.ones((2, 3), np.int64))),
}


@pytest.mark.core
@pytest.mark.parametrize("computed", ["neither", "first", "second", "both"])
@pytest.mark.parametrize("kind", UNLIKE)
def test_unlike_datasets_are_not_joined(strategy, kind, computed):
    """All ranks are told by `concatenate`, or where functions hide the elements, at the first."""
    first, second = UNLIKE[kind]
    if computed in ("first", "both"):
        first = first.map(lambda *x: x[0] if len(x) == 1 else x)
    if computed in ("second", "both"):
        second = second.map(lambda *x: x[0] if len(x) == 1 else x)
    with pytest.raises(TypeError, match=r"Dataset\.concatenate"):
        list(strategy.experimental_distribute_dataset(first.concatenate(second).batch(3)))
    hs.barrier()


@pytest.mark.core
@pytest.mark.parametrize("computed", [False, True])
def test_texts_of_different_lengths_are_joined(strategy, computed):
    more = Dataset.from_tensor_slices(np.array(["three", "five5", "7"]))
    dataset = TEXTS.concatenate(more.map(lambda x: x) if computed else more).batch(3)
    found = steps(strategy, strategy.experimental_distribute_dataset(dataset))
    n = strategy.num_replicas_in_sync
    assert found == [shares(["one", "two", "three"], 3, n), shares(["five5", "7"], 2, n)]


# ---- batches that do not reach all replicas


def warnings_of(iterate):
    """The texts and places of the warnings of the block, on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterate()
    return [(str(warning.message), warning.filename, warning.category) for warning in caught]


@pytest.mark.core
@pytest.mark.parametrize("is_filtered", [False, True])
def test_each_rank_warns_once_of_a_batch_that_does_not_reach_all_replicas(strategy, is_filtered):
    n = strategy.num_replicas_in_sync
    dataset = Dataset.range(4 * n + 1)
    dataset = (dataset.filter(lambda x: True) if is_filtered else dataset).batch(2 * n)
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = warnings_of(lambda: [list(distributed) for _ in range(2)])
    if n == 1:
        assert found == []
        return
    ((text, place, category),) = found
    assert (
        f"some of {n} replicas have no elements of a batch of 1" in text
        and "drop_remainder=True" in text
    )
    assert (place, category) == (__file__, UserWarning)


@pytest.mark.core
@several_replicas
def test_where_warnings_are_errors_all_ranks_raise(strategy):
    n = strategy.num_replicas_in_sync
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(2 * n + 1).batch(2 * n)))
    next(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=f"some of {n} replicas have no elements"):
            next(iterator)
    hs.barrier()


@pytest.mark.core
@pytest.mark.parametrize("rest", [1, 3, 7])
@pytest.mark.parametrize("policy", [None, *list(AutoShardPolicy)[1:]])
def test_short_batches_are_split_evenly(strategy, rest, policy):
    n = strategy.num_replicas_in_sync
    dataset = Dataset.range(16 * n + rest).batch(8 * n)
    if policy is not None:
        options = hs.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        dataset = dataset.with_options(options)
    *full, last = steps(strategy, strategy.experimental_distribute_dataset(dataset))
    assert full == [shares(range(8 * n * step, 8 * n * (step + 1)), 8 * n, n) for step in range(2)]
    assert last == shares(range(16 * n, 16 * n + rest), rest, n)


def test_other_ways_to_feed_replicas_are_refused(place):
    options = hs.data.Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    dataset = Dataset.range(4).batch(2)
    with pytest.raises(NotImplementedError, match=r"Dataset\.with_options: .*split evenly"):
        dataset.with_options(options)
    per_replica = hs.InputOptions(
        experimental_replication_mode=hs.data.InputReplicationMode.PER_REPLICA
    )
    placed = hs.InputOptions(experimental_place_dataset_on_device=True)
    refused = (
        (per_replica, NotImplementedError, "replication_mode"),
        (placed, ValueError, "place_dataset_on_device"),
    )
    for made in STRATEGIES:
        with place.make(made) as strategy:
            for options, kind, name in refused:
                with pytest.raises(kind, match=name):
                    strategy.experimental_distribute_dataset(dataset, options)
                with pytest.raises(kind, match=name):
                    strategy.distribute_datasets_from_function(lambda _: dataset, options)
        hs.barrier()


@pytest.mark.core
def test_an_error_in_a_part_without_elements_says_so(strategy):
    (batch,) = strategy.experimental_distribute_dataset([np.ones((1, 3))])

    def first_row(x, y, *, others):
        return x[0] + y + others["x"][0] + [][0]

    for args, kwargs in (
        ((batch, 1), {"others": {"x": np.ones(1)}}),
        ((np.ones(1), 1), {"others": {"x": batch}}),
    ):
        with pytest.raises(IndexError) as caught:
            strategy.run(first_row, args, kwargs)
        notes = getattr(caught.value, "__notes__", [])
        if hs.rank() == 0:
            assert notes == []
        else:
            (note,) = notes
            assert (
                "this replica's part of the batch has no elements" in note
                and "drop_remainder=True" in note
            )
    hs.barrier()


def test_an_empty_array_of_the_programs_own_is_not_explained(strategy):
    with pytest.raises(IndexError) as caught:
        strategy.run(lambda x: x[0], args=(np.zeros(0),))
    assert getattr(caught.value, "__notes__", []) == []


def test_an_iterator_has_the_spec_of_its_dataset(place):
    with place.make(hs.MirroredStrategy) as strategy:
        distributed = strategy.experimental_distribute_dataset(hs.data.Dataset.range(8).batch(4))
        assert iter(distributed).element_spec == distributed.element_spec
