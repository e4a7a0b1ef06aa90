"""How datasets are split, in one process: each rank is a thread, and all step together."""

import functools
import itertools
import threading
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import distribute_dataset, distribute_from_function, nests, select
from strategies import STRATEGIES
from thread_ranks import Rank, on_ranks, parts

import hpcstrat as hs
from hpcstrat import PerReplica, PerReplicaSpec, TensorSpec
from hpcstrat.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    DistributedDataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
    ValueContext,
)

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


def lists(steps):
    return [[np.asarray(part).tolist() for part in step] for step in steps]


def shares(batch, size):
    """The even parts of one batch."""
    ends = np.cumsum([len(batch) // size + (r < len(batch) % size) for r in range(size)])
    return [list(batch[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


PIPELINES = {
    "range": lambda n, b: Dataset.range(n).batch(b),
    "slices": lambda n, b: Dataset.from_tensor_slices(np.arange(n)).batch(b),
    "dropped": lambda n, b: Dataset.range(n).batch(b, drop_remainder=True),
    "shuffled": lambda n, b: Dataset.range(n).shuffle(7, seed=1).batch(b),
    "wholly shuffled": lambda n, b: Dataset.range(n).shuffle(n + 1, seed=1).batch(b),
    "shuffled batches": lambda n, b: Dataset.range(n).batch(b).shuffle(3, seed=1),
    "mapped": lambda n, b: Dataset.range(n).map(lambda x: x * 2).batch(b),
    "mapped batches": lambda n, b: Dataset.range(n).batch(b).map(lambda x: x - x.max()),
    "filtered": lambda n, b: Dataset.range(n).filter(lambda x: x % 3).batch(b),
    "filtered batches": lambda n, b: Dataset.range(n).batch(b).filter(lambda x: x[0] % 2 == 0),
    "generated": lambda n, b: Dataset.from_generator(lambda: iter(range(n)), np.int64).batch(b),
    "repeated": lambda n, b: Dataset.range(n).repeat(2).batch(b),
    "repeated batches": lambda n, b: Dataset.range(n).batch(b).repeat(2),
    "sharded batches": lambda n, b: Dataset.range(n).batch(b).shard(2, 1),
    "zipped batches": lambda n, b: Dataset.zip(
        (Dataset.range(n).batch(b), Dataset.range(n).repeat(2).batch(b).shuffle(2, seed=1))
    ).map(lambda x, y: x),
    "batches of joined rows": lambda n, b: Dataset.range(n).concatenate(Dataset.range(7)).batch(b),
    "batches of batches": lambda n, b: (
        Dataset.range(n).batch(3, drop_remainder=True).batch(b).map(lambda x: x[:, 1])
    ),
    "joined batches": lambda n, b: Dataset.range(n).batch(b).concatenate(Dataset.range(n).batch(b)),
    "cached": lambda n, b: Dataset.range(n).map(lambda x: x + 1).cache().batch(b).cache(),
    "rebatched": lambda n, b: Dataset.range(n).batch(3).unbatch().batch(b),
    "mapped in threads": lambda n, b: (
        Dataset.range(n).map(lambda x: x * 2, num_parallel_calls=3).batch(b).prefetch(2)
    ),
    "mapped batches in threads": lambda n, b: (
        Dataset.range(n).batch(b).map(lambda x: -x, num_parallel_calls=3)
    ),
    "generated and mapped in threads": lambda n, b: (
        Dataset.from_generator(lambda: iter(range(n)), np.int64)
        .map(lambda x: -x, num_parallel_calls=AUTOTUNE)
        .filter(lambda x: x % 5)
        .batch(b)
    ),
    "rebatched results": lambda n, b: Dataset.range(n).batch(3).map(lambda x: x).unbatch().batch(b),
}


FEW = hypothesis.settings(max_examples=hypothesis.settings().max_examples // 4)


@pytest.mark.parametrize("pipeline", PIPELINES)
@FEW
@hypothesis.given(size=st.integers(1, 5), n=st.integers(0, 25), b=st.integers(1, 12))
@hypothesis.example(size=2, n=25, b=4)
@hypothesis.example(size=3, n=24, b=8)
@hypothesis.example(size=5, n=19, b=3)
def test_the_parts_of_all_ranks_are_the_batches(pipeline, size, n, b):
    make = functools.partial(PIPELINES[pipeline], n, b)
    expected = [shares(batch.tolist(), size) for batch in make()]
    assert lists(parts(size, make)) == expected


@FEW
@hypothesis.given(
    size=st.integers(1, 5), n=st.integers(0, 20), b=st.integers(1, 5), user_code=st.booleans()
)
@hypothesis.example(size=3, n=20, b=3, user_code=True)
def test_from_function_deals_the_elements_in_turn(size, n, b, user_code):
    def make(context):
        assert context == InputContext(1, 0, size)
        dataset = Dataset.range(n).batch(b)
        return dataset.map(lambda x: x) if user_code else dataset

    batches = [list(range(n))[i : i + b] for i in range(0, n, b)]
    batches += [[]] * (-len(batches) % size)
    expected = [batches[i : i + size] for i in range(0, len(batches), size)]
    assert lists(parts(size, lambda: make, distribute_from_function)) == expected


@pytest.mark.parametrize("size", [2, 3])
def test_empty_parts_have_the_dtype_and_the_trailing_shape(size):
    x, y = np.ones((1, 2, 3), np.float32), np.ones(1, np.int16)
    pairs = Dataset.from_tensor_slices({"x": x, "y": (y,)})
    for make in (
        lambda: pairs.batch(2),
        lambda: pairs.map(lambda z: z).batch(2),
        lambda: pairs.batch(2).map(lambda z: z),
        lambda: [{"x": x, "y": (y,)}],
        lambda: pairs.batch(1).batch(2),
    ):
        ((*_, last),) = parts(size, make)
        inner = (1,) if last["x"].ndim == 4 else ()
        assert last["x"].shape == (0, *inner, 2, 3) and last["x"].dtype == np.float32
        assert last["y"][0].shape == (0, *inner) and last["y"][0].dtype == np.int16
    ((*_, last),) = parts(size, lambda: lambda context: pairs.batch(1), distribute_from_function)
    assert last["x"].shape == (0, 2, 3)


def test_batches_that_a_function_makes_longer_are_split_evenly():
    make = lambda: Dataset.range(2).batch(2).map(lambda x: np.tile(x, 3))  # noqa: E731
    assert lists(parts(2, make)) == [[[0, 1, 0], [1, 0, 1]]]


class Loader:
    """Like PyTorch's: has `len`, is re-iterable, batches are lists of array-likes."""

    class Tensor:
        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array if dtype is None else self.array.astype(dtype)

    def __len__(self):
        return 2

    def __iter__(self):
        for n in (4, 3):
            yield [self.Tensor(np.arange(n)), {"y": self.Tensor(np.ones((n, 2)))}]


def test_any_iterable_of_batches():
    def generated():
        yield np.arange(5)
        yield np.arange(2)

    assert lists(parts(3, lambda: generated)) == [[[0, 1], [2, 3], [4]], [[0], [1], []]]
    first, second = parts(2, Loader)
    assert isinstance(first[0], list)
    np.testing.assert_array_equal(first[1][0], [2, 3])
    assert second[1][1]["y"].shape == (1, 2)
    source = [np.arange(4.0)]
    for size in (1, 2):
        for step in parts(size, lambda: source):
            for part in step:
                part[:] = -1
    np.testing.assert_array_equal(source[0], np.arange(4.0))


def test_it_is_iterated_over_again_and_left_early():
    def program(rank):
        distributed = distribute_dataset(Dataset.range(5).repeat().batch(4), rank, None)
        seen = []
        for _ in range(2):
            iterator = iter(distributed)
            seen.append([select(iterator.get_next()).tolist() for _ in range(3)])
        finite = iter(distribute_dataset(Dataset.range(2).batch(2).map(lambda x: x), rank, None))
        next(finite)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(finite)
        return seen

    left, right = on_ranks(2, program)
    assert left == [[[0, 1], [4, 0], [3, 4]]] * 2
    assert right == [[[2, 3], [1, 2], [0, 1]]] * 2


# ---- what is read, and what is communicated


def test_a_replica_calls_functions_for_its_own_elements_only():
    def program(rank):
        called = []
        dataset = (
            Dataset.range(96)
            .map(lambda x: called.append(int(x)) or x)
            .shuffle(100, seed=3)
            .batch(8)
        )
        mine = [select(x).tolist() for x in distribute_dataset(dataset, rank, None)]
        assert called == list(itertools.chain(*mine))
        return called

    assert sorted(itertools.chain(*on_ranks(4, program))) == list(range(96))


def test_indexed_sources_are_touched_for_the_replicas_own_rows_only():
    def program(rank):
        # Rows of other ranks change after the plan is known, which this rank never sees.
        source = np.arange(12)
        mine = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]][rank.rank]
        dataset = Dataset.from_tensor_slices(source).take(12).prefetch(1).cache().batch(6).repeat(1)
        iterator = iter(distribute_dataset(dataset, rank, None))
        source[[i for i in range(12) if i not in mine]] = -1
        return [select(x).tolist() for x in iterator]

    assert on_ranks(3, program) == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


def test_only_user_code_makes_steps_communicate():
    def calls(make):
        def program(rank):
            steps = sum(1 for _ in distribute_dataset(make(), rank, None))
            return steps, len(rank.calls)

        (found,) = set(on_ranks(2, program))
        return found

    indexed = Dataset.range(10).enumerate().shuffle(4).repeat(2).shard(2, 0)
    assert calls(lambda: indexed.batch(4).prefetch(1).skip(1).cache()) == (2, 1)
    assert calls(lambda: Dataset.range(10).map(lambda x: x).batch(4)) == (3, 1 + 3 + 1)


def test_batches_are_new_writable_and_contiguous():
    source = np.arange(24.0).reshape(12, 2)
    for make in (
        lambda: Dataset.from_tensor_slices(source).batch(6),
        lambda: Dataset.from_tensor_slices(source).shuffle(12).batch(6),
        lambda: (
            Dataset.from_tensors(source)
            .batch(6)
            .unbatch()
            .repeat(2)
            .batch(3)
            .unbatch()
            .unbatch()
            .batch(6)
        ),
        lambda: Dataset.from_tensor_slices(source).map(lambda x: x).cache().batch(6),
        lambda: [source],
    ):
        for size in (1, 3):
            for part in itertools.chain(*parts(size, make)):
                assert part.flags.writeable and part.flags.c_contiguous and part.base is None
                assert not np.shares_memory(part, source)


# ---- random orders


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("buffer_size", [4, 20])
def test_an_unseeded_shuffle_has_one_order_on_all_ranks_and_another_in_each_iteration(
    size, buffer_size
):
    def program(rank):
        dataset = (
            Dataset.range(20).shuffle(buffer_size).map(lambda x: x).shuffle(buffer_size).batch(5)
        )
        if rank.rank == 0:
            list(dataset)  # one rank iterating alone does not put the ranks out of step
        distributed = distribute_dataset(dataset, rank, None)
        return [[select(x).tolist() for x in distributed] for _ in range(3)]

    ranks = on_ranks(size, program)
    orders = [
        tuple(itertools.chain(*(part for step in zip(*of, strict=True) for part in step)))
        for of in zip(*ranks, strict=True)
    ]
    assert [sorted(order) for order in orders] == [list(range(20))] * 3
    assert len(set(orders)) == 3


def test_one_order_for_good_without_reshuffling_and_from_a_cache():
    for transform in (
        lambda d: d.shuffle(9, reshuffle_each_iteration=False),
        lambda d: d.shuffle(9).cache(),
        lambda d: d.filter(lambda x: x >= 0).shuffle(9).cache(),
    ):

        def program(rank, transform=transform):
            distributed = distribute_dataset(transform(Dataset.range(9)).batch(3), rank, None)
            return [[select(x).tolist() for x in distributed] for _ in range(2)]

        first, second = zip(*on_ranks(2, program), strict=True)
        assert first == second
        assert sorted(itertools.chain(*itertools.chain(*first))) == list(range(9))


# ---- what is refused, and where ranks disagree


@pytest.mark.parametrize("size", [1, 2])
def test_unbatched_datasets_are_refused(size):
    rank: Any = Rank(0, threading.Barrier(1), [None] * size)
    ten = Dataset.range(10)
    slabs = ten.map(lambda i: np.arange(i, i + 3))
    for unbatched in (
        ten,
        ten.batch(2).unbatch(),
        ten.batch(2).enumerate(),
        Dataset.zip((ten, ten.batch(2))),
        slabs,
    ):
        with pytest.raises(
            ValueError,
            match=r"experimental_distribute_dataset: .* call Dataset\.batch.*\.unbatch\(\)",
        ):
            distribute_dataset(unbatched, rank, None)
    distribute_dataset(ten.batch(2).batch(2).unbatch(), rank, None)
    distribute_dataset(slabs.unbatch().batch(4), rank, None)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.arange(4), "ndarray is not a dataset; make one with"),
        ((np.arange(4), np.arange(4)), "tuple is not a dataset"),
        ({"x": np.arange(4)}, "dict is not a dataset"),
        ("data", "str is not a dataset"),
        (3, "int is not a dataset"),
        (Dataset.range(4).batch, "batch is a method of a Dataset; call it"),
        (
            (x for x in [np.arange(4)]),
            r"generator can be iterated over only once; pass the generator function itself \(`f`, not `f\(\)`\)",
        ),
    ],
    ids=["array", "tuple", "dict", "text", "number", "method", "generator"],
)
def test_what_is_no_dataset_is_refused(wrong, text):
    rank: Any = Rank(0, threading.Barrier(1), [None])
    with pytest.raises(TypeError, match=r"Strategy\.experimental_distribute_dataset: " + text):
        distribute_dataset(wrong, rank, None)
    with pytest.raises(
        TypeError, match=r"Strategy\.distribute_datasets_from_function: what dataset_fn returned"
    ):
        distribute_from_function(lambda context: wrong, rank, None)


def test_a_distributed_dataset_takes_no_more():
    rank: Any = Rank(0, threading.Barrier(1), [None])
    distributed = distribute_dataset(Dataset.range(4).batch(2), rank, None)
    assert isinstance(distributed, DistributedDataset)
    assert not hasattr(distributed, "map")
    with pytest.raises(TypeError, match="already distributed"):
        distribute_dataset(distributed, rank, None)
    with pytest.raises(TypeError, match="dataset_fn is Dataset"):
        distribute_from_function(Dataset.range(4), rank, None)  # pyright: ignore[reportArgumentType]


MODE = InputReplicationMode.PER_REPLICA
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "per replica": (
        InputOptions(experimental_replication_mode=MODE),
        NotImplementedError,
        "PER_REPLICA",
    ),
    "on the device": (
        InputOptions(experimental_place_dataset_on_device=True),
        ValueError,
        "experimental_place_dataset_on_device",
    ),
    "both": (InputOptions(False, MODE, True), NotImplementedError, "PER_REPLICA|place_dataset"),
    "a dict": ({"experimental_fetch_to_device": True}, TypeError, "options is dict"),
}


@pytest.mark.parametrize("options", REFUSED)
@pytest.mark.parametrize("make", [*STRATEGIES, hs.OneDeviceStrategy])
def test_options_that_every_strategy_refuses(make, options):
    strategy = make(["CPU:0"]) if make is not hs.OneDeviceStrategy else make("CPU:0")
    wrong, error, text = REFUSED[options]
    dataset = Dataset.range(4).batch(2)
    with pytest.raises(error, match=rf"Strategy\.experimental_distribute_dataset: .*{text}"):
        strategy.experimental_distribute_dataset(dataset, wrong)
    with pytest.raises(error, match=rf"Strategy\.distribute_datasets_from_function: .*{text}"):
        strategy.distribute_datasets_from_function(lambda context: dataset, wrong)


def test_scalars_that_do_not_go_round_are_left_out_with_a_warning():
    def program(rank):
        return [
            select(x)
            for x in distribute_from_function(lambda context: Dataset.range(5), rank, None)
        ]

    with pytest.warns(UserWarning, match="elements for only 1 of 2 replicas"):
        assert on_ranks(2, program) == [[0, 2], [1, 3]]


# ---- attributes


def test_element_spec():
    def spec(size, make, distribute=distribute_dataset):
        (first, *others) = on_ranks(size, lambda rank: distribute(make(), rank, None).element_spec)
        assert all(other == first for other in others)
        return first

    pairs = Dataset.from_tensor_slices((np.ones((6, 2), np.float32), np.arange(6)))
    whole = (TensorSpec((None, 2), np.float32), TensorSpec((None,), np.int64))
    split = (PerReplicaSpec((None, 2), np.float32), PerReplicaSpec((None,), np.int64))
    assert spec(1, lambda: pairs.batch(4)) == whole
    assert spec(2, lambda: pairs.batch(4)) == spec(3, lambda: pairs.batch(4, True)) == split
    assert spec(2, lambda: pairs.batch(4, True))[1] == PerReplicaSpec((2,), np.int64)
    assert spec(2, lambda: [np.ones((3, 2))]) == PerReplicaSpec((None, 2), np.float64)
    assert spec(2, lambda: lambda context: pairs.batch(3, True), distribute_from_function)[
        1
    ].shape == (3,)
    assert spec(3, lambda: lambda context: pairs.batch(3, True), distribute_from_function)[
        1
    ].shape == (None,)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_there_are_as_many_steps_as_it_says(size):
    def program(rank):
        found = []
        for n in (0, 1, 7, 12):
            for made in (
                distribute_dataset(Dataset.range(n).batch(2), rank, None),
                distribute_dataset(Dataset.range(n).batch(2, drop_remainder=True), rank, None),
                distribute_from_function(lambda _, n=n: Dataset.range(n).batch(2), rank, None),
            ):
                assert made and len(made) == made.cardinality == len(list(made)), made
                found.append(len(made))
        endless = distribute_dataset(Dataset.range(3).batch(2).repeat(), rank, None)
        filtered = distribute_dataset(Dataset.range(3).filter(lambda x: x > 0).batch(2), rank, None)
        assert (endless.cardinality, filtered.cardinality) == (
            INFINITE_CARDINALITY,
            UNKNOWN_CARDINALITY,
        )
        for dataset, why in (endless, "infinite"), (filtered, "unknown"):
            with pytest.raises(
                TypeError, match=rf"experimental_distribute_dataset: len\(\).*{why}"
            ):
                len(dataset)
        return found

    steps = [-(-m // size) for m in (0, 1, 4, 6)]
    assert on_ranks(size, program)[0] == [
        x for n, of in zip((0, 1, 7, 12), steps, strict=True) for x in (-(-n // 2), n // 2, of)
    ]


@pytest.mark.filterwarnings("ignore:.*the last step has elements for only")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_of_scalars_that_are_left_out_do_not_count(size):
    def program(rank):
        made = distribute_from_function(lambda _: Dataset.range(7), rank, None)
        assert len(made) == len(list(made)) == 7 // size

    on_ranks(size, program)


@pytest.mark.parametrize("size", [1, 2])
def test_the_next_step_or_none(size):
    def program(rank):
        iterator = iter(distribute_dataset(Dataset.range(3).batch(2), rank, None))
        found = []
        while (step := iterator.get_next_as_optional()).has_value():
            found.append(select(step.get_value()).tolist())
        return found

    assert on_ranks(size, program) == ([[[0, 1], [2]]] if size == 1 else [[[0], [2]], [[1], []]])


def test_values_are_per_replica_where_there_are_several():
    def program(rank):
        return next(
            iter(distribute_dataset([{"x": np.arange(4), "y": [np.arange(4)]}], rank, None))
        )

    assert all(isinstance(leaf, np.ndarray) for leaf in nests.flatten(on_ranks(1, program))[0])
    for nest in on_ranks(2, program):
        assert all(isinstance(leaf, PerReplica) for leaf in nests.flatten(nest)[0])


def test_contexts_and_options():
    assert InputContext(2, 1, 4).get_per_replica_batch_size(8) == 2
    assert InputContext().get_per_replica_batch_size(0) == 0
    with pytest.raises(
        ValueError, match=r"global_batch_size is 7, not a multiple of 4, the number of replicas.* 8"
    ):
        InputContext(2, 1, 4).get_per_replica_batch_size(7)
    assert InputOptions(None) == InputOptions(True) == InputOptions()
    assert InputOptions(False, MODE, True, 2).experimental_per_replica_buffer_size == 2
    assert RunOptions() == RunOptions(True, False, None)
    for frozen in (InputContext(), InputOptions(), RunOptions(), ValueContext()):
        with pytest.raises(AttributeError):
            setattr(frozen, next(iter(vars(frozen))), 3)
