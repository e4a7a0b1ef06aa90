"""The clocks of a timeline's hosts, and of their GPUs."""

import time

import pytest
from internals import GpuSpans, Span, connect, difference, gpu, zero

pytestmark = pytest.mark.core


def meetings(communicator, rounds):
    """When each rank entered and left each of these barriers."""
    times = []
    for _ in range(rounds):
        entered = time.perf_counter_ns()
        communicator.barrier()
        times.append((entered, time.perf_counter_ns()))
    return communicator.all_gather_obj(times)


def test_the_bounds_of_a_difference_hold_it():
    """The ranks here are on one host and share a clock: the difference is 0."""
    everyones = meetings(connect(), 5)
    for one in everyones:
        for other in everyones:
            least, most = difference(one, other)
            assert least <= 0 <= most


def test_ranks_of_one_host_begin_at_one_number():
    communicator = connect()
    start = zero(communicator, [0] * communicator.size)
    assert communicator.all_gather_obj(start) == [start] * communicator.size


def test_the_begins_of_several_hosts_are_one_moment():
    """Each rank poses as a separate host: what is found is within the meetings, so before now."""
    communicator = connect()
    before = meetings(communicator, 1)
    start = zero(communicator, list(range(communicator.size)))
    after = meetings(communicator, 1)
    for one in communicator.all_gather_obj(start):
        assert max(come for ((come, _),) in before) <= one <= min(left for ((_, left),) in after)


@pytest.mark.parametrize("place", ["GPU"], indirect=True)
def test_spans_of_a_gpu_have_times_of_the_host(place):
    ordinal = int(place.devices[connect().rank].removeprefix("GPU:"))
    stream, other = gpu.Stream(ordinal), gpu.Stream(ordinal)
    spans, begun = GpuSpans(ordinal), time.perf_counter_ns()
    found = []
    for number in range(3):  # more than once: events are used again
        span, on_host = (
            Span("communication", name, None, 0, 0) for name in ("on a stream", "on the host")
        )
        spans.start(on_host, None)
        spans.start(span, other if number == 1 else stream)
        with stream.current():
            assert place.xp.arange(1000).sum() == 499_500
        spans.end(span)
        spans.end(on_host)
        spans.wait()
        assert span.has_range and on_host.has_range and on_host.stream is None
        found += spans.take_done()
    slack = 60 * 10**9  # the host records an event's time a little late, on a busy machine by more
    assert [track for _, track, _, _ in found] == [0, 1, 0]
    for _, _, begin, end in found:
        assert begun - slack <= begin <= end <= time.perf_counter_ns() + slack
