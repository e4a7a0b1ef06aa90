"""What the library sends between hosts per step: recorded from its code, and as a formula."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
from internals import MpiCommunicator

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
STEPS = ["flat", "unsharded", "sharded"]
EVEN = [(ranks,) * hosts for hosts in (1, 2, 3, 4, 8) for ranks in (1, 2, 3, 4)]
UNEVEN = [(1, 2), (3, 1), (1, 3, 2), (4, 2, 1, 4), (1, 1, 5), (2, 3, 3, 1)]
QUICK = [(1,), (3,), (1,) * 2, (4,) * 2, (1,) * 3, (3,) * 3, (2,) * 4, (1,) * 8, *UNEVEN]
GROUPS = [
    pytest.param(groups, marks=() if groups in QUICK else pytest.mark.slow)
    for groups in (*EVEN, *UNEVEN)
]


@pytest.fixture
def modules(monkeypatch) -> Any:
    """`recorded_ranks`, `scale_formulas` and `scale_simulation`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return [
        importlib.import_module(name)
        for name in ("recorded_ranks", "scale_formulas", "scale_simulation")
    ]


def random_gradients(n, elements):
    """Numbers whose sum depends on the order."""
    return [np.random.default_rng(rank).standard_normal(elements, np.float32) for rank in range(n)]


def stepped(total):
    """The variable after the two steps of `scale_simulation.step`, given the summed gradients."""
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


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_library_sends_what_the_formula_says(modules, name, groups):
    recorded_ranks, formulas, simulation = modules
    assert [*simulation.STEPS] == STEPS
    hosts, n = recorded_ranks.hosts_of(groups), sum(groups)
    elements = simulation.even(20_000, groups)
    assert elements * 4 > 1 << 15  # small messages take another path
    gradients = random_gradients(n, elements)
    calls, values = simulation.step(name, hosts, gradients)
    found = [simulation.cost(call, hosts) for call in calls]
    if len(groups) == 1:
        assert all(one.messages == 0 for one in found)
    else:
        expected = formulas.STEPS[name](groups, 4 * elements)
        assert found == expected
        for links in (
            formulas.Links(),
            formulas.Links(of_each_rank=True),
            formulas.Links(2e-5, 1.25e9),
        ):
            times = [simulation.seconds(call, hosts, links) for call in calls]
            assert times == [one.seconds(links) for one in expected]
    of_hosts = [
        [gradients[rank] for rank in range(n) if hosts[rank] == host] for host in range(len(groups))
    ]
    total = sum_in_order(
        gradients if name == "flat" else [sum_in_order(parts) for parts in of_hosts]
    )
    for value in values:
        assert value.tobytes() == stepped(total).tobytes()


@pytest.mark.parametrize(
    "hosts", [(0, 1, 0, 1), (0, 1, 2, 0, 1, 2, 0, 1, 2), (1, 0, 0, 1, 1, 0)], ids=str
)
def test_ranks_that_are_dealt_out_to_hosts(modules, hosts):
    """All ranks of a host send the same number of bytes between hosts, in any placement."""
    _, formulas, simulation = modules
    n, count = len(hosts), max(hosts) + 1
    elements = simulation.even(20_000, (n // count,) * count)
    calls, values = simulation.step("sharded", hosts, simulation.gradients_of(n, elements))
    expected = formulas.rails((n // count,) * count, 4 * elements // n)
    found = [simulation.cost(call, hosts) for call in calls if call.name != "Allgather"]
    assert [one._replace(rounds=expected.rounds) for one in found] == [expected, expected]
    # Whole numbers: the order does not matter.
    total = stepped(sum_in_order(simulation.gradients_of(n, elements)))
    assert all(np.array_equal(value, total) for value in values)


@pytest.mark.parametrize("groups", [(1, 1, 1), (3, 2), (2,) * 4], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_large_messages_go_in_pieces(modules, monkeypatch, name, groups):
    recorded_ranks, formulas, simulation = modules
    for module in (MpiCommunicator, formulas):
        monkeypatch.setattr(module, "PIECE", 5000)
    hosts, n = recorded_ranks.hosts_of(groups), sum(groups)
    elements = simulation.even(20_000, groups)
    gradients = simulation.gradients_of(n, elements)
    calls, values = simulation.step(name, hosts, gradients)
    assert {call.name for call in calls} == {"Allgather", "Isend"}
    assert [simulation.cost(call, hosts) for call in calls] == formulas.STEPS[name](
        groups, 4 * elements
    )
    # Whole numbers: the order does not matter.
    for value in values:
        assert np.array_equal(value, stepped(sum_in_order(gradients)))


@pytest.mark.parametrize(
    "groups",
    [(1, 1, 1), (3, 2), (2, 3, 1), pytest.param((4,) * 8, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_variable_leaves_its_host_once(modules, groups):
    """The first rank's value is sent to all ranks when the variable is made."""
    recorded_ranks, _, simulation = modules
    hosts, elements = recorded_ranks.hosts_of(groups), 300_000  # more than one piece
    job = recorded_ranks.Job(hosts)

    def program(comm, host_comm):
        storage = simulation.MirroredHostStorage(simulation.by_hosts(comm.Dup(), host_comm))
        job.record(comm)
        return storage.create(np.full(elements, comm.rank + 1, np.float32)).array.copy()

    assert all(np.all(value == 1) for value in job.run(program))
    found = [simulation.cost(call, hosts) for call in job.calls if call.name != "Allgather"]
    assert sum(one.nbytes for one in found) == 4 * elements * (len(groups) - 1)
    assert max(one.through_host for one in found) == 4 * elements


def test_an_error_of_one_rank_ends_all(modules):
    recorded_ranks, _, _ = modules

    def program(comm, host_comm):
        if comm.rank == 1:
            raise ZeroDivisionError
        comm.Barrier()

    with pytest.raises(ZeroDivisionError):
        recorded_ranks.Job((0, 0, 1)).run(program)
