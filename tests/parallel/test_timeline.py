"""The clocks of a timeline's hosts."""

from internals import clocks, connect


def test_the_bounds_of_a_difference_hold_it():
    """The ranks here are on one host and share a clock: the difference is 0."""
    everyones = clocks.meet(connect(), 5)
    for one in everyones:
        for other in everyones:
            least, most = clocks.difference(one, other)
            assert least <= 0 <= most


def test_ranks_of_one_host_begin_at_one_number():
    communicator = connect()
    zero = clocks.zero(communicator, [0] * communicator.size)
    assert communicator.all_gather_obj(zero) == [zero] * communicator.size


def test_the_begins_of_several_hosts_are_one_moment():
    """Each rank poses as a host of its own: what is found lies within the meetings, so before now."""
    communicator = connect()
    before = clocks.meet(communicator, 1)
    zero = clocks.zero(communicator, list(range(communicator.size)))
    after = clocks.meet(communicator, 1)
    for one in communicator.all_gather_obj(zero):
        assert max(come for ((come, _),) in before) <= one <= min(left for ((_, left),) in after)
