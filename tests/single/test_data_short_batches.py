"""Batches too short for all replicas: how they are split, the warning; ranks are threads."""

import warnings

import numpy as np
import pytest
from internals import Workers, distribute_dataset, distribute_from_function, reports
from public_api import begins_with_a_call
from thread_ranks import on_ranks

from hpcstrat.data import Dataset


def warned(size, make, distribute=distribute_dataset, passes=1, workers=None, **kwargs):
    """The texts of each rank's warnings in `passes` passes over the dataset that it makes."""

    def program(rank):
        options = kwargs if workers is None else kwargs | {"workers": Workers(workers, rank.rank)}
        distributed = distribute(make(), rank, **{"options": None} | options)
        for _ in range(passes):
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_batch_for_fewer_than_all_replicas_is_warned_of_once(size):
    for count in range(1, 2 * size):
        texts = warned(size, lambda n=count: Dataset.range(9 * size + n).batch(9 * size), passes=3)
        if count >= size:
            assert texts == []
            continue
        (text,) = texts
        assert f"some of {size} replicas have no elements of a batch of {count}" in text
        assert text.endswith("pass batch(..., drop_remainder=True)")
        assert len(text) < 240  # two lines


def test_lists_of_batches_are_warned_of():
    assert len(warned(3, lambda: [np.arange(2)] * 3, passes=2)) == 1
    assert warned(3, lambda: [np.arange(6), np.arange(3), np.arange(0)]) == []


def test_there_is_no_warning_where_all_replicas_have_elements():
    assert warned(1, lambda: Dataset.range(5).batch(4)) == []
    assert warned(3, lambda: Dataset.range(5).batch(4, drop_remainder=True)) == []
    assert warned(3, lambda: Dataset.range(7).batch(4)) == []


def test_steps_with_batches_for_some_replicas_only_are_warned_of():
    (text,) = warned(
        3, lambda: lambda context: Dataset.range(10).batch(2), distribute_from_function, passes=2
    )
    assert "some replicas have no elements in a step" in text
    assert (
        warned(2, lambda: lambda context: Dataset.range(8).batch(2), distribute_from_function) == []
    )


@pytest.mark.parametrize("short", [0, 1])
def test_of_two_workers_either_may_be_short(short):
    def dataset_fn(context):
        return Dataset.range(8 - 2 * (context.input_pipeline_id == short)).batch(2)

    (text,) = warned(4, lambda: dataset_fn, distribute_from_function, workers=(0, 0, 1, 1))
    assert "some replicas have no elements in a step" in text
    assert (
        warned(
            4,
            lambda: lambda c: Dataset.range(8).batch(2),
            distribute_from_function,
            workers=(0, 0, 1, 1),
        )
        == []
    )


def test_where_warnings_are_errors_all_ranks_raise():
    def program(rank):
        iterator = iter(distribute_dataset(Dataset.range(5).batch(4), rank, None))
        next(iterator)
        with pytest.raises(UserWarning, match="some of 3 replicas have no elements"):
            next(iterator)
        return "raised"

    assert on_ranks(3, program) == ["raised"] * 3


def test_notes_show_with_the_error_that_ends_the_job():
    """In Python 3.10 too, which has no notes."""
    error = ValueError("wrong")
    reports.add_note(error, "the first")
    reports.add_note(error, "the second")
    reports.add_note(error, "the first")
    assert getattr(error, "__notes__", None) == ["the first", "the second"]
    shown = reports.capture(lambda: None, error)
    for note in ("the first\n", "the second\n"):
        assert shown.count(note) == 1
