"""The formulas of benchmarks/scale_model.py against the simulation of every message."""

import importlib
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
SHAPES = [(1, 1, 1), (1, 4, 4), (1, 8, 8), (2, 1, 1), (5, 1, 1), (2, 4, 4), (3, 2, 2), (4, 4, 4), (8, 8, 8), (6, 4, 4)]
STEPS = [
    *("central, flat", "central", "central, rails", "mirrored, leaders", "mirrored, one ring", "mirrored, rails"),
    "sharded, rails",
]
SMALL, LARGE = 2**8 * 15, 2**20 * 15  # bytes; they divide by all numbers of ranks here


@pytest.fixture
def modules(monkeypatch):
    """`scale_model` and `scale_simulation`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("scale_model"), importlib.import_module("scale_simulation")


def machine_of(model, hosts, gpus, nics):
    inside, between = model.Link(2e-6, 450e9), model.Link(4e-6, 50e9)
    return model.Machine(hosts, gpus, inside, between, nics, memory=3350e9)


def moved(cost):
    return (cost.messages_inside, cost.bytes_inside, cost.messages_between, cost.bytes_between, cost.busiest_nic)


def test_all_steps_are_tested(modules):
    assert list(modules[0].STEPS) == STEPS


@pytest.mark.parametrize("nbytes", [SMALL, LARGE, 2**26 * 15])
@pytest.mark.parametrize(("hosts", "gpus", "nics"), SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_the_formulas_count_what_the_simulation_moves(modules, name, hosts, gpus, nics, nbytes):
    model, simulation = modules
    machine = machine_of(model, hosts, gpus, nics)
    expected = model.STEPS[name](machine, nbytes)
    found = simulation.simulate(simulation.schedule(name, machine, nbytes))
    assert moved(found) == moved(expected)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-3)  # segments of a chain differ by a byte


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("name", STEPS)
def test_where_gpus_share_nics_the_formulas_give_at_most_more_time(modules, name, nbytes):
    model, simulation = modules
    for nics in (1, 2):
        machine = machine_of(model, 4, 4, nics)
        expected = model.STEPS[name](machine, nbytes)
        found = simulation.simulate(simulation.schedule(name, machine, nbytes))
        assert moved(found) == moved(expected)
        assert 0.7 * expected.seconds < found.seconds < 1.001 * expected.seconds


def test_bytes_that_do_not_divide_are_all_moved(modules):
    model, simulation = modules
    machine = machine_of(model, 3, 4, 4)
    for name in ("central, flat", "central", "mirrored, leaders"):
        expected = model.STEPS[name](machine, 1_000_003)
        assert moved(simulation.simulate(simulation.schedule(name, machine, 1_000_003)))[:4] == moved(expected)[:4]


def test_one_message_by_hand(modules):
    model, simulation = modules
    machine = model.Machine(2, 1, None, model.Link(1.0, 10.0), nics=1, memory=7.0)
    cost = simulation.simulate(simulation.schedule("central, flat", machine, 20))
    assert cost == model.Cost(0, 0, 2, 40, 20, 3.0 + 20.0 + 3.0)


def test_messages_into_one_rank_wait_for_each_other(modules):
    model, simulation = modules
    machine = model.Machine(1, 4, model.Link(1.0, 10.0), None, nics=1, memory=float("inf"))
    assert simulation.simulate(simulation.schedule("central, flat", machine, 10)).seconds == 2 * 3 * 2.0


def test_a_chain_takes_the_best_number_of_segments(modules):
    model, _ = modules
    link = model.Link(2e-6, 50e9)
    best = model.chain_segments(9, 10**8, link)

    def seconds(segments):
        return (9 - 2 + segments) * link.seconds(10**8 / segments)

    assert 2 * seconds(best) == model.chain(9, 10**8, link).seconds
    assert seconds(best) <= min(seconds(best - 1), seconds(best + 1)) * (1 + 1e-6)


def test_memory_of_a_gpu(modules):
    model, _ = modules
    machine = machine_of(model, 4, 8, 8)
    found = [model.memory_of_a_gpu(name, machine, 32) for name in STEPS]
    assert found == [(128, 64), (128, 64), (72, 64), (128, 128), (128, 128), (128, 128), (66, 66)]
