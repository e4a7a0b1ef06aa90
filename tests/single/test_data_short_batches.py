"""Batches that are too short for all replicas: how they are split, and the warning; each rank is a thread."""

import warnings

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import Workers, _edge, _failure, distribute_dataset, distribute_from_function
from public_api import begins_with_a_call
from thread_ranks import on_ranks, parts

from hpcstrat.data import Dataset, InputOptions

EVENLY = InputOptions(even_batches=True)


def warned(size, make, distribute=distribute_dataset, passes=1, workers=None, **kwargs):
    """The texts of what is warned of in so many passes over what each rank makes."""

    def program(rank):
        options = kwargs if workers is None else kwargs | {"workers": Workers(workers, rank.rank)}
        distributed = distribute(make(), rank, **{"options": None} | options)
        for _ in range(passes):
            list(distributed)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(size, program)
    texts = [str(one.message) for one in caught]
    assert all(begins_with_a_call(text.removeprefix("iterating over ")) for text in texts)
    assert {(one.filename, one.category) for one in caught} <= {(__file__, UserWarning)}
    return texts


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(size=st.integers(2, 5), n=st.integers(0, 25), b=st.integers(1, 12), mapped=st.booleans())
def test_batches_are_split_evenly_where_it_is_asked(size, n, b, mapped):
    def make():
        return Dataset.range(n).batch(b).map(lambda x: x) if mapped else Dataset.range(n).batch(b)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        steps = parts(size, make, options=EVENLY)
    for batch, step in zip(make(), steps, strict=True):
        assert np.concatenate(step).tolist() == batch.tolist()
        sizes = [len(part) for part in step]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_batch_that_does_not_reach_all_replicas_is_warned_of_once(size):
    for full in (size, 2 * size + 1, 5 * size):
        for count in range(1, full + 1):
            (found,) = warned(size, lambda f=full, n=count: Dataset.range(f + n).batch(f), passes=3) or [""]
            last = parts_of(size, full, count)[-1]
            assert bool(found) == (last == 0)
            if found:
                assert f"a batch of {count} elements does not reach all {size} replicas" in found
                assert "Dataset.batch(..., drop_remainder=True)" in found and f"range(0, {full + count})" in found
                assert ("even_batches=True" in found) == (count >= size)


def parts_of(size, full, count):
    """By the rule: each replica's share of a full batch, in order, as far as the elements go."""
    sizes = []
    for rank in range(size):
        sizes.append(min(count - sum(sizes), full // size + (rank < full % size)))
    return sizes


def test_a_batch_for_fewer_than_all_replicas_is_warned_of():
    assert len(warned(3, lambda: Dataset.range(8).batch(2))) == 1
    assert len(warned(3, lambda: [np.arange(2)] * 3, passes=2)) == 1
    assert len(warned(3, lambda: Dataset.range(8).batch(2), options=EVENLY)) == 1


def test_there_is_no_warning_where_all_replicas_have_elements():
    assert warned(1, lambda: Dataset.range(5).batch(4)) == []
    assert warned(3, lambda: Dataset.range(5).batch(4, drop_remainder=True)) == []
    assert warned(3, lambda: Dataset.range(7).batch(4), options=EVENLY) == []
    assert warned(3, lambda: [np.arange(6), np.arange(3), np.arange(0)]) == []


def test_each_dataset_is_warned_of():
    """Python shows a text once for each line of the program; each dataset has a text of its own."""

    def make():
        return [Dataset.range(n).batch(4) for n in (5, 9)]

    def program(rank):
        for dataset in make():
            for _ in distribute_dataset(dataset, rank, None):
                pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        on_ranks(2, program)
    assert ["range(0, 5)" in str(one.message) for one in caught] == [True, False]


def test_steps_with_batches_for_some_replicas_only_are_warned_of():
    (text,) = warned(3, lambda: lambda context: Dataset.range(10).batch(2), distribute_from_function, passes=2)
    assert "a step has batches for 2 of 3 replicas" in text
    assert warned(2, lambda: lambda context: Dataset.range(8).batch(2), distribute_from_function) == []


@pytest.mark.parametrize("short", [0, 1])
def test_of_two_workers_either_may_be_short(short):
    def dataset_fn(context):
        return Dataset.range(8 - 2 * (context.input_pipeline_id == short)).batch(2)

    (text,) = warned(4, lambda: dataset_fn, distribute_from_function, workers=(0, 0, 1, 1))
    assert "a step has batches for some of 4 replicas" in text
    assert warned(4, lambda: lambda c: Dataset.range(8).batch(2), distribute_from_function, workers=(0, 0, 1, 1)) == []


def test_where_warnings_are_errors_all_ranks_raise():
    def program(rank):
        iterator = iter(distribute_dataset(Dataset.range(5).batch(4), rank, None))
        next(iterator)
        with pytest.raises(UserWarning, match="does not reach all 3 replicas"):
            next(iterator)
        return "raised"

    assert on_ranks(3, program) == ["raised"] * 3


@pytest.mark.parametrize(
    ("filter", "raises"),
    [
        (dict(action="error"), True),
        (dict(action="error", category=UserWarning, message="of .*"), True),
        (dict(action="error", module="thread_.*"), False),
        (dict(action="error", category=DeprecationWarning), False),
        (dict(action="error", message="another"), False),
        (dict(action="ignore"), False),
        (dict(action="always"), False),
    ],
    ids=["error", "this error", "another module's", "another category's", "another text's", "ignore", "always"],
)
def test_the_other_ranks_raise_where_the_lead_does(filter, raises):
    """As the filters have it; else they say nothing."""
    for is_lead in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.resetwarnings()
            warnings.filterwarnings(**filter)
            if raises:
                with pytest.raises(UserWarning, match="of all ranks"):
                    _edge.warn_together("of all ranks", UserWarning, is_lead)
            else:
                _edge.warn_together("of all ranks", UserWarning, is_lead)
        assert len(caught) == (is_lead and not raises and filter["action"] != "ignore")


def test_even_batches_go_with_splitting():
    with pytest.raises(ValueError, match=r"distribute_datasets_from_function: even_batches is True.* leave it False"):
        on_ranks(2, lambda rank: distribute_from_function(lambda context: Dataset.range(4), rank, EVENLY))


@pytest.mark.parametrize("has_notes", [True, False])
def test_notes_show_with_the_error_that_ends_the_job(monkeypatch, has_notes):
    """Python 3.10 has no notes, and shows none."""
    if has_notes and not _failure._HAS_NOTES:
        pytest.skip("Python 3.10 has no notes")
    monkeypatch.setattr(_failure, "_HAS_NOTES", has_notes)
    error = ValueError("wrong")
    _failure.add_note(error, "the first")
    _failure.add_note(error, "the second")
    assert getattr(error, "__notes__", None) == ["the first", "the second"]
    shown = _failure._shown(lambda: None, error)
    for note in ("the first\n", "the second\n"):
        assert shown.count(note) == 1
