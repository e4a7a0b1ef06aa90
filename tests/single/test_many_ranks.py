"""What 512 ranks say when some of them do something else; they are threads of one process."""

import importlib
import inspect
import pathlib
import re

import pytest
from internals import HierarchicalCommunicator, call_named, signature_of

from hpcstrat import ReplicaMismatchError

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
N = 512


@pytest.fixture
def said(monkeypatch):
    """The errors of all ranks, by text, of 64 hosts that each make a call."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    job = importlib.import_module("recorded_ranks").Job([rank // 8 for rank in range(N)])

    def run(call):
        def program(comm, host_comm):
            communicator = HierarchicalCommunicator(comm, host_comm)
            with call_named("Strategy.reduce"):
                with pytest.raises(Exception) as error:
                    call(communicator, comm.rank)
                communicator.exchange(signature_of("the next call"))  # all have met
            return type(error.value), str(error.value)

        return job.run(program)

    return run


def line_of(function, text):
    """File and line of a function's line with this text, as messages show it."""
    lines, first = inspect.getsourcelines(function)
    return rf"test_many_ranks\.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_one_rank_that_makes_another_call_is_named(said):
    def call(communicator, rank):
        if rank == 256:
            communicator.exchange(signature_of("Strategy.reduce", "MAX"))
        else:
            communicator.exchange(signature_of("Strategy.reduce", "SUM"))

    ((kind, text),) = set(said(call))
    assert kind is ReplicaMismatchError and len(text.splitlines()) == 3
    others, one = line_of(call, '"SUM"'), line_of(call, '"MAX"')
    assert re.search(rf"\n  ranks 0-255, 257-511: .*reduce\(SUM\), at .*{others} in call\n", text)
    assert re.search(rf"\n  rank 256: .*reduce\(MAX\), at .*{one} in call$", text)


@pytest.mark.slow
def test_two_ranks_that_differ_in_different_ways_are_named(said):
    def call(communicator, rank):
        what = {3: "MAX", 511: "MIN"}.get(rank, "SUM")
        communicator.exchange(signature_of("Strategy.reduce", what))

    ((_, text),) = set(said(call))
    lines = [line.split(":")[0].strip() for line in text.splitlines()[1:]]
    assert lines == ["ranks 0-2, 4-510", "rank 3", "rank 511"]


@pytest.mark.slow
def test_the_error_of_one_rank_is_everyones(said):
    def call(communicator, rank):
        with communicator.raise_together():
            if rank == 300:
                raise ValueError("the cause")
            communicator.exchange(signature_of("Strategy.reduce", "SUM"))

    errors = said(call)
    assert errors.pop(300) == (ValueError, "the cause")
    assert set(errors) == {(ValueError, "the cause (found by rank 300)")}
