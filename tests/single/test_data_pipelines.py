"""Chains of transformations, alone and split between ranks, compared with a model of lists."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from internals import distribute_dataset, distribute_from_function, select
from pipelines import (
    BATCHES,
    ROWS,
    SOURCES,
    UNKNOWN_ORDERS,
    UNKNOWN_SIZES,
    Pipeline,
    attempted,
    check_resuming,
    check_steps,
    failing_pipelines,
    items,
    pipelines,
)
from thread_ranks import on_ranks

from hpcstrat import TensorSpec
from hpcstrat.data import UNKNOWN_CARDINALITY

# Short batches are intended here.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


def more(factor):
    """Settings for as many examples more, or less."""
    return hypothesis.settings(max_examples=int(hypothesis.settings().max_examples * factor))


def check(pipeline):
    """Compares two passes, and what the dataset tells of itself."""
    dataset = pipeline.make()
    for number in range(2):
        expected = pipeline.expected(number)
        assert items(dataset) == expected, pipeline
        if not pipeline.names & UNKNOWN_SIZES:
            assert len(dataset) == len(expected), pipeline
        else:  # an endless repeat counts as endless, though it ends if it has no elements
            known = (UNKNOWN_CARDINALITY, len(expected))
            assert dataset.cardinality() in known or "endless" in pipeline.names, pipeline
    is_whole = pipeline.drops and "join" not in dict(pipeline.ends)
    shape = (pipeline.size if is_whole else None,)
    assert dataset.element_spec == TensorSpec(shape, np.int64), pipeline


@pytest.mark.parametrize("source", SOURCES)
def test_each_transformation_is_that_of_lists(source):
    for name, k in itertools.product(sorted({*ROWS} - UNKNOWN_ORDERS), range(1, 5)):
        check(Pipeline(source, [(name, k)], 1 + k, k % 2 > 0))
    for name, k in itertools.product(sorted({*BATCHES} - UNKNOWN_ORDERS), range(1, 5)):
        check(Pipeline(source, [], 5, k % 2 > 0, [(name, k)]))


@more(3)
@hypothesis.given(pipelines(UNKNOWN_ORDERS))
def test_a_chain_of_transformations_is_that_of_lists(pipeline):
    check(pipeline)


@more(2)
@hypothesis.given(pipelines(), st.none() | st.integers(0, 9))
def test_a_pass_that_is_stopped_anywhere_goes_on_where_it_was(tmp_path_factory, pipeline, stop):
    data, *fresh = (pipeline.make() for _ in range(3))
    path = tmp_path_factory.getbasetemp() / "stopped"
    check_resuming(data, fresh, np.ndarray.tolist, stop, path)


@more(4)
@hypothesis.given(failing_pipelines(UNKNOWN_ORDERS))
def test_an_error_anywhere_comes_after_the_elements_before_it(pipeline):
    dataset = pipeline.make()
    for number in range(2):
        found, expected = attempted(dataset, np.ndarray.tolist), pipeline.expected(number)
        if "an error" in found:
            expected = [*expected[: len(found) - 1], "an error"]
        assert found == expected


def both_passes(pipeline, rank, deals):
    """This rank's parts of the steps of two passes."""
    if deals:
        data = distribute_from_function(lambda context: pipeline.make(), rank, None)
    else:
        data = distribute_dataset(pipeline.make(), rank, None)
    return [attempted(data, lambda x: select(x).tolist()) for _ in range(2)]


@more(2)
@hypothesis.given(pipelines() | failing_pipelines(), st.integers(2, 5), st.booleans())
def test_the_parts_of_all_ranks_are_the_batches(pipeline, size, deals):
    ranks = on_ranks(size, lambda rank: both_passes(pipeline, rank, deals))
    passes = [[list(step) for step in zip(*of, strict=True)] for of in zip(*ranks, strict=True)]
    check_steps(passes, pipeline, size, deals)
