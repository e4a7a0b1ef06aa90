"""Positions in data that a checkpoint holds, beside what test_data_distributed.py draws."""

import os

import numpy as np
import pytest
from mpi4py import MPI

import hpcstrat as hs
from hpcstrat.checkpoint import Checkpoint

N, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


# Short batches are intended.
pytestmark = pytest.mark.filterwarnings("ignore:iterating over .* have no:UserWarning")


@pytest.fixture
def path(tmp_path):
    """The same path on all ranks."""
    return MPI.COMM_WORLD.bcast(os.fspath(tmp_path / "folder" / "checkpoint"))


@pytest.fixture(scope="module")
def replicas(place):
    with place.make(hs.CentralStorageStrategy) as made:
        yield made


def shown(replicas, *passes):
    """What all replicas got in each step of each pass, bit by bit."""
    return [
        repr(hs.asnumpy(list(replicas.experimental_local_results(list(steps))))) for steps in passes
    ]


@pytest.mark.parametrize("pipeline", ["map in threads", "filter", "generator", "dealt generator"])
def test_what_failed_on_one_rank_is_tried_again(replicas, path, pipeline):
    """All ranks raise, the iteration ends, and its position is that of the step that failed."""
    bad = []

    def load(x):
        if x in bad:
            raise KeyError("no such element")
        return x

    def see(x):  # each number is seen by all ranks, of which the last fails
        return load(x) if RANK == N - 1 else x

    def make():
        dataset = hs.data.Dataset.range(24).shuffle(24, seed=5)
        if pipeline == "map in threads":  # each number is loaded by one rank
            dataset = dataset.map(load, num_parallel_calls=3)
        elif pipeline == "filter":
            dataset = dataset.filter(lambda x: see(x) >= 0)
        else:
            dataset = hs.data.Dataset.from_generator(lambda: map(see, np.arange(24)))
            dataset = dataset.map(lambda x: -x, 3).prefetch(2)
        dataset = dataset.batch(N)
        if pipeline == "dealt generator":
            return replicas.distribute_datasets_from_function(lambda context: dataset)
        return replicas.experimental_distribute_dataset(dataset)

    whole = shown(replicas, make())
    for number in (0, 9, 23):
        found, iterator = [], iter(make())
        bad.append(number)
        with pytest.raises(KeyError, match="no such element"):
            for step in iterator:
                found.append(step)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(iterator)
        Checkpoint(data=iterator).save(path)
        bad.clear()
        again = iter(make())
        Checkpoint(data=again).restore(path)
        assert shown(replicas, [*found, *again]) == whole


class StatefulLoader:
    """Batches in a random order that goes on from pass to pass.

    Its state is, as that of torchdata's loader, the start of the pass in progress, and how many
    batches it has yielded; after the pass the start of the next one.
    """

    def __init__(self, seed):
        self._random, self._first = np.random.default_rng(seed), 0
        self._note(0)

    def _note(self, yielded):
        self._state = {"random": self._random.bit_generator.state, "yielded": yielded}

    def __iter__(self):
        first, self._first = self._first, 0
        self._note(first)
        return self._batches(self._random.permutation(4 * N + 1), first)

    def _batches(self, order, first):
        for i in range(first, 4):
            self._state["yielded"] = i + 1
            yield {"x": order[i * N : (i + 1) * N], "y": -order[i * N : (i + 1) * N]}
        self._note(0)

    def state_dict(self):
        return self._state.copy()

    def load_state_dict(self, state):
        self._random.bit_generator.state, self._first = state["random"], state["yielded"]
        self._note(self._first)


@pytest.mark.parametrize("is_iterator", [False, True])
def test_a_loader_with_a_state_goes_on_where_it_was(replicas, path, is_iterator):
    loader = StatefulLoader(seed=5)
    dataset = replicas.experimental_distribute_dataset(loader)
    for stop in (0, 3, 4):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        Checkpoint(data=iterator if is_iterator else dataset).save(path)
        expected = shown(replicas, iterator, dataset)
        for other_loader in (StatefulLoader(seed=6), loader):
            other = replicas.experimental_distribute_dataset(other_loader)
            iterator = iter(other) if is_iterator else other
            Checkpoint(data=iterator).restore(path)
            assert shown(replicas, iterator, other) == expected
            assert repr(other_loader.state_dict()) == repr(loader.state_dict())


def test_after_an_abandoned_iteration_the_next_one_is_saved(replicas, path):
    def make():
        dataset = hs.data.Dataset.range(23).shuffle(23).batch(4)
        return replicas.experimental_distribute_dataset(dataset)

    dataset, fresh = make(), make()
    for _ in dataset:
        break
    Checkpoint(data=dataset).save(path)
    Checkpoint(data=fresh).restore(path)
    assert shown(replicas, fresh) == shown(replicas, dataset)


def test_another_size_of_batches_and_nothing_is_loaded_that_is_left_out(replicas, path):
    loaded = []

    def noted(x):
        loaded.append(int(x))
        return x

    def make(size, count=24):
        dataset = hs.data.Dataset.range(count).shuffle(count, seed=1)
        return replicas.experimental_distribute_dataset(dataset.map(noted).batch(size))

    dataset = make(4)
    iterator = iter(dataset)
    for _ in range(3):
        next(iterator)
    Checkpoint(data=dataset).save(path)
    everything = [int(x) for x in hs.data.Dataset.range(24).shuffle(24, seed=1)]
    loaded.clear()
    other = make(6)
    Checkpoint(data=other).restore(path)
    parts = [replicas.experimental_local_results(step) for step in other]
    assert [int(x) for step in parts for part in step for x in hs.asnumpy(part)] == everything[12:]
    assert {*loaded} <= {*everything[12:]}
    unshuffled = hs.data.Dataset.range(24).map(noted).batch(4)
    for wrong, match in [
        (make(5), "it was saved after 12 elements, not a multiple of its batch size 5"),
        (
            make(4, 25),
            r"its pipeline is Dataset\.range\(0, 25\).* and the saved one Dataset\.range\(0, 24\)",
        ),
        (
            replicas.experimental_distribute_dataset(unshuffled),
            r"its pipeline is Dataset\.range\(0, 24\)\.map.* the saved one .*\.shuffle\(24, 1, True\)",
        ),
    ]:
        with pytest.raises(ValueError, match=match):
            Checkpoint(data=wrong).restore(path)
