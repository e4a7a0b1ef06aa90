"""Nested datasets, in one process: window, flat_map, interleave; also scan, reduce and others."""

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import distribute_dataset, select
from test_data_dataset import BAD, FAILING, MAKERS, attempts, items
from thread_ranks import on_ranks

from hpcstrat import ReplicaMismatchError, TensorSpec
from hpcstrat.data import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Dataset, DatasetSpec

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


# ---- window


def windows(values, size, shift, stride, drop):
    found = [values[start:][::stride][:size] for start in range(0, len(values), shift)]
    return [window for window in found if len(window) == size or not drop]


@pytest.mark.parametrize("kind", MAKERS)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(
    n=st.integers(0, 20),
    size=st.integers(1, 6),
    shift=st.integers(1, 7),
    stride=st.integers(1, 4),
    drop=st.booleans(),
)
def test_windows_are_those_of_lists(kind, n, size, shift, stride, drop):
    dataset = MAKERS[kind](n).window(size, shift, stride, drop)
    expected = windows(list(range(n)), size, shift, stride, drop)
    assert [items(window) for window in dataset] == expected
    assert [window.cardinality() for window in dataset] == [len(window) for window in expected]
    assert items(dataset.flat_map(lambda window: window.batch(size))) == expected
    assert dataset.cardinality() in (len(expected), UNKNOWN_CARDINALITY)


@pytest.mark.parametrize("n", [0, 5])
def test_the_spec_of_a_function_of_windows_is_known_without_a_window(n):
    windows = Dataset.range(n).window(2)
    sums = windows.map(lambda window: window.reduce(np.int64(0), lambda total, x: total + x))
    assert sums.element_spec == TensorSpec((), np.int64)
    assert windows.map(lambda window: window.batch(2)).element_spec == DatasetSpec(
        TensorSpec((None,), np.int64)
    )
    pairs = Dataset.from_tensor_slices({"x": np.ones((n, 3)), "y": np.arange(n)}).window(2)
    rows = pairs.map(
        lambda w: {
            "x": next(iter(w["x"])),
            "n": w["y"].reduce(np.int32(0), lambda count, y: count + np.int32(1)),
        }
    )
    assert rows.element_spec == {"x": TensorSpec((3,), np.float64), "n": TensorSpec((), np.int32)}
    of_windows = windows.window(2).map(
        lambda outer: outer.reduce(np.float32(0), lambda count, window: count + np.float32(1))
    )
    assert of_windows.element_spec == TensorSpec((), np.float32)


def test_windows_of_nests_are_nests_of_windows():
    rows = Dataset.from_tensor_slices(
        {"a": np.arange(5), "b": (np.arange(5) * 10, np.ones((5, 2)))}
    )
    found = list(rows.window(2, drop_remainder=True))
    assert [items(window["a"]) for window in found] == [[0, 1], [2, 3]]
    assert [items(window["b"][0].batch(2)) for window in found] == [[[0, 10]], [[20, 30]]]
    spec = rows.window(2).element_spec
    assert spec["a"] == DatasetSpec(TensorSpec((), np.int64)) and spec["b"][
        1
    ].element_spec == TensorSpec((2,), float)
    assert [
        items(window[0]) for window in Dataset.from_tensor_slices((np.arange(3),)).window(2)
    ] == [[0, 1], [2]]
    together = rows.window(2).flat_map(lambda w: Dataset.zip((w["a"].batch(2), w["b"][1].batch(2))))
    assert items(together)[-1] == ([4], [[1.0, 1.0]])
    assert "DatasetSpec(TensorSpec" in repr(spec["a"]) and spec["a"] != DatasetSpec(
        TensorSpec((), np.int32)
    )


def test_an_element_of_several_windows_is_loaded_for_each_of_them_and_once_for_all_its_leaves():
    calls = []
    pairs = Dataset.range(4).map(lambda x: calls.append(int(x)) or (x, -x))
    found = pairs.window(2).flat_map(lambda a, b: Dataset.zip((a.batch(2), b.batch(2))))
    assert items(found) == [([0, 1], [0, -1]), ([2, 3], [-2, -3])]
    assert (
        sorted(calls[1:]) == [0, 1, 2, 3] and calls[0] == 0
    )  # the first element shows the structure


def test_windows_may_be_reduced_and_passed_on():
    sums = (
        Dataset.range(5)
        .window(2)
        .map(lambda window: window.reduce(np.int64(0), lambda a, b: a + b))
    )
    assert items(sums.batch(2)) == [[1, 5], [4]]
    batched = Dataset.range(5).window(2).map(lambda window: window.batch(2))
    assert batched.element_spec == DatasetSpec(TensorSpec((None,), np.int64))
    assert items(batched.flat_map(lambda window: window)) == [[0, 1], [2, 3], [4]]
    assert [items(window) for window in Dataset.range(4).window(2).cache().repeat(2)] == [
        [0, 1],
        [2, 3],
    ] * 2
    assert sorted(items(window) for window in Dataset.range(4).window(2).shuffle(9, seed=1)) == [
        [0, 1],
        [2, 3],
    ]


def test_windows_are_no_rows():
    with pytest.raises(TypeError, match=r"Dataset.batch: the elements are datasets.*flat_map"):
        list(Dataset.range(4).window(2).batch(2))
    wrongs: list[Any] = [(0,), (2, 0), (2, -1), (2, 1, 0)]
    for wrong in wrongs:
        with pytest.raises(
            ValueError, match=r"Dataset.window: (size|shift|stride) is .*at least 1"
        ):
            Dataset.range(4).window(*wrong)


# ---- flat_map and interleave


def interleaved(lists, cycle, block):
    """TensorFlow's rule: a slot whose list ends passes; at its next turn it takes the next list."""
    waiting, slots, found, index = iter(lists), [None] * cycle, [], 0
    while True:
        if slots[index] is None:
            slots[index] = next(map(iter, waiting), None)
        if not any(slots):
            return found
        if slots[index] is not None:
            turn = list(itertools.islice(slots[index], block))
            found += turn
            if len(turn) < block:
                slots[index] = None
        index = (index + 1) % cycle


@pytest.mark.parametrize("kind", MAKERS)
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(
    sizes=st.lists(st.integers(0, 5), max_size=8), cycle=st.integers(1, 5), block=st.integers(1, 4)
)
def test_datasets_take_turns(kind, sizes, cycle, block):
    def numbers(index):
        return MAKERS[kind](sizes[index]).map(lambda x: 10 * index + x)

    lists = [[10 * i + x for x in range(size)] for i, size in enumerate(sizes)]
    outer = Dataset.range(len(sizes))
    assert items(outer.interleave(numbers, cycle, block)) == interleaved(lists, cycle, block)
    assert items(outer.flat_map(numbers)) == list(itertools.chain(*lists))


def test_a_flat_map_stays_lazy_and_may_be_infinite():
    seen = []
    endless = Dataset.range(3).flat_map(
        lambda x: seen.append(int(x)) or Dataset.from_tensors(x).repeat()
    )
    assert items(endless.take(3)) == [0, 0, 0] and seen == [0]
    assert (
        endless.cardinality()
        == Dataset.range(3).repeat().flat_map(Dataset.range).cardinality()
        == -2
    )
    assert items(Dataset.range(1).repeat().interleave(lambda x: Dataset.range(2), 2).take(5)) == [
        0,
        0,
        1,
        1,
        0,
    ]


def test_batches_of_several_datasets_and_nests():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3, 6))).flat_map(
        lambda a, b: Dataset.from_tensor_slices({"x": np.full((2, 2), a), "y": np.full(2, b)})
    )
    assert items(pairs.batch(4)) == [
        {"x": [[0, 0], [0, 0], [1, 1], [1, 1]], "y": [3, 3, 4, 4]},
        {"x": [[2, 2], [2, 2]], "y": [5, 5]},
    ]
    assert pairs.element_spec == {"x": TensorSpec((2,), np.int64), "y": TensorSpec((), np.int64)}
    ragged = Dataset.range(1, 3).flat_map(lambda x: Dataset.from_tensors(np.zeros(x)))
    assert ragged.element_spec == TensorSpec((None,), np.float64)
    with pytest.raises(ValueError, match=r"same shape and dtype.*float64\[1\], float64\[2\]"):
        list(ragged.batch(2))
    with pytest.raises(ValueError, match="element_spec.*no elements"):
        _ = Dataset.range(0).flat_map(Dataset.range).element_spec


def test_shuffles_within_have_an_order_of_their_own_each():
    for seed in (None, 5):
        orders = Dataset.range(20).flat_map(
            lambda x, seed=seed: Dataset.range(9).shuffle(9, seed=seed).batch(9)
        )
        first, second = items(orders), items(orders)
        assert all(sorted(order) == list(range(9)) for order in first + second)
        assert len({str(order) for order in first + second}) > 35
    two = Dataset.range(8).flat_map(
        lambda x: Dataset.zip((Dataset.range(9).shuffle(9), Dataset.range(9).shuffle(9))).batch(9)
    )
    assert any(a != b for a, b in items(two))
    one = Dataset.range(8).flat_map(
        lambda x: Dataset.range(9).shuffle(9, reshuffle_each_iteration=False).batch(9)
    )
    assert len({str(order) for order in items(one) + items(one)}) == 1
    kept = Dataset.range(3).flat_map(lambda x: Dataset.range(9).shuffle(9)).cache()
    assert items(kept) == items(kept)


def shuffled_within(seed, reshuffle=True):
    return lambda x: Dataset.range(10 * x, 10 * x + 9).shuffle(9, seed, reshuffle)


def of_one_dataset(one):
    return Dataset.range(4).flat_map(lambda x: one.map(lambda y: 10 * x + y))


SEEDED = {
    "flat_map": lambda seed: Dataset.range(4).flat_map(shuffled_within(seed)),
    "interleave": lambda seed: Dataset.range(4).interleave(shuffled_within(seed), 2, 2),
    "threads": lambda seed: Dataset.range(4).interleave(shuffled_within(seed), 2, 2, 3),
    "nested": lambda seed: Dataset.range(2).interleave(
        lambda x: Dataset.range(2 * x, 2 * x + 2).flat_map(shuffled_within(seed)).repeat(2), 2, 2
    ),
    "sampled": lambda seed: Dataset.range(4).flat_map(
        lambda x: Dataset.sample_from_datasets(
            [Dataset.range(10), Dataset.range(10, 20)], seed=seed, rerandomize_each_iteration=True
        )
    ),
    "of one dataset": lambda seed: of_one_dataset(Dataset.range(9).shuffle(9, seed=seed)),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_orders_with_a_seed_within_are_the_same_in_every_program(kind):
    passes = [[items(dataset) for _ in range(3)] for dataset in map(SEEDED[kind], [5, 5, 5, 6])]
    assert passes[0] == passes[1] == passes[2]
    assert len({str(order) for order in passes[0] + passes[3]}) == 6
    assert len({str(sorted(order)) for order in passes[0] + passes[3]}) == 1
    assert items(SEEDED[kind](5).repeat(2)) == passes[0][0] + passes[0][1]
    if kind == "threads":
        assert passes[0][0] == items(SEEDED["interleave"](5))


def test_equal_seeds_within_give_equal_orders_in_a_dataset():
    pairs = Dataset.range(3).flat_map(
        lambda x: Dataset.zip(shuffled_within(5)(x), shuffled_within(5)(x))
    )
    assert all(x == y for x, y in items(pairs))
    one = Dataset.range(3).flat_map(lambda x: shuffled_within(5, False)(0).repeat(2))
    assert (
        items(one)
        == items(Dataset.range(9).shuffle(9, seed=5, reshuffle_each_iteration=False)) * 6
        == items(one)
    )


@pytest.mark.parametrize("kind", SEEDED)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 1), (3, 2)])
def test_orders_with_a_seed_within_go_on_in_a_dataset_on_other_ranks(kind, sizes):
    """In the second pass, in the middle of the second inner dataset."""
    taken = 14  # elements: 7 batches
    passes = SEEDED[kind](5)
    first, second, third = [items(passes) for _ in range(3)]

    def saved(rank):
        distributed = distribute_dataset(SEEDED[kind](5).batch(2), rank, None)
        list(distributed)
        iterator = iter(distributed)
        for _ in range(taken // 2):
            next(iterator)
        return iterator._position()

    position, *others = on_ranks(sizes[0], saved)
    assert all(other == position for other in others) and position.taken == taken

    def resumed(rank):
        distributed = distribute_dataset(SEEDED[kind](5).batch(2), rank, None)
        distributed._seek(position)
        return [[select(step).tolist() for step in distributed] for _ in range(2)]

    every = on_ranks(sizes[1], resumed)
    rest, following = (
        [x for parts in zip(*steps, strict=True) for part in parts for x in part]
        for steps in zip(*every, strict=True)
    )
    assert rest == second[taken:] and following == third and first not in (second, third)


@pytest.mark.parametrize("source", FAILING)
def test_errors_of_a_function_and_within_a_dataset_have_their_place(source):
    of_input = FAILING[source]().flat_map(lambda x: Dataset.from_tensors(x).repeat(2))
    assert attempts(of_input) == [0, 0, 1, 1, BAD, 3, 3, 4, 4, BAD, 6, 6]
    within = Dataset.range(2).flat_map(lambda x: FAILING[source]())
    assert attempts(within) == [0, 1, BAD, 3, 4, BAD, 6] * 2
    assert attempts(within.batch(2))[:3] == [[0, 1], BAD, BAD]

    def refused(x):
        return Dataset.range(10 // (1 - int(x)), 12)

    assert attempts(Dataset.range(3).interleave(refused, 2)) == [10, BAD, 11, *range(-10, 12)]


def test_an_error_of_a_generator_ends_its_dataset_only():
    def numbers():
        yield 1
        yield 1 // 0

    assert attempts(Dataset.range(2).flat_map(lambda x: Dataset.from_generator(numbers))) == [
        1,
        BAD,
        1,
        BAD,
    ]


def test_functions_must_make_datasets():
    for call in ("flat_map", "interleave"):
        with pytest.raises(
            TypeError, match=rf"Dataset.{call}: map_func returned int64; it must return a Dataset"
        ):
            list(getattr(Dataset.range(3), call)(lambda x: x))
        with pytest.raises(TypeError, match=f"Dataset.{call}: map_func is int"):
            getattr(Dataset.range(3), call)(3)
    wrongs: list[Any] = [(0,), (-2,), (2, 0)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="Dataset.interleave: (cycle|block)_length is"):
            Dataset.range(3).interleave(Dataset.range, *wrong)
    assert (
        repr(Dataset.range(3).interleave(Dataset.range))
        == "Dataset.range(0, 3).interleave(range, 16, 1)"
    )


# ---- scan and reduce


def test_scan_is_accumulate(make):
    sums = make(10).scan(np.int64(0), lambda total, x: (total + x, total + x))
    assert items(sums) == items(sums) == list(itertools.accumulate(range(10)))
    assert items(sums.batch(4).take(1)) == [[0, 1, 3, 6]]
    assert sums.element_spec == TensorSpec((), np.int64) and sums.cardinality() in (
        10,
        UNKNOWN_CARDINALITY,
    )
    nested = make(5).scan(
        {"a": 0, "b": [1, 1]},
        lambda state, x: ({"a": state["a"] + 1, "b": state["b"] * 2}, (x, state)),
    )
    assert items(nested.map(lambda x, state: (x, state["a"], state["b"])))[-1] == (4, 4, [16, 16])
    assert (
        Dataset.range(3).repeat().scan(0, lambda s, x: (s, x)).cardinality() == INFINITE_CARDINALITY
    )


def test_scan_after_an_error_goes_on_with_the_state_before():
    def add(total, x):
        return total + 12 // (int(x) - 2), total

    assert attempts(Dataset.range(5).scan(0, add)) == [0, -6, BAD, -18, -6]
    assert attempts(FAILING["map"]().scan(0, lambda n, x: (n + 1, n))) == [0, 1, BAD, 2, 3, BAD, 4]
    with pytest.raises(
        TypeError, match="Dataset.scan: scan_func returned int64; it must return a pair"
    ):
        list(Dataset.range(2).scan(0, lambda s, x: x))
    with pytest.raises(
        ValueError, match=r"Dataset.scan: scan_func returned a state that is PyTreeSpec\(\(\*, \*\)"
    ):
        list(Dataset.range(2).scan(0, lambda s, x: ((s, s), x)))
    with pytest.raises(
        ValueError, match=r"Dataset.element_spec: .*scan\(<lambda>\) has no elements"
    ):
        _ = Dataset.range(0).scan(0, lambda s, x: (s, x)).element_spec


def test_reduce(make):
    assert make(10).reduce(0, lambda total, x: total + x) == 45
    largest, count = (
        make(10)
        .batch(3)
        .reduce((np.int64(0), 0), lambda s, x: (np.maximum(s[0], x.max()), s[1] + 1))
    )
    assert (largest, count) == (9, 4)
    pairs = Dataset.zip((make(4), make(4)))
    assert pairs.reduce(np.int64(0), lambda s, x: s + x[0] * x[1]) == 14
    assert make(0).reduce({"a": 7}, lambda s, x: s) == {"a": 7}
    with pytest.raises(ValueError, match="Dataset.reduce: reduce_func returned a state"):
        make(3).reduce((0, 0), lambda s, x: x)
    with pytest.raises(ZeroDivisionError):
        FAILING["map"]().reduce(0, lambda s, x: s)


def test_to_reduce_moves_no_iteration():
    dataset = Dataset.range(6).shuffle(6, seed=1)
    iterator = iter(dataset)
    first = [int(next(iterator)) for _ in range(3)]
    assert dataset.reduce(0, lambda s, x: s + x) == 15
    assert sorted(first + items(iterator)) == list(range(6))


# ---- padded_batch


def counts(n):
    return Dataset.from_generator(lambda: (np.full(i, i) for i in range(1, n + 1)), np.int64)


def padded(n, size, width=None, value=0):
    found = []
    for start in range(1, n + 1, size):
        rows = range(start, min(start + size, n + 1))
        most = width or max(rows)
        found.append([[i] * i + [value] * (most - i) for i in rows])
    return found


@pytest.mark.parametrize("n", [0, 1, 5])
def test_batches_are_padded(n):
    assert items(counts(n).padded_batch(2)) == padded(n, 2)
    assert items(counts(n).padded_batch(3, [None], -1)) == padded(n, 3, value=-1)
    assert items(counts(n).padded_batch(3, [7], np.int64(9))) == padded(n, 3, 7, 9)
    assert items(counts(n).padded_batch(2, 6, drop_remainder=True)) == padded(n - n % 2, 2, 6)


def test_padding_of_nests_and_dtypes():
    rows = counts(3).map(
        lambda x: {"n": x, "text": np.full((1, len(x)), "ab"), "m": (x > 1, x * 0.5, len(x))}
    )
    (batch,) = rows.padded_batch(3, {"n": [4], "text": [-1, None], "m": ([None], 3, [])})
    assert batch["n"].shape == (3, 4) and batch["n"].dtype == np.int64
    assert batch["text"].tolist() == [[["ab", "", ""]], [["ab", "ab", ""]], [["ab", "ab", "ab"]]]
    assert batch["m"][0].dtype == bool and not batch["m"][0][0].any()
    assert batch["m"][1].dtype == np.float64 and batch["m"][2].tolist() == [1, 2, 3]
    (batch,) = rows.padded_batch(3, padding_values={"n": 5, "text": "-", "m": (True, np.inf, None)})
    assert batch["text"][0].tolist() == [["ab", "-", "-"]] and batch["m"][1][0].tolist() == [
        0.5,
        np.inf,
        np.inf,
    ]
    assert items(
        counts(2).map(lambda x: x.astype(np.uint8)).padded_batch(2, padding_values=255)
    ) == [[[1, 255], [2, 2]]]
    assert rows.padded_batch(3, drop_remainder=True).element_spec["text"].shape == (3, None, None)
    assert counts(3).padded_batch(2, [5]).element_spec == TensorSpec((None, 5), np.int64)
    assert Dataset.range(5).padded_batch(2).cardinality() == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((2, [1]), ValueError, r"larger than the padded shape \[1\]: .* are \[2\]"),
        (
            (2, [2, 2]),
            ValueError,
            r"padded shape \[2, 2\] does not match an element of shape \[1\]",
        ),
        ((2, ([2], [2])), ValueError, "padded shape .* does not match"),
        ((2, None, (1, 2)), TypeError, r"padding_values has \(1, 2\)"),
        ((2, None, 1.5), TypeError, "padding_values has 1.5 for a leaf of dtype int64"),
        ((2, None, "x"), TypeError, "padding_values has 'x'"),
        ((2, None, np.uint64(2**63)), TypeError, "padding_values has"),
    ],
    ids=[
        "too small",
        "of two dimensions",
        "two shapes",
        "two values",
        "a fraction",
        "text",
        "too large a number",
    ],
)
def test_padding_that_does_not_go(arguments, error, text):
    with pytest.raises(error, match=f"Dataset.padded_batch: .*{text}"):
        list(counts(4).padded_batch(*arguments))
    with pytest.raises(ValueError, match="Dataset.padded_batch: batch_size is 0"):
        counts(4).padded_batch(0)
    pairs = counts(2).map(lambda x: (x, x))
    with pytest.raises(ValueError, match="Dataset.padded_batch: padded_shapes is"):
        list(pairs.padded_batch(2, ([2],)))
    with pytest.raises(ValueError, match="Dataset.padded_batch: padding_values is"):
        list(pairs.padded_batch(2, padding_values=(1, 2, 3)))


def test_rows_that_cannot_be_padded_together():
    for odd in (np.zeros((1, 1), np.int64), np.zeros(1), (np.zeros(1, np.int64),)):
        dataset = Dataset.from_generator(lambda odd=odd: iter([np.zeros(1, np.int64), odd]))
        with pytest.raises(ValueError, match="Dataset.padded_batch: the elements of a batch must "):
            list(dataset.padded_batch(2))


# ---- rebatch


@hypothesis.given(
    n=st.integers(0, 20),
    size=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    drop=st.booleans(),
)
def test_rebatch_is_batch_of_the_rows(n, size, sizes, drop):
    expected, start = [], 0
    for turn in itertools.cycle(sizes):
        if start >= n:
            break
        expected.append(list(range(start, min(start + turn, n))))
        start += turn
    if drop and start > n:
        expected.pop()
    for dataset in (Dataset.range(n).batch(size), Dataset.range(n).batch(size).map(lambda x: x)):
        assert items(dataset.rebatch(sizes, drop)) == expected
    batched = Dataset.range(n).concatenate(Dataset.range(0)).batch(size)
    assert items(batched.rebatch(sizes[0])) == items(batched.unbatch().batch(sizes[0]))


def test_rebatch_takes_sizes():
    assert Dataset.range(8).batch(4).rebatch(3, True).element_spec == TensorSpec((3,), np.int64)
    assert Dataset.range(8).batch(4).rebatch([3, 2], True).element_spec == TensorSpec(
        (None,), np.int64
    )
    for wrong in (0, [2, 0], []):
        with pytest.raises(ValueError, match="Dataset.rebatch: batch_size"):
            Dataset.range(8).batch(4).rebatch(wrong)


# ---- sample_from_datasets, choose_from_datasets, list_files


def test_elements_are_drawn_by_their_weights(make):
    sizes, weights = (40, 60, 50), (1, 2, 0)
    datasets = [
        make(size).map(lambda x, start=start: x + start)
        for start, size in zip((0, 100, 200), sizes, strict=True)
    ]
    one = Dataset.sample_from_datasets(datasets[:2], weights[:2], seed=4)
    found = items(one)
    assert [x for x in found if x < 100] == list(range(40)) and [
        x for x in found if x >= 100
    ] == list(range(100, 160))
    assert (
        items(one)
        == found
        != items(Dataset.sample_from_datasets(datasets[:2], weights[:2], seed=5))
    )
    again = Dataset.sample_from_datasets(datasets[:2], seed=4, rerandomize_each_iteration=True)
    assert items(again) != items(again)
    assert items(Dataset.sample_from_datasets(datasets[2:])) == list(range(200, 250))
    assert max(items(Dataset.sample_from_datasets(datasets, weights))) < 200
    many, few = Dataset.range(3).repeat(), Dataset.range(5)
    of_one = [
        Dataset.sample_from_datasets([few]),
        Dataset.sample_from_datasets([many, few], [0, 2]),
    ]
    of_two = [
        Dataset.sample_from_datasets([many, few, few], weights)
        for weights in ([1, 1, 0], [0, 1, 1])
    ]
    assert [dataset.cardinality() for dataset in (*of_one, *of_two)] == [5, 5, -1, -2]
    stopped = items(
        Dataset.sample_from_datasets(datasets[:2], weights[:2], seed=4, stop_on_empty_dataset=True)
    )
    assert stopped == found[: len(stopped)] and (stopped.count(39) or stopped.count(159))


@hypothesis.given(
    choices=st.lists(st.integers(0, 2), max_size=30),
    sizes=st.tuples(*[st.integers(0, 6)] * 3),
    stops=st.booleans(),
    kind=st.sampled_from(list(MAKERS)),
)
def test_elements_are_chosen(choices, sizes, stops, kind):
    expected, streams = [], [iter(range(10 * i, 10 * i + size)) for i, size in enumerate(sizes)]
    for choice in choices:
        found = next(streams[choice], None)
        if found is not None:
            expected.append(found)
        elif stops:
            break
    datasets = [MAKERS[kind](size).map(lambda x, i=i: 10 * i + x) for i, size in enumerate(sizes)]
    numbers = Dataset.from_tensor_slices(np.array(choices, np.int64))
    assert items(Dataset.choose_from_datasets(datasets, numbers, stops)) == expected
    keyed = [Dataset.range(10 * i, 10 * i + size) for i, size in enumerate(sizes)]
    assert items(Dataset.choose_from_datasets(keyed, numbers, stops).batch(4)) == [
        expected[i : i + 4] for i in range(0, len(expected), 4)
    ]


def test_to_choose_is_lazy_and_drawing_may_be_infinite():
    seen = []
    noted = Dataset.range(9).map(lambda x: seen.append(int(x)) or x)
    both = Dataset.choose_from_datasets(
        [noted, Dataset.range(9)], Dataset.from_tensors(np.int64(0)).repeat()
    )
    # The first element is also read to compare it with the others.
    assert items(both.take(2)) == [0, 1] and seen == [0, 0, 1]
    endless = [Dataset.range(2).repeat(), Dataset.range(10, 12).repeat()]
    drawn = Dataset.sample_from_datasets(endless, seed=1)
    assert drawn.cardinality() == INFINITE_CARDINALITY and len(items(drawn.take(3000))) == 3000
    assert drawn.element_spec == TensorSpec((), np.int64)


def test_what_cannot_be_drawn_from():
    few, call = Dataset.range(3), Dataset.sample_from_datasets
    for weights in ([1], [1, -1], [0, 0], [1, np.nan]):
        with pytest.raises(
            ValueError,
            match="sample_from_datasets: weights is .* one number for each of the 2 datasets",
        ):
            call([few, few], weights)
    with pytest.raises(ValueError, match="there is no dataset"):
        call([])
    wrongs: list[Any] = [
        ([few, 3], None),
        ([few, Dataset.from_tensors(1.5)], None),
        ([few, few], few),
    ]
    for datasets, weights in wrongs:
        with pytest.raises(TypeError):
            call(datasets, weights)
    for choice in (3, -1, 1.5):
        with pytest.raises(ValueError, match="choose_from_datasets: choice_dataset has an element"):
            list(Dataset.choose_from_datasets([few, few], Dataset.from_tensors(np.asarray(choice))))


def test_files_are_listed(tmp_path):
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.dat")]
    for name in names:
        open(name, "w").close()
    assert items(Dataset.list_files(tmp_path / "*", shuffle=False)) == names
    assert items(Dataset.list_files([f"{tmp_path}/*.dat", f"{tmp_path}/a*"], shuffle=False)) == [
        names[0],
        names[2],
    ]
    shuffled = Dataset.list_files(f"{tmp_path}/*", seed=1)
    assert sorted(items(shuffled)) == names and shuffled.cardinality() == 3
    assert len({str(items(shuffled)) for _ in range(20)}) > 1
    with pytest.raises(ValueError, match="Dataset.list_files: no file matches .*nothing"):
        Dataset.list_files(tmp_path / "nothing")

    def lines(name):
        with open(name) as file:
            yield from file

    read = Dataset.list_files(f"{tmp_path}/*.txt", shuffle=False).interleave(
        lambda name: Dataset.from_generator(lambda: lines(name), np.str_), num_parallel_calls=2
    )
    for name in names:
        with open(name, "w") as file:
            file.write(f"1 of {name[-5]}\n2\n")
    assert items(read) == ["1 of a\n", "1 of b\n", "2\n", "2\n"]


# ---- on several ranks


@pytest.mark.parametrize("size", [2, 3])
def test_of_indexed_datasets_each_rank_loads_its_own_elements_only(size):
    def loaded(transform):
        def program(rank):
            calls = []
            dataset = Dataset.range(24).map(lambda x: calls.append(int(x)) or x)
            for _ in distribute_dataset(transform(dataset), rank, None):
                pass
            return calls

        return on_ranks(size, program)

    windows = loaded(lambda data: data.window(2).flat_map(lambda window: window.batch(2)).batch(6))
    for calls in windows:  # the first element shows the structure of a window
        assert calls[0] == 0 and len(calls) == 1 + 24 // size
    assert sorted(x for calls in windows for x in calls[1:]) == list(range(24))
    mapped = loaded(
        lambda data: Dataset.range(3).flat_map(lambda x: data.skip(8 * x).take(8)).batch(6)
    )
    assert sorted(x for calls in mapped for x in calls) == list(range(24))
    rows = loaded(lambda data: data.padded_batch(6, []))
    assert sorted(x for calls in rows for x in calls) == list(range(24))
    again = loaded(lambda data: data.batch(4).rebatch(6))
    assert sorted(x for calls in again for x in calls) == list(range(24))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_unseeded_shuffle_within_a_dataset_has_one_order_on_all_ranks(size):
    def program(rank):
        dataset = (
            Dataset.range(4)
            .interleave(lambda x: Dataset.range(10 * x, 10 * x + 10).shuffle(10), 2, 3)
            .batch(size)
        )
        distributed = distribute_dataset(dataset, rank, None)
        return [[select(step).tolist() for step in distributed] for _ in range(2)]

    every = on_ranks(size, program)
    orders = [
        [x for parts in zip(*of, strict=True) for part in parts for x in part]
        for of in zip(*every, strict=True)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40)) and orders[0] != orders[1]
    assert [x // 10 for x in orders[0]] == [x // 10 for x in orders[1]]


def test_datasets_of_a_function_that_differ_between_ranks_are_noticed():
    def program(rank):
        dataset = (
            Dataset.range(3)
            .flat_map(lambda x: Dataset.from_tensor_slices(np.arange(4) + rank.rank))
            .batch(2)
        )
        list(distribute_dataset(dataset, rank, None))

    with pytest.raises(ReplicaMismatchError, match="different elements up to step"):
        on_ranks(2, program)


def none_and(x):
    return None, x


NONES = {
    # What TensorFlow 2.15.1 gives for `Dataset.range(4).map(lambda x: (None, x))` and the same
    # methods; `padded_batch` and a signature with None it refuses.
    "batch": (lambda d: d.batch(3), [(None, [0, 1, 2]), (None, [3])]),
    "unbatch": (lambda d: d.batch(3).unbatch(), [(None, x) for x in range(4)]),
    "map": (lambda d: d.map(lambda a, b: (a, b + 1)), [(None, x) for x in range(1, 5)]),
    "zip": (lambda d: Dataset.zip(d, Dataset.range(2)), [((None, 0), 0), ((None, 1), 1)]),
    "cache": (lambda d: d.cache().skip(2), [(None, 2), (None, 3)]),
    "padded_batch": (lambda d: d.padded_batch(3), [(None, [0, 1, 2]), (None, [3])]),
    "window": (lambda d: d.window(2).flat_map(lambda _, b: b.batch(2)), [[0, 1], [2, 3]]),
}


def without_arrays(element):
    if isinstance(element, tuple):
        return tuple(map(without_arrays, element))
    return element if element is None else np.asarray(element).tolist()


@pytest.mark.parametrize("name", NONES)
def test_none_in_an_element_stays_where_it_is(name):
    transform, expected = NONES[name]
    assert [without_arrays(x) for x in transform(Dataset.range(4).map(none_and))] == expected


def test_none_comes_from_any_source(tmp_path):
    one = [(None, 1)]
    signature = (None, TensorSpec((), np.int32))
    assert list(Dataset.from_tensors((None, 1))) == one
    kinds: list[dict[str, Any]] = [{"output_signature": signature}, {"output_types": (None, "i4")}]
    for options in {}, *kinds:
        assert list(Dataset.from_generator(lambda: one, **options)) == one
    rows = Dataset.from_tensor_slices({"a": None, "b": np.arange(4)}).shuffle(4, seed=0)
    assert [x["a"] for x in rows] == [None] * 4 and sorted(x["b"] for x in rows) == [0, 1, 2, 3]
    mapped = Dataset.range(4).map(none_and)
    assert mapped.element_spec == (None, TensorSpec((), np.int64))
    assert mapped.batch(2).element_spec == (None, TensorSpec((None,), np.int64))
    mapped.save(tmp_path / "saved")
    loaded = Dataset.load(tmp_path / "saved")
    assert list(loaded) == list(mapped) and loaded.element_spec == mapped.element_spec


def test_none_matches_none_alone():
    for join in (
        lambda d, other: d.concatenate(other),
        lambda d, other: d.concatenate(other).batch(8),
    ):
        with pytest.raises((TypeError, ValueError), match=r"None, (\*|TensorSpec)"):
            list(join(Dataset.range(4).map(none_and), Dataset.range(4).map(lambda x: (x, x))))
    with pytest.raises(TypeError, match="a leaf of an element is None"):  # a forgotten return
        list(Dataset.range(4).map(lambda x: None))
    with pytest.raises(TypeError, match="NoneType is not a Dataset"):
        Dataset.zip((Dataset.range(2), None))
