"""Distributed datasets under a real strategy, on any number of ranks."""

import itertools
import os
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from mpi4py import MPI
from pipelines import (
    attempted,
    check_resuming,
    check_steps,
    failing_pipelines,
    order,
    pipelines,
)

import hpcstrat as hs
from hpcstrat.data import Dataset

# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")
several_replicas = pytest.mark.mpi(min_size=2)  # one agrees with itself, and has all elements


@pytest.fixture(scope="module")
def strategy(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


def parts_of(strategy):
    """A function of a step: every replica's part, as a list, on every rank."""
    return lambda step: [
        hs.asnumpy(part).tolist() for part in strategy.experimental_local_results(step)
    ]


def steps(strategy, distributed):
    """`[step][replica]`: every replica's part, as a list, on every rank."""
    return [*map(parts_of(strategy), distributed)]


def own(strategy, batch):
    """This replica's part."""
    found = []
    strategy.run(found.append, args=(batch,))
    return found[0]


def distributed_of(strategy, pipeline, deals):
    if deals:
        return strategy.distribute_datasets_from_function(lambda context: pipeline.make())
    return strategy.experimental_distribute_dataset(pipeline.make())


@hypothesis.given(failing_pipelines(), st.booleans())
def test_the_parts_of_all_replicas_are_the_batches_up_to_an_error(strategy, pipeline, deals):
    n, data = strategy.num_replicas_in_sync, distributed_of(strategy, pipeline, deals)
    passes = [attempted(data, parts_of(strategy)) for _ in range(2)]
    passes = [[[x] * n if x == "an error" else x for x in found] for found in passes]
    check_steps(passes, pipeline, n, deals)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path_factory.getbasetemp() / "stopped"))


@hypothesis.given(pipelines(), st.none() | st.integers(0, 9), st.booleans())
def test_a_pass_that_is_stopped_anywhere_goes_on_where_it_was(
    strategy, path, pipeline, stop, deals
):
    data, *fresh = (distributed_of(strategy, pipeline, deals) for _ in range(3))
    passes = check_resuming(data, fresh, parts_of(strategy), stop, path)
    check_steps(passes, pipeline, strategy.num_replicas_in_sync, deals)


def test_none_in_a_batch_is_none_on_each_replica(strategy):
    n = strategy.num_replicas_in_sync
    batches = Dataset.range(2 * n + 1).map(lambda x: (x, None)).batch(n)
    for dataset in batches, list(batches):
        numbers = []
        for batch in strategy.experimental_distribute_dataset(dataset):
            assert strategy.run(lambda x, none: none, args=batch) is batch[1] is None
            numbers += strategy.gather(batch[0], 0).tolist()
        assert numbers == [*range(2 * n + 1)]
    dealt = strategy.distribute_datasets_from_function(lambda _: batches)
    assert [batch[1] for batch in dealt] == [None] * -(-3 // n)


def test_unseeded_shuffles_agree_and_differ_between_iterations(strategy):
    dataset = Dataset.range(50).shuffle(7).map(lambda x: x).shuffle(50).batch(10)
    if hs.is_lead():
        list(dataset)  # one rank's own iteration puts no rank out of step
    distributed = strategy.experimental_distribute_dataset(dataset)
    passes = [steps(strategy, distributed) for _ in range(3)]
    orders = [tuple(itertools.chain(*itertools.chain(*one))) for one in passes]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len(set(orders)) == 3


def test_orders_do_not_depend_on_what_was_prepared_ahead(strategy):
    """Each iteration is left after its first round of 3 steps; a thread may have begun another."""
    for ahead in (0, 4):
        dataset = Dataset.range(12).shuffle(12, seed=3).batch(4).repeat()
        dataset = dataset.prefetch(ahead) if ahead else dataset
        distributed = strategy.experimental_distribute_dataset(dataset)
        for number in range(3):
            for step, x in enumerate(distributed):
                if step == 0:
                    assert strategy.gather(x, axis=0).tolist() == order(12, 3, number)[:4]
                time.sleep(0.01)  # a thread takes further steps meanwhile
                if step == 2:
                    break


def test_an_iteration_left_half_way_disturbs_no_other(strategy):
    n = strategy.num_replicas_in_sync
    for dataset in Dataset.range(20 * n).map(lambda x: x + 1), Dataset.range(1, 20 * n + 1):
        distributed = strategy.experimental_distribute_dataset(dataset.batch(2 * n))
        left = iter(distributed)
        for _ in range(5):
            next(left)
        between = steps(strategy, distributed)
        starts = [[2 * (s * n + r) + 1 for r in range(n)] for s in range(10)]
        assert between == [[[a, a + 1] for a in step] for step in starts]
        assert steps(strategy, itertools.islice(left, 2)) == between[5:7]
        del left
        assert steps(strategy, distributed) == between


def test_v1_calls_a_function_for_each_element(place):
    with place.make(hs.compat.v1.CentralStorageStrategy) as strategy:
        n = strategy.num_replicas_in_sync
        numbers = iter(range(2 * n))
        make = strategy.make_input_fn_iterator
        iterator = make(lambda context: lambda: np.full(2, next(numbers)))
        iterator.initialize()
        for step in range(2):
            parts = parts_of(strategy)(iterator.get_next())
            assert parts == [2 * [step * n + replica] for replica in range(n)]
        with pytest.raises(StopIteration):
            iterator.get_next()


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

    nests = [nest(step) for step in range(len(sizes))]
    distributed = strategy.experimental_distribute_dataset(nests)
    for step, batch in zip(range(len(sizes)), distributed, strict=True):
        part, whole = own(strategy, batch), nest(step)
        mine = slice(r * sizes[step], (r + 1) * sizes[step])
        pairs = [(part[name], whole[name]) for name in ("half", "empty", "name")]
        for found, expected in [*pairs, *zip(part["nest"], whole["nest"], strict=True)]:
            assert type(found) is (np.ndarray if expected.dtype.kind == "U" else xp.ndarray)
            assert found.dtype == expected.dtype and found.tolist() == expected[mine].tolist()


def test_batches_stay_on_the_host_where_it_is_asked(strategy):
    n = strategy.num_replicas_in_sync
    options = hs.InputOptions(experimental_fetch_to_device=False)
    whole, dealt = Dataset.range(6 * n).batch(2 * n), Dataset.range(6 * n).batch(2)
    for distributed in (
        strategy.experimental_distribute_dataset(whole, options),
        strategy.distribute_datasets_from_function(lambda context: dealt, options),
    ):
        assert iter(distributed).element_spec == distributed.element_spec
        parts = [own(strategy, batch) for batch in distributed]
        assert [type(part) for part in parts] == [np.ndarray] * 3
        starts = [2 * (step * n + hs.rank()) for step in range(3)]
        assert [part.tolist() for part in parts] == [[a, a + 1] for a in starts]


@pytest.mark.parametrize(("slow", "buffer"), [("producer", 4), ("consumer", 0), ("consumer", 1)])
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
        expected = values.sum(axis=1).T @ np.arange(1.0, steps + 1)
        assert weighted.numpy().tolist() == expected.tolist()
    # Nothing overwrote what is still held.
    for part, expected in zip(kept, values[::3, hs.rank()], strict=True):
        assert part.tolist() == expected.tolist()


@pytest.mark.gpu
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
            totals = strategy.run(step, args=(batch, [xp.full(1, 1.0)]))
            expected = 2 * np.arange(20.0 * i, 20.0 * i + 20).sum() + 20
            assert float(strategy.reduce("SUM", totals, None)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_functions_in_threads_compute_on_the_gpu_of_the_pipeline(place):
    xp, places, rows = place.xp, [], np.arange(80.0).reshape(40, 2)

    def doubled(row):
        places.append((xp.cuda.Device().id, xp.cuda.get_current_stream().ptr))
        return (xp.asarray(row) * 2).get()

    with place.make(hs.MirroredStrategy) as strategy:
        dataset = Dataset.from_tensor_slices(rows).map(doubled, num_parallel_calls=3).batch(10)
        distributed = strategy.experimental_distribute_dataset(dataset)
        gathered = [strategy.gather(step, 0) for step in distributed]
        assert np.array_equal(hs.asnumpy(xp.concatenate(gathered)), 2 * rows)
        own = strategy.experimental_local_results(strategy.run(lambda: xp.cuda.Device().id))
        assert {device for device, _ in places} == {own[hs.rank()]}
        assert len({stream for _, stream in places}) == 1


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


def test_a_step_cannot_be_taken_inside_a_replica_function(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(Dataset.range(10).batch(2)))
    for take in (next, type(iterator).get_next):
        with pytest.raises(ValueError, match="next was called inside a replica .* it outside"):
            strategy.run(take, args=(iterator,))
    hs.barrier()
    assert len(list(iterator)) == 5  # nothing was taken


@several_replicas
def test_datasets_that_differ_are_named(strategy):
    own = np.random.default_rng(hs.rank()).permutation(1000)
    arrays = r"different arrays .* on rank 1"
    generated = Dataset.from_generator(lambda: iter(range(4 + hs.rank())), np.int64)
    for dataset, facts in (
        (generated, "numbers of elements in step 2: none on rank 0; 1 on rank 1"),
        (Dataset.range(4 + hs.rank()), r"rank 1: Dataset\.range\(0, 5\)\.batch\(2, False\) with 3"),
        (Dataset.from_tensor_slices(own), arrays),
        (strategy.experimental_make_numpy_dataset(own), arrays),
    ):
        with pytest.raises(hs.ReplicaMismatchError, match=facts):
            list(strategy.experimental_distribute_dataset(dataset.batch(2)))
    same = Dataset.from_tensor_slices(hs.broadcast_object(own)).batch(100)
    distributed = strategy.experimental_distribute_dataset(same)
    assert sum(int(strategy.reduce("SUM", x, axis=0)) for x in distributed) == 499_500


def test_an_error_in_a_part_without_elements_says_so(strategy):
    (batch,) = strategy.experimental_distribute_dataset([np.ones((1, 3))])

    def first_row(x, y, *, others):
        return x[0] + y + others["x"][0] + [][0]

    for args, kwargs, is_explained in (
        ((batch, 1), {"others": {"x": np.ones(1)}}, hs.rank() > 0),
        ((np.ones(1), 1), {"others": {"x": batch}}, hs.rank() > 0),
        ((np.zeros(0), 1), {"others": {"x": np.ones(1)}}, False),  # the program's own
    ):
        with pytest.raises(IndexError) as caught:
            strategy.run(first_row, args, kwargs)
        notes = getattr(caught.value, "__notes__", [])
        assert len(notes) == is_explained
        for note in notes:
            assert "this replica's part of the batch has no elements" in note
            assert "drop_remainder=True" in note
    hs.barrier()
