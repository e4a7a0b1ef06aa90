"""What the library sends between hosts: recorded from its code, and as formulas."""

import importlib
import pathlib
from typing import Any

import numpy as np
import pytest
from internals import PointToPoint

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
CALLS = [
    "agreement",
    "`reduce` of a number",
    "`all_gather` of a number",
    "broadcast of 1 MB",
]
UNEVEN = [(1, 2), (4, 2, 1, 4), (1, 1, 5), (2, 3, 3, 1), (2, 3, 1, 4, 5, 6)]
QUICK = [(3,), (1,) * 2, (1,) * 3, (2,) * 5, (1,) * 17, (3,) * 8, *UNEVEN]
LARGE = [(8,) * 12, (8,) * 16, (1,) * 128, (8,) * 128]


def ids(groups):
    """In words; those of 128 hosts take minutes, so `.ci/run` leaves them to the night."""
    return f"{len(groups)} hosts of {sorted({*groups})} ranks{', nightly' * (len(groups) >= 128)}"


def on_hosts(most=1024):
    """Each of the hosts, of up to so many ranks."""
    marks = [pytest.mark.slow, pytest.mark.timeout(600)]
    return pytest.mark.parametrize(
        "groups",
        [
            pytest.param(groups, marks=marks if groups in LARGE else (), id=ids(groups))
            for groups in (*QUICK, *LARGE)
            if sum(groups) <= most
        ],
    )


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


def sum_of_hosts(sums):
    """Neighbours first; of other numbers than powers of two, the first are summed in pairs before.

    Like this for 5: ((0 + 1) + 2) + (3 + 4).
    """
    extra = len(sums) - (1 << len(sums).bit_length() - 1)
    sums = [sums[2 * i] + sums[2 * i + 1] for i in range(extra)] + sums[2 * extra :]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@on_hosts(most=128)
def test_a_step_sends_what_the_formula_says(modules, groups):
    _, formulas, simulation = modules
    hosts, n = formulas.hosts_of(groups), sum(groups)
    elements = simulation.even(20_000, groups)
    assert elements * 4 > 1 << 15  # a few ranks' small messages take another path
    gradients = random_gradients(n, elements)
    calls, values = simulation.step(hosts, gradients)
    found = simulation.costs(calls, hosts)
    if len(groups) == 1:
        assert all(one.messages == 0 for one in found)
    else:
        assert found == formulas.step(groups, 4 * elements)
    of_hosts = [
        sum_in_order([gradients[rank] for rank in range(n) if hosts[rank] == host])
        for host in range(len(groups))
    ]
    expected = stepped(sum_of_hosts(of_hosts)).tobytes()
    assert all(value.tobytes() == expected for value in values)


@pytest.mark.parametrize("megabytes", [4, pytest.param(400, marks=pytest.mark.slow)])
@on_hosts()
def test_a_large_step_sends_what_the_formula_says(modules, groups, megabytes):
    """Without memory for its elements."""
    _, formulas, simulation = modules
    hosts, elements = formulas.hosts_of(groups), simulation.even(megabytes * 250_000, groups)
    gradients = simulation.unbacked_gradients(sum(groups), elements)
    calls, _ = simulation.step(hosts, gradients, is_unbacked=True)
    if len(groups) > 1:
        expected = formulas.step(groups, 4 * elements)
        assert simulation.costs(calls, hosts) == expected


@on_hosts()
@pytest.mark.parametrize("name", CALLS)
def test_a_call_sends_what_the_formula_says(modules, name, groups):
    _, formulas, simulation = modules
    assert [*simulation.CALLS] == CALLS
    hosts, n = formulas.hosts_of(groups), sum(groups)
    calls, results, _ = simulation.call(name, hosts)
    if len(groups) > 1:
        assert simulation.costs(calls, hosts) == formulas.CALLS[name](groups)
    expected = [None, [n * (n - 1) / 2], range(n), [1.0] * (1 << 17)][CALLS.index(name)]
    if expected is not None:
        assert all(np.array_equal(result, expected) for (result,) in results)


@pytest.mark.parametrize("hosts", [2, 8, 32, 128])
@pytest.mark.parametrize("ranks", [1, 8])
def test_powers_of_two(modules, hosts, ranks):
    """The formulas, where they are simple; by hand, not by the assumed rounds."""
    _, formulas, _ = modules
    n, bits = hosts * ranks, hosts.bit_length() - 1
    found = formulas.agreement((ranks,) * hosts)
    inside = 0 if ranks == 1 else 3
    if n > 16:
        of_rank = 96 * bits
        assert found == (bits, n * bits, n * of_rank, ranks * of_rank, of_rank, 0, inside)
    part = 1 << 20
    way = formulas.halving(hosts, ranks, part)
    least = 2 * part * (hosts - 1) // hosts
    assert (way.messages, way.handled) == (ranks * hosts * way.rounds, 2 * way.rounds)
    assert bits <= way.rounds <= 2 * bits and way.through_rank >= least
    assert formulas.pairwise(hosts, ranks, part)[2:5] == (n * least, ranks * least, least)


def test_agreement_takes_a_latency_for_each_doubling(modules):
    _, formulas, _ = modules
    links = formulas.Links()
    few, many = [formulas.agreement((8,) * hosts).seconds(links) for hosts in (8, 128)]
    assert many / few < 7 / 3
    assert formulas.records((8,) * 128).seconds(links) > 10 * many


@pytest.mark.parametrize(
    "hosts", [(0, 1, 0, 1), (0, 1, 2, 0, 1, 2, 0, 1, 2), (1, 0, 0, 1, 1, 0)], ids=str
)
def test_ranks_that_are_dealt_out_to_hosts(modules, hosts):
    """All ranks of a host send the same number of bytes between hosts, in any placement."""
    _, formulas, simulation = modules
    n, count = len(hosts), max(hosts) + 1
    groups = (n // count,) * count
    elements = simulation.even(20_000, groups)
    gradients = random_gradients(n, elements)
    calls, values = simulation.step(hosts, gradients)
    expected = [one for one in formulas.step(groups, 4 * elements) if one.handled]
    sent = [call for call in calls if call.name == "Isend"]
    assert simulation.costs(sent, hosts) == expected
    # Hosts are in the order of their first ranks.
    of_hosts = [
        sum_in_order([gradients[rank] for rank in range(n) if hosts[rank] == host])
        for host in dict.fromkeys(hosts)
    ]
    total = stepped(sum_of_hosts(of_hosts)).tobytes()
    assert all(value.tobytes() == total for value in values)


@pytest.mark.parametrize("groups", [(1, 1, 1), (3, 2), (2,) * 4], ids=str)
def test_large_messages_go_in_pieces(modules, monkeypatch, groups):
    _, formulas, simulation = modules
    for module in (PointToPoint, formulas):
        monkeypatch.setattr(module, "PIECE", 5000)
    hosts, n = formulas.hosts_of(groups), sum(groups)
    elements = simulation.even(20_000, groups)
    gradients = random_gradients(n, elements)
    calls, values = simulation.step(hosts, gradients)
    assert {call.name for call in calls} == {"Allgather", "Isend"}
    assert simulation.costs(calls, hosts) == formulas.step(groups, 4 * elements)
    assert len({value.tobytes() for value in values}) == 1


@pytest.mark.parametrize("groups", [(1, 1, 1), (3, 2), (2,) * 10], ids=str)
def test_a_new_variable_goes_through_a_link_twice_at_most(modules, groups):
    """The first rank's value is sent to all ranks when the variable is made."""
    recorded_ranks, formulas, simulation = modules
    hosts, elements = formulas.hosts_of(groups), 300_000  # more than one piece
    job = recorded_ranks.Job(hosts)

    def program(comm, host_comm):
        storage = simulation.HostStorage(simulation.connect(comm.Dup(), host_comm))
        job.record(comm)
        return storage.create(np.full(elements, comm.rank + 1, np.float32)).array.copy()

    assert all(np.all(value == 1) for value in job.run(program))
    (sent,) = simulation.costs([call for call in job.calls if call.name == "Bcast"], hosts)
    assert 4 * elements <= sent.through_host <= 2 * 4 * elements


def test_rounds_are_those_in_which_messages_can_be_sent(modules):
    """Ranks 2 and 3 need not wait for the first message; those after it are one round later."""
    recorded_ranks, *_ = modules
    job = recorded_ranks.Job((0, 1, 2, 3))

    def program(comm, _):
        def swap(to, source):
            number = np.zeros(1)
            requests = [comm.Irecv(number, source)] if source is not None else []
            requests += [comm.Isend(np.ones(1), to)] if to is not None else []
            recorded_ranks.MPI.Request.Waitall(requests)

        for to, source in {
            0: [(None, 1), (2, 2), (1, None)],
            1: [(0, None), (None, 0)],
            2: [(3, 3), (0, 0)],
            3: [(2, 2)],
        }[comm.rank]:
            swap(to, source)

    job.run(program)
    (call,) = job.calls
    ways = [sorted((source, to) for source, to, _ in messages) for messages in call.rounds]
    assert ways == [[(1, 0), (2, 3), (3, 2)], [(0, 2), (2, 0)], [(0, 1)]]


@pytest.mark.parametrize("mistake", ["raises", "returns", "receives"])
def test_a_mistake_of_one_rank_ends_all(modules, mistake):
    recorded_ranks, *_ = modules

    def program(comm, host_comm):
        if comm.rank == 1:
            if mistake == "raises":
                raise ZeroDivisionError
            if mistake == "returns":
                return
            recorded_ranks.MPI.Request.Waitall([comm.Irecv(np.zeros(1), 2)])
        comm.Barrier()

    with pytest.raises(ZeroDivisionError if mistake == "raises" else RuntimeError):
        recorded_ranks.Job((0, 0, 1)).run(program)
