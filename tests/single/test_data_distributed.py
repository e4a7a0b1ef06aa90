"""How datasets are split, in one process: each rank is a thread, and all step together."""

import itertools
import threading
import warnings
from typing import Any

import numpy as np
import pytest
from internals import Workers, distribute_dataset, distribute_from_function, select
from public_api import begins_with_a_call
from thread_ranks import Rank, on_ranks, parts

import hpcstrat as hs
from hpcstrat import PerReplicaSpec, TensorSpec
from hpcstrat.data import (
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


def identity(x):
    return x


# ---- what ranks get


def test_empty_parts_have_the_dtype_and_the_trailing_shape():
    x, y = np.ones((1, 2, 3), np.float32), np.ones(1, np.int16)
    pairs = Dataset.from_tensor_slices({"x": x, "y": (y,)})
    for make in (
        lambda: pairs.batch(2),
        lambda: pairs.map(identity).batch(2),
        lambda: pairs.batch(2).map(identity),
        lambda: [{"x": x, "y": (y,)}],
        lambda: pairs.batch(1).batch(2),
    ):
        ((*_, last),) = parts(2, make)
        inner = (1,) if last["x"].ndim == 4 else ()
        assert last["x"].shape == (0, *inner, 2, 3) and last["x"].dtype == np.float32
        assert last["y"][0].shape == (0, *inner) and last["y"][0].dtype == np.int16
    ((*_, last),) = parts(2, lambda: lambda context: pairs.batch(1), distribute_from_function)
    assert last["x"].shape == (0, 2, 3)


def test_columns_of_python_numbers():
    """As those of a HuggingFace dataset."""
    rows = [0, 1, 2]
    table = {"text": [f"row {row}" for row in rows], "weight": [row / 2 for row in rows]}
    table["tokens"] = [[row, 2 * row] for row in rows]
    ((one, other),) = parts(2, lambda: lambda: iter([{"id": rows, **table}]))
    found = {name: np.concatenate([one[name], other[name]]) for name in one}
    assert {name: column.tolist() for name, column in found.items()} == {"id": rows, **table}
    assert found["weight"].dtype == np.float32


# ---- what is read, and what is communicated


def test_a_replica_calls_functions_for_its_own_elements_only():
    def program(rank):
        called = []
        mapped = Dataset.range(96).map(lambda x: called.append(int(x)) or x)
        distributed = distribute_dataset(mapped.shuffle(100, seed=3).batch(8), rank, None)
        assert [*itertools.chain(*(select(x).tolist() for x in distributed))] == called
        return called

    assert sorted(itertools.chain(*on_ranks(4, program))) == list(range(96))


def test_only_user_code_makes_steps_communicate():
    def calls(make):
        def program(rank):
            steps = sum(1 for _ in distribute_dataset(make(), rank, None))
            return steps, len(rank.calls)

        (found,) = set(on_ranks(2, program))
        return found

    indexed = Dataset.range(10).enumerate().shuffle(4).repeat(2).shard(2, 0)
    assert calls(lambda: indexed.batch(4).prefetch(1).skip(1).cache()) == (2, 1)
    assert calls(lambda: Dataset.range(10).map(identity).batch(4)) == (3, 1 + 3 + 1)


# ---- what is refused

ONE: Any = Rank(0, threading.Barrier(1), [None])
TEN = Dataset.range(10)


def test_unbatched_datasets_are_refused():
    rank: Any = Rank(0, threading.Barrier(1), [None] * 2)
    slabs = TEN.map(lambda i: np.arange(i, i + 3))
    for unbatched in (
        TEN,
        TEN.batch(2).unbatch(),
        Dataset.zip((TEN, TEN.batch(2))),
        slabs,
    ):
        with pytest.raises(
            ValueError,
            match=r"experimental_distribute_dataset: .* call Dataset\.batch.*\.unbatch\(\)",
        ):
            distribute_dataset(unbatched, rank, None)
    distribute_dataset(TEN.batch(2).batch(2).unbatch(), rank, None)
    distribute_dataset(slabs.unbatch().batch(4), rank, None)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.arange(4), "ndarray is not a dataset; make one with"),
        ((np.arange(4), np.arange(4)), "tuple is not a dataset"),
        ({"x": np.arange(4)}, "dict is not a dataset"),
        ("data", "str is not a dataset"),
        (3, "int is not a dataset"),
        (TEN.batch, "batch is a method of a Dataset; call it"),
        ((x for x in [np.arange(4)]), r"generator can be .* only once; .*\(`f`, not `f\(\)`\)"),
        (distribute_dataset(TEN.batch(2), ONE, None), "the dataset is already distributed"),
    ],
    ids=["array", "tuple", "dict", "text", "number", "method", "generator", "distributed"],
)
def test_what_is_no_dataset_is_refused(wrong, text):
    with pytest.raises(TypeError, match=r"^Strategy\.experimental_distribute_dataset: " + text):
        distribute_dataset(wrong, ONE, None)
    what = r"^Strategy\.distribute_datasets_from_function: what dataset_fn returned: "
    with pytest.raises(TypeError, match=what + text):
        distribute_from_function(lambda context: wrong, ONE, None)


def test_a_distributed_dataset_takes_no_more():
    distributed = distribute_dataset(TEN.batch(2), ONE, None)
    assert isinstance(distributed, DistributedDataset) and not hasattr(distributed, "map")
    with pytest.raises(TypeError, match="dataset_fn is Dataset"):
        distribute_from_function(TEN, ONE, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("make", [hs.MirroredStrategy, hs.OneDeviceStrategy])
def test_options_that_strategies_refuse(make):
    strategy, dataset = make("CPU:0" if make is hs.OneDeviceStrategy else ["CPU:0"]), TEN.batch(2)
    mode = InputReplicationMode.PER_REPLICA
    placed = InputOptions(experimental_place_dataset_on_device=True)
    refused: list[Any] = [
        (InputOptions(experimental_replication_mode=mode), NotImplementedError, "PER_REPLICA"),
        (placed, ValueError, "experimental_place_dataset_on_device"),
        ({"experimental_fetch_to_device": True}, TypeError, "options is dict"),
    ]
    for wrong, error, text in refused:
        with pytest.raises(error, match=rf"Strategy\.experimental_distribute_dataset: .*{text}"):
            strategy.experimental_distribute_dataset(dataset, wrong)
        with pytest.raises(error, match=rf"Strategy\.distribute_datasets_from_func.*: .*{text}"):
            strategy.distribute_datasets_from_function(lambda context: dataset, wrong)


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
    for size, shape in (2, (3,)), (3, (None,)):
        dealt = spec(size, lambda: lambda context: pairs.batch(3, True), distribute_from_function)
        assert dealt[1].shape == shape


@pytest.mark.filterwarnings("ignore:.*the last step has elements for only")
def test_there_are_as_many_steps_as_it_says():
    def program(rank):
        for n, drops in itertools.product((0, 1, 7, 12), (False, True)):
            batches, count = Dataset.range(n).batch(2, drops), n // 2 if drops else -(-n // 2)
            for made, steps in (
                (distribute_dataset(batches, rank, None), count),
                (distribute_from_function(lambda _, d=batches: d, rank, None), -(-count // 2)),
            ):
                assert made and len(made) == made.cardinality == len(list(made)) == steps
        for dataset, why in (TEN.batch(2).repeat(), "infinite"), (TEN.batch(2).filter(any), "unkn"):
            with pytest.raises(TypeError, match=rf"tribute_dataset: len\(\).*{why}"):
                len(distribute_dataset(dataset, rank, None))

    on_ranks(2, program)


def test_contexts_and_options():
    assert InputContext(2, 1, 4).get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match=r"global_batch_size is 7, not a multiple of 4, .* 8"):
        InputContext(2, 1, 4).get_per_replica_batch_size(7)
    assert InputOptions(None) == InputOptions(True) == InputOptions()
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True, 2)
    assert options.experimental_per_replica_buffer_size == 2
    assert RunOptions() == RunOptions(True, False, None)
    for frozen in (InputContext(), InputOptions(), RunOptions(), ValueContext()):
        with pytest.raises(AttributeError):
            setattr(frozen, next(iter(vars(frozen))), 3)


# ---- steps in which some replicas have nothing


def warned(size, make, distribute=distribute_dataset, workers=None):
    """The texts of each rank's warnings in three passes over the dataset that it makes."""

    def program(rank):
        options = {} if workers is None else {"workers": Workers(workers, rank.rank)}
        distributed = distribute(make(), rank, options=None, **options)
        for _ in range(3):
            list(distributed)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(size, program)
    everyones = sorted(str(one.message) for one in caught)
    texts = everyones[::size]
    assert everyones == sorted(texts * size)
    assert all(begins_with_a_call(text.removeprefix("iterating over ")) for text in texts)
    assert {(one.filename, one.category) for one in caught} <= {(__file__, UserWarning)}
    return texts


@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_for_fewer_than_all_replicas_is_warned_of_once(size):
    for count in range(1, 2 * size):
        texts = warned(size, lambda n=count: Dataset.range(9 * size + n).batch(9 * size))
        assert len(texts) == (count < size)
        for text in texts:
            assert f"some of {size} replicas have no elements of a batch of {count}" in text
            assert text.endswith("pass batch(..., drop_remainder=True)")
            assert len(text) < 240  # two lines
    assert warned(size, lambda: Dataset.range(size + 1).batch(size, drop_remainder=True)) == []
    assert warned(size, lambda: [np.arange(2 * size), np.arange(size), np.arange(0)]) == []


def test_steps_with_batches_for_some_replicas_only_are_warned_of():
    """Of two workers either may be short."""

    def texts(workers, *rows):
        make = lambda context: Dataset.range(rows[context.input_pipeline_id]).batch(2)  # noqa: E731
        return warned(len(workers), lambda: make, distribute_from_function, workers)

    for workers, *rows in ((0, 0), 6), ((0, 0, 1, 1), 6, 8), ((0, 0, 1, 1), 8, 6):
        (text,) = texts(workers, *rows)
        assert "some replicas have no elements in a step" in text
    assert texts((0, 0, 1, 1), 8, 8) == []


def test_scalars_that_do_not_go_round_are_left_out_with_a_warning():
    def program(rank):
        return [
            select(x)
            for x in distribute_from_function(lambda context: Dataset.range(5), rank, None)
        ]

    with pytest.warns(UserWarning, match="elements for only 1 of 2 replicas"):
        assert on_ranks(2, program) == [[0, 2], [1, 3]]


def test_where_warnings_are_errors_all_ranks_raise():
    def program(rank):
        iterator = iter(distribute_dataset(Dataset.range(5).batch(4), rank, None))
        next(iterator)
        with pytest.raises(UserWarning, match="some of 3 replicas have no elements"):
            next(iterator)
        return "raised"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_ranks(3, program) == ["raised"] * 3


# ---- what fails: all ranks raise, and then end


FOUR = Dataset.range(4)
RAGGED = {
    "mapped": (lambda: FOUR.map(lambda i: np.zeros(i // 2)), r"float64\[0\], float64\[1\]"),
    "generated": (
        lambda: Dataset.from_generator(lambda: (np.ones(n, np.int64) for n in (1, 1, 2, 2))),
        r"int64\[1\], int64\[2\]",
    ),
    "structures": (
        lambda: FOUR.map(lambda i: {"a" if i < 2 else "b": i}),
        r"nests of the same structure; they are \{'a': \*\} and \{'b': \*\}",
    ),
    "parts": (
        lambda: FOUR.map(identity).concatenate(FOUR.map(lambda x: {"a": x})),
        r"Dataset\.concatenate: .*must have the same structure",
    ),
}


@pytest.mark.parametrize("kind", RAGGED)
def test_rows_that_make_no_batch_are_refused_on_any_number_of_replicas(kind):
    """Even if the rows of each replica match, as with two replicas."""
    make, message = RAGGED[kind]
    size = 8 if kind == "parts" else 4

    def program(rank):
        iterator = iter(distribute_dataset(make().repeat(2).batch(size), rank, None))
        with pytest.raises((TypeError, ValueError), match=message):
            next(iterator)
        return list(iterator)

    for size_ in range(1, 4):
        assert on_ranks(size_, program) == [[]] * size_
    with pytest.raises(ValueError, match="first dimension"):
        parts(2, lambda: [(np.arange(3), np.arange(4))])


def test_all_ranks_raise_if_a_worker_has_nothing_to_show_the_shapes_of_empty_steps():
    def program(rank):
        def make(context):
            count = 0 if context.input_pipeline_id else 5
            return Dataset.from_generator(lambda: iter(np.eye(count)))

        workers = Workers((0, 1), rank.rank)
        distributed = distribute_from_function(make, rank, None, workers=workers)
        with pytest.raises(ValueError, match="yields nothing"):
            next(iter(distributed))

    on_ranks(2, program)
