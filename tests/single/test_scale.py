"""What the library sends between hosts in a step: recorded from its own code, and in closed form."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
from internals import MpiCommunicator

pytest.importorskip("mpi4py")
BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
STEPS = ["flat", "leaders", "sharded"]
EVEN = [(ranks,) * hosts for hosts in (1, 2, 3, 4, 8) for ranks in (1, 2, 3, 4)]
UNEVEN = [(1, 2), (3, 1), (1, 3, 2), (4, 2, 1, 4), (1, 1, 5), (2, 3, 3, 1)]


@pytest.fixture
def modules(monkeypatch) -> Any:
    """`recorded_ranks`, `scale_formulas` and `scale_simulation`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return [importlib.import_module(name) for name in ("recorded_ranks", "scale_formulas", "scale_simulation")]


def random_gradients(n, elements):
    """Numbers whose sum depends on the order."""
    return [np.random.default_rng(rank).standard_normal(elements, np.float32) for rank in range(n)]


def stepped(total):
    """The variable after the two steps of `scale_simulation.step`, from the sum of the gradients."""
    velocity, value = np.zeros_like(total), np.zeros_like(total)
    for _ in range(2):
        velocity = velocity * np.float32(0.5) + total
        value = value - velocity
    return value


def sum_in_order(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("groups", [*EVEN, *UNEVEN], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_library_sends_what_the_formula_says(modules, name, groups):
    recorded_ranks, formulas, simulation = modules
    assert [*simulation.STEPS] == [*formulas.STEPS] == STEPS
    hosts, n = recorded_ranks.hosts_of(groups), sum(groups)
    elements = simulation.even(20_000, groups)
    assert elements * 4 > 1 << 15  # small messages go another way
    gradients = random_gradients(n, elements)
    calls, values = simulation.step(name, hosts, gradients)
    found = [simulation.cost(call, hosts) for call in calls]
    if len(groups) == 1:
        assert all(one.messages == 0 for one in found)
    else:
        expected = formulas.STEPS[name](groups, 4 * elements)
        assert found == expected
        for links in formulas.Links(), formulas.Links(of_each_rank=True), formulas.Links(2e-5, 1.25e9):
            times = [simulation.seconds(call, hosts, links) for call in calls]
            assert times == [one.seconds(links) for one in expected]
    of_hosts = [[gradients[rank] for rank in range(n) if hosts[rank] == host] for host in range(len(groups))]
    total = sum_in_order(gradients if name == "flat" else [sum_in_order(parts) for parts in of_hosts])
    for value in values:
        assert value.tobytes() == stepped(total).tobytes()


@pytest.mark.parametrize("hosts", [(0, 1, 0, 1), (0, 1, 2, 0, 1, 2, 0, 1, 2), (1, 0, 0, 1, 1, 0)], ids=str)
def test_ranks_that_are_dealt_out_to_hosts(modules, hosts):
    """All ranks of a host send as many bytes between hosts, wherever the ranks are."""
    _, formulas, simulation = modules
    n, count = len(hosts), max(hosts) + 1
    elements = simulation.even(20_000, (n // count,) * count)
    calls, values = simulation.step("sharded", hosts, simulation.gradients_of(n, elements))
    expected = formulas.rails((n // count,) * count, 4 * elements // n)
    found = [simulation.cost(call, hosts) for call in calls if call.name == "Alltoallv"]
    assert [one._replace(rounds=expected.rounds) for one in found] == [expected, expected]
    total = stepped(sum_in_order(simulation.gradients_of(n, elements)))  # whole numbers: in any order
    assert all(np.array_equal(value, total) for value in values)


@pytest.mark.parametrize("groups", [(1, 2), (2,) * 4], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_beyond_what_a_call_of_mpi_takes(modules, monkeypatch, name, groups):
    """By pairs and root by root, with 8 ranks and more by a scatter and a ring: values and bytes are the same."""
    recorded_ranks, _, simulation = modules
    hosts, n = recorded_ranks.hosts_of(groups), sum(groups)
    gradients = simulation.gradients_of(n, simulation.even(20_000, groups))
    expected, values = simulation.step(name, hosts, gradients)
    monkeypatch.setattr(MpiCommunicator, "PIECE", 5003)
    calls, in_pieces = simulation.step(name, hosts, gradients)
    assert {call.name for call in calls} == {"Allgather", "Sendrecv"} | ({"Bcast"} if name != "sharded" else set())
    for one, other in zip(values, in_pieces, strict=True):
        assert one.tobytes() == other.tobytes()

    def received(calls, names):
        return sum(
            nbytes for call in calls if call.name in names for messages in call.rounds for _, _, nbytes in messages
        )

    assert received(calls, ["Sendrecv"]) == received(expected, ["Alltoallv"])
    if name == "leaders" or n < 8:
        assert received(calls, ["Bcast"]) == received(expected, ["Allgatherv"])


def test_an_error_of_one_rank_ends_all(modules):
    recorded_ranks, _, _ = modules

    def program(comm, host_comm):
        if comm.rank == 1:
            raise ZeroDivisionError
        comm.Barrier()

    with pytest.raises(ZeroDivisionError):
        recorded_ranks.Job((0, 0, 1)).run(program)
